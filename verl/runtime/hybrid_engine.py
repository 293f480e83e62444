"""The 3D-HybridEngine in a loop of one's own: a policy that trains and generates, and a critic on devices of its own.

A plain script has one device per role. With more it is started by ``torchrun``, one process per device: the actor's
come first and run the script, each with its own rows; the actor is sharded over them (FSDP2) and each generates from a
whole copy, which ``step`` brings up to date through ``verl.hybrid``. Processes of the critic alone answer the actor's
until these end; only ids, masks, values and their gradients cross.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.batch import Ragged
from verl.config.devices import Device, check_exists, parse
from verl.config.engine import HybridConfig
from verl.config.errors import RequestError, RunError
from verl.engines.sharding import layers_of, units
from verl.hybrid.publish import Corridor
from verl.hybrid.table import Standing
from verl.models.decoder import base_model, in_place, without_dropout
from verl.models.factory import create_model, eos_ids, packed_attention
from verl.models.packing import pack
from verl.models.policy import Policy
from verl.models.probe import probe
from verl.models.value import Value
from verl.rollout.base import Request, Response, Sampling
from verl.rollout.native import NativeEngine

PATIENCE = timedelta(days=1)  # of a process that waits for another: one may generate for long
VALUES, BACKWARD, STEP, STOP = range(4)  # what a process of the critic alone is asked


@dataclass(frozen=True)
class StepReport:
    """One ``HybridEngine.step`` on this process.

    ``version``: the step whose weights generate now; ``published``: whether they are this step's. ``bytes``: of
    weights that came from other processes, in ``ms``. ``crossed``: bytes between actor and critic since the last step,
    by what they were.
    """

    step: int
    version: int
    published: bool
    bytes: int = 0
    ms: float = 0.0
    crossed: Mapping[str, int] = field(default_factory=dict)


class HybridEngine:
    """See the module. Nothing is loaded before ``actor_model`` or ``critic_model`` is first asked for.

    Args:
        model: hub name, folder or loaded causal LM; the critic gets a copy of its backbone.
        actor_devices, critic_devices: as in ``device_map``: GPU numbers, ``"cpu"``, ``"cpu:0-1"``, lists of these;
            the critic's default is where the actor is. Of several devices each, both are the same ones, or as many.
        hybrid_config: keys of ``HybridConfig``: ``reshard_interval`` (steps between publishes), ``incremental``,
            ``bucket_mib``.
        tokenizer: whose end-of-sequence ids end responses, beside those of the model's own configuration.
        dtype: of a model that is read here; with bf16 your optimizer must keep fp32 masters, or small steps are lost. A
            loaded model keeps its own. The critic's is always float32.
        critic_lr: ``step`` makes the critic's optimizer step, AdamW's, with this learning rate. ``None``: your own
            optimizer does, over ``critic_model.parameters()``; only where the critic is in the actor's processes.

    Raises:
        RequestError: devices that don't exist, don't fit each other or the number of processes; unknown keys.
    """

    def __init__(
        self, model: str | PreTrainedModel, actor_devices: Any = "cpu", critic_devices: Any = None,
        hybrid_config: Mapping[str, Any] | None = None, *, tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype = torch.float32, critic_lr: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        try:
            self.config = HybridConfig.model_validate(dict(hybrid_config or {}))
        except ValidationError as error:
            found = error.errors()[0]
            key, known = ".".join(map(str, found["loc"])), ", ".join(HybridConfig.model_fields)
            wrong = f"no key {key}, it has {known}" if found["type"] == "extra_forbidden" else f"{key}: {found['msg']}"
            raise RequestError(f"hybrid_config: {wrong}") from error
        self.source, self.tokenizer, self.dtype, self.critic_lr, self.seed = model, tokenizer, dtype, critic_lr, seed
        self.places = _Places.of(actor_devices, critic_devices)
        if self.places.apart and critic_lr is None:
            raise RequestError(
                "the critic is in processes of its own, where your optimizer can't reach it: set critic_lr, such as "
                "critic_lr=1e-5 or 5e-6"
            )
        self.steps = self.version = 0
        self._closed = False
        self._crossed: dict[str, int] = {}
        if self.places.apart and not self.places.serves:
            atexit.register(self.close)  # the critic's process waits for this one's end

    @cached_property
    def actor_model(self) -> ActorModel:
        self._serve()
        return ActorModel(self)

    @cached_property
    def critic_model(self) -> CriticModel | RemoteCritic:
        self._serve()
        return RemoteCritic(self) if self.places.apart else CriticModel(self)

    @cached_property
    def _loaded(self) -> PreTrainedModel:
        """As it was before training."""
        if isinstance(self.source, nn.Module):
            lm: Any = nn.Module.to(self.source, self.places.actor)
        else:
            lm = create_model(self.source, self.places.actor, self.dtype)
        without_dropout(lm)
        return lm

    @cached_property
    def _start(self) -> nn.Module:
        """A copy of the model for the critic, made before training changes or shards it."""
        return copy.deepcopy(base_model(self._loaded))

    def _serve(self) -> None:
        """On a process of the critic alone: answer until the actor's end, then end too."""
        if self.places.serves:
            _answer(self)
            sys.exit(0)

    def step(self) -> StepReport:
        """After the actor's optimizer step: the critic's, where that is the engine's; a publish, when it is due.

        In every process together. Generation then uses weights that are at most ``reshard_interval - 1`` steps old.
        With VERL_DEBUG=1 a few tokens' log-probabilities prove that it does.

        Raises:
            RunError: what arrived isn't what was sent, or generation doesn't use it.
        """
        self._serve()
        self.steps += 1
        for module in (self.__dict__.get("actor_model"), self.__dict__.get("critic_model")):
            _reshard(module)  # what a pass without gradients left whole is older than the optimizer's step
        if "critic_model" in self.__dict__ and self.critic_lr is not None:
            critic: Any = self.critic_model
            critic.step()
        due = self.steps % self.config.reshard_interval == 0
        bytes_, ms = self.actor_model.publish(self.steps) if due else (0, 0.0)
        if due:
            self.version = self.steps
            if os.environ.get("VERL_DEBUG") == "1":
                self.actor_model.prove()
        crossed, self._crossed = self._crossed, {}
        return StepReport(self.steps, self.version, due, bytes_, ms, crossed)

    def crosses(self, **tensors: Tensor) -> None:
        """Count what goes from the actor's device to the critic's, or back."""
        for name, tensor in tensors.items():
            self._crossed[name] = self._crossed.get(name, 0) + tensor.nbytes

    def close(self) -> None:
        """End threads, and processes of the critic alone."""
        if "actor_model" in self.__dict__:
            self.actor_model.engine.close()
        if self.places.apart and not self.places.serves and not self._closed:
            critic: Any = self.critic_model
            critic.stop()
        self._closed = True

    def __enter__(self) -> HybridEngine:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class ActorModel(nn.Module):
    """The trained causal LM, called and trained as such; ``generate`` samples with the published weights."""

    def __init__(self, engine: HybridEngine) -> None:
        super().__init__()
        self._hybrid, places = engine, engine.places
        lm = engine._loaded
        if not places.apart:
            _ = engine._start
        self._in_place = places.actors == 1 and engine.config.reshard_interval == 1
        shared: dict[int, Any] = {id(t): t for t in (*lm.parameters(), *lm.buffers())} if self._in_place else {}
        mine: Any = copy.deepcopy(lm, shared)  # the same module once more, around the same or other parameters
        packed_attention(base_model(mine))
        probe(mine)
        if not self._in_place:
            mine.requires_grad_(False)
        self.lm = lm
        self.engine = NativeEngine(Policy(mine), eos_ids(lm, engine.tokenizer), tokenizer=engine.tokenizer)
        self._calls = itertools.count()
        self._probe: tuple[int, ...] = (1, 2, 3, 4)
        if places.actor.type == "cuda":
            self.engine.thread.submit(torch.cuda.set_device, places.actor).result()
        if places.actors > 1:
            for part in (*layers_of(base_model(lm).get_decoder()), lm):
                fully_shard(part, mesh=places.mesh)
        if not self._in_place:
            policy = self.engine.policy
            self._standing = [Standing(each, partial(in_place, each, policy.adapter)) for each in (lm, policy.lm)]
            link: Any = places.actor, engine.config
            self._corridor = Corridor.meet(*self._ends(), *link, rank=places.rank, group=places.group)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # config, dtype and all else of the model itself
            return getattr(super().__getattr__("lm"), name)

    def forward(self, *args: Any, **keys: Any) -> Any:
        return self.lm(*args, **keys)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, max_new_tokens: int = 20,
        temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, do_sample: bool = True,
        num_return_sequences: int = 1, pad_token_id: int = 0,
    ) -> Tensor:  # fmt: skip
        """``input_ids [B, P]`` and what was sampled, ``[B * n, P + R]``. Prompts are padded on the left, where
        ``attention_mask`` is 0, and responses on the right with ``pad_token_id``; ``responses`` then has the ids,
        log-probabilities and version of each.

        Noise follows from the engine's seed and the number of the call, whatever the batch.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
            raise RequestError(
                "generate() takes a tensor of token ids [B, P], padded on the left: tokenizer(prompts, padding=True, "
                'padding_side="left", return_tensors="pt")'
            )
        call = next(self._calls)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [tuple(row[m.bool()].tolist()) for row, m in zip(input_ids.cpu(), mask.cpu(), strict=True)]
        rank = self._hybrid.places.rank
        requests = [
            Request(f"{i}/{k}", f"{rank}/{call}/{i}", prompt, k)
            for i, prompt in enumerate(prompts)
            for k in range(num_return_sequences)
        ]
        sampling = Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens, seed=self._hybrid.seed,
            greedy=not do_sample,
        )  # fmt: skip

        async def collect() -> dict[str, Response]:
            return {r.row_id: r async for r in self.engine.generate(requests, sampling)}

        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop of its own
            done = thread.submit(asyncio.run, collect()).result()
        self.responses = [done[request.row_id] for request in requests]
        self._probe = (*prompts[0], *self.responses[0].ids)
        width = max(len(r.ids) for r in self.responses)
        new = torch.tensor([[*r.ids, *[pad_token_id] * (width - len(r.ids))] for r in self.responses])
        return torch.cat([input_ids.repeat_interleave(num_return_sequences, 0), new.to(input_ids)], 1)

    def publish(self, version: int) -> tuple[int, float]:
        """Generation gets the trained weights; bytes that came from other processes, and milliseconds."""
        if self._in_place:
            self.engine.version = version
            return 0, 0.0

        def move() -> None:
            with self.engine.updating(version):
                for _ in self._corridor.flow(version, *self._ends(), self.engine.version):
                    pass

        self.engine.thread.submit(move).result()  # rows that are being sampled end with the weights they began with
        return self._corridor.report.received_bytes, 1e3 * self._corridor.report.seconds

    def prove(self) -> None:
        """``RunError`` unless trained model and engine give the last row sampled the same log-probabilities."""
        policy, tokens = self.engine.policy, self._probe[:64]
        ids = torch.tensor([tokens], device=policy.device)
        packed = pack(Ragged.from_rows([tokens[:1]]), Ragged.from_rows([tokens[1:]])).to(policy.device)
        with torch.no_grad():
            logprobs = self.lm(input_ids=ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            ours = policy(packed, ids[0, 1:], frozenset({"logprobs"}), 1.0)["logprobs"]
        apart = (logprobs - ours).abs().max().item()
        if not apart < (1e-3 if policy.dtype == torch.float32 else 0.5):
            raise RunError(
                f"step {self._hybrid.steps}: generation gives a token another log-probability than the trained model, "
                f"apart by {apart:.3g}: it doesn't use the published weights"
            )

    def _ends(self) -> tuple[Any, Any]:
        """What is trained and what generates, as parts."""
        trained, generating = self._standing
        return trained.parts(), generating.parts()


class CriticModel(nn.Module):
    """``values [B, T]`` (float32), each of the state that ends with that token, on the actor's device; the value before
    a response's first token is that of the prompt's last."""

    def __init__(self, engine: HybridEngine) -> None:
        super().__init__()
        self._hybrid, places = engine, engine.places
        start: Any = engine.__dict__.pop("_start", None) or engine._start
        engine.__dict__.pop("_start", None)
        if places.serves:
            engine.__dict__.pop("_loaded", None)
        self.value = Value(start.to(places.critic, torch.float32), engine.seed)
        self.value.requires_grad_(True).train()
        if places.critics > 1:
            for part in (*layers_of(self.value.backbone), self.value.value_head, self):
                fully_shard(part, mesh=places.mesh)
        self._optimizer = None if engine.critic_lr is None else torch.optim.AdamW(self.parameters(), engine.critic_lr)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """``input_ids [B, T]``; positions where ``attention_mask`` is 0 have values that mean nothing."""
        places, home = self._hybrid.places, input_ids.device
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if home != places.critic:
            self._hybrid.crosses(ids=input_ids, mask=mask)
        ids, mask = input_ids.to(places.critic), mask.to(places.critic)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self.value.backbone(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        values: Tensor = self.value.value_head(hidden.flatten(0, 1)).view(ids.shape).clone()  # FSDP wants no view
        if home != places.critic:
            self._hybrid.crosses(values=values)
        return values.to(home)

    def step(self) -> None:
        """The engine's optimizer, where the critic's is its."""
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()


class RemoteCritic(nn.Module):
    """A ``CriticModel`` in another process; gradients of its values go there. ``parameters`` has nothing of it."""

    def __init__(self, engine: HybridEngine) -> None:
        super().__init__()
        self._hybrid, self._peer = engine, engine.places.partner
        self.anchor = nn.Parameter(torch.zeros(()))
        self._calls = itertools.count()
        self._stopped = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """As ``CriticModel``."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return _Remote.apply(self.anchor, self, input_ids, mask, torch.is_grad_enabled())

    def values(self, ids: Tensor, mask: Tensor, grad: bool) -> tuple[Tensor, int]:
        call = next(self._calls)
        self._say(VALUES, call, *ids.shape, int(grad))
        sent = {"ids": ids.to(torch.int32).cpu(), "mask": mask.to(torch.uint8).cpu()}
        for tensor in sent.values():
            dist.send(tensor, self._peer)
        values = torch.empty(ids.shape)
        dist.recv(values, self._peer)
        self._hybrid.crosses(**sent, values=values)
        return values.to(ids.device), call

    def backward(self, call: int, grad: Tensor) -> None:
        sent = grad.float().cpu().contiguous()
        self._say(BACKWARD, call, *sent.shape, 0)
        dist.send(sent, self._peer)
        self._hybrid.crosses(gradients=sent)

    def step(self) -> None:
        self._say(STEP)

    def stop(self) -> None:
        if not self._stopped:
            self._say(STOP)
        self._stopped = True

    def _say(self, *words: int) -> None:
        dist.send(torch.tensor([*words, *[0] * (5 - len(words))]), self._peer)


