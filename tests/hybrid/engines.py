"""On each rank of a process group: a policy that is trained over all of them, an engine on each that samples from what
is published, and whether that is what a fresh engine samples from the exported weights."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.engines.test_fsdp import BOTH, batch, loss_fn
from tests.engines.test_spread import Case as Spreading
from tests.engines.test_spread import seats
from tests.rollout_contract import ask, requests
from tests.tiny import f_bpe, save
from verl.cluster.group import Context
from verl.config.devices import Device
from verl.config.engine import HybridConfig
from verl.config.errors import RunError
from verl.config.model import ModelConfig, OptimizerConfig
from verl.dataflow.placement import Placement
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import device_mesh
from verl.hybrid import publish
from verl.hybrid.transport import Distributed, Messages
from verl.layout import Layout
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.rollout.base import RolloutEngine, Sampling
from verl.rollout.native import NativeEngine
from verl.runtime.publish import Through


def model(folder: Path) -> str:
    """Heads of 64, which vLLM computes; some parts are large, some small, some cut unevenly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return save(folder, LlamaForCausalLM(config).eval(), f_bpe())


def judge(told: list[Any]) -> None:
    """Of ``samples`` on all ranks: they agree, with the fresh engine too, and versions differ."""
    for rank in told:
        mine = [tokens for tokens, _ in rank]
        assert mine == [tokens for tokens, _ in told[0]]
        assert all(tokens == fresh for tokens, fresh in rank if fresh is not None) and rank[-1][1] is not None
        assert mine[0] != mine[1] != mine[2]


GREEDY = Sampling(max_new_tokens=8, greedy=True)


class Corrupt(Distributed):
    """Flips a bit of the last message that this rank sends of the ``which``-th exchange."""

    def __init__(self, group: Any, device: torch.device, which: int) -> None:
        super().__init__(group, device)
        self.left = which

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        if sends:
            self.left -= 1
            if self.left == -1:
                sends = {peer: [t.clone() for t in tensors] for peer, tensors in sends.items()}
                next(iter(sends.values()))[-1].view(torch.uint8)[-1] ^= 1
        return super().start(sends, receives)


def tokens(engine: RolloutEngine) -> dict[str, tuple[int, ...]]:
    return {row: response.ids for row, response in ask(engine, requests(samples=1), GREEDY).items()}


class Publishing:
    """One rank's part. ``kind``: of engine; ``lora``: adapters are trained and published."""

    def __init__(self, folder: str, kind: str, lora: bool, dtype: torch.dtype) -> None:
        self.folder, self.kind, self.dtype = folder, kind, dtype
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        cuda = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        self.device = torch.device(cuda, self.rank) if cuda == "cuda" else torch.device("cpu")
        torch.manual_seed(0)  # peft draws A from the global state
        self.trained = self.policy(folder, use_lora=lora, lora_r=2)
        torch.manual_seed(0)
        self.sampler = self.engine(folder, lora)
        mesh = device_mesh(Layout.of(self.size), cuda)
        self.trainer = FsdpEngine(self.trained, OptimizerConfig(lr=0.1), None, False, mesh)
        ranks = tuple(range(self.size))
        placement = Placement(tuple(Device(cuda, rank) for rank in ranks), {"actor": ranks, "rollout": ranks})
        peers: Any = lambda rank: None  # noqa: E731
        here = Context(self.rank, self.size, str(self.device), peers, None)
        link: Any = here, self.trained, dist.group.WORLD, self.sampler, self.device, HybridConfig(bucket_mib=1)
        publish.ALONE = 1 << 12  # small parts too go from place to place
        self.publisher = Through(placement, *link, by_files=kind != "native")

    def policy(self, source: str, **options: Any) -> Policy:
        return Policy(load_model(ModelConfig(model_name_or_path=source, **options), self.device, self.dtype))

    def native(self, policy: Policy) -> NativeEngine:
        made = NativeEngine(policy, frozenset())
        if self.device.type == "cuda":
            made.thread.submit(torch.cuda.set_device, self.device).result()
        return made

    def engine(self, source: str, lora: bool) -> RolloutEngine:
        if self.kind == "native":
            options = {"use_lora": True, "lora_r": 2} if lora else {}
            return self.native(self.policy(source, **options).requires_grad_(False))
        from verl.rollout.vllm import VllmEngine

        more = {"enforce_eager": True, "gpu_memory_utilization": 0.1} if self.device.type == "cuda" else {}
        return VllmEngine(
            source, frozenset(), None, device=self.device, dtype=self.dtype, max_rows=16, max_tokens=64, options=more
        )  # fmt: skip

    def update(self) -> None:
        case = Spreading(micro_rows=3)
        self.trainer.update(batch(), seats(case, self.size)[self.rank], loss_fn, BOTH, 0.8)

    def export(self, number: int) -> str:
        """The trained weights as a folder, by the way of checkpoints: gathered, written by the first rank."""
        told = [str(Path(self.folder).with_name(f"exported-{number}"))]
        dist.broadcast_object_list(told, 0)
        if self.trained.has_adapters:
            shards = {name: t.clone() for name, t in self.trainer.shards()}
            torch.save(shards, f"{told[0]}-{self.rank}.test")
            return f"{told[0]}-{self.rank}.test"
        shards = {name: t.to("cpu", copy=True) for name, t in self.trainer.shards()}
        if self.rank == 0:
            lm = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype)
            lm.load_state_dict(shards, strict=False)
            lm.save_pretrained(told[0])
        dist.barrier()
        return told[0]

    def fresh(self, exported: str) -> dict[str, tuple[int, ...]]:
        """What an engine that was started from the export samples."""
        if self.trained.has_adapters:
            policy = self.policy(self.folder, use_lora=True, lora_r=2)
            policy.load(torch.load(exported, weights_only=True))
            return tokens(self.native(policy))
        if self.kind == "native":
            return tokens(self.native(self.policy(exported)))
        engine = self.engine(exported, False)
        lm = AutoModelForCausalLM.from_pretrained(exported, dtype=self.dtype).to(self.device)
        engine.load(((n, p.detach()) for n, p in lm.named_parameters()), 0)
        try:
            return tokens(engine)
        finally:
            engine.close()


