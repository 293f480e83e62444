"""Megatron's ranks on two GPUs over NCCL, beside FSDP; see ``tests/engines/test_megatron.py``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'verl[megatron]'")

from tests.engines import test_spread as spread
from tests.engines.ranks import run
from tests.engines.test_fsdp import BOTH, loss_fn
from tests.engines.test_megatron import FAST, Case, layout, named, published, saved, taken, train
from tests.engines.test_spread import DECAYING, PLAIN, agree
from tests.tiny import f_bpe, save
from verl.batch import Batch, Ragged
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.engines.megatron import MegatronEngine, megatron_mesh
from verl.engines.sharding import device_mesh
from verl.layout import Layout
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.seats import seat

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BOTH_KINDS = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (Case(), 1e-4),
        (Case(tp=2), 1e-4),
        (Case(tp=2, model="qwen2", optimizer=PLAIN), 1e-4),
        (Case(pp=2, micro_rows=1), 1e-4),
        (Case(pp=2, model="tied"), 1e-4),
        (Case(cp=2, model="qwen3", optimizer=PLAIN), 1e-4),
        (Case(tp=2, cpu_offload=True), 1e-4),
        (Case(cpu_offload=True), 1e-4),
        (Case(dtype="bfloat16", optimizer=PLAIN), 0.06),
        (Case(tp=2, dtype="bfloat16", optimizer=PLAIN), 0.06),
        (Case(pp=2, dtype="bfloat16", optimizer=PLAIN), 0.06),
    ],
    ids=named,
)
def test_the_same_numbers(case, tolerance):
    alone = replace(case, cpu_offload=False).alone
    agree(spread.train(alone), run(2, train, case, backend=BOTH_KINDS), tolerance)


@pytest.mark.parametrize("case", [Case(tp=2), Case(pp=2, model="tied", dtype="bfloat16")], ids=named)
def test_it_goes_on_bit_for_bit(case):
    case = replace(case, optimizer=DECAYING, steps=2)
    straight = run(2, saved, replace(case, steps=4), backend="nccl")[0]
    again = run(2, saved, case, run(2, saved, case, backend="nccl")[0], backend="nccl")[0]
    assert all(torch.equal(t, straight[0][name]) for name, t in again[0].items())


@pytest.mark.parametrize("case", [Case(tp=2), Case(pp=2)], ids=named)
def test_weights_come_back_bit_for_bit(case, tmp_path):
    folder = save(tmp_path, spread.MODELS["qwen3"](), f_bpe())
    assert all(same and placed for same, placed, _ in run(2, taken, case, folder, backend="nccl"))


@pytest.mark.parametrize("case", [Case(tp=2, optimizer=FAST), Case(pp=2, model="qwen3", optimizer=FAST)], ids=named)
def test_what_is_trained_is_what_generates(case, tmp_path):
    folder = save(tmp_path, spread.MODELS[case.model](), f_bpe())
    assert run(2, published, case, folder, backend=BOTH_KINDS) == [[True, True, True]] * 2


TOY = {"hidden": 64, "layers": 2, "vocabulary": 131, "rows": 4, "prompt": 6, "response": 9, "micro_rows": 1}
MIDDLE = {"hidden": 1024, "layers": 8, "vocabulary": 32003, "rows": 32, "prompt": 256, "response": 512, "micro_rows": 4}


def beside_fsdp(case: Case | None, size: dict[str, int], dtype: str) -> dict[str, Any]:
    """A random Qwen2 of ``size``: log-probabilities, reports and seconds of three updates. ``case=None``: by FSDP."""
    cuda = "nccl" in dist.get_backend_config()
    kind, hidden = "cuda" if cuda else "cpu", size["hidden"]
    config = hf.Qwen2Config(
        vocab_size=size["vocabulary"], hidden_size=hidden, intermediate_size=4 * hidden, tie_word_embeddings=True,
        num_hidden_layers=size["layers"], num_attention_heads=8, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    lm: Any = hf.Qwen2ForCausalLM(config).eval()
    module = Policy(load_model(ModelConfig(model_name_or_path=lm), kind, getattr(torch, dtype)))
    optimizer = OptimizerConfig(lr=1e-5)
    if case is None:
        where = Layout.of(2)
        e: Any = FsdpEngine(module, optimizer, None, True, device_mesh(where, kind))
    else:
        where = layout(case)
        e = MegatronEngine(module, optimizer, None, True, megatron_mesh(where, kind))
    g = torch.Generator().manual_seed(0)
    n = size["rows"]
    data = Batch([str(i) for i in range(n)])
    lengths = [torch.randint(k // 2, k, (n,), generator=g).tolist() for k in (size["prompt"], size["response"])]
    for name, found in zip(("prompt_ids", "response_ids"), lengths, strict=True):
        data[name] = Ragged.from_rows([torch.randint(1, size["vocabulary"], (k,), generator=g) for k in found])
    total = sum(lengths[1])
    data["response_mask"] = data.ragged("response_ids").with_values(torch.ones(total, dtype=torch.bool))
    data["weight"] = data.ragged("response_ids").with_values(22 * torch.randn(total, generator=g) / total)
    shape = {"mini_batch_rows": n, "micro_rows": size["micro_rows"], "share_prompts": False}
    cut = seat(*lengths, list(range(n)), ranks=where.dp, **shape).mini_batches[0]
    cut = cut.ranks[where.place(dist.get_rank()).dp]
    order = sorted(row for micro in cut for row in micro)
    mine, cut = data.select(order), [[order.index(row) for row in micro] for micro in cut]
    mine["weight"] = mine.ragged("weight").to(kind)
    out = e.forward(mine, cut, BOTH, 1.0)["logprobs"]
    found = {"logprobs": dict(zip(order, [x.cpu() for x in out.rows()], strict=True)), "norms": [], "losses": []}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        report = e.update(mine, cut, loss_fn, BOTH, 1.0)
        seconds.append(time.perf_counter() - start)
        found["norms"].append(report.grad_norm)
        found["losses"].append(report.stats["loss"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return found | {"seconds": min(seconds), "gib": peak}


def compare(size: dict[str, int], dtype: str, backend: str) -> list[str]:
    """A line per way: largest differences from FSDP's numbers, time and memory."""
    theirs = run(2, beside_fsdp, None, size, dtype, backend=backend)
    expected = theirs[0]["logprobs"] | theirs[1]["logprobs"]
    lines = [f"{dtype} fsdp: {theirs[0]['seconds'] * 1e3:.0f} ms per update, {theirs[0]['gib']:.1f} GiB"]
    loose = 1e-4 if dtype == "float32" else 0.1
    for case in (Case(tp=2), Case(pp=2)):
        for ours in run(2, beside_fsdp, case, size, dtype, backend=backend):
            gap = max((x - expected[row]).abs().max().item() for row, x in ours["logprobs"].items())
            norms = max(abs(a / b - 1) for a, b in zip(ours["norms"], theirs[0]["norms"], strict=True))
            assert set(ours["logprobs"]) == set(expected)
            assert gap <= loose and norms <= loose, (case, gap, norms)
        lines.append(
            f"{dtype} tp={case.tp} pp={case.pp}: {ours['seconds'] * 1e3:.0f} ms per update, {ours['gib']:.1f} GiB, "
            f"logprobs within {gap:.1e}, gradient norms within {norms:.1e} of fsdp's"
        )
    return lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_larger_model_beside_fsdp(dtype, capsys):
    lines = compare(MIDDLE, dtype, "nccl")
    with capsys.disabled():
        print("", *lines, sep="\n")