class _Remote(torch.autograd.Function):
    """Values from another process; the backward pass sends their gradient there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, critic: RemoteCritic, ids: Tensor, mask: Tensor, grad: bool) -> Tensor:
        values, call = critic.values(ids, mask, grad and anchor.requires_grad)
        ctx.critic, ctx.call = critic, call
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.critic.backward(ctx.call, grads[0])
        return torch.zeros(()), None, None, None, None


def _answer(engine: HybridEngine) -> None:
    """Serve one of the actor's processes with values until it stops."""
    critic, peer = CriticModel(engine), engine.places.partner
    home = engine.places.critic
    graphs: dict[int, Tensor] = {}
    while True:
        said = torch.empty(5, dtype=torch.int64)
        dist.recv(said, peer)
        what, call, rows, length, grad = said.tolist()
        if what == STOP:
            return
        if what == STEP:
            critic.step()
            graphs.clear()
            continue
        if what == BACKWARD:
            gradient = torch.empty(rows, length)
            dist.recv(gradient, peer)
            graphs.pop(call).backward(gradient.to(home))
            continue
        ids, mask = torch.empty(rows, length, dtype=torch.int32), torch.empty(rows, length, dtype=torch.uint8)
        dist.recv(ids, peer)
        dist.recv(mask, peer)
        with torch.set_grad_enabled(bool(grad)):
            values = critic(ids.long().to(home), mask.long().to(home))
        if grad:
            graphs[call] = values
        dist.send(values.detach().cpu(), peer)


