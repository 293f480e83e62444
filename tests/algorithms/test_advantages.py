"""Advantages against slow loops, and the numbers of their papers' formulas."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch

from tests.algorithms.facts import GROUPED, NUMBERS, PER_TOKEN, estimator_facts, per_token
from tests.algorithms.ragged import rows
from verl.algorithms.advantages import (
    ESTIMATORS,
    TokenAdvantages,
    broadcast,
    discounted_sums,
    distill,
    gae,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_k,
    place_scores,
    prime,
    remax,
    rloo,
    subtract_kl,
    without_abstained,
)
from verl.algorithms.named import call

R = rows()
NAN = math.nan


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_against_the_backward_loop(gamma, lam):
    rewards, values = R.values(1), R.values(2)
    got = gae(rewards, values, R.mask, R.row, gamma, lam)
    for i in range(R.n):
        advantage = following = 0.0
        for t in reversed(R.tokens(i)):
            delta = float(rewards[t]) + gamma * following - float(values[t])
            advantage, following = delta + gamma * lam * advantage, float(values[t])
            assert got.advantages[t].item() == pytest.approx(advantage, abs=1e-12)
            assert got.returns[t].item() == pytest.approx(advantage + following, abs=1e-12)
    assert (got.advantages[~R.mask] == 0).all() and (got.returns[~R.mask] == 0).all()


def test_gae_gives_no_gradient_and_float32_for_half_precision():
    values = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    mask, row = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    got = gae(torch.zeros(4), values, mask, row, 1.0, 0.95)
    assert got.returns.dtype == torch.float32 and not got.returns.requires_grad


def test_gae_of_nothing():
    nothing = torch.zeros_like(R.mask)
    got = gae(R.values(1), R.values(2), nothing, R.row, 1.0, 0.95)
    assert (got.advantages == 0).all() and (got.returns == 0).all()


def test_discounted_sums_stay_in_their_row():
    values, row = f64([1, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 2, 2, 3])
    assert discounted_sums(values, row, 0.5).tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5, 5, 6]
    assert discounted_sums(values, row, 0.0).tolist() == values.tolist()


def test_scores_land_on_the_last_policy_token():
    mask = torch.tensor([True, True, False, False, False, True])
    row = torch.tensor([0, 0, 0, 1, 2, 2])
    assert place_scores(f64([1.5, 9, 2]), mask, row, 3).tolist() == [0, 1.5, 0, 0, 0, 2]
    assert place_scores(f64([1.5, NAN, 2]), mask, row, 3).tolist() == [0, 1.5, 0, 0, 0, 2]
    assert place_scores(f64([1, 1, 1]), torch.zeros_like(mask), row, 3).tolist() == [0] * 6


def test_abstained_rows_must_be_masked_first():
    mask, row, scores = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 1]), f64([1, NAN])
    with pytest.raises(ValueError, match=r"rows \[1\] have no score"):
        place_scores(scores, mask, row, 2)
    left = without_abstained(mask, row, scores)
    assert left.tolist() == [True, False, False]
    assert place_scores(scores, left, row, 2).tolist() == [1, 0, 0]


def test_kl_in_the_reward_is_k1_and_reaches_no_masked_token():
    rewards, logprobs, reference = R.values(1), R.values(2), R.values(3)
    got = subtract_kl(rewards, logprobs.clone().requires_grad_(), reference, R.mask, 0.1)
    assert not got.requires_grad
    assert (got[~R.mask] == 0).all()
    for t in R.mask.nonzero().flatten().tolist():
        assert got[t].item() == pytest.approx(float(rewards[t]) - 0.1 * float(logprobs[t] - reference[t]))


# Estimators over groups: a slow form each, of one group's scored rows; lists in, list out.


def slow_pass_k(scores: list[float], k: int) -> list[float]:
    """The paper's group-normalised advantage, with every subset of k drawn: its reward is the best one's."""
    right = [score > 0.5 for score in scores]
    subsets = list(itertools.combinations(range(len(scores)), k))
    if not subsets:
        return [0.0] * len(scores)
    rewards = [float(any(right[i] for i in subset)) for subset in subsets]
    mean, std = statistics.mean(rewards), statistics.pstdev(rewards)
    if std == 0:
        return [0.0] * len(scores)
    mine = [
        [(r - mean) / std for r, subset in zip(rewards, subsets, strict=True) if i in subset] for i in range(len(right))
    ]
    return [statistics.mean(each) for each in mine]


def slow_std(scores: list[float]) -> list[float]:
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    return [(s - mean) / (std + 1e-6) for s in scores]


def slow_others(scores: list[float]) -> list[float]:
    return [s - (sum(scores) - s) / (len(scores) - 1) for s in scores]


def slow_opo(scores: list[float], lengths: list[int]) -> list[float]:
    weight = sum(lengths)
    return [s - sum(a * b for a, b in zip(scores, lengths, strict=True)) / weight for s in scores]


SLOW: dict[str, Callable[[list[float], list[int]], list[float]]] = {
    "grpo": lambda scores, lengths: slow_std(scores),
    "rloo": lambda scores, lengths: slow_others(scores),
    "reinforce_plus_plus_baseline": lambda scores, lengths: [s - statistics.mean(scores) for s in scores],
    "opo": slow_opo,
    "pass_k": lambda scores, lengths: slow_pass_k(scores, NUMBERS["pass_k"]),
}
SLOW["gpg"] = SLOW["reinforce_plus_plus_baseline"]  # times alpha, which is the batch's: see its own test
ELSEWHERE = {"gae", "reinforce_plus_plus", "remax", "gdpo", "prime", "distill"}


def test_every_estimator_has_its_slow_form():
    assert set(SLOW) | ELSEWHERE == set(ESTIMATORS)


def by_group(group: list[int], valid: list[bool]) -> list[list[int]]:
    return [[i for i, g in enumerate(group) if g == name and valid[i]] for name in sorted(set(group))]


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_against_the_loop(name, seed):
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 5, (40,), generator=generator) * 7 - 3  # any numbers, rows of a group apart
    scores = torch.randn(40, generator=generator, dtype=torch.float64)
    scores[torch.rand(40, generator=generator) < 0.3] = NAN
    scores[group == 4] = NAN  # a group where all abstained
    lengths = torch.randint(1, 9, (40,), generator=generator)
    got = call(ESTIMATORS[name], NUMBERS | {"scores": scores, "group": group, "lengths": lengths})
    assert got.dtype == torch.float64
    expected, scored = [0.0] * 40, (~scores.isnan()).tolist()
    for members in by_group(group.tolist(), scored):
        if len(members) > 1:
            values = SLOW[name](scores[members].tolist(), lengths[members].tolist())
            for i, value in zip(members, values, strict=True):
                expected[i] = value
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_dr_grpo_leaves_the_deviation_undivided():
    assert grpo(f64([1, 0, 0.5, 0.5]), torch.zeros(4, dtype=torch.int64), scale="none").tolist() == [0.5, -0.5, 0, 0]


def test_numbers_of_a_group_with_missing_rewards():
    # G17: totals [1.5, 0.5, 0, 1]: mean 0.75, std 0.645497
    group = torch.zeros(4, dtype=torch.int64)
    assert grpo(f64([1.5, 0.5, 0, 1]), group).tolist() == pytest.approx([1.1619, -0.3873, -1.1619, 0.3873], abs=1e-4)


def test_a_small_genuine_spread_is_kept():
    # The floor of 1e-6 is far below a spread of 1e-3: nothing is erased.
    got = grpo(f64([0.5, 0.501]), torch.zeros(2, dtype=torch.int64))
    assert got.tolist() == pytest.approx([-0.7061, 0.7061], abs=1e-4)


def test_opo_by_hand():
    # (4 * 1 + 1 * 0 + 5 * 0) / 10 = 0.4; a row without tokens has no weight
    group = torch.zeros(3, dtype=torch.int64)
    assert opo(f64([1, 0, 0]), group, torch.tensor([4, 1, 5])).tolist() == pytest.approx([0.6, -0.4, -0.4])
    assert opo(f64([1, 0, 9]), group, torch.tensor([4, 4, 0]))[:2].tolist() == pytest.approx([0.5, -0.5])


def test_gpg_scales_by_the_groups_that_differ():
    # 7 scored rows, 3 of them in the only group whose scores differ
    scores = f64([1, 0, 0.5, 0.2, 0.2, NAN, 1, 1])
    got = gpg(scores, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))
    assert got.tolist() == pytest.approx([x * 7 / 3 for x in (0.5, -0.5, 0)] + [0] * 5)
    assert (gpg(scores[3:], torch.tensor([1, 1, 1, 2, 2])) == 0).all()


def test_pass_k_by_hand():
    # n = 4, k = 2, one right: F = C(3, 2) / C(4, 2) = 1/2; a right row 1, a wrong one (1/2 - 2/3) / (1/2) = -1/3
    group = torch.zeros(4, dtype=torch.int64)
    got = pass_k(f64([0, 0.51, 0.5, 0.2]), group, 2)
    assert got.tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3])
    # three right: no pair without a right one, nothing to learn; none right: nothing to learn from
    assert (pass_k(f64([0, 1, 1, 1]), group, 2) == 0).all() and (pass_k(f64([0, 0, 0, 0]), group, 2) == 0).all()
    # k = 1 is GRPO with the population's deviation
    assert pass_k(f64([1, 0, 0, 0]), group, 1).tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


def test_pass_k_needs_groups_of_k_rows():
    scores, group = f64([1, 0, 1, 0, 1]), torch.tensor([7, 7, 7, 2, 2])
    with pytest.raises(ValueError, match=r"groups \[2\] have fewer rows than pass_k = 3"):
        pass_k(scores, group, 3)
    # rows enough, but too few of them scored: no signal
    assert (pass_k(f64([1, 0, NAN]), group[:3], 3) == 0).all()
    assert pass_k(f64([1, 1, 0, 0]), torch.tensor([5, 7, 7, 7]), 2, allow_singletons=True)[0] == 0
    assert pass_k(torch.cat([f64([1]), f64([0]).expand(99)]), torch.zeros(100, dtype=torch.int64), 64).isfinite().all()


def test_remax():
    got = remax(f64([1, 0.25, NAN, 2]), f64([0.5, 0.25, 1, NAN]))
    assert got.dtype == torch.float64 and got.tolist() == [0.5, 0, 0, 0]
    for scores, greedy in (([1, math.inf], [0, 0]), ([0, 0], [1, -math.inf])):
        with pytest.raises(ValueError, match=r"rows \[1\] have an infinite score"):
            remax(f64(scores), f64(greedy))


def test_gdpo_against_the_sum_of_its_parts():
    facts = estimator_facts(R, seed=3)
    facts["per_reward"]["short"][2] = NAN
    got = call(gdpo, facts)
    expected = torch.zeros(R.n, dtype=torch.float64)
    for weight, scores in zip(facts["reward_weights"], facts["per_reward"].values(), strict=True):
        for members in by_group(facts["group"].tolist(), (~scores.isnan()).tolist()):
            expected[members] += weight * f64(slow_std(scores[members].tolist()))
    assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_gdpo_keeps_apart_what_a_sum_of_rewards_collapses():
    # sums (0, 1) and (0, 2) have the same advantages when normalised as sums; here the second pair's are twice as large
    rewards = {"a": f64([0, 1, 0, 1]), "b": f64([0, 0, 0, 1])}
    got = gdpo(rewards, [1.0, 1.0], torch.tensor([0, 0, 1, 1]))
    half = 1 / math.sqrt(2)
    assert got.tolist() == pytest.approx([-half, half, -2 * half, 2 * half], abs=1e-5)
    with pytest.raises(ValueError, match="2 rewards and 1 weights"):
        gdpo(rewards, [1.0], torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_prime_against_the_loop(gamma):
    group = torch.tensor([0, 0, 0, 5, 5, 5, 9, 9])
    facts = estimator_facts(R, group) | {"gamma": gamma}
    facts["scores"][4] = facts["scores"][6] = NAN  # group 9 is left with one row
    got = call(prime, facts)
    mean = {i: facts["token_rewards"][R.tokens(i)].mean().item() for i in range(R.n) if R.tokens(i) and i not in (4, 6)}
    outcome = rloo(facts["scores"], group)
    for i in range(R.n):
        others = [m for j, m in mean.items() if j != i and group[j] == group[i]]
        ahead = 0.0
        for t in reversed(R.tokens(i)):
            if i in (4, 6):
                assert got.advantages[t] == 0
                continue
            ahead = gamma * ahead + (facts["token_rewards"][t].item() - statistics.mean(others) if others else 0.0)
            assert got.advantages[t].item() == pytest.approx(ahead + outcome[i].item(), abs=1e-12)
    assert (got.advantages[~R.mask] == 0).all() and got.returns is got.advantages


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_the_reward_to_go(gamma):
    facts = estimator_facts(R) | {"gamma": gamma}
    got = call(ESTIMATORS["reinforce_plus_plus"], facts)
    for i in range(R.n):
        ahead = 0.0
        for t in reversed(R.tokens(i)):
            ahead = facts["rewards"][t].item() + gamma * ahead
            assert got.advantages[t].item() == pytest.approx(ahead, abs=1e-12)
    assert (got.advantages[~R.mask] == 0).all() and (got.returns == got.advantages).all()


def test_distill_is_minus_the_reverse_kl_of_each_token():
    facts = estimator_facts(R)
    got = call(distill, facts).advantages
    inside = facts["teacher_logprobs"] - facts["old_logprobs"]
    assert (got[R.mask] == inside[R.mask]).all() and (got[~R.mask] == 0).all()
    # exactly: the mean over the student's own distribution is minus KL(student, teacher)
    student, teacher = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(
        -1
    )
    everywhere = torch.ones(50, dtype=torch.bool)
    kl = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum")
    assert (student.exp() * distill(student, teacher, everywhere).advantages).sum().item() == pytest.approx(-kl.item())


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_without_score_changes_nobody_else(name):
    facts = estimator_facts(rows((3, 2, 4, 1, 2, 2)), torch.tensor([0, 0, 0, 0, 1, 1]))
    r = rows((3, 2, 4, 1, 2, 2))
    facts["scores"] = f64([1, NAN, 0, 0.9, 0.7, 0.1])
    facts["per_reward"] = {"a": facts["scores"], "b": facts["scores"] * 2}
    with_gap = per_token(name, facts)
    assert (with_gap[r.row == 1] == 0).all()
    kept, rest = r.row != 1, torch.tensor([0, 2, 3, 4, 5])
    alone = {
        k: v[kept] if torch.is_tensor(v) and v.shape == r.row.shape else v[rest] if torch.is_tensor(v) else v
        for k, v in facts.items()
    }
    alone |= {"row": alone["row"] - (alone["row"] > 1).long(), "n_rows": 5}
    alone["per_reward"] = {k: v[rest] for k, v in facts["per_reward"].items()}
    assert with_gap[kept].tolist() == pytest.approx(per_token(name, alone).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_outside_the_mask_is_read(name):
    facts = estimator_facts(R)  # NaN outside
    junk = {
        k: torch.where(R.mask, v, 7.0) if torch.is_tensor(v) and v.shape == R.row.shape and v.is_floating_point() else v
        for k, v in facts.items()
    }
    got = per_token(name, facts)
    assert got.isfinite().all() and (got[~R.mask] == 0).all()
    assert got.tolist() == per_token(name, junk).tolist()


@pytest.mark.parametrize("name", PER_TOKEN)
def test_token_advantages_have_no_gradient_and_are_float32_at_least(name):
    facts = {
        k: v.bfloat16().requires_grad_()
        if torch.is_tensor(v) and v.shape == R.row.shape and v.is_floating_point()
        else v
        for k, v in estimator_facts(R).items()
    }
    got = call(ESTIMATORS[name], facts)
    assert isinstance(got, TokenAdvantages)
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in got)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_of_one_token(name):
    r = rows((1, 1, 1, 1))
    r.mask[:] = True
    facts = estimator_facts(r)
    got = per_token(name, facts)
    assert got.shape == (4,) and got.isfinite().all()
    if name == "gae":
        assert got.tolist() == pytest.approx((facts["rewards"] - facts["values"]).tolist())
    if name == "prime":
        both = rloo(facts["scores"], facts["group"]) + rloo(facts["token_rewards"], facts["group"])
        assert got.tolist() == pytest.approx(both.tolist())


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_one_and_infinite_scores(name):
    r = rows((2, 2, 2))
    facts = estimator_facts(r, torch.tensor([3, 5, 3])) | {"scores": f64([1, 2, 3])}
    facts["per_reward"] = {"a": facts["scores"], "b": facts["scores"]}
    with pytest.raises(ValueError, match=r"groups \[5\] have one row"):
        per_token(name, facts)
    facts["allow_singletons"] = True
    got = per_token(name, facts)
    assert (got[r.row == 1] == 0).all() and got.isfinite().all()
    facts["scores"] = f64([1, 2, math.inf])
    facts["per_reward"] = {"a": f64([1, 2, 3]), "b": facts["scores"]}
    with pytest.raises(ValueError, match=r"rows \[2\] have an infinite score"):
        per_token(name, facts)


def test_broadcast():
    mask, row = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    got = broadcast(f64([2, -3]), mask, row)
    assert got.dtype == torch.float32 and got.tolist() == [2, 0, -3]
