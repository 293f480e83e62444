"""Every op gives the same numbers whether its rows sit on one rank or are spread over two.

Each case plays two laps in this process, alone, and on ranks of their own (``tests/engines/ranks.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.ranks import run
from tests.engines.test_fsdp import ALL, BOTH, loss_fn, policy
from tests.engines.test_fsdp import batch as six_rows
from tests.tiny import f_llama
from verl.batch import Batch, Ragged
from verl.config.load import load_config
from verl.config.model import ModelConfig, OptimizerConfig
from verl.config.run import RunConfig
from verl.dataflow.nodes import Actor, Critic, Op, ProcessReward, Reference, Teacher
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import Sharding, device_mesh
from verl.layout import Layout
from verl.models.factory import load_scorer
from verl.models.scorer import Scorer
from verl.models.value import HIDDEN, SharedValue, Value
from verl.seats import Seats, seat
from verl.workers.actor import COVARIANCE, ActorWorker
from verl.workers.critic import START, CriticWorker, ProcessRewardWorker
from verl.workers.frozen import ReferenceWorker, TeacherWorker
from verl.workers.lap import Lap, Mean, Metric, Most, merged
from verl.workers.offline import ANSWER_MASK, MISMATCHED, offline_worker

SGD = OptimizerConfig(name="sgd", lr=0.05)
GROUPS, SAMPLES = 3, 4


@dataclass(frozen=True)
class Case:
    """``ops``: of one lap, as ``node.op``; ``judge``: held-out rows after it."""

    algorithm: str
    ops: tuple[str, ...]
    keys: dict[str, Any] = field(default_factory=dict)  # of the configuration
    steps: int = 2  # per epoch
    sharding: Sharding = "FULL_SHARD"
    micro_rows: int = 2
    shared_critic: bool = False
    judge: bool = False

    @property
    def cfg(self) -> RunConfig:
        """Its sizes are not what is played here."""
        keys: dict[str, Any] = {"actor_model_config": {"model_name_or_path": "m"}, "dataset": "d.jsonl"}
        if self.algorithm in ("kto", "sft", "dpo", "reward_model", "verifier"):
            keys |= {"train_batch_size": 8}
        elif self.algorithm == "distill":
            keys |= {"teacher_model_config": {"model_name_or_path": "m"}}
        else:
            keys |= {"reward_fn": "exact"}
        algorithm = {"name": self.algorithm} | self.keys.get("algorithm", {})
        return load_config(None, **(keys | self.keys | {"algorithm": algorithm}))


# -- rows ----------------------------------------------------------------------------------------------------------


def ragged(generator: torch.Generator, lengths: Tensor, low: float, high: float) -> Ragged:
    return Ragged(torch.rand(int(lengths.sum()), generator=generator) * (high - low) + low, lengths)


def ids(generator: torch.Generator, n: int) -> Tensor:
    return torch.randint(3, 32, (n,), generator=generator)


def sampled(step: int) -> Batch:
    """Three groups of four rows of 1 to 7 tokens, one of them without a loss, the last group's scores all equal."""
    g = torch.Generator().manual_seed(step)
    group = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    prompts = [ids(g, n) for n in (5, 3, 4)]
    responses = [ids(g, int(n)) for n in torch.randint(1, 8, (len(group),), generator=g)]
    batch = Batch([str(i) for i in range(len(group))])
    batch["prompt_ids"] = Ragged.from_rows([prompts[i] for i in group])
    batch["group"] = group
    batch["response_ids"] = Ragged.from_rows(responses)
    lengths = batch.ragged("response_ids").lengths
    mask = torch.rand(int(lengths.sum()), generator=g) < 0.9
    mask[batch.ragged("response_ids").row_index == 2] = False
    batch["response_mask"] = Ragged(mask, lengths)
    batch["sampled_logprobs"] = ragged(g, lengths, -4.0, -2.0)
    scores = torch.rand(len(group), generator=g, dtype=torch.float64)
    scores[group == GROUPS - 1] = 0.5
    batch["scores"] = scores
    return batch