@dataclass(frozen=True)
class _Places:
    """Where this process stands. ``partner``: the process that has the critic of this one's rows, or the other way
    round, where those are apart."""

    rank: int
    actors: int
    critics: int
    actor: torch.device
    critic: torch.device
    apart: bool = False  # in processes of their own
    mesh: Any = None  # of this process's role
    group: Any = None  # of the actor's processes

    @property
    def serves(self) -> bool:
        return self.apart and self.rank >= self.actors

    @property
    def partner(self) -> int:
        return self.rank - self.actors if self.serves else self.rank + self.actors

    @staticmethod
    def of(actor: Any, critic: Any) -> _Places:
        actors = _parsed("actor_devices", actor)
        critics = actors if critic is None else _parsed("critic_devices", critic)
        together = actors == critics
        processes = int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
        if processes == 1:
            if len(actors) > 1 or len(critics) > 1:
                need = len(actors) if together else len(actors) + len(critics)
                raise RequestError(
                    f"{len(actors)} devices of the actor and {len(critics)} of the critic in one process: start the "
                    f"script as `torchrun --nproc-per-node={need} {os.path.basename(sys.argv[0]) or 'script.py'}`, or "
                    "give each one device"
                )
            return _Places(0, 1, 1, _torch(actors[0]), _torch(critics[0]))
        if not together and len(actors) != len(critics):
            raise RequestError(
                f"{len(actors)} devices of the actor and {len(critics)} of the critic: both the same ones, or equally "
                f"many others, such as {len(actors)} or {len(critics)} each"
            )
        if not together and set(actors) & set(critics):
            raise RequestError("actor and critic share some devices, not all: give both the same ones, or others")
        both = actors if together else [*actors, *critics]
        if len(both) != processes:
            raise RequestError(
                f"{processes} processes for {len(both)} devices: start the script as "
                f"`torchrun --nproc-per-node={len(both)} {os.path.basename(sys.argv[0])}`"
            )
        if not dist.is_initialized():
            cuda = any(device.kind == "cuda" for device in both)
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
        rank = dist.get_rank()
        here = _torch(both[rank])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        if here.type == "cuda" and local < processes:  # torchrun counts each machine's own
            here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if here.type == "cuda":
            torch.cuda.set_device(here)
        groups = [list(range(len(actors)))] + ([] if together else [list(range(len(actors), processes))])
        made = [dist.new_group(ranks) for ranks in groups]
        meshes = [
            dist.DeviceMesh(here.type, torch.tensor(ranks), mesh_dim_names=("dp",)) for ranks in groups
        ]  # every process makes every mesh
        mine = 0 if rank < len(actors) else 1
        return _Places(rank, len(actors), len(critics), here, here, not together, meshes[mine], made[0])


def _reshard(module: nn.Module | None) -> None:
    for unit in units(module) if module is not None else ():
        unit.reshard()


def _parsed(name: str, value: Any) -> list[Device]:
    try:
        devices = parse(list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value)
    except RequestError as error:
        raise RequestError(f"{name} {error}") from error
    check_exists(devices, torch.cuda.device_count())
    return devices


def _torch(device: Device) -> torch.device:
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index)
