from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.rollout import vllm
from verl.rollout.base import Sampling
from verl.rollout.sampling import choose, noise_key, uniforms

MASK = (1 << 64) - 1


def slow_uniform(key: int, position: int) -> float:
    """SplitMix64 in Python's unbounded integers."""
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) >> 12) * 2.0**-52


def test_uniforms_are_splitmix64() -> None:
    keys = [noise_key(seed, f"p{i}", k) for seed in (0, 1) for i in range(5) for k in range(5)]
    got = uniforms(torch.tensor(keys), torch.arange(50))
    assert got.tolist() == [slow_uniform(key, i) for i, key in enumerate(keys)]


def test_noise_is_stable_between_machines_and_versions() -> None:
    """Changing it would silently change every seeded run."""
    assert noise_key(0, "p", 0) == -327390673183444221
    assert uniforms(torch.tensor([-327390673183444221]), torch.tensor([0])).item() == pytest.approx(0.8188298692796159)


def test_uniforms_are_uniform() -> None:
    u = uniforms(torch.tensor([noise_key(0, "p", k) for k in range(200)])[:, None], torch.arange(100)[None])
    counts = torch.histc(u.flatten(), 50, 0, 1)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * 98**0.5
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < 0.35  # 200 samples: a deviation is 0.07
    assert u.min() >= 0 and u.max() < 1


@pytest.mark.parametrize("vocabulary", [3, 256, 1000, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_choose_inverts_the_cumulative_distribution(vocabulary: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(300, vocabulary) * 3
    noise = uniforms(torch.arange(300), torch.arange(300))
    ids, logprobs = choose(logits.clone(), noise, Sampling(temperature=temperature))
    p = (logits.double() / temperature).softmax(-1)
    assert ids.tolist() == (p.cumsum(-1) > noise[:, None]).int().argmax(-1).tolist()
    torch.testing.assert_close(logprobs, p.gather(1, ids[:, None])[:, 0].log().float(), atol=2e-6, rtol=0)


def test_extreme_noise_never_gives_an_impossible_token() -> None:
    logits = torch.full((2, 600), float("-inf"))
    logits[:, [7, 300]] = 0.0
    ids, logprobs = choose(logits, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), Sampling())
    assert ids.tolist() == [7, 300]
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 0.5]).log())


def test_top_p_keeps_the_token_that_crosses() -> None:
    """p = .5 .3 .2: top_p 0.5 keeps one, 0.6 two, 0.9 all three."""
    for top_p, kept in ((0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2})):
        noise = torch.linspace(0, 1 - 2.0**-52, 64, dtype=torch.float64)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(64, 1)
        ids, logprobs = choose(logits, noise, Sampling(top_p=top_p))
        assert set(ids.tolist()) == kept
        mass = sum((0.5, 0.3, 0.2)[i] for i in kept)
        assert logprobs[0].item() == pytest.approx(torch.tensor(0.5 / mass).log().item(), abs=1e-6)


def test_vllm_chooses_for_rows_of_any_limit_at_once(monkeypatch: pytest.MonkeyPatch):
    """Each row of an episode has another number of tokens left; that is no reason to choose for it alone."""
    calls = []

    def counted(logits: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(logits))
        return choose(logits, *rest)

    monkeypatch.setattr(vllm, "choose", counted)
    chooser, params = vllm._Chooser(None, torch.device("cpu"), False), []
    for i in range(6):
        sampling = Sampling(temperature=0.5 if i == 5 else 1.0, max_new_tokens=10 + i, seed=i)
        params.append((i, SimpleNamespace(extra_args={"verl": (i, sampling)}), [], []))
    chooser.update_state(SimpleNamespace(removed=[], added=params, moved=[]))
    out = chooser.apply(torch.randn(6, 32))
    assert sorted(calls) == [1, 5] and (out > float("-inf")).sum(1).tolist() == [1] * 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(top_k=3, top_p=0.9)])
def test_what_is_not_finite_shows(bad: float, sampling: Sampling) -> None:
    logits = torch.randn(2, 600)
    logits[1, 500] = bad
    ids, logprobs = choose(logits, torch.full((2,), 0.5, dtype=torch.float64), sampling)
    assert logprobs.isfinite().tolist() == [True, False] and ((ids >= 0) & (ids < 600)).all()