def examples(step: int, kind: str) -> tuple[Batch, int]:
    """Rows of a data set, and how many of them are trained: KTO's have a partner each."""
    g = torch.Generator().manual_seed(step)
    n = 3
    groups = torch.arange(n).repeat_interleave(2) if kind == "pairs" else torch.arange(n)
    own = len(groups)
    prompts = [ids(g, k) for k in (5, 3, 4)]
    answers = [ids(g, k) for k in (4, 2, 7, 3, 1, 5)[:own]]
    masks = [torch.arange(len(a)) >= (len(a) > 2) for a in answers]  # a long answer's first token isn't trained
    if kind == "kto":
        groups = groups.repeat(2)
        answers += [answers[(i + 1) % n] for i in range(n)]
        masks += [masks[(i + 1) % n] for i in range(n)]
    batch = Batch([str(i) for i in range(len(groups))])
    batch["prompt_ids"] = Ragged.from_rows([prompts[i] for i in groups])
    batch["group"] = groups
    batch["response_ids"] = Ragged.from_rows(answers)
    answer = Ragged.from_rows(masks)
    batch["response_mask"] = answer.with_values(answer.values & (answer.row_index < own))
    if kind == "pairs":
        batch["preferred"] = torch.tensor([1, -1] * n)
        batch["margin"] = torch.tensor([0.5, 0.5, torch.nan, torch.nan, 0.1, 0.1], dtype=torch.float64)
    else:
        batch["label"] = torch.tensor([1.0, 0.0, 1.0] * (len(groups) // n), dtype=torch.float64)
    if kind == "kto":
        batch[ANSWER_MASK], batch[MISMATCHED] = answer, torch.tensor([-1] * n + list(range(n)))
    return batch, own


# -- a lap ---------------------------------------------------------------------------------------------------------


def everybody(mine: Any) -> list[Any]:
    """What each rank has; alone: mine."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Play:
    """What the controller does with a lap's rows, without hosts: every rank holds the columns of all rows."""

    def __init__(self, case: Case, workers: dict[str, Any], batch: Batch, own: int, step: int) -> None:
        self.case, self.workers, self.batch, self.own, self.step = case, workers, batch, own, step
        self.cfg = case.cfg
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.trained = list(range(own))
        self.metrics: dict[str, float | None] = {}

    def seats(self, trained: Sequence[int], steps: int, epochs: int) -> Seats:
        batch, mask = self.batch, self.batch.ragged("response_mask")
        loss_tokens = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, mask.row_index, mask.values.long())
        return seat(
            batch.ragged("prompt_ids").lengths.tolist(), mask.lengths.tolist(), batch.tensor("group").tolist(),
            ranks=self.ranks, mini_batch_rows=len(batch) // steps, micro_rows=self.case.micro_rows,
            loss_tokens=loss_tokens.tolist(), skip=set(range(len(batch))) - set(trained), share_prompts=True,
            whole_groups="preferred" in batch, epochs=epochs, seed=self.step,
        )  # fmt: skip

    def do(self, op: Op) -> None:
        rows = list(range(len(self.batch)))
        lap = Lap(self.step, kl_coef=self.cfg.init_kl_coef or 0.0)
        if op.seats == "pass":
            seats = self.seats(rows, 1, 1)
            rows = sorted(i for micro in seats.rows(self.rank) for i in micro)
            lap.forward = seats.of(self.rank).among(rows)
        elif op.seats == "update":
            seats = self.seats(self.trained, self.case.steps, self.cfg.algorithm.update_epochs)
            rows = self.with_partners(seats)
            lap.update = seats.of(self.rank).among(rows)
        elif self.rank:
            rows = []
        written: dict[str, Any] = {}
        if op.seats != "one" or not self.rank:
            written = self.run(op, rows, lap)
        parts = everybody((rows, written, lap.metrics, lap.trained, lap.kl_per_response))
        self.metrics |= merged([metrics for _, _, metrics, _, _ in parts])
        self.take([(r, w) for r, w, *_ in parts if r])
        if (flags := parts[0][3]) is not None:
            self.trained = [i for i in self.trained if flags[i]]
        if op.name == "update" and op.node.kind == "actor":
            assert len({kl for *_, kl in parts}) == 1

    def run(self, op: Op, rows: list[int], lap: Lap) -> dict[str, Any]:
        """The op on these rows and the columns it declares; what it wrote."""
        declared = {*op.reads, *op.uses, *op.keeps}
        seen = {name: column for name, column in self.batch.columns.items() if name in declared}
        local = Batch(self.batch.ids, seen).select(rows)
        local["row"] = torch.tensor(rows, dtype=torch.int64)
        before = dict(local.columns)
        getattr(self.workers[op.node.kind], op.name)(local, lap)
        written = {name: column for name, column in local.columns.items() if before.get(name) is not column}
        assert written.keys() <= {*op.writes, *op.keeps, "response_mask"}
        return written

    def take(self, parts: list[tuple[list[int], dict[str, Any]]]) -> None:
        order = [row for rows, _ in parts for row in rows]
        for name in parts[0][1]:
            assert sorted(order) == list(range(len(self.batch)))
            joined = Batch.cat([Batch([str(i) for i in rows], {name: written[name]}) for rows, written in parts])
            self.batch[name] = joined.select(torch.tensor(order).argsort().tolist())[name]

    def with_partners(self, seats: Seats) -> list[int]:
        """The rank's rows; KTO's with their partners."""
        rows = {i for micro in seats.rows(self.rank) for i in micro}
        if MISMATCHED in self.batch:
            rows |= {self.own + i for i in rows}
        return sorted(rows)

    def judge(self) -> None:
        seats = self.seats(range(self.own), 1, 1)
        rows = self.with_partners(seats)
        lap = Lap(self.step, kl_coef=0.0, update=seats.of(self.rank).among(rows))
        found = self.workers["actor"].judge(self.batch.select(rows), lap)
        assert all(found == other for other in everybody(found))
        self.metrics |= {f"eval/{name}": value for name, value in found.items()}


NODES = {node.kind: node for node in (Actor(), Critic(), Reference(), Teacher(), ProcessReward())}


def workers_of(case: Case, cfg: RunConfig) -> dict[str, Any]:
    mesh = device_mesh(Layout(dp=dist.get_world_size()), "cpu") if dist.is_initialized() else None

    def engine(module: Any) -> FsdpEngine:
        return FsdpEngine(module, SGD, mesh=mesh, sharding=case.sharding)

    def frozen(module: Any) -> FsdpEngine:
        return engine(copy.deepcopy(module).requires_grad_(False))

    kinds = {op.partition(".")[0] for op in case.ops}
    found: dict[str, Any] = {}
    if cfg.algorithm.recipe.trains == "scorer":
        config = ModelConfig(model_name_or_path=f_llama())
        module: Any = Scorer(load_scorer(config, "cpu", torch.float32))
    else:
        module = policy(f_llama())
    if "reference" in kinds:  # another model than the actor, so that their KL isn't 0
        found["reference"] = ReferenceWorker(frozen(policy(f_llama(seed=1))), cfg)
    if "teacher" in kinds:
        found["teacher"] = TeacherWorker(frozen(policy(f_llama(seed=2))), cfg)
    if "process_reward" in kinds:
        found["process_reward"] = ProcessRewardWorker(engine(policy(f_llama())), frozen(policy(f_llama(seed=1))), cfg)
    actor = engine(module)
    found["actor"] = offline_worker(actor, cfg) if cfg.algorithm.recipe.advantage is None else ActorWorker(actor, cfg)
    if "critic" in kinds:
        value = SharedValue(module) if case.shared_critic else Value(policy(f_llama(seed=3)).lm)
        found["critic"] = CriticWorker(engine(value), cfg)
        found["critic"].shared = case.shared_critic
    return found


def play(case: Case, laps: int = 2) -> tuple[dict[str, Tensor], list[dict[str, float | None]], list[list[int]]]:
    """Weights at the end by role, metrics and trained rows of each lap."""
    cfg = case.cfg
    workers = workers_of(case, cfg)
    metrics, trained = [], []
    for step in range(1, laps + 1):
        kind = {"kto": "kto", "dpo": "pairs", "reward_model": "pairs"}.get(case.algorithm, "rows")
        batch, own = (sampled(step), GROUPS * SAMPLES) if cfg.algorithm.recipe.samples else examples(step, kind)
        lap = Play(case, workers, batch, own, step)
        for label in case.ops:
            node, _, op = label.partition(".")
            lap.do(NODES[node].ops[op])
        if case.judge:
            lap.judge()
        metrics.append(lap.metrics)
        trained.append(lap.trained)
    roles = [role for role in ("actor", "critic", "process_reward") if role in workers]
    weights = {f"{r}/{n}": t.detach().clone() for r in roles for n, t in workers[r].engine.shards()}
    return weights, metrics, trained


# -- cases ---------------------------------------------------------------------------------------------------------

EPOCHS = {"algorithm": {"update_epochs": 2}}
SAMPLED = ("actor.logprobs", "reference.logprobs", "actor.advantages", "actor.update")
CRITIC = ("actor.logprobs", "reference.logprobs", "critic.values", "actor.advantages", "critic.update", "actor.update")
FIT = ("actor.fit",)
WITH_REFERENCE = ("reference.logprobs", "actor.fit")
CASES = {
    "grpo": Case("grpo", SAMPLED, {"init_kl_coef": 0.1, "algorithm": {"update_epochs": 2, "correction": "tis"}}),
    "drift": Case(
        "grpo", ("reference.drift", "actor.advantages", "actor.update"), {"init_kl_coef": 0.0, "kl_sample_rows": 5},
        steps=1,
    ),
    "clip_cov": Case(
        "clip_cov", SAMPLED,
        {"init_kl_coef": 0.0, "algorithm": {"covariance_share": 0.2, "covariance_low": -9.0, "covariance_high": 9.0}},
    ),
    "ppo": Case("ppo", CRITIC, EPOCHS),
    "shared critic": Case("ppo", CRITIC, shared_critic=True),
    "prime": Case("prime", ("process_reward.update", "process_reward.rewards", "actor.advantages", "actor.update")),
    "distill": Case("distill", ("actor.logprobs", "teacher.logprobs", "actor.distill", "actor.update")),
    "online_dpo": Case("online_dpo", ("reference.logprobs", "actor.prefer", "actor.fit"), steps=1),
    "dpo": Case("dpo", WITH_REFERENCE, steps=1, judge=True),
    "kto": Case("kto", WITH_REFERENCE, EPOCHS, steps=1, judge=True),
    "kto, a row a step": Case("kto", WITH_REFERENCE, steps=3, judge=True),
    "sft": Case("sft", FIT, EPOCHS, steps=1, judge=True),
    "reward_model": Case("reward_model", FIT, steps=1, judge=True),
    "verifier": Case("verifier", FIT, steps=3, judge=True),
}  # fmt: skip
COPIES = ("grpo", "shared critic", "kto", "prime")  # and with a whole copy of the model on each rank


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(replace(CASES[name], sharding="NO_SHARD") for name in COPIES)],
    ids=[*CASES, *(f"{name}, copies" for name in COPIES)],
)
def test_two_ranks_learn_and_tell_what_one_does(case):
    weights, metrics, trained = play(case)
    for ours, told, rows in run(2, play, case):
        assert rows == trained
        for lap, alone in zip(told, metrics, strict=True):
            assert lap == pytest.approx(alone, rel=1e-5, abs=1e-5)
        assert ours.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_case_says_something(case):
    """Else equality would be cheap: the weights move, and every metric of the ops under test is there."""
    told = play(case, laps=1)[1][0]
    assert told["policy/grad_norm"] > 1e-3
    wanted = {
        "grpo": {"kl/mean", "kl/per_response", "rollout/logprob_diff_mean", "correction/weight_mean"},
        "clip_cov": {"rollout/logprob_diff_max"},
        "ppo": {"critic/value_mean", "critic/explained_variance", "critic/grad_norm"},
        "prime": {"process_reward/accuracy", "process_reward/grad_norm", "process_reward/bad_steps"},
        "distill": {"distill/kl", "rollout/logprob_diff_mean"},
        "online_dpo": {"preference/pairs", "kl/mean", "preference/margin"},
        "dpo": {"eval/loss", "eval/preference/margin"},
        "kto": {"preference/kl_baseline", "eval/preference/kl_baseline", "eval/loss"},
        "sft": {"sft/nll", "eval/sft/nll"},
        "reward_model": {"eval/preference/accuracy", "preference/margin"},
        "verifier": {"eval/preference/accuracy"},
    }[case.algorithm]
    if "reference.drift" in case.ops:
        wanted = {"kl/mean", "rollout/logprob_diff_mean", "rollout/logprob_diff_max"}
    missing = {name for name in wanted if told.get(name) is None}
    assert not missing
    zero = {name for name in ("kl/mean", "preference/kl_baseline", "critic/explained_variance") if told.get(name) == 0}
    assert not zero


