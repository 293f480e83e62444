"""One engine from one process to many ranks: the same numbers for every way of spreading a model.

Each test computes a case in this process, alone, and on ranks of their own (``ranks.py``), and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from tests.engines.ranks import run
from tests.engines.test_fsdp import ADAM, BOTH, SGD, batch, loss_fn, policy
from tests.tiny import _built, f_gpt2, f_llama
from verl.config.errors import RequestError
from verl.config.model import OptimizerConfig
from verl.engines.base import UpdateReport
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import Sharding, device_mesh
from verl.layout import Layout
from verl.models.value import HIDDEN, SharedValue, Value
from verl.seats import seat


def qwen(name: str):
    """Biases in attention (Qwen2), or norms on each head (Qwen3)."""
    import transformers as hf

    config = getattr(hf, f"{name}Config")(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    return _built(getattr(hf, f"{name}ForCausalLM"), config, 0)


MODELS = {
    "llama": f_llama,
    "tied": lambda: f_llama(tied=True, kv_heads=1),
    "gpt2": f_gpt2,
    "qwen2": lambda: qwen("Qwen2"),
    "qwen3": lambda: qwen("Qwen3"),
}


@dataclass(frozen=True)
class Case:
    """What is trained, how it is spread, and how its rows are cut."""

    sharding: Sharding = "FULL_SHARD"
    tp: int = 1
    replicas: int = 1
    model: str = "llama"
    kind: str = "policy"  # or value, shared, lora
    dtype: str = "float32"
    compute_dtype: str | None = None
    micro_rows: int = 6
    share_prompts: bool = True
    recompute: bool = True
    optimizer: Any = ADAM
    steps: int = 3

    @property
    def want(self) -> frozenset[str]:
        return frozenset({"values"}) if self.kind in ("value", "shared") else BOTH


def engine(case: Case) -> FsdpEngine:
    """On every rank of the process group, or alone without one."""
    mesh = None
    if dist.is_initialized():
        mesh = device_mesh(Layout.of(dist.get_world_size(), tp=case.tp), "cpu", case.replicas)
    spread = {"mesh": mesh, "sharding": case.sharding} if mesh else {}
    if mesh and case.compute_dtype:
        spread["compute_dtype"] = getattr(torch, case.compute_dtype)
    torch.manual_seed(0)  # peft draws A from the global state
    module: Any = policy(MODELS[case.model](), getattr(torch, case.dtype), use_lora=case.kind == "lora", lora_r=3)
    if case.kind == "shared":  # its backbone is spread by the actor's engine
        FsdpEngine(module, case.optimizer, None, case.recompute, **spread)
        module = SharedValue(module)
        spread.pop("compute_dtype", None)
    elif case.kind == "value":
        module = Value(module.lm)
    return FsdpEngine(module, case.optimizer, None, case.recompute, **spread)


def rows(share_prompts: bool = True, poison: dict[str, int] | None = None):
    """Six rows; ``poison={"nan": row}`` spoils a row's weights, ``{"masked": row}`` masks row and all after it."""
    out = batch(share_prompts)
    at = out.ragged("response_ids").offsets
    for kind, row in (poison or {}).items():
        if kind == "nan":
            out.ragged("weight").values[at[row]] = math.nan
        else:
            out.ragged("response_mask").values[at[row] :] = False
            out.ragged("weight").values[at[row] :] = 0.0
    return out


def seats(case: Case, ranks: int, **options):
    data = rows()
    lengths = [data.ragged(name).lengths.tolist() for name in ("prompt_ids", "response_ids")]
    shape = {"mini_batch_rows": 6, "micro_rows": case.micro_rows, "share_prompts": case.share_prompts}
    return seat(*lengths, data.tensor("group").tolist(), ranks=ranks, **shape, **options).mini_batches[0].ranks


