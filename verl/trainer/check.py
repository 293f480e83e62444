"""``verl check``: what must be true of every run, seen on this model, these data and this machine.

Three short runs in a folder that goes again: three laps; the first lap once more in other micro-batches; laps two and
three once more from the checkpoint after lap one.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from verl.checkpoint.store import Checkpoint
from verl.config.run import RunConfig
from verl.metrics.health import GAP_BF16, GAP_FP32
from verl.models.factory import resolve_dtype
from verl.runtime.collect import Collected
from verl.runtime.controller import LapResult
from verl.trainer.base import Run
from verl.trainer.folder import writable

LAPS, LR = 3, 1e-4
NUMBERS = (  # of a lap, that don't depend on how it was computed
    "reward/mean", "kl/mean", "policy/loss", "policy/entropy", "policy/grad_norm", "critic/loss", "critic/grad_norm",
    "critic/value_mean", "preference/accuracy", "preference/margin", "sft/nll", "distill/kl", "process_reward/loss",
    "process_reward/grad_norm",
)  # fmt: skip
MOVED = 1e-9  # nats per token: more than a policy that stayed where it was has to its start, in fp32

Metrics = Mapping[str, float | None]
Verdict = Literal["ok", "look", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """``look``: nothing is broken, but training would be slow or odd. ``unknown``: it can't be judged here."""

    what: str
    verdict: Verdict
    text: str


def check(load: Callable[..., RunConfig], rows: int) -> tuple[str, list[Finding]]:
    """``load(**keys)``: the run's configuration with these top-level keys on top. ``rows``: of a lap, at least.

    Returns what was run, in a line, and what was found. Raises as a run does.
    """
    asked = load()
    with tempfile.TemporaryDirectory(prefix=".verl-check-", dir=writable(Path(asked.run_dir))) as folder:
        keys = _keys(asked, rows)
        whole = load(**keys, run_dir=f"{folder}/run")
        micro = _other_micro(whole)
        with Run(whole, console=False) as run:
            run.prepare()
            crew, feed = run.controller.crew, dict(run.feed.counts)
            where = crew.device if crew.alone else f"{len(crew.ranks)} workers"
            laps = [run.step()]
            first = Checkpoint.open(run.save())
            laps.append(run.step())
            second = Checkpoint.open(run.save())
            laps.append(run.step())
            plain = crew.group.places[crew.of("actor")[0]].device
        exact = resolve_dtype(whole.actor_model_config.dtype, plain).itemsize > 2
        split = []
        if micro is not None:
            other = load(**keys | _micro(whole.mini_batch_size, micro), run_dir=f"{folder}/split")
            with Run(other, console=False) as run:
                run.prepare()
                split = [run.step()]
        with Run(whole, console=False) as run:
            run.prepare(first)
            again = [run.step() for _ in laps[1:]]
        findings = [
            _data(feed, laps[0].metrics),
            *(_sampled(whole, laps, exact) if whole.algorithm.recipe.samples else ()),
            _gradients(laps[0].metrics, first, second),
            _same_numbers(
                f"micro-batches of {micro} give the gradient of {whole.micro_batch_size}", laps[:1], split,
                1e-3 if exact else 0.05, "cpu" in plain,
            ),
            _same_numbers(
                "a resumed run is the run that went on", laps[1:], again,
                1e-4 if exact else 0.05, "cpu" in plain,
            ),
        ]  # fmt: skip
    size = f"{whole.train_batch_size} rows a lap, {LAPS} laps, learning rate {whole.actor_model_config.optimizer.lr:g}"
    return f"{whole.algorithm.name} on {where}: {size}", findings


# -- what is run ---------------------------------------------------------------------------------------------------