# -- pieces --------------------------------------------------------------------------------------------------------


def test_parts_of_metrics_become_one():
    left: dict[str, Metric] = {"m": Mean(6.0, 3), "x": Most(2.0), "p": 7.0, "none": None, "left": 1.0, "e": Mean(0, 0)}
    right: dict[str, Metric] = {"m": Mean.of(torch.tensor([1.0, 5.0])), "x": Most.of(torch.tensor([])), "p": 7.0}
    right |= {"none": None, "x2": Most(None), "e": Mean.of(torch.tensor([]))}
    assert merged([left, right]) == {
        "m": 12 / 5, "x": 2.0, "p": 7.0, "none": None, "left": 1.0, "e": None, "x2": None,
    }  # fmt: skip
    assert merged([right]) == {"m": 3.0, "x": None, "p": 7.0, "none": None, "x2": None, "e": None}
    assert merged([]) == {}


def test_columns_of_a_node_s_own_are_declared_by_their_names():
    kept = {op.label: set(op.keeps) for node in NODES.values() for op in node.ops.values() if op.keeps}
    assert kept == {
        "actor.advantages": {"reward_parts", COVARIANCE},
        "actor.distill": {COVARIANCE},
        "actor.update": {COVARIANCE},
        "actor.fit": {MISMATCHED, ANSWER_MASK},
        "process_reward.update": {START},
        "process_reward.rewards": {START},
        "critic.values": {HIDDEN},
        "critic.update": {HIDDEN},
    }


