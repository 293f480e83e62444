"""Importance weights between sampler and trainer against loops and numbers worked by hand."""

from __future__ import annotations

import math
import statistics
from typing import Any, get_args

import pytest
import torch

from tests.algorithms.facts import cut
from tests.algorithms.ragged import rows
from verl.algorithms.correction import correction_weights, effective_share
from verl.algorithms.named import call
from verl.config.algorithm import Correction

R = rows()
MODES = get_args(Correction)
CAP, FLOOR = 1.4, 0.7


def facts(mode: str, spread: float = 0.5) -> dict[str, Any]:
    sampled = -R.values(1).abs()
    return {
        "old_logprobs": sampled + spread * R.values(2), "sampled_logprobs": sampled, "mask": R.mask, "row": R.row,
        "n_rows": R.n, "correction": mode, "correction_cap": CAP, "correction_floor": FLOOR,
    }  # fmt: skip


def slow(mode: str, q: list[float]) -> list[float]:
    """Weights of one row's masked tokens."""
    inside = {"icepop": lambda x: FLOOR <= x <= CAP}
    if mode == "none":
        return [1.0] * len(q)
    if mode == "tis":
        return [min(math.exp(x), CAP) for x in q]
    if mode == "tis_sequence":
        return [min(math.exp(sum(q)), CAP)] * len(q)
    if mode == "icepop":
        return [math.exp(x) if inside["icepop"](math.exp(x)) else 0.0 for x in q]
    assert mode == "reject"
    return [1.0 if FLOOR <= math.exp(statistics.mean(q)) <= CAP else 0.0] * len(q)


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_sums_against_the_loop(mode):
    given = facts(mode)
    got = call(correction_weights, given)
    assert got.weights.dtype == torch.float32
    weights, ratios, changed, kl = [], [], 0, 0.0
    for i in range(R.n):
        tokens = R.tokens(i)
        if not tokens:
            continue
        q = (given["old_logprobs"] - given["sampled_logprobs"])[tokens].tolist()
        expected = slow(mode, q)
        assert got.weights[tokens].tolist() == pytest.approx(expected, rel=1e-6)
        weights += expected
        ratios += [math.exp(x) for x in q]
        changed += sum(w in (0.0, CAP) for w in expected)
        kl += sum(math.exp(x) - 1 - x for x in q)
    assert (got.weights[~R.mask] == 0).all()
    assert got.total.item() == pytest.approx(sum(weights), rel=1e-6)
    assert got.squares.item() == pytest.approx(sum(w * w for w in weights), rel=1e-6)
    assert got.ratio_total.item() == pytest.approx(sum(ratios))
    assert got.ratio_squares.item() == pytest.approx(sum(x * x for x in ratios))
    assert got.changed == changed and (changed > 0) == (mode != "none")
    assert (0.0 in weights) == (mode in ("icepop", "reject"))
    assert got.kl.item() == pytest.approx(kl)


@pytest.mark.parametrize("mode", MODES)
def test_equal_logprobs_change_nothing(mode):
    given = facts(mode, spread=0.0)
    got = call(correction_weights, given)
    assert (got.weights[R.mask] == 1).all()
    assert got.changed == 0 and got.kl == 0
    assert effective_share(got.total.item(), got.squares.item(), R.mask.sum().item()) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", MODES)
def test_weights_carry_no_gradient_and_ignore_what_is_masked(mode):
    given = facts(mode)
    junk = {
        k: v.masked_fill(~R.mask, 9.0) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in given.items()
    }
    given["old_logprobs"].requires_grad_()
    got, same = call(correction_weights, given), call(correction_weights, junk)
    assert not any(x.requires_grad for x in got)
    assert all((a == b).all() and a.isfinite().all() for a, b in zip(got, same, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4, 1])
def test_split_invariance(mode, size):
    given = facts(mode)
    whole = call(correction_weights, given)
    parts = [call(correction_weights, cut(given, R, i, i + size)) for i in range(0, R.n, size)]
    assert torch.cat([p.weights for p in parts]).tolist() == whole.weights.tolist()
    for name in whole._fields[1:]:
        assert sum(getattr(p, name) for p in parts).item() == pytest.approx(getattr(whole, name).item())


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("none", [1, 1, 1, 1]),
        ("tis", [1.4, 0.5, 1, 1.2]),  # ratios 2, 0.5; 1, 1.2
        ("tis_sequence", [1, 1, 1.2, 1.2]),  # products 1 and 1.2
        ("icepop", [0, 0, 1, 1.2]),
        ("reject", [1, 1, 1, 1]),  # geometric means 1 and 1.0954
    ],
)
def test_by_hand(mode, weights):
    old = torch.tensor([2, 0.5, 1, 1.2], dtype=torch.float64).log()
    row, everywhere = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    got = correction_weights(old, torch.zeros(4), everywhere, row, 2, mode, CAP, FLOOR)
    assert got.weights.tolist() == pytest.approx(weights)
    share = effective_share(got.total.item(), got.squares.item(), 4)
    assert share == pytest.approx(sum(weights) ** 2 / (4 * sum(w * w for w in weights)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("far", [200.0, -200.0])
def test_far_apart_stays_finite(mode, far):
    old, row = torch.tensor([far, far, -0.1]), torch.tensor([0, 0, 1])
    got = correction_weights(old, torch.tensor([0, 0, -0.1]), torch.ones(3, dtype=torch.bool), row, 2, mode, CAP, FLOOR)
    assert all(x.isfinite().all() for x in got)
    assert got.weights[2].item() == pytest.approx(1.0)
    if mode in ("icepop", "reject"):
        assert got.weights[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_one_token_and_none(mode):
    old, row = torch.tensor([0.1, 5.0]), torch.tensor([0, 1])
    got = correction_weights(old, torch.zeros(2), torch.ones(2, dtype=torch.bool), row, 2, mode, CAP, FLOOR)
    assert got.weights.tolist() == pytest.approx([w for q in old.tolist() for w in slow(mode, [q])], rel=1e-6)
    nothing = correction_weights(old, torch.zeros(2), torch.zeros(2, dtype=torch.bool), row, 2, mode, CAP, FLOOR)
    assert (nothing.weights == 0).all() and nothing.total == 0 and nothing.kl == 0


def test_effective_share():
    assert effective_share(2.0, 4.0, 2) == 0.5  # one of two samples has all the weight
    assert effective_share(0.0, 0.0, 5) == 0.0 and effective_share(0.0, 0.0, 0) == 0.0


def test_unknown_correction():
    with pytest.raises(ValueError, match="unknown correction 'both'"):
        call(correction_weights, facts("both"))
