"""How long a publish takes: a model sharded over all ranks (FSDP2) to a whole copy that generates, by the corridor.

    torchrun --nproc-per-node=2 benchmarks/publish.py [--shape 7b] [--repeats 5]

The ``Publisher`` of ``verl train``, on a random model: all weights to each rank and to the last one alone, what changed
after a real optimizer step, an adapter. Beside it the link itself (point to point, both ways at once, and all-gather,
of as many bytes), and the plain way: each parameter gathered (``full_tensor``) and copied. Milliseconds are the slowest
rank's, of the whole call, until the device has ended; medians. With ``--device cpu`` over gloo. What a failure leaves
unmeasured is measured by naming it in ``--parts``.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import random_model
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.batch import Batch, Ragged
from verl.cluster.group import Context
from verl.config.devices import Device
from verl.config.engine import HybridConfig
from verl.config.model import ModelConfig, OptimizerConfig
from verl.dataflow.placement import Placement
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import device_mesh
from verl.layout import Layout
from verl.models.decoder import in_place
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.rollout.native import NativeEngine
from verl.runtime.publish import Plainly, Through


class Bench:
    """One rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        kind = args.device
        self.device = torch.device(kind, self.rank) if kind == "cuda" else torch.device("cpu")
        self.lines: list[str] = []
        self.mesh = device_mesh(Layout.of(self.ranks), kind)
        self.versions = 0

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def ms(self, work: Callable[[], Any], repeats: int | None = None, before: Callable[[], Any] | None = None) -> float:
        """Of the slowest rank, the median; one call to warm up."""
        told = []
        for i in range(1 + (repeats or self.args.repeats)):
            if before is not None and i:
                before()
            self.wait()
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            told.append(1e3 * seconds.item())
        if self.args.verbose:
            self.say("   each:", " ".join(f"{t:.2f}" for t in told))
        return statistics.median(told[1:])

    def line(self, what: str, ms: float, received: float, formula: float | None = None, note: str = "") -> None:
        rate = received / ms / 1e6 if ms else 0.0
        text = "" if formula is None else f"{formula / 1e6:>12,.1f}"
        self.lines.append(f"{what:<46} {ms:>9.2f} {received / 1e6:>12,.1f} {text:>12} {rate:>8.1f}  {note}".rstrip())
        self.say(self.lines[-1])

    # -- models --------------------------------------------------------------------------------------------------

    def policies(self, **options: Any) -> tuple[Policy, Policy, FsdpEngine]:
        """What is trained, sharded, and a whole copy of it."""
        args = self.args
        lm = random_model.model(args.shape, self.device, torch.bfloat16, args.vocabulary)
        trained = Policy(load_model(ModelConfig(model_name_or_path=lm, **options), self.device, torch.bfloat16))
        copied = copy.deepcopy(trained).requires_grad_(False)
        lr = OptimizerConfig(lr=1e-6 if not options else 1e-4)
        return trained, copied, FsdpEngine(trained, lr, None, True, self.mesh)

    def update(self, engine: FsdpEngine) -> None:
        """A real optimizer step on random rows."""
        draw = torch.Generator().manual_seed(self.rank)
        rows = Batch([f"{self.rank}/{i}" for i in range(4)])
        high = self.args.vocabulary
        rows["prompt_ids"] = Ragged.from_rows([torch.randint(3, high, (16,), generator=draw) for _ in range(4)])
        responses = Ragged.from_rows([torch.randint(3, high, (32,), generator=draw) for _ in range(4)])
        rows["response_ids"] = responses
        rows["response_mask"] = responses.with_values(torch.ones(4 * 32, dtype=torch.bool))
        rows["weight"] = responses.with_values(torch.randn(4 * 32, generator=draw))

        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, float]]:
            weight = micro.ragged("weight").values.to(self.device)
            return -(outputs["logprobs"] * weight).sum() / 128, {}

        report = engine.update(rows, [list(range(4))], loss, frozenset({"logprobs"}), 1.0)
        assert report.skipped is None, report

    def placed(self, on: tuple[int, ...]) -> Placement:
        devices = tuple(Device(self.args.device, i) for i in range(self.ranks))
        return Placement(devices, {"actor": tuple(range(self.ranks)), "rollout": on})

    def publisher(
        self, trained: Policy, copied: Policy, on: tuple[int, ...] | None = None, incremental: Any = False
    ) -> tuple[Through, NativeEngine | None]:
        on = on or tuple(range(self.ranks))
        sampler = NativeEngine(copied, frozenset()) if self.rank in on else None
        context: Any = Context(self.rank, self.ranks, str(self.device), "", lambda rank: None)
        cfg = HybridConfig(incremental=incremental, bucket_mib=self.args.bucket_mib)
        link: Any = self.placed(on), context, trained, dist.group.WORLD, sampler, self.device, cfg
        return Through(*link, by_files=False), sampler

    def check(self, trained: Policy, copied: Policy) -> None:
        """What generates is what is trained, bit for bit; a few tensors."""
        mine, theirs = in_place(trained.lm, trained.adapter), in_place(copied.lm, copied.adapter)
        names = list(mine)
        for name in (names[0], names[len(names) // 2], names[-2], names[-1]):
            tensor: Any = mine[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, theirs[name]), f"{name} differs"

    def spoil(self, copied: Policy) -> None:
        with torch.no_grad():
            for tensor in in_place(copied.lm, copied.adapter).values():
                tensor.zero_()

    def publish(self, publisher: Through | Plainly) -> Any:
        self.versions += 1
        self.report = publisher.publish(self.versions)
        return self.report

    def received(self) -> float:
        """The most on a rank, in the last publish."""
        told = torch.tensor([float(self.report.received_bytes)], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item()

    # -- parts of the table ----------------------------------------------------------------------------------------

    def link(self, size: int) -> None:
        """``size`` bytes come to each rank."""
        here, there = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        peer = self.rank ^ 1
        if self.ranks == 2:

            def both() -> None:
                ops = [dist.P2POp(dist.isend, here, peer), dist.P2POp(dist.irecv, there, peer)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

            self.line("the link: point to point, both ways", self.ms(both), size)
        gathered = torch.zeros(size * self.ranks, dtype=torch.uint8, device=self.device)
        ms = self.ms(lambda: dist.all_gather_into_tensor(gathered, here))
        self.line("the link: all-gather", ms, size * (self.ranks - 1))

    def full(self, trained: Policy, copied: Policy, model: int) -> None:
        formula = model * (self.ranks - 1) / self.ranks
        for on in (tuple(range(self.ranks)), (self.ranks - 1,)):
            where = "to each rank" if len(on) > 1 else "to one rank"
            publisher, _ = self.publisher(trained, copied, on)
            if self.rank in on:
                self.spoil(copied)
            ms = self.ms(lambda p=publisher: self.publish(p))
            self.line(f"corridor, all weights {where}", ms, self.received(), formula)
            if self.rank in on:
                self.check(trained, copied)
            else:
                self.check_along(trained)
            publisher.corridor.checksums = False
            bare = self.ms(lambda p=publisher: self.publish(p))
            self.line("  without checksums", bare, self.received(), formula, f"checksums: {ms - bare:.2f} ms")
            self.where_time_goes(publisher, f"all weights {where}")

    def check_along(self, trained: Policy) -> None:
        """Take part in the others' ``check``."""
        names = list(mine := in_place(trained.lm, trained.adapter))
        for name in (names[0], names[len(names) // 2], names[-2], names[-1]):
            tensor: Any = mine[name]
            if isinstance(tensor, DTensor):
                tensor.full_tensor()

    def where_time_goes(self, publisher: Through, what: str) -> None:
        if not self.args.profile or self.device.type != "cuda":
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.publish(publisher)
        self.say(f"-- {what}: device", profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=8))
        self.say(f"-- {what}: host", profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))

    def changes(self, trained: Policy, copied: Policy, engine: FsdpEngine, model: int) -> None:
        publisher, sampler = self.publisher(trained, copied, incremental=True)
        assert sampler is not None
        sampler.version = self.versions
        share: list[float] = []

        def publish() -> None:
            report = self.publish(publisher)
            share.append(report.changed / max(report.compared, 1))

        ms = self.ms(publish, 3, before=lambda: self.update(engine))
        self.check(trained, copied)
        formula = model * (self.ranks - 1) / self.ranks
        self.line(
            "corridor, what changed in a step (lr 1e-6)", ms, self.received(), formula, f"{share[-1]:.2%} changed"
        )
        self.where_time_goes(publisher, "what changed")

    def plainly(self, trained: Policy, copied: Policy, engine: FsdpEngine, model: int) -> None:
        into = in_place(copied.lm, copied.adapter)

        def gather() -> None:
            with torch.no_grad():
                for name, tensor in in_place(trained.lm, trained.adapter).items():
                    whole: Any = tensor
                    into[name].copy_(whole.full_tensor() if isinstance(whole, DTensor) else whole)

        received = model * (self.ranks - 1) / self.ranks
        self.line("plain: full_tensor() of each, then copied", self.ms(gather), received)
        context: Any = Context(self.rank, self.ranks, str(self.device), "", lambda rank: None)
        sampler = NativeEngine(copied, frozenset())
        plain = Plainly(self.placed(tuple(range(self.ranks))), context, engine, None, sampler, {})
        self.line("plain: hybrid_engine: false", self.ms(lambda: self.publish(plain)), received)

    def run(self) -> None:
        args = self.args
        self.say(f"{args.shape}, bf16, {self.ranks} ranks on {args.device}, buckets of {args.bucket_mib} MiB")
        self.lines.append(f"{'':<46} {'ms':>9} {'MB received':>12} {'formula':>12} {'GB/s':>8}")
        self.say(self.lines[-1])
        state: dict[str, Any] = {}

        def models() -> None:
            state["all"] = self.policies()
            trained = state["all"][0]
            state["bytes"] = sum(t.nbytes for t in in_place(trained.lm, None).values())
            whole = [t for t in in_place(state["all"][1].lm, None).values()]
            assert state["bytes"] == sum(t.nbytes for t in whole)
            self.say(f"{len(whole)} tensors, {state['bytes'] / 1e9:.2f} GB")

        def adapter() -> None:
            state.pop("all", None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            trained, copied, engine = self.policies(use_lora=True, lora_r=32)
            publisher, _ = self.publisher(trained, copied)
            size = sum(t.nbytes for t in in_place(copied.lm, copied.adapter).values())
            self.update(engine)
            ms = self.ms(lambda: self.publish(publisher))
            self.check(trained, copied)
            formula = size * (self.ranks - 1) / self.ranks
            self.line("corridor, an adapter (LoRA, r 32, all-linear)", ms, self.received(), formula)

        parts: dict[str, Callable[[], None]] = {
            "models": models,
            "link": lambda: self.link(state["bytes"] * (self.ranks - 1) // self.ranks),
            "full": lambda: self.full(state["all"][0], state["all"][1], state["bytes"]),
            "changes": lambda: self.changes(*state["all"], state["bytes"]),
            "plain": lambda: self.plainly(*state["all"], state["bytes"]),
            "adapter": adapter,
        }
        for name, part in parts.items():
            if name not in ("models", *args.parts.split(",")):
                continue
            start = time.perf_counter()
            try:
                part()
            except Exception:
                print(f"{name} failed on rank {self.rank}:\n{traceback.format_exc()}", flush=True)
                self.say("\n" + "\n".join(self.lines))
                os._exit(1)  # the others wait in a collective
            self.say(f"[{name}: {time.perf_counter() - start:.1f} s]")
        if self.device.type == "cuda":
            self.say(f"peak of rank 0: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        self.say("\n" + "\n".join(self.lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=tuple(random_model.SHAPES))
    parser.add_argument("--vocabulary", type=int, default=random_model.VOCABULARY)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--parts", default="link,full,changes,plain,adapter")
    parser.add_argument("--profile", action="store_true", help="show where a publish's time goes")
    parser.add_argument("--verbose", action="store_true", help="every measurement")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=90))
    try:
        Bench(args).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
