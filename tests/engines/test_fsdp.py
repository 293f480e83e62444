"""The training engine: any cut into micro-batches, shared prompts or not, recomputed or not: the same gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.engines.pieces import saved_state
from tests.tiny import f_gpt2, f_llama
from verl.batch import Batch, Ragged
from verl.config.errors import RequestError
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.logprobs import CHUNK_BYTES
from verl.models.policy import Policy
from verl.models.value import HIDDEN, SharedValue, Value

LOGPROBS = frozenset({"logprobs"})
BOTH = frozenset({"logprobs", "entropy"})
SGD = OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=1e9)  # the step is the gradient
ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.1)


def policy(model, dtype=torch.float32, **options) -> Policy:
    return Policy(load_model(ModelConfig(model_name_or_path=model, **options), "cpu", dtype))


def batch(shared=True) -> Batch:
    """Six rows of two prompts, not sorted by prompt; weights stand for advantages."""
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 32, (n,), generator=g) for n in (5, 3)]
    order = [0, 1, 0, 0, 1, 1]
    responses = [torch.randint(3, 32, (n,), generator=g) for n in (4, 1, 7, 2, 5, 3)]
    out = Batch([str(i) for i in range(6)])
    out["prompt_ids"] = Ragged.from_rows([prompts[i] for i in order])
    out["response_ids"] = Ragged.from_rows(responses)
    total = int(out.ragged("response_ids").lengths.sum())
    out["response_mask"] = out.ragged("response_ids").with_values(torch.ones(total, dtype=torch.bool))
    out["weight"] = out.ragged("response_ids").with_values(torch.randn(total, generator=g))
    if shared:
        out["group"] = torch.tensor(order)
    return out


def loss_fn(outputs, rows):
    x = outputs["logprobs"] if "logprobs" in outputs else outputs["values"]
    loss = -(x * rows.ragged("weight").values.to(x.device)).sum() / 22
    if "entropy" in outputs:
        loss = loss - 0.1 * outputs["entropy"].sum() / 22
    return loss, {"loss": loss.item(), "rows": len(rows), "length_max": max(rows.ragged("response_ids").lengths).item()}


def step_of(model, micro_batches, *, shared=True, recompute=False, wrap=lambda p: p, want=BOTH):
    module = wrap(policy(copy.deepcopy(model)))
    before = {n: p.detach().clone() for n, p in module.trainable()}
    engine = FsdpEngine(module, SGD, gradient_checkpointing=recompute)
    report = engine.update(batch(shared), micro_batches, loss_fn, want, 0.8)
    return {n: p.detach() - before[n] for n, p in module.trainable()}, report


ALL = [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("make", [f_llama, f_gpt2, lambda: f_llama(tied=True, kv_heads=1)])
def test_the_gradient_never_depends_on_the_cut(make):
    model = make()
    reference, whole = step_of(model, [[i] for i in range(6)], shared=False)
    assert whole.grad_norm > 0.1
    for micro_batches in (ALL, [[0, 2, 3], [1, 4, 5]], [[5, 0], [1], [2, 4, 3]]):
        for shared in (True, False):
            for recompute in (True, False):
                step, report = step_of(model, micro_batches, shared=shared, recompute=recompute)
                for name, delta in step.items():
                    torch.testing.assert_close(delta, reference[name], atol=1e-5, rtol=1e-5, msg=name)
                assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
                assert report.stats["loss"] == pytest.approx(whole.stats["loss"], abs=1e-5)
                assert report.stats["rows"] == 6 and report.stats["length_max"] == 7


def test_a_value_model_too():
    reference, _ = step_of(
        f_llama(), [[i] for i in range(6)], shared=False, wrap=lambda p: Value(p.lm), want={"values"}
    )
    step, _ = step_of(f_llama(), ALL, recompute=True, wrap=lambda p: Value(p.lm), want={"values"})
    assert {"value_head.weight", "model.embed_tokens.weight"} <= step.keys()
    for name, delta in step.items():
        torch.testing.assert_close(delta, reference[name], atol=1e-5, rtol=1e-5, msg=name)


def test_recomputing_really_happens_and_only_in_training():
    module = policy(f_llama())
    engine = FsdpEngine(module, SGD, gradient_checkpointing=True)
    calls = []
    module.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.update(batch(), ALL, loss_fn, LOGPROBS, 1.0)
    assert len(calls) == 2
    engine.forward(batch(), ALL, LOGPROBS, 1.0)
    assert len(calls) == 3 and not module.training


def test_forward_gives_rows_in_batch_order_without_a_graph():
    engine = FsdpEngine(policy(f_llama()), SGD)
    whole = engine.forward(batch(), ALL, BOTH, 0.8)
    parts = engine.forward(batch(), [[4, 1], [0], [5, 3, 2]], BOTH, 0.8)
    assert whole.keys() == BOTH
    for name, column in whole.items():
        assert torch.equal(column.lengths, batch().ragged("response_ids").lengths)
        assert torch.equal(parts[name].lengths, column.lengths) and not column.values.requires_grad
        torch.testing.assert_close(parts[name].values, column.values, atol=1e-5, rtol=1e-5)


def test_outputs_go_home_together():
    """From the meta device nothing can go: all micro-batches are computed before something is to."""
    engine, calls = FsdpEngine(policy(f_llama()).requires_grad_(False).to("meta"), SGD), []
    engine.module.register_forward_hook(lambda *_: calls.append(1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(CHUNK_BYTES, "meta", 1 << 20)
        with pytest.raises(NotImplementedError, match="out of meta tensor"):
            engine.forward(batch(), [[4, 1], [0], [5, 3, 2]], BOTH, 0.8)
    assert len(calls) == 3


@pytest.mark.parametrize("micro_batches", [[[0, 1]], [[0, 1, 2, 3, 4, 5, 5]], []])
def test_forward_needs_each_row_once(micro_batches):
    with pytest.raises(ValueError, match="each of the batch's 6 once"):
        FsdpEngine(policy(f_llama()), SGD).forward(batch(), micro_batches, LOGPROBS, 1.0)


def unchanged(engine, run):
    weights = {n: t.clone() for n, t in engine.shards()}
    state = saved_state(engine)[0]
    report = run()
    assert all(torch.equal(t, weights[n]) for n, t in engine.shards())
    assert all(torch.equal(t, state[n]) for n, t in saved_state(engine)[0].items())
    return report


@pytest.mark.parametrize("empty", ["no rows", "no micro-batches", "all masked"])
def test_g06_nothing_to_learn_from_changes_nothing(empty):
    engine = FsdpEngine(policy(f_llama()), ADAM)
    rows = batch()
    engine.update(rows, ALL, loss_fn, LOGPROBS, 1.0)
    if empty == "all masked":
        rows["response_mask"] = rows.ragged("response_mask").with_values(torch.zeros(22, dtype=torch.bool))
    cut = {"no rows": [[]], "no micro-batches": [], "all masked": ALL}[empty]
    report = unchanged(engine, lambda: engine.update(rows, cut, loss_fn, LOGPROBS, 1.0))
    assert report.skipped == "empty" and report.grad_norm == 0
    assert engine.update(batch(), ALL, loss_fn, LOGPROBS, 1.0).skipped is None


def test_a_nonfinite_gradient_is_skipped_and_told():
    engine = FsdpEngine(policy(f_llama()), ADAM)
    rows = batch()
    rows.ragged("weight").values[3] = math.nan
    report = unchanged(engine, lambda: engine.update(rows, ALL, loss_fn, LOGPROBS, 1.0))
    assert report.skipped == "nonfinite" and math.isnan(report.grad_norm)
    assert engine.update(batch(), ALL, loss_fn, LOGPROBS, 1.0).skipped is None


def test_a_reference_can_only_compute():
    frozen = policy(f_llama()).requires_grad_(False)
    engine = FsdpEngine(frozen, ADAM, gradient_checkpointing=True)
    assert engine.forward(batch(), ALL, LOGPROBS, 1.0)["logprobs"].values.isfinite().all()
    with pytest.raises(RuntimeError, match="no trainable"):
        engine.update(batch(), ALL, loss_fn, LOGPROBS, 1.0)
    assert saved_state(engine) == ({}, {})


def test_a_model_on_the_cpu_has_nothing_to_offload():
    with pytest.raises(RequestError, match="cpu_offload: the model computes on the CPU already"):
        FsdpEngine(policy(f_llama()), ADAM, cpu_offload=True)
    assert FsdpEngine(policy(f_llama()).requires_grad_(False), ADAM, cpu_offload=True).optimizer is None


def test_a_shared_critic_trains_its_head_on_kept_hidden_states():
    actor = policy(f_llama())
    critic = FsdpEngine(SharedValue(actor), OptimizerConfig(lr=1e-2))
    rows = batch()
    out = critic.forward(rows, [[0, 2, 3], [1, 4, 5]], frozenset({"values", "hidden"}), 1.0)
    rows[HIDDEN] = out["hidden"]
    before = {n: p.detach().clone() for n, p in actor.trainable()}
    calls = []
    actor.backbone.register_forward_hook(lambda *_: calls.append(1))

    def fit(outputs, micro):
        loss = (outputs["values"] - 1).square().sum() / 22
        return loss, {"loss": loss.item()}

    losses = [
        critic.update(rows, [[5, 0, 1], [2, 3, 4]], fit, frozenset({"values"}), 1.0).stats["loss"] for _ in range(9)
    ]
    assert losses[-1] < losses[0] and not calls
    assert all(torch.equal(p, before[n]) for n, p in actor.trainable())


@pytest.mark.parametrize("kind", ["fp32", "bf16", "lora", "value", "shared"])
def test_restoring_goes_on_bit_for_bit(kind):
    """4 updates = 2 updates, save, restore into a fresh engine, 2 updates."""
    want = frozenset({"values"} if kind in ("value", "shared") else {"logprobs"})
    cfg = OptimizerConfig(lr=1e-2, weight_decay=0.1, schedule="linear", warmup_steps=1)

    def fresh():
        p = policy(f_llama(), torch.bfloat16 if kind == "bf16" else torch.float32, use_lora=kind == "lora", lora_r=2)
        return FsdpEngine(
            {"value": lambda: Value(p.lm), "shared": lambda: SharedValue(p)}.get(kind, lambda: p)(), cfg, 4
        )

    def run(engine, n):
        for _ in range(n):
            assert engine.update(batch(), [[0, 2, 3], [1, 4, 5]], loss_fn, want, 1.0).skipped is None

    torch.manual_seed(0)  # peft draws A from the global state
    straight = fresh()
    run(straight, 4)
    torch.manual_seed(0)
    first = fresh()
    run(first, 2)
    saved = {n: t.clone() for n, t in first.shards()}, *saved_state(first)
    second = fresh()
    second.restore(*saved)
    run(second, 2)
    end = dict(second.shards())
    assert all(torch.equal(t, end[n]) for n, t in straight.shards())
    assert second.optimizer.lr == straight.optimizer.lr
