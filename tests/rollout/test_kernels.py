"""Each kernel beside plain torch: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tests.rollout.interpreter import DEVICE, TRITON, WHY
from verl.rollout.base import Sampling
from verl.rollout.sampling import choose, uniforms

if not TRITON:
    pytest.skip(WHY, allow_module_level=True)
from verl.rollout import kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def bits_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """But for a last bit here and there, where float32 sums in another order. The interpreter cuts bf16 off instead of
    rounding it, each time."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    elif DEVICE == "cpu":
        torch.testing.assert_close(got, expected, rtol=2**-5, atol=2**-5)
    else:
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-8)
        assert (got == expected).float().mean() > 0.99


@TYPES
@pytest.mark.parametrize("width", [48, 1536])
def test_add_norm(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, residual = normal(5, width, dtype=dtype), normal(5, width, dtype=dtype)
    norm = Qwen3RMSNorm(width, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = normal(width, dtype=dtype)
    kept = residual.clone()
    with torch.no_grad():
        bits_alike(kernels.add_norm(None, residual, norm.weight, 1e-5), norm(kept))
        assert torch.equal(residual, kept)
        bits_alike(kernels.add_norm(x, residual, norm.weight, 1e-5), norm(kept + x))
    bits_alike(residual, kept + x)


@TYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = normal(7, 333, dtype=dtype) * 3, normal(7, 333, dtype=dtype)
    bits_alike(kernels.silu_mul(gate, up), F.silu(gate) * up)
    bits_alike(kernels.silu_mul(*torch.cat([gate, up], -1).split(333, -1)), F.silu(gate) * up)


def table_of(prompts: list[torch.Tensor], responses: list[torch.Tensor]) -> torch.Tensor:
    """Of stores ``[slots, H_kv, length, D]`` of keys and of values."""
    addresses = [t.data_ptr() for t in (*prompts, *responses)]
    return torch.tensor([*addresses, prompts[0].shape[2], responses[0].shape[2], 0, 0], device=DEVICE)


@TYPES
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_rotate_store(dtype: torch.dtype, norm: bool, joint: bool) -> None:
    """Three query heads and two of keys, rows at ragged places; a row without a slot writes nothing."""
    torch.manual_seed(0)
    dim, slots, length = 16, 6, 9
    config = Qwen3Config(head_dim=dim, num_attention_heads=3, num_key_value_heads=2)
    rotary, positions = Qwen3RotaryEmbedding(config).to(DEVICE), torch.tensor([0, 7, 123, 4], device=DEVICE)
    q, k, v = normal(4, 3 * dim, dtype=dtype), normal(4, 2 * dim, dtype=dtype), normal(4, 2 * dim, dtype=dtype)
    if joint:
        q, k, v = torch.cat([q, k, v], -1).split([3 * dim, 2 * dim, 2 * dim], -1)
    cos, sin = rotary(q, positions[None])
    norms = [Qwen3RMSNorm(dim, eps=1e-6).to(DEVICE, dtype) for _ in range(2)]
    heads = [q.reshape(4, -1, dim), k.reshape(4, -1, dim)]
    if norm:
        for n in norms:
            n.weight.data = normal(dim, dtype=dtype)
        heads = [n(x) for n, x in zip(norms, heads, strict=True)]
    q_new, k_new = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in heads), cos, sin)
    slot, place = torch.tensor([4, 0, -1, 5], device=DEVICE), torch.tensor([0, 8, 3, 2], device=DEVICE)
    stores = [normal(slots, 2, length, dim, dtype=dtype) for _ in range(2)]
    expected = [s.clone() for s in stores]
    for row in (0, 1, 3):
        expected[0][slot[row], :, place[row]] = k_new[0, :, row].detach()
        expected[1][slot[row], :, place[row]] = v.reshape(4, -1, dim)[row]
    weights = (norms[0].weight.detach(), norms[1].weight.detach()) if norm else None
    table = table_of([normal(1, 2, 1, dim)] * 2, stores)
    kernels.rotate_store(q, k, v, weights, 1e-6, cos[0], sin[0], table, slot, place)
    bits_alike(q.reshape(4, -1, dim), q_new[0].transpose(0, 1).detach())
    bits_alike(stores[0], expected[0])
    assert torch.equal(stores[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("together", [0, 1, 2], ids=["each row", "groups", "prompts in parts"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 32), (3, 3, 16)])
def test_attend(dtype, parts, together, heads, kv_heads, dim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts and responses, some within one tile, some over several; a place without a row gives zeros. The
    interpreter has no products of bf16."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "PROGRAMS", 5 * kv_heads * parts)
    monkeypatch.setattr(kernels, "NEAR", 4 // max(together, 1))
    assert kernels.parts_for(5 * kv_heads, kernels.PROGRAMS) == parts
    monkeypatch.setattr(kernels, "parts_for", lambda _, full: parts if full == kernels.PROGRAMS else together)
    prompts = [normal(3, kv_heads, 150, dim, dtype=dtype) for _ in range(2)]
    responses = [normal(5, kv_heads, 90, dim, dtype=dtype) for _ in range(2)]
    slot, group = [4, 0, 2, -1, 1], [2, 0, 0, 0, 1]
    prompt, place = [150, 1, 70, 0, 3], [89, 0, 64, 0, 20]
    q = normal(5, heads * dim, dtype=dtype)
    apart = torch.cat([q, normal(5, 8, dtype=dtype)], -1)[:, : heads * dim] if parts > 1 else q
    got = kernels.attend(
        apart,
        dim,
        kv_heads,
        table_of(prompts, responses),
        *(torch.tensor(x, device=DEVICE) for x in (slot, group, prompt, place)),
        together=together > 0,
    ).view(5, heads, dim)
    for row in range(5):
        if slot[row] < 0:
            assert not got[row].any()
            continue
        k, v = (
            torch.cat([p[group[row], :, : prompt[row]], r[slot[row], :, : place[row] + 1]], 1).float()
            for p, r in zip(prompts, responses, strict=True)
        )
        expected = F.scaled_dot_product_attention(
            q.view(5, heads, 1, dim)[row].float(), *(x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        )[:, 0]
        loose = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got[row].float(), expected, atol=loose, rtol=loose)


def drawn(z: torch.Tensor, noise: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    ids, logprobs = torch.empty(len(z), dtype=torch.int64, device=DEVICE), torch.empty(len(z), device=DEVICE)
    options = torch.tensor([sampling.temperature, sampling.top_p, sampling.top_k], dtype=torch.float64, device=DEVICE)
    cut = sampling.top_k > 0 or sampling.top_p < 1
    kernels.sample(z, noise, options, ids, logprobs, greedy=sampling.greedy, cut=cut)
    return ids, logprobs


@pytest.mark.parametrize("vocabulary", [32, 3000])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(), Sampling(temperature=0.6), Sampling(greedy=True, temperature=0.7), Sampling(top_k=7),
        Sampling(top_p=0.8), Sampling(temperature=0.8, top_k=50, top_p=0.95), Sampling(top_k=10**6, top_p=0.3),
        Sampling(temperature=0.3, top_p=0.99), Sampling(top_k=400, top_p=0.9), Sampling(top_k=10**6),
    ],
    ids=["plain", "cool", "greedy", "k", "p", "both", "big k", "cool p", "k of many blocks", "all k"],
)  # fmt: skip
@pytest.mark.parametrize("few", [False, True], ids=["", "small blocks"])
def test_sample_equals_choose(vocabulary: int, sampling: Sampling, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small blocks some rows have fewer logits that may be the last to stay than there is room for, some more."""
    if few:
        monkeypatch.setattr(kernels, "BLOCK", 16)
        monkeypatch.setattr(kernels, "ROOM", 256)
        monkeypatch.setattr(kernels, "PIECE", 64)
    torch.manual_seed(0)
    z = normal(8, vocabulary) * 3
    z[1] = z[1].round()  # ties
    z[2] = 0.0
    z[3, ::2] = float("-inf")
    z[4] = -z[4].abs() - 100
    noise = uniforms(torch.arange(8, device=DEVICE), torch.arange(8, device=DEVICE))
    expected, logprobs = choose(z.clone(), noise, sampling)
    got = drawn(z, noise, sampling)
    assert got[0].tolist() == expected.tolist()
    torch.testing.assert_close(got[1], logprobs, atol=2e-5, rtol=0)  # a last bit of logits beyond 100


def test_extreme_noise_never_gives_an_impossible_token() -> None:
    z = torch.full((2, 3000), float("-inf"), device=DEVICE)
    z[:, [7, 1300]] = 0.0
    ids, logprobs = drawn(z, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64, device=DEVICE), Sampling())
    assert ids.tolist() == [7, 1300]
    torch.testing.assert_close(logprobs.cpu(), torch.tensor([0.5, 0.5]).log())


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=3), Sampling(top_k=3, top_p=0.9), Sampling(top_p=0.9), Sampling(top_k=10**6)], ids=str
)
def test_a_nan_among_logits_that_are_cut_shows(sampling: Sampling) -> None:
    z = torch.zeros(2, 3000, device=DEVICE)
    z[:, 10], z[1, 1500] = 20.0, float("nan")
    _, logprobs = drawn(z, torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE), sampling)
    assert logprobs.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5, top_p=0.9), Sampling(greedy=True)])
def test_what_is_not_finite_shows(bad: float, sampling: Sampling) -> None:
    z = torch.zeros(3, 2000, device=DEVICE)
    z[1, 1500] = bad
    z[2] = bad
    ids, logprobs = drawn(z, torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE), sampling)
    assert logprobs.isfinite().tolist() == [True, False, False]
    assert ((ids >= 0) & (ids < 2000)).all()