def _keys(cfg: RunConfig, rows: int) -> dict[str, Any]:
    """A short run's keys: small laps of one optimizer step each, with steps that can be seen."""
    recipe = cfg.algorithm.recipe
    unit = cfg.group_size if recipe.samples else 2
    size = -(-rows // unit) * unit
    most = min(cfg.micro_batch_size, size)
    model: Any = {"optimizer": {"lr": max(cfg.actor_model_config.optimizer.lr, LR), "schedule": "constant",
                                "warmup_steps": 0}}  # fmt: skip
    keys: dict[str, Any] = {
        "train_batch_size": size,
        **_micro(size, next(n for n in range(most, 0, -1) if size % n == 0 and (n == 1 or n % _least(cfg) == 0))),
        "total_steps": LAPS, "total_epochs": None, "eval": {"dataset": None}, "actor_model_config": model,
        "checkpoint": {"every_steps": 0, "every_minutes": None, "save": "global", "keep": 2, "beside_training": False},
        "metrics": {"tensorboard": False, "prometheus_port": None},
        "algorithm": {"update_epochs": 1},
    }  # fmt: skip
    if recipe.samples:
        keys |= {"rollout_batch_size": size, "max_staleness": 0, "hybrid_config": {"reshard_interval": 1}}
        if cfg.algorithm.dynamic_sampling:
            keys["algorithm"]["dynamic_sampling"] = False
        if not cfg.init_kl_coef:
            keys["kl_sample_rows"] = size
        if recipe.advantage not in ("pass_k", "prime", None) and "reward" in recipe.needs:  # those know right and wrong
            n = len(cfg.reward_fn)
            keys["reward_fn"] = [*cfg.reward_fn, luck]
            keys["reward_weights"] = [*cfg.reward_weights[:n], 1.0, *cfg.reward_weights[n:]]
    return keys


def luck(response_ids: Sequence[int]) -> float:
    """A reward that differs from answer to answer, so that there is a gradient where the run's own are all the same."""
    return zlib.crc32(repr(list(response_ids)).encode()) / 2**32


def _micro(mini: int, micro: int) -> dict[str, int]:
    return {"mini_batch_size": mini, "micro_batch_size": micro, "gradient_accumulation_steps": mini // micro}


def _least(cfg: RunConfig) -> int:
    """Rows that a micro-batch can't be without."""
    recipe = cfg.algorithm.recipe
    return 2 if recipe.pairs_sampled or recipe.data == "pairs" else 1


def _other_micro(cfg: RunConfig) -> int | None:
    """The smallest micro-batch, or twice it where that is what the run has; None: there is one row, or one pair."""
    least = _least(cfg)
    if cfg.micro_batch_size > least:
        return least
    return 2 * least if cfg.mini_batch_size % (2 * least) == 0 else None


# -- what is found -------------------------------------------------------------------------------------------------


def _data(counts: Mapping[str, int], metrics: Metrics) -> Finding:
    odd = {what: n for what, n in counts.items() if n and what != "kept"}
    odd |= {name: int(n) for name in ("truncated", "filtered", "bad") if (n := metrics.get(f"data/{name}"))}
    text = ", ".join([f"{counts.get('kept', 0)} kept", *(f"{n} {what}" for what, n in odd.items())])
    advice = "; verl stats tells the lengths" if odd else ""
    return Finding("rows of the data", "look" if odd else "ok", text + advice)


def _sampled(cfg: RunConfig, laps: list[LapResult], exact: bool) -> Iterator[Finding]:
    first, second = laps[0].metrics, laps[1].metrics
    cut = first.get("response/truncated") or 0.0
    yield Finding(
        "responses end by themselves", "look" if cut > 0.5 else "ok",
        f"{cut:.0%} are cut at {cfg.max_response_length} tokens" + (
            ": raise max_response_length, or see whether the model knows its end token" if cut > 0.5 else ""
        ),
    )  # fmt: skip
    if cfg.reward_fn or cfg.reward_model_config is not None:
        assert laps[0].collected is not None
        yield _rewards(laps[0].collected, first)
    gap, limit = first.get("rollout/logprob_diff_max"), GAP_FP32 if exact else GAP_BF16
    comparable = cfg.rollout.top_p == 1 and not cfg.rollout.top_k
    if gap is None or not comparable:
        why = "no row was compared" if comparable else "top_p and top_k change what is sampled from"
        yield Finding("sampler and trainer agree", "unknown", why)
    else:
        wide = gap > limit
        advice = ": rollout.engine native tells whether it is the engine" if wide else ""
        yield Finding(
            "sampler and trainer agree", "wrong" if wide else "ok",
            f"on a token by {gap:.2g} nats at most, rounding explains {limit:g}{advice}",
        )  # fmt: skip
    ratio = first.get("policy/ratio_max")
    if ratio is not None and cfg.algorithm.old_logprobs == "trainer":
        far = abs(ratio - 1) > (1e-3 if exact else 0.5)
        yield Finding("the first update starts from the sampled policy", "wrong" if far else "ok", f"ratio {ratio:.6g}")
    start, moved = first.get("kl/mean"), second.get("kl/mean")
    if start is not None:
        far = abs(start) > (1e-5 if exact else 0.02)
        yield Finding("the reference is the starting policy", "wrong" if far else "ok", f"KL {start:.2g} nats a token")
    yield _new_weights(first, second, moved, limit if comparable else None)


def _rewards(collected: Collected, metrics: Metrics) -> Finding:
    """Of the run's own rewards."""
    failed = sum(metrics.get(f"reward/{name}") or 0.0 for name in ("failed", "timed_out", "dropped"))
    by_chance = collected.scores.per_reward.get("luck") or [0.0] * len(collected.rows)
    own = [values for name, values in collected.scores.per_reward.items() if name != "luck"]
    groups: dict[int, list[float]] = {}
    for i, (row, total, chance) in enumerate(zip(collected.rows, collected.scores.totals, by_chance, strict=True)):
        if total is not None and any(values[i] is not None for values in own):
            groups.setdefault(row.draw.number, []).append(round(total - (chance or 0.0), 6))
    totals = [total for group in groups.values() for total in group]
    if not totals:
        return Finding("rewards differ", "wrong", "no row has one: does the function return a number?")
    text = f"mean {statistics.fmean(totals):.3g}, spread {statistics.pstdev(totals):.3g}"
    flat = [len(set(group)) == 1 for group in groups.values() if len(group) > 1]
    if flat:
        text += f", {sum(flat)} of {len(flat)} groups are flat"
    if failed:
        return Finding("rewards differ", "wrong", f"{text}; {failed:g} calls failed, see reward_failure")
    if len(set(totals)) == 1 or (flat and all(flat)):
        advice = "nothing to learn from; see more rows with --rows, or take other prompts"
        return Finding("rewards differ", "look", f"{text}: {advice}")
    return Finding("rewards differ", "ok", text)


def _new_weights(first: Metrics, second: Metrics, moved: float | None, limit: float | None) -> Finding:
    """After an optimizer step the sampler is as near to the trainer as before, which has moved away meanwhile."""
    what = "new weights reach the sampler"
    before, after = (m.get("rollout/logprob_diff_mean") for m in (first, second))
    if before is None or after is None or limit is None:
        return Finding(what, "unknown", "log-probabilities of sampler and trainer can't be compared")
    shift = "" if moved is None else f"the policy moved by {moved:.2g} nats a token, "
    text = f"{shift}the gap was {before:.2g} and is {after:.2g}"
    if after > 3 * before + 1e-4 * limit:
        return Finding(what, "wrong", text)
    if moved is not None and abs(moved) < MOVED:
        return Finding(what, "unknown", "the optimizer step didn't move the policy")
    return Finding(what, "ok", text)


def _gradients(metrics: Metrics, first: Checkpoint, second: Checkpoint) -> Finding:
    what, norm = "the gradient reaches what is trained", metrics.get("policy/grad_norm")
    bad = sum(metrics.get(f"{role}/bad_steps") or 0.0 for role in ("policy", "critic", "process_reward"))
    if bad or (norm is not None and not math.isfinite(norm)):
        return Finding(what, "wrong", f"it isn't finite in {bad:g} steps")
    if norm == 0:
        return Finding(what, "look", "it is 0: there was nothing to learn from")
    still, count = [], 0
    for role in ("actor", "critic", "process_reward"):
        if role in first:
            old, new = (_trained(checkpoint, role) for checkpoint in (first, second))
            count += len(old)
            still += [f"{role} {name}" for name in old if torch.equal(old[name], new[name])]
    text = f"norm {norm:.3g}, " if norm is not None else ""
    if not count:
        return Finding(what, "unknown", f"{text}the checkpoints hold nothing that is trained")
    if not still:
        return Finding(what, "ok", f"{text}all {count} tensors change")
    shown = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    return Finding(what, "look", f"{text}{len(still)} of {count} stay: {shown}")


def _trained(checkpoint: Checkpoint, role: str) -> dict[str, torch.Tensor]:
    """What the optimizer steps on: a step may be too small to be seen in the bf16 copy of a float32 master."""
    state = checkpoint.tensors(f"{role}_optimizer")
    masters = {name.removeprefix("master/"): state[name] for name in state if name.startswith("master/")}
    return {**checkpoint.tensors(role), **masters}


def _same_numbers(what: str, laps: list[LapResult], others: list[LapResult], limit: float, repeats: bool) -> Finding:
    """``limit``: of the relative difference: several threads may round anew each time. ``repeats``: whether what is
    sampled is the same each time; a GPU's rounding may lead to another token."""
    if not others:
        return Finding(what, "unknown", "there are no others")
    if not all(map(_same_rows, laps, others)):
        return Finding(what, "wrong" if repeats else "unknown", "other rows were sampled")
    far, name = max(
        (_distance(one.metrics[name], other.metrics.get(name)), name)
        for one, other in zip(laps, others, strict=True)
        for name in NUMBERS
        if one.metrics.get(name) is not None
    )
    near = "to the last bit" if far == 0 else f"to {far:.1g}" + (f" ({name})" if far > limit else "")
    return Finding(what, "wrong" if far > limit else "ok", f"the same {near}")


def _same_rows(one: LapResult, other: LapResult) -> bool:
    if one.collected is None or other.collected is None:
        return one.collected is other.collected
    a, b = ([(row.id, row.length, row.finish_reason) for row in lap.collected.rows] for lap in (one, other))  # type: ignore[union-attr]
    return a == b


def _distance(a: float | None, b: float | None) -> float:
    """Relative; of numbers below a thousandth, a thousand times the absolute one."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if a == b else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-3)