def samples(folder: str, kind: str, lora: bool, dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """Of three versions (as started, and after each of two optimizer steps): greedy tokens after a publish, and a fresh
    engine's. Of engines that are one to a process, the fresh one's of the last version."""
    with contextlib.closing(_Closing(Publishing(folder, kind, lora, dtype))) as held:
        one = held.publishing
        told: list[tuple[Any, Any]] = []
        for version in (1, 2, 3):
            report = one.publisher.publish(version)
            assert report.version == one.sampler.version == version
            mine = tokens(one.sampler)
            if kind == "native":
                told.append((mine, one.fresh(one.export(version))))
                _same_bits(one)
            else:
                told.append((mine, None))
            if version < 3:
                one.update()
        if kind != "native":
            exported = one.export(3)
            one.sampler.close()
            told[-1] = (told[-1][0], one.fresh(exported))
        return told


def _same_bits(one: Publishing) -> None:
    from verl.models.decoder import in_place

    assert isinstance(one.sampler, NativeEngine)
    generating = in_place(one.sampler.policy.lm, one.sampler.policy.adapter)
    for name, tensor in in_place(one.trained.lm, one.trained.adapter).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, generating[name]), name


class _Closing:
    def __init__(self, publishing: Publishing) -> None:
        self.publishing = publishing

    def close(self) -> None:
        self.publishing.sampler.close()


def corrupted(folder: str, which: int) -> tuple[str, str]:
    """What a publish and the next generation say when a message is damaged on its way; ``which``: exchange."""
    one = Publishing(folder, "native", False, torch.float32)
    one.update()
    corridor = one.publisher.corridor
    flips = which if one.rank == 0 else -2
    corridor.transport = Corrupt(dist.group.WORLD, one.device, flips)
    said = []
    for action in (lambda: one.publisher.publish(1), lambda: tokens(one.sampler)):
        try:
            action()
            said.append("")
        except RunError as error:
            said.append(str(error))
    return said[0], said[1]


def bereft(rank: int, folder: str, meet: str, pipe: Any) -> None:
    """A process of two. The second dies in the middle of a publish; the first tells how its own ended, after how many
    seconds, and what its engine then says."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=limit)
    cut = publish.buckets
    publish.buckets = lambda moves, limit: cut(moves, 1 << 16)
    one = Publishing(folder, "native", False, torch.float32)
    write = publish._Passage._write_bucket

    def write_and_die(self: Any, bucket: Any) -> Iterator[Any]:
        yield from write(self, bucket)
        if rank == 1 and bucket.number == 1:
            assert len(self.c.buckets) > 4
            os.kill(os.getpid(), signal.SIGKILL)

    publish._Passage._write_bucket = write_and_die  # type: ignore[method-assign]
    before = tokens(one.sampler)
    one.update()
    start, said = time.monotonic(), []
    for action in (lambda: one.publisher.publish(1), lambda: tokens(one.sampler)):
        try:
            action()
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    pipe.send((len(before), time.monotonic() - start, *said))