def mine(case: Case, **options) -> list[list[int]]:
    """This rank's micro-batches."""
    if not dist.is_initialized():
        return seats(case, 1, **options)[0]
    return seats(case, dist.get_world_size() // case.tp, **options)[dist.get_rank() // case.tp]


def train(case: Case, poison: dict[str, int] | None = None, cut: list | None = None) -> dict[str, Any]:
    """A forward pass and ``steps`` updates; what they gave, and the weights at the end."""
    e, data = engine(case), rows(case.share_prompts, poison)
    cut = mine(case) if cut is None else cut[dist.get_rank() // case.tp] if dist.is_initialized() else sum(cut, [])
    order = sorted(row for micro in cut for row in micro)
    local = data.select(order)
    cut = [[order.index(row) for row in micro] for micro in cut]  # a rank's batch holds its own rows alone
    want = case.want | {"hidden"} if case.kind == "shared" else case.want
    out = e.forward(local, cut, want, 0.8)
    if case.kind == "shared":
        local[HIDDEN] = out.pop("hidden")
    reports = [e.update(local, cut, loss_fn, case.want, 0.8) for _ in range(case.steps)]
    outputs = {name: dict(zip(order, map(torch.clone, column.rows()), strict=True)) for name, column in out.items()}
    return {"outputs": outputs, "reports": reports, "shards": {n: t.detach().clone() for n, t in e.shards()}}


def agree(alone: dict[str, Any], ranks: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    close = {"atol": tolerance, "rtol": tolerance}
    seen: dict[str, set[int]] = {name: set() for name in alone["outputs"]}
    for rank in ranks:
        for name, found in rank["outputs"].items():
            seen[name] |= found.keys()
            for row, values in found.items():
                torch.testing.assert_close(values, alone["outputs"][name][row], **close, msg=lambda m: f"{name}: {m}")
        for ours, theirs in zip(rank["reports"], alone["reports"], strict=True):
            assert ours.skipped == theirs.skipped
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance, nan_ok=True)
            assert ours.stats == pytest.approx(theirs.stats, rel=tolerance, abs=tolerance, nan_ok=True)
        assert rank["shards"].keys() == alone["shards"].keys()
        for name, weights in rank["shards"].items():
            torch.testing.assert_close(weights, alone["shards"][name], **close, msg=lambda m: f"{name}: {m}")
    assert all(found == set(range(6)) for found in seen.values()), "every row's outputs on some rank"


SPREADS = [
    (2, Case("FULL_SHARD")),
    (2, Case("SHARD_GRAD_OP")),
    (2, Case("NO_SHARD")),
    (2, Case("NO_SHARD", tp=2)),
    (2, Case("FULL_SHARD", tp=2)),
    (4, Case("FULL_SHARD")),
    (4, Case("SHARD_GRAD_OP")),
    (4, Case("HYBRID_SHARD", replicas=2)),
    (4, Case("NO_SHARD")),
    (4, Case("FULL_SHARD", tp=2)),
    (4, Case("SHARD_GRAD_OP", tp=2)),
    (4, Case("NO_SHARD", tp=2)),
]


def named(x: Any) -> str | None:
    return "-".join(str(v) for k, v in vars(x).items() if v != getattr(Case, k)) if isinstance(x, Case) else None


@pytest.fixture(scope="module")
def alone():
    """Each row by itself, nothing shared or recomputed: what everything else must equal."""
    return train(Case(micro_rows=1, share_prompts=False, recompute=False))


@pytest.mark.parametrize(("n", "case"), SPREADS, ids=named)
def test_the_same_numbers_however_the_model_is_spread(n, case, alone):
    """With 6 rows on 4 ranks some micro-batches are padding."""
    agree(alone, run(n, train, case))
    agree(alone, run(n, train, replace(case, micro_rows=1, share_prompts=False, recompute=False)))


@pytest.mark.parametrize("micro_rows", [1, 2, 3])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_same_numbers_however_the_rows_are_cut(micro_rows, share_prompts, recompute, alone):
    agree(alone, run(2, train, Case(micro_rows=micro_rows, share_prompts=share_prompts, recompute=recompute)))


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, Case(model="tied")),
        (2, Case("NO_SHARD", model="tied")),
        (2, Case(model="gpt2")),
        (2, Case("NO_SHARD", tp=2, model="qwen2")),
        (4, Case(tp=2, model="qwen3")),
        (2, Case("NO_SHARD", tp=2, model="qwen3")),
        (2, Case(kind="lora")),
        (2, Case("NO_SHARD", tp=2, kind="lora")),
        (4, Case(tp=2, kind="lora")),
        (4, Case(kind="value")),
        (4, Case(tp=2, kind="value")),
        (2, Case("NO_SHARD", kind="value")),
        (2, Case(kind="shared")),
        (2, Case("SHARD_GRAD_OP", kind="shared")),
        (2, Case("NO_SHARD", tp=2, kind="shared")),
        (4, Case(tp=2, kind="shared")),
        (2, Case(optimizer=SGD)),
    ],
    ids=named,
)
def test_whatever_is_trained(n, case):
    agree(train(case), run(n, train, replace(case, micro_rows=2)))
