"""Policy losses against scalar loops, finite differences and their papers' numbers; and under every split."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.algorithms.facts import NUMBERS, cut, loss_facts, loss_of
from tests.algorithms.ragged import rows, totals_of
from tests.forks import FORKS
from verl.algorithms.policy import POLICY_LOSSES, covariance_tokens, gmpo, gspo, ppo_loss, sapo
from verl.algorithms.reduce import reduce_loss

R = rows()
LOW, HIGH, DUAL = NUMBERS["clip_low"], NUMBERS["clip_high"], NUMBERS["dual_clip"]
REDUCTIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def slow_ppo(a: float, ratio: float, dual: float | None = DUAL) -> float:
    loss = max(-a * ratio, -a * clip(ratio, 1 - LOW, 1 + HIGH))
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def slow_gmpo_log(a: float, delta: float) -> float:
    return min(delta, math.log(1 + HIGH)) if a > 0 else max(delta, math.log(1 - LOW))


def slow_dppo(a: float, ratio: float, new: float, old: float) -> float:
    away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
    return 0.0 if away and abs(math.exp(new) - math.exp(old)) > NUMBERS["dppo_threshold"] else -a * ratio


def slow_sapo(a: float, ratio: float) -> float:
    tau = NUMBERS["sapo_tau_positive"] if a > 0 else NUMBERS["sapo_tau_negative"]
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


# Each: the losses of one row's masked tokens from lists of A, log rho, new and old log-probability, chosen.
Slow = Callable[[list[float], list[float], list[float], list[float], list[bool]], list[float]]
SLOW: dict[str, Slow] = {
    "ppo": lambda a, d, new, old, chosen: [slow_ppo(x, math.exp(y)) for x, y in zip(a, d, strict=True)],
    "reinforce": lambda a, d, new, old, chosen: [-x * y for x, y in zip(a, new, strict=True)],
    "gspo": lambda a, d, new, old, chosen: [slow_ppo(x, math.exp(statistics.mean(d)), None) for x in a],
    "cispo": lambda a, d, new, old, chosen: [
        -clip(math.exp(y), 1 - LOW, 1 + HIGH) * x * z for x, y, z in zip(a, d, new, strict=True)
    ],
    "sapo": lambda a, d, new, old, chosen: [slow_sapo(x, math.exp(y)) for x, y in zip(a, d, strict=True)],
    "gmpo": lambda a, d, new, old, chosen: [
        -x * math.exp(statistics.mean(slow_gmpo_log(y, z) for y, z in zip(a, d, strict=True))) for x in a
    ],
    "dppo": lambda a, d, new, old, chosen: [
        slow_dppo(x, math.exp(y), n, o) for x, y, n, o in zip(a, d, new, old, strict=True)
    ],
    "clip_cov": lambda a, d, new, old, chosen: [
        0.0 if c else slow_ppo(x, math.exp(y), None) for x, y, c in zip(a, d, chosen, strict=True)
    ],
    "kl_cov": lambda a, d, new, old, chosen: [
        -x * math.exp(y) + c * NUMBERS["kl_cov_coef"] * (math.exp(y) - 1 - y)
        for x, y, c in zip(a, d, chosen, strict=True)
    ],
}


def test_every_loss_has_its_slow_form():
    assert set(SLOW) == set(POLICY_LOSSES)


@every_loss
@pytest.mark.parametrize("spread", [0.05, 0.5, 1.5])
def test_losses_against_the_loop(name, spread):
    facts = loss_facts(R, spread)
    got = loss_of(name, facts)
    kl = largest = 0.0
    for i in range(R.n):
        tokens = R.tokens(i)
        if not tokens:
            continue
        a, new, old, chosen = (
            facts[k][tokens].tolist() for k in ("advantages", "logprobs", "old_logprobs", "covariance_tokens")
        )
        delta = [x - y for x, y in zip(new, old, strict=True)]
        assert got.losses[tokens].tolist() == pytest.approx(SLOW[name](a, delta, new, old, chosen), abs=1e-12)
        kl += sum(math.exp(x) - 1 - x for x in delta)
        largest = max(largest, *(math.exp(x) for x in delta))
    assert (got.losses[~R.mask] == 0).all()
    assert got.approx_kl.item() == pytest.approx(kl)
    assert got.ratio_max.item() == pytest.approx(largest)


@every_loss
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_gradient_by_finite_differences(name, spread):
    facts = loss_facts(R, spread)
    totals = totals_of(R.mask, R.row, R.n)
    facts |= {k: facts[k].masked_fill(~R.mask, 0.0) for k in ("logprobs", "old_logprobs")}  # differences of NaN are NaN
    start = facts["logprobs"].clone()

    def share(logprobs: torch.Tensor) -> torch.Tensor:
        old = facts["old_logprobs"]
        if name == "cispo":  # its weight is a constant of the gradient: moving both keeps the ratio where it is
            old = old + (logprobs - start)
        losses = loss_of(name, facts | {"logprobs": logprobs, "old_logprobs": old}).losses
        return reduce_loss(losses, R.mask, R.row, R.n, "seq-mean-token-mean", totals)

    assert torch.autograd.gradcheck(share, (facts["logprobs"].requires_grad_(),), atol=1e-7)


@every_loss
def test_before_any_update_the_gradient_is_the_policy_gradient(name):
    facts = loss_facts(R, 0.0)
    logprobs = facts["logprobs"] = facts["old_logprobs"].clone().requires_grad_()
    facts["covariance_tokens"] = torch.zeros_like(R.mask)
    got = loss_of(name, facts)
    got.losses.sum().backward()
    assert got.ratio_max.item() == 1.0 and got.approx_kl.item() == 0.0
    assert got.clipped.item() == 0
    assert logprobs.grad[R.mask].tolist() == pytest.approx((-facts["advantages"][R.mask]).tolist(), abs=1e-12)


@every_loss
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(name):
    facts = loss_facts(R)
    results = []
    for outside in (torch.nan, torch.inf, 7.0):
        filled = {
            k: v.masked_fill(~R.mask, outside) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in facts.items()
        }
        filled["logprobs"].requires_grad_()
        filled["covariance_tokens"] = facts["covariance_tokens"] | ~R.mask
        got = loss_of(name, filled)
        got.losses.sum().backward()
        assert (filled["logprobs"].grad[~R.mask] == 0).all() and (got.losses[~R.mask] == 0).all()
        results.append((got.losses.tolist(), filled["logprobs"].grad.tolist(), [x.item() for x in got[1:]]))
    assert results[0] == results[1] == results[2]
    assert all(map(math.isfinite, results[0][0] + results[0][1]))


@every_loss
def test_gradients_reach_the_new_logprobs_only(name):
    facts = loss_facts(R)
    for column in ("logprobs", "old_logprobs", "advantages"):
        facts[column].requires_grad_()
    got = loss_of(name, facts)
    got.losses.sum().backward()
    assert facts["logprobs"].grad is not None and not any(x.requires_grad for x in got[1:])
    assert facts["old_logprobs"].grad is None and facts["advantages"].grad is None


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    facts = loss_facts(R, dtype=dtype)
    same = loss_of(name, {k: v.float() if torch.is_tensor(v) and v.dtype == dtype else v for k, v in facts.items()})
    got = loss_of(name, facts)
    assert got.losses.dtype == torch.float32
    assert got.losses.tolist() == same.losses.tolist()


@every_loss
def test_a_row_of_one_token_and_no_token_at_all(name):
    one = rows((1,))
    facts = loss_facts(one)
    facts["logprobs"].requires_grad_()
    got = loss_of(name, facts)
    got.losses.sum().backward()
    a, new, old = (facts[k].tolist() for k in ("advantages", "logprobs", "old_logprobs"))
    expected = SLOW[name](a, [new[0] - old[0]], new, old, facts["covariance_tokens"].tolist())
    assert got.losses.tolist() == pytest.approx(expected) and facts["logprobs"].grad.isfinite().all()
    nothing = loss_of(name, loss_facts(R) | {"mask": torch.zeros_like(R.mask)})
    assert (nothing.losses == 0).all() and nothing.ratio_max == 0 and nothing.clipped == 0


Shares = tuple[float, list[float]]


def shares(name: str, mode: str, cuts: list[tuple[int, int]]) -> Shares:
    """Loss and gradient, added over micro-batches; the denominators are those of all rows."""
    facts = loss_facts(R)
    logprobs = facts["logprobs"].requires_grad_()
    totals, loss = totals_of(R.mask, R.row, R.n), 0.0
    for first, last in cuts:
        part = cut(facts, R, first, last)
        losses = loss_of(name, part).losses
        share = reduce_loss(losses, part["mask"], part["row"], part["n_rows"], mode, totals, fixed_length=16)
        share.backward()
        loss += share.item()
    return loss, [0.0] * len(R.row) if logprobs.grad is None else logprobs.grad.tolist()


def pieces(size: int, first: int = 0, last: int = R.n) -> list[tuple[int, int]]:
    return [(i, min(i + size, last)) for i in range(first, last, size)]


@every_loss
@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("size", [4, 1, 3])
def test_micro_batches_add_to_the_whole(name, mode, size):
    whole, parts = shares(name, mode, [(0, R.n)]), shares(name, mode, pieces(size))
    assert whole[0] != 0
    assert parts[0] == pytest.approx(whole[0], abs=1e-12) and parts[1] == pytest.approx(whole[1], abs=1e-12)


@every_loss
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_ranks_add_to_the_whole(name, mode):
    whole = shares(name, mode, [(0, R.n)])
    ranks = [shares(name, mode, pieces(3, 0, 5)), shares(name, mode, pieces(1, 5, R.n))]
    assert sum(loss for loss, _ in ranks) == pytest.approx(whole[0], abs=1e-12)
    gradient = [sum(each) for each in zip(*(g for _, g in ranks), strict=True)]
    assert gradient == pytest.approx(whole[1], abs=1e-12)


def test_two_processes_add_to_the_whole(tmp_path):
    processes = [FORKS.Process(target=_rank, args=(tmp_path, rank)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(report) == {f"{name} {mode}" for name in POLICY_LOSSES for mode in REDUCTIONS}
        for key, got in report.items():
            loss, gradient = shares(*key.split(" "), [(0, R.n)])
            assert got == pytest.approx([loss, *gradient], abs=1e-12)


@every_loss
def test_statistics_add_over_micro_batches(name):
    facts = loss_facts(R, 1.0)
    whole = loss_of(name, facts)
    parts = [loss_of(name, cut(facts, R, first, last)) for first, last in pieces(3)]
    for field in ("clipped", "approx_kl"):
        assert sum(getattr(p, field) for p in parts).item() == pytest.approx(getattr(whole, field).item())
    assert max(p.ratio_max for p in parts) == whole.ratio_max


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"reinforce", "sapo", "kl_cov", "cispo", "gspo"}))
def test_clipped_counts_the_tokens_without_gradient(name):
    facts = loss_facts(R, 1.0) | {"dual_clip": None}
    facts["logprobs"].requires_grad_()
    got = loss_of(name, facts)
    got.losses.sum().backward()
    still = (facts["logprobs"].grad[R.mask] == 0).sum()
    assert got.clipped == still > 0


def test_the_ratio_is_clamped_before_exp():
    logprobs = torch.tensor([-1.0, -200.0], requires_grad=True)
    everywhere = torch.ones(2, dtype=torch.bool)
    got = ppo_loss(logprobs, torch.tensor([-200.0, -1.0]), torch.tensor([-1.0, 1.0]), everywhere, 0.2, 0.2)
    assert got.ratio_max.item() == pytest.approx(math.exp(20))


# numbers worked by hand: two tokens with ratios 1.5 and 0.9
RATIOS = torch.tensor([1.5, 0.9], dtype=torch.float64).log()
ZERO, BOTH = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
ONE_ROW = torch.zeros(2, dtype=torch.int64)


def test_gspo_by_hand():
    # s = sqrt(1.35) = 1.161895: inside a clip of 0.2, outside one of 0.1
    free = gspo(RATIOS, ZERO, ZERO + 2, BOTH, ONE_ROW, 1, 0.2, 0.2)
    assert free.losses.tolist() == pytest.approx([-2.323790] * 2, abs=1e-6) and free.clipped == 0
    bounded = gspo(RATIOS, ZERO, ZERO + 2, BOTH, ONE_ROW, 1, 0.1, 0.1)
    assert bounded.losses.tolist() == pytest.approx([-2.2] * 2) and bounded.clipped == 2


def test_gmpo_by_hand():
    # the paper's range: log 1.5 = 0.405465 is cut to 0.4 (log 1.4918); (0.4 + log 0.9) / 2 = 0.147320
    low, high = 1 - math.exp(-0.4), math.exp(0.4) - 1
    got = gmpo(RATIOS, ZERO, ZERO + 1, BOTH, ONE_ROW, 1, low, high)
    assert got.losses.tolist() == pytest.approx([-1.158724] * 2, abs=1e-6) and got.clipped == 1
    # A < 0: a large ratio isn't clipped
    got = gmpo(RATIOS, ZERO, ZERO - 1, BOTH, ONE_ROW, 1, low, high)
    assert got.losses.tolist() == pytest.approx([math.sqrt(1.35)] * 2) and got.clipped == 0
    assert gmpo(RATIOS, ZERO, ZERO - 1, BOTH, ONE_ROW, 1, 1.0, high).losses.isfinite().all()


def test_sapo_by_hand():
    # 4 sigmoid(0.5) = 2.489837; 4 / 1.05 sigmoid(-0.105) = 1.804854
    got = sapo(RATIOS, ZERO, torch.tensor([1.0, -1.0]), BOTH)
    assert got.losses.tolist() == pytest.approx([-2.489837, 1.804854], abs=1e-6)


@pytest.mark.parametrize(
    ("new", "advantage", "blocked"),
    [(0.7, 1.0, True), (0.6, 1.0, False), (0.7, -1.0, False), (0.3, -1.0, True), (0.4, -1.0, False), (0.3, 1.0, False)],
)
def test_dppo_blocks_by_probability_and_only_away_from_the_old_policy(new, advantage, blocked):
    facts = {"logprobs": torch.tensor([new]).log().requires_grad_(), "old_logprobs": torch.tensor([0.5]).log()}
    facts |= {"advantages": torch.tensor([advantage]), "mask": torch.tensor([True]), "dppo_threshold": 0.15}
    got = loss_of("dppo", facts)
    got.losses.sum().backward()
    assert got.clipped == blocked
    assert facts["logprobs"].grad.item() == pytest.approx(0.0 if blocked else -advantage * new / 0.5)


def covariances(old: list[float], advantages: list[float]) -> list[float]:
    mean_p, mean_a = statistics.mean(old), statistics.mean(advantages)
    return [(p - mean_p) * (a - mean_a) for p, a in zip(old, advantages, strict=True)]


BIG = rows((40, 30, 50, 20, 60))


def test_kl_cov_takes_the_largest_covariances():
    facts = loss_facts(BIG)
    inside = BIG.mask.nonzero().flatten().tolist()
    expected = covariances(facts["old_logprobs"][inside].tolist(), facts["advantages"][inside].tolist())
    count = int(0.1 * len(inside))
    best = sorted(range(len(inside)), key=lambda i: -expected[i])[:count]
    got = covariance_tokens(facts["old_logprobs"], facts["advantages"], BIG.mask, "kl_cov", 0.1)
    assert count > 5 and got.nonzero().flatten().tolist() == sorted(inside[i] for i in best)


def test_clip_cov_draws_from_the_band_by_seed():
    facts = loss_facts(BIG)
    inside = BIG.mask.nonzero().flatten().tolist()
    expected = covariances(facts["old_logprobs"][inside].tolist(), facts["advantages"][inside].tolist())
    band = {t for t, c in zip(inside, expected, strict=True) if 0.1 <= c <= 0.5}
    columns = facts["old_logprobs"], facts["advantages"], BIG.mask, "clip_cov", 0.05, 0.1, 0.5
    draws = [set(covariance_tokens(*columns, seed=seed).nonzero().flatten().tolist()) for seed in (1, 1, 2)]
    assert len(draws[0]) == int(0.05 * len(inside)) < len(band)
    assert draws[0] <= band and draws[2] <= band
    assert draws[0] == draws[1] != draws[2]
    everything = covariance_tokens(*columns[:4], 1.0, 0.1, 0.5).nonzero().flatten().tolist()
    assert set(everything) == band


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_few_tokens(kind):
    old, advantages = torch.tensor([-1.0, -3.0, torch.nan]), torch.tensor([2.0, -1.0, torch.nan])
    mask = torch.tensor([True, True, False])
    # means -2 and 0.5: covariances 1.5 and 1.5; a share of 0.01 is no token, but one is taken
    got = covariance_tokens(old, advantages, mask, kind, 0.01)
    assert got.sum() == 1 and not got[2]
    assert not covariance_tokens(old, advantages, mask, kind, 0.0).any()
    assert not covariance_tokens(old, advantages, torch.zeros_like(mask), kind, 0.5).any()
    if kind == "clip_cov":
        assert not covariance_tokens(old, advantages, mask, kind, 0.5, 2.0, 5.0).any()
    with pytest.raises(ValueError, match="no tokens are chosen by covariance for 'ppo'"):
        covariance_tokens(old, advantages, mask, "ppo", 0.5)


def _rank(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    report = {}
    for name in POLICY_LOSSES:
        for mode in REDUCTIONS:
            loss, gradient = shares(name, mode, pieces(2, 0, 3) if rank == 0 else pieces(4, 3, R.n))
            added = torch.tensor([loss, *gradient], dtype=torch.float64)
            dist.all_reduce(added)
            report[f"{name} {mode}"] = added.tolist()
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
