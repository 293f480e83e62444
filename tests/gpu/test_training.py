"""The training engine on a GPU: compiled beside eager, bf16 beside fp32, the head's kernels, 4-bit bases."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.engines.test_fsdp import ALL, BOTH, LOGPROBS, batch, loss_fn, policy
from tests.engines.test_layers import CUTS, qwen2
from tests.models.test_logprobs import plain
from tests.tiny import f_llama
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.logprobs import token_logprobs
from verl.models.policy import Policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def steps(model, dtype, cuts=CUTS, device="cuda", lr=0.05, **options) -> tuple[dict[str, torch.Tensor], list[float]]:
    """How far each parameter went, and the gradients' norms."""
    module = policy(copy.deepcopy(model), dtype).to(device)
    e = FsdpEngine(module, OptimizerConfig(name="sgd", lr=lr, max_grad_norm=1e9), **options)
    before = {name: p.detach().clone() for name, p in e.optimizer.masters.items()}
    norms = [e.update(batch(), cut, loss_fn, BOTH, 0.8).grad_norm for cut in cuts]
    return {name: (p.detach() - before[name]).cpu() for name, p in e.optimizer.masters.items()}, norms


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative, of all parameters together."""
    difference = sum((a[name] - b[name]).square().sum().item() for name in b)
    return math.sqrt(difference / sum(x.square().sum().item() for x in b.values()))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_compiled_equals_eager(dtype, tolerance, recompute):
    torch._dynamo.reset()
    model = qwen2(5)
    eager, norms = steps(model, dtype, gradient_checkpointing=recompute)
    compiled, compiled_norms = steps(model, dtype, gradient_checkpointing=recompute, compile_backend="inductor")
    assert gap(compiled, eager) < tolerance
    assert compiled_norms == pytest.approx(norms, rel=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("model", [lambda: qwen2(3), lambda: f_llama(tied=True, kv_heads=1)], ids=["qwen2", "tied"])
def test_a_gpu_step_equals_the_cpu_reference(model, dtype, tolerance):
    """In bf16 through the packed kernel, in fp32 through masked attention."""
    model = model().to(torch.bfloat16).float()  # so that both begin alike
    reference, norms = steps(model, torch.float32, [ALL], device="cpu", gradient_checkpointing=True)
    ours, our_norms = steps(model, dtype, [ALL], gradient_checkpointing=True)
    assert gap(ours, reference) < tolerance
    assert our_norms == pytest.approx(norms, rel=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("want", ["both", "logprobs", "entropy"])
def test_logprobs_equal_the_plain_formula(dtype, tolerance, keep_bytes, want):
    g = torch.Generator().manual_seed(0)
    n, width, vocabulary = 301, 64, 5003
    hidden, weight = (torch.randn(*s, generator=g).cuda().to(dtype) for s in ((n, width), (vocabulary, width)))
    targets = torch.randint(vocabulary, (n,), generator=g).cuda()
    slopes = torch.randn(2, n, generator=g).cuda() * torch.tensor([[want != "entropy"], [want != "logprobs"]]).cuda()
    results = []
    for ours in (True, False):
        h, w = (x.detach().to(dtype if ours else torch.float64).requires_grad_() for x in (hidden, weight))
        if ours:
            lp, entropy = token_logprobs(
                h, w, None, targets, temperature=0.7, scale=0.3, with_entropy=True, chunk=100, keep_bytes=keep_bytes
            )
        else:
            lp, entropy = plain(h, w, None, targets, 0.7, 0.3, None)
        loss = sum((x * s).sum() for x, s in zip((lp, entropy), slopes, strict=True) if s.any())
        loss.backward()
        results.append([x.detach().double() for x in (lp, entropy, h.grad, w.grad)])
    for name, a, b in zip(("logprobs", "entropy", "hidden", "weight"), *results, strict=True):
        limit = tolerance if name in ("hidden", "weight") else 1e-5
        assert (a - b).norm() / b.norm() < limit, name


def test_many_logprobs_take_little_memory():
    hidden = torch.randn(32768, 1536, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(151936, 1536, device="cuda") / 40).bfloat16().requires_grad_()
    targets = torch.randint(151936, (32768,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, None, targets, with_entropy=True)[0].mean().backward()
    beyond = torch.cuda.max_memory_allocated() - before - 4 * weight.numel()
    assert beyond < 2 << 30, f"{beyond / 2**30:.2f} GiB beyond the head's gradient"


def test_a_nonfinite_gradient_is_skipped():
    e = FsdpEngine(policy(f_llama(), torch.bfloat16).to("cuda"), OptimizerConfig(lr=1e-2))
    rows = batch()
    rows.ragged("weight").values[3] = math.nan
    before = {name: p.clone() for name, p in e.shards()}
    assert e.update(rows, ALL, loss_fn, LOGPROBS, 1.0).skipped == "nonfinite"
    assert all(torch.equal(p, before[name]) for name, p in e.shards())
    assert e.update(batch(), ALL, loss_fn, LOGPROBS, 1.0).skipped is None


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_four_bit_bases_train_after_an_evaluation_too(tmp_path, name):
    pytest.importorskip("bitsandbytes")
    qwen2(2).save_pretrained(tmp_path)
    cfg = ModelConfig(model_name_or_path=str(tmp_path), use_lora=True, load_in_4bit=True, lora_r=4)
    module = Policy(load_model(cfg, "cuda", torch.bfloat16))
    e = FsdpEngine(module, OptimizerConfig(name=name, lr=1e-2), gradient_checkpointing=True)
    norms = []
    for _ in range(3):
        e.forward(batch(), ALL, LOGPROBS, 0.8)  # an evaluation may repack weights that then pass no gradient
        norms.append(e.update(batch(), ALL, loss_fn, LOGPROBS, 0.8).grad_norm)
    assert min(norms) > 1e-3
    trained = {n: p for n, p in module.trainable()}
    assert all(p.is_cuda and ("lora_B" not in n or p.abs().sum() > 0) for n, p in trained.items())