def apart(tp: int) -> dict[str, Tensor]:
    """Ranks 1 and 2 of three train a model together; rank 0 trains another meanwhile, a different number of times."""
    together = device_mesh(Layout.of(2, tp=tp), "cpu", ranks=[1, 2])
    single = device_mesh(Layout(), "cpu", ranks=[0])
    rank = dist.get_rank()
    mesh, place = (together, rank - 1) if rank else (single, 0)
    engine = FsdpEngine(policy(f_llama()), SGD, mesh=mesh)
    cut = [ALL, ALL] if not rank or tp == 2 else [[[0, 4, 2]], [[1, 3, 5]]]
    for _ in range(3 if rank else 5):
        engine.update(six_rows(), cut[place], loss_fn, BOTH, 0.8)
        assert engine.total([1.0]) == [2.0 if rank and tp == 1 else 1.0]
    return {name: t.detach().clone() for name, t in engine.shards()}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_role_has_some_of_the_world_s_ranks(tp):
    alone = FsdpEngine(policy(f_llama()), SGD)
    weights = []
    for _ in range(5):
        alone.update(six_rows(), ALL, loss_fn, BOTH, 0.8)
        weights.append({name: t.detach().clone() for name, t in alone.shards()})
    for ours, theirs in zip(run(3, apart, tp), (weights[4], weights[2], weights[2]), strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def refused() -> list[str]:
    found = []
    for ranks in ([1, 0], [0], [0, 0]):
        with pytest.raises(ValueError, match="different ones in ascending order") as error:
            device_mesh(Layout(dp=2), "cpu", ranks=ranks)
        found.append(str(error.value))
    return found


def test_ranks_of_a_mesh_ascend():
    assert run(2, refused)[1][0] == "ranks [1, 0] aren't 2 different ones in ascending order"


def totals(tp: int) -> list[list[float]]:
    engine = FsdpEngine(policy(f_llama()), SGD, mesh=device_mesh(Layout.of(dist.get_world_size(), tp=tp), "cpu"))
    rank = dist.get_rank() // tp
    return [engine.total([rank + 1, 0.1 * (rank + 1)]), engine.total([])]


def test_totals_count_rows_once():
    assert FsdpEngine(policy(f_llama()), SGD).total([1, 0.5]) == [1.0, 0.5]
    assert run(2, totals, 1) == [[[3.0, 0.1 + 0.2], []]] * 2
    assert run(2, totals, 2) == [[[1.0, 0.1], []]] * 2
