"""G03, G04, G05, G06, G08, G20 and G23 on every training engine, on one rank and on two, with real models.

What an engine tells is compared with numbers made by hand and with transformers' own forward and backward pass of one
row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.engines.ranks import run
from tests.engines.test_fsdp import policy
from tests.models.test_adapters import trained_adapter
from tests.rollout_contract import ask, logprobs_of, requests
from tests.tiny import f_bpe, f_gpt2, f_llama, save
from verl.algorithms.kl import kl_estimate
from verl.algorithms.preference import dpo
from verl.algorithms.reduce import row_sums
from verl.batch import Batch, Ragged
from verl.cluster.group import Context
from verl.config.devices import Device
from verl.config.engine import HybridConfig
from verl.config.errors import RequestError, RunError
from verl.config.load import load_config
from verl.config.model import OptimizerConfig
from verl.dataflow.placement import Placement
from verl.engines.fsdp import FsdpEngine
from verl.engines.megatron import MegatronEngine, megatron_mesh
from verl.engines.sharding import device_mesh, local
from verl.hybrid.publish import Corridor
from verl.hybrid.table import parts_in, parts_of
from verl.layout import Layout
from verl.models.decoder import in_place
from verl.models.policy import Policy
from verl.rollout.base import Sampling
from verl.rollout.native import NativeEngine
from verl.runtime.publish import Through
from verl.seats import MiniBatch, Seats, Totals, seat
from verl.workers.actor import ActorWorker
from verl.workers.lap import Lap

LOGPROBS = frozenset({"logprobs"})
DECAY = 0.1
SGD = OptimizerConfig(name="sgd", lr=1.0, weight_decay=DECAY, max_grad_norm=1e9)  # a step is the gradient and decay
ADAM = OptimizerConfig(lr=3e-2)


@dataclass(frozen=True)
class Kind:
    """``dp`` ranks with rows of their own, times ``tp`` with a part of every layer."""

    megatron: bool = False
    dp: int = 1
    tp: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(dp=self.dp, tp=self.tp)

    @property
    def place(self) -> int:
        """Which rows are this rank's."""
        return self.layout.place(dist.get_rank()).dp if dist.is_initialized() else 0

    def engine(self, module: Policy, optimizer: OptimizerConfig) -> FsdpEngine | MegatronEngine:
        if self.megatron:
            return MegatronEngine(module, optimizer, None, False, megatron_mesh(self.layout, "cpu"))
        return FsdpEngine(module, optimizer, mesh=device_mesh(self.layout, "cpu") if self.layout.size > 1 else None)

    def told(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function`` gives on each rank; one alone is this process."""
        return run(self.layout.size, function, self, *args) if self.layout.size > 1 else [function(self, *args)]


KINDS = {
    "fsdp": Kind(),
    "fsdp2": Kind(dp=2),
    "tensor parallel": Kind(tp=2),
    "megatron": Kind(megatron=True, tp=2),
    "megatron, data parallel": Kind(megatron=True, dp=2),
}
FSDP = [name for name, kind in KINDS.items() if not kind.megatron]


# -- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """``masked``: no token of the response is in the loss."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    advantage: float = 1.0
    masked: bool = False

    @staticmethod
    def drawn(number: int, prompt: int, response: int, advantage: float, masked: bool = False) -> Row:
        g = torch.Generator().manual_seed(number)
        ids = [tuple(torch.randint(3, 32, (n,), generator=g).tolist()) for n in (prompt, response)]
        return Row(ids[0], ids[1], advantage, masked)


def batch(rows: Sequence[Row]) -> Batch:
    """As the actor's update reads it: on policy, each row a group of its own."""
    made = Batch([str(i) for i in range(len(rows))])
    made["prompt_ids"] = Ragged.from_rows([list(row.prompt) for row in rows])
    made["response_ids"] = column = Ragged.from_rows([list(row.response) for row in rows])
    made["group"] = torch.arange(len(rows))
    made["response_mask"] = column.with_values(torch.tensor([not row.masked for row in rows])[column.row_index])
    made["advantages"] = column.with_values(torch.tensor([row.advantage for row in rows])[column.row_index])
    made["sampled_logprobs"] = column.with_values(torch.full((len(column.values),), -1.0))
    return made


def seated(kind: Kind, rows: Sequence[Row], micro_rows: int, *, steps: int = 1, max_tokens: int | None = None) -> Seats:
    lengths = [len(row.prompt) for row in rows], [len(row.response) for row in rows]
    counted = [0 if row.masked else len(row.response) for row in rows]
    shape = {"mini_batch_rows": len(rows) // steps, "micro_rows": micro_rows, "max_tokens": max_tokens}
    return seat(*lengths, list(range(len(rows))), ranks=kind.dp, loss_tokens=counted, **shape)


def cut(kind: Kind, ranks: list[list[list[int]]], totals: Totals) -> Seats:
    """One optimizer step in which rows are cut so over two ranks; where there is one, all rows are its."""
    return Seats([MiniBatch(ranks if kind.dp == 2 else [[micro for micros in ranks for micro in micros]], totals)])


def of_row(lm: PreTrainedModel | PeftModel, row: Row, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response's tokens, by transformers, of one row alone."""
    logits = lm(torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(row.response)[:, None])[:, 0]


def by_hand(rows: Sequence[Row], weights: Sequence[float], steps: int = 1) -> tuple[float, dict[str, Tensor]]:
    """``steps`` of ``SGD`` on ``-weight * advantage * log-probability``, summed over the rows' tokens: the first
    gradient's norm, which is that of every policy loss at ratio 1, and by how much each weight fell."""
    lm, norm = f_llama(), 0.0
    start = {name: p.detach().clone() for name, p in lm.named_parameters()}
    for _ in range(steps):
        for row, weight in zip(rows, weights, strict=True):
            (-weight * row.advantage * of_row(lm, row).sum()).backward()
        norm = norm or torch.nn.utils.get_total_norm([p.grad for p in lm.parameters() if p.grad is not None]).item()
        with torch.no_grad():
            for p in lm.parameters():
                p -= p.grad + (DECAY * p if p.ndim > 1 else 0.0)
                p.grad = None
    return norm, {name: start[name] - p.detach() for name, p in lm.named_parameters()}


# -- G03, G04 ------------------------------------------------------------------------------------------------------

ROW = Row((5, 6), (7, 8, 9))
LONG = Row(tuple(range(6, 14)), tuple(range(14, 22)))
TEMPERATURES = (0.5, 1.0, 2.0)


def scored(kind: Kind, lm: PreTrainedModel) -> list[Tensor]:
    """``ROW``'s log-probabilities at each temperature; its neighbours differ from rank to rank."""
    engine = kind.engine(policy(lm), SGD)
    rows = [LONG, ROW] if kind.place == 1 else [ROW, replace(LONG, response=LONG.response[:1])]
    at = rows.index(ROW)
    return [
        list(engine.forward(batch(rows), [[0, 1]], LOGPROBS, temperature)["logprobs"].rows())[at].clone()
        for temperature in TEMPERATURES
    ]


MODELS = {"llama": f_llama, "gpt2": f_gpt2}


@pytest.mark.parametrize(("name", "model"), [*((n, "llama") for n in KINDS), ("fsdp", "gpt2"), ("fsdp2", "gpt2")])
def test_g03_g04_temperature_and_neighbours(name, model):
    plain = MODELS[model]()
    for told in KINDS[name].told(scored, MODELS[model]()):
        for temperature, logprobs in zip(TEMPERATURES, told, strict=True):
            torch.testing.assert_close(logprobs, of_row(plain, ROW, temperature).detach(), atol=1e-5, rtol=0)


# -- G05, G06, G23 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """One lap's update, by the actor's worker."""

    rows: Sequence[Row]
    seats: Seats
    reduction: str = "token-mean"


@dataclass(frozen=True)
class Told:
    """``fell``: by how much each weight did. ``passes``: forward passes of the update on this rank. ``logprobs``: of
    this rank's rows, before it; not of all updates."""

    metrics: dict[str, float | None]
    fell: dict[str, Tensor]
    passes: int
    logprobs: dict[int, Tensor]


PAIR = [Row((5, 6), (7,), 1.0), Row((8, 9, 10), (11, 12, 13), -1.0)]
THIRTY = [Row.drawn(0, 3, 10, -1.0), Row.drawn(1, 4, 5, -1.0, masked=True), Row.drawn(2, 2, 15, -1.0)]
MASKED = [replace(row, masked=True) for row in PAIR]
BUDGET = [Row.drawn(i, 3, n - 3, [1.0, -0.5, 2.0][i % 3]) for i, n in enumerate([95] * 5 + [20] * 5)]
TOKENS = sum(len(row.response) for row in BUDGET)


def updates(kind: Kind) -> dict[str, Update]:
    one_rank_masked = cut(kind, [[[0], [2]], [[1], []]], Totals(tokens=25, rows=2))
    short_ones_together = cut(kind, [[[0], [1], [2], [3], [4]], [[5, 6, 7, 8, 9], [], [], [], []]], Totals(TOKENS, 10))
    return {
        "together": Update(PAIR, seated(kind, PAIR, 2)),
        "apart": Update(PAIR, seated(kind, PAIR, 1)),
        "four times": Update(PAIR * 4, seated(kind, PAIR * 4, 2)),
        "two steps": Update(PAIR * 4, seated(kind, PAIR * 4, 2, steps=2)),
        "by row": Update(PAIR, seated(kind, PAIR, 1), "seq-mean-token-mean"),
        "masked": Update(THIRTY, seated(kind, THIRTY, 1)),
        "one rank masked": Update(THIRTY, one_rank_masked),
        "masked, by row": Update(THIRTY, seated(kind, THIRTY, 1), "seq-mean-token-mean"),
        "all masked": Update(MASKED, seated(kind, MASKED, 1)),
        "half masked": Update(MASKED + PAIR, seated(kind, MASKED + PAIR, 1, steps=2)),
        "budget": Update(BUDGET, seated(kind, BUDGET, 10, max_tokens=100)),
        "budget, unlike": Update(BUDGET, short_ones_together),
    }


def updated(kind: Kind) -> dict[str, Told]:
    """Each of the updates, from the same start."""
    engine = kind.engine(policy(f_llama()), SGD)
    start, facts = {name: t.detach().clone() for name, t in engine.shards()}, engine.optimizer.facts
    layers = engine.model.decoder.layers if isinstance(engine, MegatronEngine) else engine.module.backbone.layers
    passes: list[None] = []
    layers[0].register_forward_pre_hook(lambda *_: passes.append(None))
    told = {}
    for name, update in updates(kind).items():
        cfg = load_config(
            None, actor_model_config={"model_name_or_path": "m"}, dataset="d.jsonl", reward_fn="exact",
            algorithm={"name": "grpo", "loss_reduction": update.reduction},
        )  # fmt: skip
        engine.restore(start, {}, facts)
        rows = sorted(row for micro in update.seats.rows(kind.place) for row in micro)
        mine, seats = batch(update.rows).select(rows), update.seats.of(kind.place).among(rows)
        logprobs = {}
        if "budget" in name:
            column = engine.forward(mine, seats.rows(0), LOGPROBS, 1.0)["logprobs"]
            logprobs = dict(zip(rows, map(torch.clone, column.rows()), strict=True))
        passes.clear()
        lap = Lap(1, kl_coef=0.0, update=seats)
        ActorWorker(engine, cfg).update(mine, lap)
        metrics: Any = lap.metrics
        told[name] = Told(metrics, {n: start[n] - t.detach() for n, t in engine.shards()}, len(passes), logprobs)
    return told


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def told(kind: Kind) -> list[dict[str, Told]]:
    """By rank."""
    return kind.told(updated)


def check(told: Told, loss: float, expected: tuple[float, dict[str, Tensor]], steps: int = 1) -> None:
    norm, fell = expected
    assert told.metrics["policy/loss"] == pytest.approx(loss, abs=1e-5)
    assert told.metrics["policy/optimizer_steps"] == steps
    assert steps > 1 or told.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert told.fell.keys() == fell.keys()
    for name, weight in told.fell.items():
        loose = 1e-5 if steps == 1 else 1e-4
        torch.testing.assert_close(weight, fell[name], atol=loose, rtol=loose, msg=lambda m, n=name: f"{n}: {m}")


def test_g05_token_mean_does_not_depend_on_the_cut(told):
    """One token of advantage 1 and three of -1: at ratio 1 the loss is (3 - 1) / 4, and by row (1 - 1) / 2."""
    by_token, twice, by_row = (
        by_hand(PAIR, weights, steps)
        for weights, steps in (([1 / 4, 1 / 4], 1), ([1 / 4, 1 / 4], 2), ([1 / 2, 1 / 6], 1))
    )
    for rank in told:
        for name in ("together", "apart", "four times"):
            check(rank[name], 0.5, by_token)
        check(rank["two steps"], 0.5, twice, steps=2)  # of 4 micro-batches, 2 to a step
        check(rank["by row"], 0.0, by_row)


def test_g06_masked_responses_are_in_no_sum_and_no_count(told):
    """Of 30 tokens with a loss of 1 each, 5 are masked."""
    kept = [row for row in THIRTY if not row.masked]
    by_token, by_row = by_hand(kept, [1 / 25, 1 / 25]), by_hand(kept, [1 / 20, 1 / 30])
    for rank in told:
        check(rank["masked"], 1.0, by_token)
        check(rank["one rank masked"], 1.0, by_token)
        check(rank["masked, by row"], 1.0, by_row)


def test_g06_where_every_response_is_masked_nothing_moves(told):
    """Not even by weight decay. A step of the same lap that has tokens is made."""
    live = by_hand(PAIR, [1 / 4, 1 / 4])
    for rank in told:
        nothing, half = rank["all masked"], rank["half masked"]
        facts = [nothing.metrics[f"policy/{n}"] for n in ("loss", "grad_norm", "optimizer_steps", "empty_steps")]
        assert facts == [0.0, 0.0, 0, 1]
        assert not any(fell.any() for fell in nothing.fell.values())
        check(half, 0.5, live)
        assert half.metrics["policy/empty_steps"] == 1


def test_g23_ranks_keep_step_under_a_token_budget(kind, told):
    """Five rows of 95 tokens and five of 20, a budget of 100: as they are seated, and with all short ones together on
    one rank, whose other passes are without rows."""
    expected, truth = by_hand(BUDGET, [1 / TOKENS] * 10), [of_row(f_llama(), row).detach() for row in BUDGET]
    loss = -sum(row.advantage * len(row.response) for row in BUDGET) / TOKENS
    for name, passes in {"budget": (6, 4), "budget, unlike": (10, 5)}.items():
        cut = updates(kind)[name].seats.mini_batches[0].ranks
        assert all(sum(95 if row < 5 else 20 for row in micro) <= 100 for micros in cut for micro in micros)
        seen: set[int] = set()
        for rank in told:
            check(rank[name], loss, expected)
            assert rank[name].passes == passes[kind.dp - 1]
            for row, logprobs in rank[name].logprobs.items():
                torch.testing.assert_close(logprobs, truth[row], atol=1e-5, rtol=0)
            seen.update(rank[name].logprobs)
        assert seen == set(range(10))


# -- G08 -----------------------------------------------------------------------------------------------------------


def nll(outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, float]]:
    return -outputs["logprobs"].sum() / 8, {}


PROBE = [ROW, replace(ROW, response=(4, 7)), LONG, replace(LONG, response=(9, 9, 3))]  # two pairs


def anchored(kind: Kind, folder: str) -> dict[str, Tensor]:
    """Log-probabilities of policy and reference before and after three steps of the policy. The reference is the
    policy's own start where an adapter is trained, else a copy."""
    trained, rows, micros = policy(folder), batch(PROBE), [[0, 1], [2, 3]]
    if trained.has_adapters:
        trained.keep_reference()
    engine = kind.engine(trained, ADAM)
    other = None if trained.has_adapters else kind.engine(policy(folder).requires_grad_(False), ADAM)

    def reference() -> Tensor:
        if other is not None:
            return other.forward(rows, micros, LOGPROBS, 1.0)["logprobs"].values.clone()
        with trained.as_reference():
            return engine.forward(rows, micros, LOGPROBS, 1.0)["logprobs"].values.clone()

    told = {}
    for when in ("before", "after"):
        told[f"policy {when}"] = engine.forward(rows, micros, LOGPROBS, 1.0)["logprobs"].values.clone()
        told[f"reference {when}"] = reference()
        if when == "before":
            assert all(engine.update(rows, micros, nll, LOGPROBS, 1.0).skipped is None for _ in range(3))
    return told


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A model, and an adapter of it whose B isn't 0."""
    folder = tmp_path_factory.mktemp("models")
    base = save(folder / "base", f_llama(), f_bpe())
    trained_adapter(LlamaForCausalLM.from_pretrained(base)).save_pretrained(folder / "sft")
    return {"whole": base, "adapter": str(folder / "sft")}


def loaded(folders: dict[str, str], what: str) -> Any:
    base = LlamaForCausalLM.from_pretrained(folders["whole"])
    return PeftModel.from_pretrained(base, folders["adapter"]).eval() if what == "adapter" else base.eval()


TRAINED = [(name, what) for name in KINDS for what in ("whole", "adapter") if what == "whole" or name in FSDP]
everything = pytest.mark.parametrize(("name", "what"), TRAINED)


@everything
def test_g08_the_reference_is_the_start_and_stays(name, what, folders):
    lm = loaded(folders, what)
    start = torch.cat([of_row(lm, row).detach() for row in PROBE])
    ones, column = torch.ones_like(start, dtype=torch.bool), batch(PROBE).ragged("response_ids")
    for told in KINDS[name].told(anchored, folders[what]):
        before, ref = told["policy before"], told["reference before"]
        torch.testing.assert_close(ref, start, atol=1e-5, rtol=0)
        assert kl_estimate(before, ref, ones, "k3").mean().abs() < 1e-6
        ours, theirs = (row_sums(x, ones, column.row_index, len(PROBE)) for x in (before, ref))
        pairs = dpo(ours[0::2], ours[1::2], theirs[0::2], theirs[1::2], beta=0.5)
        torch.testing.assert_close(pairs.losses, torch.full_like(pairs.losses, 0.693147), atol=1e-6, rtol=0)
        assert torch.equal(told["reference after"], ref)
        assert (told["policy after"] - before).abs().max() > 1e-2


def refusal(kind: Kind, folder: str) -> str:
    with pytest.raises(RequestError) as error:
        kind.engine(policy(folder), ADAM)
    return str(error.value)


def test_g08_an_engine_that_can_not_keep_an_adapter_says_so_at_the_start(folders):
    for said in KINDS["megatron"].told(refusal, folders["adapter"]):
        assert said == "Megatron trains all weights: use_lora must be false"


# -- G20 -----------------------------------------------------------------------------------------------------------

SAMPLING = Sampling(max_new_tokens=6, seed=1, temperature=0.7)
asked = partial(requests, samples=1)


class Publishing:
    """One rank's trainer, an engine that samples from weights of its own, and the way between them."""

    def __init__(self, kind: Kind, folder: str) -> None:
        self.kind, self.policy = kind, policy(folder)
        self.trainer = kind.engine(self.policy, ADAM)
        self.sampler = NativeEngine(policy(folder).requires_grad_(False), frozenset())
        self.rank, self.size = (dist.get_rank(), kind.layout.size) if dist.is_initialized() else (0, 1)
        self.parts = parts_in(self.trainer.pieces()) if isinstance(self.trainer, MegatronEngine) else None
        ranks, nobody = tuple(range(self.size)), lambda rank: None
        placement = Placement(tuple(Device("cpu", r) for r in ranks), {"actor": ranks, "rollout": ranks})
        here = Context(self.rank, self.size, "cpu", nobody, None)
        self.group = dist.group.WORLD if dist.is_initialized() else None
        link: Any = placement, here, self.policy, self.group, self.sampler, torch.device("cpu"), HybridConfig()
        self.publisher = Through(*link, by_files=False, parts=self.parts)

    def answers(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        return {name: (r.ids, r.logprobs) for name, r in ask(self.sampler, asked(), SAMPLING).items()}

    def scores(self, answers: dict[str, tuple[tuple[int, ...], tuple[float, ...]]]) -> float:
        """The largest difference of the trainer's log-probabilities of the answers from the sampler's own."""
        prompts = {r.row_id: r.prompt_ids for r in asked()}
        rows = batch([Row(tuple(prompts[name]), ids) for name, (ids, _) in answers.items()])
        own = self.trainer.forward(rows, [list(range(len(rows)))], LOGPROBS, SAMPLING.temperature)["logprobs"].values
        return (own - torch.tensor([x for _, logprobs in answers.values() for x in logprobs])).abs().max().item()

    def held(self, frozen: bool) -> dict[str, Tensor]:
        """What lies here of the trainer's weights: those that aren't trained, or those that are."""
        if self.parts is not None:
            return {} if frozen else {n: part.tensor.clone() for n, parts in self.parts.items() for part in parts}
        named = self.policy.lm.named_parameters()
        return {name: local(p).detach().clone() for name, p in named if p.requires_grad != frozen}

    def refuses_names(self) -> None:
        """Where all of the trainer's are others, and where one is missing."""
        target = parts_of(in_place(self.sampler.policy.lm, self.sampler.policy.adapter))
        named = self.parts or parts_of(in_place(self.policy.lm, self.policy.adapter))
        n, missing = len(target), next(iter(target))
        for source, says in (
            (
                {f"other.{name}": parts for name, parts in named.items()},
                f"; {n} of {n} weights wanted by what generates",
            ),
            ({name: parts for name, parts in named.items() if name != missing}, f"1 of {n} weights .*: {missing}$"),
        ):
            with pytest.raises(RunError, match=says):
                Corridor.meet(source, target, torch.device("cpu"), HybridConfig(), rank=self.rank, group=self.group)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


def published(kind: Kind, folder: str) -> dict[str, Any]:
    one, rows, micros = Publishing(kind, folder), batch(PROBE), [[0, 1], [2, 3]]
    one.refuses_names()
    told: dict[str, Any] = {"start": one.answers()}
    frozen, told["gaps"] = one.held(True), [one.scores(told["start"])]
    steps = [one.trainer.update(rows, micros, nll, LOGPROBS, 1.0)]
    trained, told["stale"] = one.held(False), one.scores(told["start"])
    for version, name in ((1, "published"), (2, "again")):
        one.publisher.publish(version)
        told[name] = one.answers()
        told["gaps"].append(one.scores(told[name]))
    told["kept"] = same(one.held(False), trained) and same(one.held(True), frozen)
    steps.append(one.trainer.update(rows, micros, nll, LOGPROBS, 1.0))
    told["steps"] = [step.skipped for step in steps]
    told["moved"] = not same(one.held(False), trained) and same(one.held(True), frozen)
    one.sampler.close()
    return told


@everything
def test_g20_the_engine_samples_from_the_new_policy(name, what, folders):
    base = loaded(folders, "whole")
    prompts = {r.row_id: tuple(r.prompt_ids) for r in asked()}
    ranks = KINDS[name].told(published, folders[what])
    for told in ranks:
        assert all(told[when] == ranks[0][when] for when in ("start", "published")), "one policy on every rank"
        assert max(told["gaps"]) < 1e-4 and told["stale"] > 1e-2
        assert told["start"] != told["published"] == told["again"]
        apart = [
            logprobs_of(base, prompts[row], ids, 0.7).gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(own)
            for row, (ids, own) in told["published"].items()
        ]
        assert torch.cat(apart).abs().max() > 1e-2, "nor does it sample from the base"
        assert told["kept"] and told["moved"] and told["steps"] == [None, None]
