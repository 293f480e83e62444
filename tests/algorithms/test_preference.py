"""Preference and supervised losses against hand-worked numbers, slow scalar loops and finite differences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import rows
from verl.algorithms import preference
from verl.algorithms.preference import (
    PAIR_LOSSES,
    PairLoss,
    dpo,
    implicit_outcome,
    implicit_token_rewards,
    ipo,
    kto,
    kto_baseline,
    orpo,
    outcome,
    pair_index,
    pair_statistics,
    pairwise,
    preferences_from_scores,
    sft,
    simpo,
)

R = rows()
NUMBERS = {"beta": 0.3, "label_smoothing": 0.1, "simpo_margin": 0.5, "cpo_alpha": 0.7}
REFERENCE_FREE = ("orpo", "simpo", "cpo")


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def log_odds(p: float) -> float:
    return p - math.log(1 - math.exp(p))


def slow_pair(name: str, w: float, l: float, ref_w: float, ref_l: float, n_w: int, n_l: int) -> tuple[float, ...]:  # noqa: E741
    """Loss and both rewards of one pair, as the papers write them, with ``NUMBERS``."""
    beta, e, margin, alpha = (NUMBERS[k] for k in ("beta", "label_smoothing", "simpo_margin", "cpo_alpha"))
    if name == "dpo":
        h = beta * ((w - ref_w) - (l - ref_l))
        return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h), beta * (w - ref_w), beta * (l - ref_l)
    if name == "ipo":
        d_w, d_l = (w - ref_w) / n_w, (l - ref_l) / n_l
        return (d_w - d_l - 1 / (2 * beta)) ** 2, beta * d_w, beta * d_l
    if name == "cpo":
        return -log_sigmoid(beta * w - beta * l) - alpha * w / n_w, beta * w, beta * l
    p_w, p_l = w / n_w, l / n_l
    if name == "simpo":
        return -log_sigmoid(beta * p_w - beta * p_l - margin), beta * p_w, beta * p_l
    assert name == "orpo"
    return -p_w - beta * log_sigmoid(log_odds(p_w) - log_odds(p_l)), beta * p_w, beta * p_l


def pairs(n: int = 8, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The columns of ``n`` pairs; the first has one token on either side."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (2, n), generator=generator)
    lengths[:, 0] = 1
    sums = -(torch.rand(4, n, generator=generator, dtype=torch.float64) + 0.05) * lengths.repeat(2, 1)
    chosen, rejected, ref_chosen, ref_rejected = sums.to(dtype)
    return {
        "chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected,
        "chosen_lengths": lengths[0], "rejected_lengths": lengths[1],
    }  # fmt: skip


def call(name: str, columns: dict[str, Tensor], **numbers: float) -> PairLoss:
    """By argument name, as a worker does."""
    given = {**columns, **NUMBERS, **numbers}
    return PAIR_LOSSES[name](**{a: given[a] for a in inspect.signature(PAIR_LOSSES[name]).parameters})


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_pair_losses_against_the_loop(name):
    columns = pairs()
    got = call(name, columns)
    for i in range(8):
        want = slow_pair(name, *(column[i].item() for column in columns.values()))
        assert [x[i].item() for x in got] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "loss", "chosen_reward", "rejected_reward"),
    [
        ("dpo", math.log(1 + math.exp(-1.2)), 0.4, -0.8),  # 0.4 * ((-2 + 3) - (-6 + 4)) = 1.2
        ("ipo", (0.5 - -0.5 - 1.25) ** 2, 0.2, -0.2),  # log-ratios per token 1/2 and -2/4
        ("orpo", 1 + 0.4 * math.log(1 + (math.e - 1) / (math.exp(1.5) - 1)), -0.4, -0.6),  # odds 1/(e-1), 1/(e^1.5-1)
        ("simpo", math.log(1 + math.exp(0.3)), -0.4, -0.6),  # 0.4 * (-1 + 1.5) - 0.5 = -0.3
        ("cpo", math.log(1 + math.exp(-1.6)) + 2 * 1, -0.8, -2.4),  # 0.4 * (-2 + 6) = 1.6, 1 nat per token
    ],
)
def test_pair_losses_by_hand(name, loss, chosen_reward, rejected_reward):
    columns = {
        "chosen": torch.tensor([-2.0]), "rejected": torch.tensor([-6.0]),
        "ref_chosen": torch.tensor([-3.0]), "ref_rejected": torch.tensor([-4.0]),
        "chosen_lengths": torch.tensor([2]), "rejected_lengths": torch.tensor([4]),
    }  # fmt: skip
    got = call(name, columns, beta=0.4, label_smoothing=0.0, simpo_margin=0.5, cpo_alpha=2.0)
    assert [x.item() for x in got] == pytest.approx([loss, chosen_reward, rejected_reward], rel=1e-6)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_of_pair_losses_by_finite_differences(name):
    columns = pairs()
    sides = [columns[side].requires_grad_() for side in ("chosen", "rejected")]
    assert torch.autograd.gradcheck(
        lambda chosen, rejected: call(name, columns | {"chosen": chosen, "rejected": rejected}).losses, sides
    )


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_reach_the_policy_only_and_in_the_right_direction(name):
    columns = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in pairs().items()}
    got = call(name, columns, beta=0.1, label_smoothing=0.0)
    got.losses.sum().backward()
    assert columns["ref_chosen"].grad is None and columns["ref_rejected"].grad is None
    assert not got.chosen_rewards.requires_grad and not got.rejected_rewards.requires_grad
    assert (columns["chosen"].grad < 0).all() and (columns["rejected"].grad > 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_before_the_first_step(dtype, smoothing):
    columns = pairs(64, dtype)
    got = dpo(columns["chosen"], columns["rejected"], columns["chosen"], columns["rejected"], 0.1, smoothing)
    assert (got.losses == torch.tensor(math.log(2), dtype=dtype)).all()
    assert pair_statistics(got) == {
        "pairs": 64.0, "accurate": 0.0, "margin": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0,
    }  # fmt: skip


def test_label_smoothing_stops_pulling_where_the_labels_say_enough():
    # the smoothed loss is least at sigmoid(h) = 1 - e
    chosen, zero = torch.tensor([math.log(0.9 / 0.1)], requires_grad=True), torch.zeros(1)
    dpo(chosen, zero, zero, zero, 1.0, 0.1).losses.sum().backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("far", [1e4, -1e4])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_far_apart_sides_stay_finite(name, far):
    low = torch.tensor([-1e4, -1e4])
    high = torch.tensor([-1e-3, 0.0])  # 0: a response the policy is certain of
    chosen, rejected = (high, low) if far > 0 else (low, high)
    ones = torch.ones(2, dtype=torch.int64)
    columns = {
        "chosen": chosen.clone().requires_grad_(), "rejected": rejected.clone().requires_grad_(),
        "ref_chosen": torch.zeros(2), "ref_rejected": torch.zeros(2),
        "chosen_lengths": ones, "rejected_lengths": ones,
    }  # fmt: skip
    got = call(name, columns, beta=1.0)
    got.losses.sum().backward()
    for values in (*got, columns["chosen"].grad, columns["rejected"].grad):
        assert values.isfinite().all()
    assert (got.losses > 0).all() or far > 0
    if far < 0:
        assert (columns["chosen"].grad < 0).all()


@pytest.mark.parametrize("p", [-1e4, -50.0, -1.0, -math.log(2), -0.5, -1e-3])
def test_log_odds_keep_their_digits(p):
    # against the definition in 64 bits, where float32 would have lost them: 1 - e^p needs expm1 near 0
    got = orpo(torch.tensor([p]), torch.tensor([-1.0]), torch.ones(1), torch.ones(1), 1.0)
    odds = p - math.log(-math.expm1(p)) - log_odds(-1.0)
    assert got.losses.item() == pytest.approx(-p - log_sigmoid(odds), rel=2e-6)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_half_precision_is_computed_in_float32(name):
    columns = pairs(8, torch.bfloat16)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in columns.items()}
    for got, want in zip(call(name, columns), call(name, wide), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name != "dpo"])
def test_a_side_without_tokens_is_refused(name):
    columns = pairs()
    columns["chosen_lengths"] = columns["chosen_lengths"].clone()
    columns["chosen_lengths"][[2, 5]] = 0
    with pytest.raises(ValueError, match=r"pairs \[2, 5\] have a side without tokens"):
        call(name, columns)


def test_length_normalised_losses_do_not_depend_on_length():
    columns = pairs()
    twice = {k: 2 * v for k, v in columns.items()}
    for name in ("ipo", "orpo", "simpo"):
        torch.testing.assert_close(call(name, columns).losses, call(name, twice).losses)


@pytest.mark.parametrize("margin", [None, 0.5])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_reward_model_on_pairs(margin, center):
    w, l = torch.tensor([2.0, -1.0]).double(), torch.tensor([0.5, 3.0]).double()  # noqa: E741
    margins = None if margin is None else torch.full((2,), margin)
    got = pairwise(w, l, margins, center)
    for i in range(2):
        a, b = w[i].item(), l[i].item()
        assert got.losses[i].item() == pytest.approx(-log_sigmoid(a - b - (margin or 0)) + center * (a + b) ** 2)
    assert torch.equal(got.chosen_rewards, w) and torch.equal(got.rejected_rewards, l)
    assert pair_statistics(got)["accurate"] == 1
    assert torch.autograd.gradcheck(
        lambda *scores: pairwise(*scores, margins, center).losses, (w.requires_grad_(), l.requires_grad_())
    )


def test_outcome_verifier_by_hand():
    scores = torch.tensor([0.0, 2.0, -1e4, 1e4], requires_grad=True)
    got = outcome(scores, torch.tensor([1.0, 0.25, 1.0, 1.0], dtype=torch.float64))
    got.losses.sum().backward()
    want = [math.log(2), -0.25 * log_sigmoid(2) - 0.75 * log_sigmoid(-2), 1e4, 0.0]
    assert got.losses.tolist() == pytest.approx(want, rel=1e-6)
    assert scores.grad.tolist() == pytest.approx([-0.5, 1 / (1 + math.exp(-2)) - 0.25, -1.0, 0.0])
    assert not got.rewards.requires_grad and got.rewards.tolist() == scores.tolist()


@pytest.mark.parametrize("label", [-1.0, 1.5, math.nan])
def test_a_label_that_is_no_probability_is_refused(label):
    with pytest.raises(ValueError, match=r"rows \[1\] have a label outside"):
        outcome(torch.zeros(2), torch.tensor([1.0, label]))


@pytest.mark.parametrize("baseline", [0.0, 0.8])
def test_kto_against_the_loop(baseline):
    logratios = torch.tensor([0.0, 3.0, -2.0, 0.5, 1e5, -1e5], dtype=torch.float64, requires_grad=True)
    desirable = torch.tensor([True, False, True, False, True, True])
    z = torch.tensor(baseline, requires_grad=True)
    got = kto(logratios, desirable, z, 0.1, desirable_weight=1.5, undesirable_weight=0.5)
    for i in range(6):
        h = 0.1 * (logratios[i].item() - z.item())
        value = math.exp(log_sigmoid(h if desirable[i] else -h))
        weight = 1.5 if desirable[i] else 0.5
        assert got.losses[i].item() == pytest.approx(weight * (1 - value), abs=1e-12)
        assert got.rewards[i].item() == pytest.approx(0.1 * logratios[i].item())
    got.losses.sum().backward()
    assert z.grad is None and not got.rewards.requires_grad
    assert logratios.grad.isfinite().all()
    assert (logratios.grad[:4] * torch.where(desirable[:4], 1, -1) < 0).all()
    assert torch.autograd.gradcheck(
        lambda x: kto(x, desirable[:4], z, 0.1, 1.5, 0.5).losses, logratios.detach()[:4].requires_grad_()
    )


@pytest.mark.parametrize(("values", "want"), [([1.0, 2.0, -0.6], 0.8), ([-1.0, 0.5], 0.0)])
def test_kto_baseline(values, want):
    logratios = torch.tensor(values, requires_grad=True)
    got = kto_baseline(logratios.sum(), len(values))
    assert got.shape == () and not got.requires_grad and got.item() == pytest.approx(want)


def test_kto_baseline_of_nothing():
    with pytest.raises(ValueError, match="mismatched rows"):
        kto_baseline(torch.zeros(()), 0)


def test_implicit_token_rewards():
    logprobs, reference = R.values(1).requires_grad_(), R.values(2)
    got = implicit_token_rewards(logprobs, reference, R.mask, 0.05)
    for t in range(len(R.row)):
        want = 0.05 * (logprobs[t] - reference[t]).item() if R.mask[t] else 0.0
        assert got[t].item() == pytest.approx(want, abs=1e-15)


def test_implicit_outcome_against_the_loop():
    logprobs, reference = R.values(1).requires_grad_(), R.values(2).requires_grad_()
    labels = torch.tensor([1.0, math.nan, 0.0, 1.0, 0.0, 0.25, 1.0, 0.0])  # row 1 has no token, so its label is moot
    got = implicit_outcome(logprobs, reference, R.mask, R.row, R.n, labels, 0.5)
    got.losses.sum().backward()
    for i in range(R.n):
        score = sum(0.5 * (logprobs[t] - reference[t]).item() for t in R.tokens(i))
        assert got.rewards[i].item() == pytest.approx(score)
        if i == 1:
            assert got.losses[i] == 0
            continue
        label = labels[i].item()
        assert got.losses[i].item() == pytest.approx(-label * log_sigmoid(score) - (1 - label) * log_sigmoid(-score))
        for t in R.tokens(i):
            assert logprobs.grad[t].item() == pytest.approx(0.5 * (1 / (1 + math.exp(-score)) - label))
    assert reference.grad is None and not got.rewards.requires_grad
    assert (logprobs.grad[~R.mask] == 0).all()


def test_gradient_of_implicit_outcome_by_finite_differences():
    everywhere, row = torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 1])
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = -torch.rand(2, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0])
    assert torch.autograd.gradcheck(
        lambda x: implicit_outcome(x, reference, everywhere, row, 2, labels, 0.5).losses, logprobs.requires_grad_()
    )


def test_sft():
    logprobs = R.values(1).requires_grad_()
    losses = sft(logprobs, R.mask)
    losses.sum().backward()
    assert torch.equal(losses[R.mask], -logprobs[R.mask]) and (losses[~R.mask] == 0).all()
    assert torch.equal(logprobs.grad, -R.mask.double())


def shares(of: Callable[[slice], Tensor], parameter: Tensor, cut: list[slice]) -> tuple[float, Tensor]:
    """Sum and accumulated gradient over micro-batches, one backward each."""
    parameter.grad = None
    total = 0.0
    for micro in cut:
        share = of(micro).sum() / 8  # 8 pairs or rows in the mini-batch, whatever the micro-batch holds
        share.backward()
        total += share.item()
    return total, parameter.grad


@pytest.mark.parametrize("name", [*PAIR_LOSSES, "pairwise", "outcome", "kto"])
def test_sums_do_not_depend_on_the_split(name):
    """One model parameter, 8 pairs: in one, two and eight micro-batches, and on two ranks of unlike shares."""
    theta = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    columns = pairs()
    label = torch.arange(8) % 3 == 0
    z = kto_baseline(columns["chosen"].sum() + 20, 8)

    def losses(micro: slice) -> Tensor:
        part = {k: v[micro] for k, v in columns.items()}
        part |= {side: theta * part[side] for side in ("chosen", "rejected")}
        if name == "pairwise":
            return pairwise(part["chosen"], part["rejected"], part["ref_chosen"], 0.1).losses
        if name == "outcome":
            return outcome(part["chosen"], label[micro]).losses
        if name == "kto":
            return kto(part["chosen"] - part["ref_chosen"], label[micro], z, 0.3).losses
        return call(name, part).losses

    whole = shares(losses, theta, [slice(0, 8)])
    for n in (2, 8):
        parts = shares(losses, theta, [slice(i * 8 // n, (i + 1) * 8 // n) for i in range(n)])
        assert (parts[0], parts[1].item()) == pytest.approx((whole[0], whole[1].item()), rel=1e-12)
    ranks = [shares(losses, theta, cut) for cut in ([slice(0, 3)], [slice(3, 4), slice(4, 8)])]
    assert sum(loss for loss, _ in ranks) == pytest.approx(whole[0], rel=1e-12)
    assert sum(gradient.item() for _, gradient in ranks) == pytest.approx(whole[1].item(), rel=1e-12)


def test_pair_statistics_add():
    def statistics(columns):
        return {name: float(value) for name, value in pair_statistics(call("dpo", columns)).items()}

    columns = pairs()
    whole = statistics(columns)
    chosen, rejected = (getattr(call("dpo", columns), f"{side}_rewards").tolist() for side in ("chosen", "rejected"))
    assert whole == pytest.approx(
        {
            "pairs": 8, "accurate": sum(w > l for w, l in zip(chosen, rejected, strict=True)),  # noqa: E741
            "margin": sum(chosen) - sum(rejected), "chosen_reward": sum(chosen), "rejected_reward": sum(rejected),
        }
    )  # fmt: skip
    assert 0 < whole["accurate"] < 8
    parts = [statistics({k: v[s] for k, v in columns.items()}) for s in (slice(0, 3), slice(3, 8))]
    assert {k: parts[0][k] + parts[1][k] for k in whole} == pytest.approx(whole)
    assert statistics({k: v[:0] for k, v in columns.items()}) == dict.fromkeys(whole, 0.0)


def test_pair_index():
    group = torch.tensor([7, 7, 3, 5, 3, 7, 5])
    preferred = torch.tensor([-1, 1, -1, 0, 1, 0, 0])  # group 5: no preference, no pair
    chosen, rejected = pair_index(group, preferred)
    assert (chosen.tolist(), rejected.tolist()) == ([4, 1], [2, 0])
    assert [x.tolist() for x in pair_index(group, torch.zeros(7, dtype=torch.int64))] == [[], []]


@pytest.mark.parametrize(
    ("preferred", "counts"),
    [
        ([1, 0, 0, 0], "1 chosen and 0"),
        ([1, 1, -1, 0], "2 chosen and 1"),
        ([-1, 0, -1, 0], "0 chosen and 2"),
        ([-1, 1, 1, -1], "2 chosen and 2"),
    ],
)
def test_a_group_that_is_no_pair_is_named(preferred, counts):
    with pytest.raises(ValueError, match=f"group 4 has {counts}"):
        pair_index(torch.tensor([4, 4, 4, 4, 1, 1]), torch.tensor([*preferred, 1, -1]))


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ([0.5, 0.1, 0.9], [0, -1, 1]),
        ([1.0, 0.0, 1.0, 0.0], [1, -1, 0, 0]),  # the first of equals
        ([0.3, 0.3, 0.3], [0, 0, 0]),
        ([math.nan, 2.0, math.nan], [0, 0, 0]),
        ([math.nan, 2.0, -1.0], [0, 1, -1]),
        ([math.nan], [0]),
        ([-math.inf, 3.0], [-1, 1]),
        ([1.0, 1.0 + 2**-52], [-1, 1]),
    ],
)
def test_preferences_from_scores(scores, want):
    # between the rows of two other groups, so that each group's rows are apart
    mixed, group = [], []
    for i, score in enumerate(scores):
        mixed += [float(i), score, -5.0]
        group += [8, 2, 11]
    got = preferences_from_scores(torch.tensor(mixed, dtype=torch.float64), torch.tensor(group))
    assert got.dtype == torch.int64 and got[1::3].tolist() == want
    pair_index(torch.tensor(group), got)


def test_no_rows_have_no_preferences():
    assert preferences_from_scores(torch.zeros(0).double(), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_the_table_names_its_functions():
    assert all(getattr(preference, name) is function for name, function in PAIR_LOSSES.items())
    assert (ipo, simpo) == (PAIR_LOSSES["ipo"], PAIR_LOSSES["simpo"])
    for name in REFERENCE_FREE:
        assert not any(a.startswith("ref_") for a in inspect.signature(PAIR_LOSSES[name]).parameters)
