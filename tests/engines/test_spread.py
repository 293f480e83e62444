"""One engine from one process to many ranks: the same numbers for every way of spreading a model.

Each test computes a case in this process, alone, and on ranks of their own (``ranks.py``), and compares.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.pieces import saved_state
from tests.engines.ranks import run
from tests.engines.test_fsdp import ADAM, BOTH, batch, loss_fn, policy
from tests.tiny import f_gpt2, f_llama
from verl.batch import Ragged
from verl.config.errors import RequestError
from verl.config.model import OptimizerConfig
from verl.engines.base import TrainEngine
from verl.engines.context_parallel import Part, context_group
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import Sharding, device_mesh, local
from verl.layout import Layout
from verl.models.packing import Packed, pack
from verl.models.value import HIDDEN, SharedValue, Value
from verl.seats import seat


def qwen(name: str):
    """Biases in attention (Qwen2), or norms on each head (Qwen3)."""
    config = getattr(hf, f"{name}Config")(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(hf, f"{name}ForCausalLM")(config).eval()


# a key's bias moves no attention weight: its gradient is rounding alone, which Adam would blow up to whole steps
PLAIN = OptimizerConfig(name="sgd", lr=0.05)
MUON = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)


def window():
    """Of each row's last three tokens alone."""
    config = hf.MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, pad_token_id=0, initializer_range=0.1, sliding_window=3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.MistralForCausalLM(config).eval()


def mixture():
    """Its experts lie together here, and one by one in files."""
    config = hf.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.Qwen3MoeForCausalLM(config).eval()


MODELS = {
    "llama": f_llama,
    "tied": lambda: f_llama(tied=True, kv_heads=1),
    "gpt2": f_gpt2,
    "qwen2": lambda: qwen("Qwen2"),
    "qwen3": lambda: qwen("Qwen3"),
    "window": window,
    "mixture": mixture,
}


@dataclass(frozen=True)
class Case:
    """What is trained, how it is spread, and how its rows are cut."""

    sharding: Sharding = "FULL_SHARD"
    tp: int = 1
    cp: int = 1
    replicas: int = 1
    model: str = "llama"
    kind: str = "policy"  # or value, shared, lora
    dtype: str = "float32"
    compute_dtype: str | None = None
    cpu_offload: bool = False
    micro_rows: int = 6
    share_prompts: bool = True
    recompute: bool = True
    compile_backend: str | None = None
    optimizer: Any = ADAM
    steps: int = 3

    @property
    def want(self) -> frozenset[str]:
        return frozenset({"values"}) if self.kind in ("value", "shared") else BOTH


def engine(case: Case) -> FsdpEngine:
    """On every rank of the process group, or alone without one."""
    mesh = None
    if dist.is_initialized():
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        layout = Layout.of(dist.get_world_size(), tp=case.tp, cp=case.cp)
        mesh = device_mesh(layout, device, case.replicas)
    spread = {"mesh": mesh, "sharding": case.sharding, "context": context_group(layout)} if mesh else {}
    if case.cpu_offload:
        spread["cpu_offload"] = True
    if mesh and case.compute_dtype:
        spread["compute_dtype"] = getattr(torch, case.compute_dtype)
    torch.manual_seed(0)  # peft draws A from the global state
    module: Any = policy(MODELS[case.model](), getattr(torch, case.dtype), use_lora=case.kind == "lora", lora_r=3)
    if mesh:
        module.to(mesh.device_type)
    if case.kind == "shared":  # its backbone is spread by the actor's engine
        FsdpEngine(module, case.optimizer, None, case.recompute, **spread)
        module = SharedValue(module)
        spread.pop("compute_dtype", None)
    elif case.kind == "value":
        module = Value(module.lm)
    return FsdpEngine(module, case.optimizer, None, case.recompute, compile_backend=case.compile_backend, **spread)


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
    alike = case.tp * case.cp
    return seats(case, dist.get_world_size() // alike, **options)[dist.get_rank() // alike]


def train(case: Case, poison: dict[str, int] | None = None, cut: list | None = None) -> dict[str, Any]:
    """A forward pass and ``steps`` updates; what they gave, and the weights at the end."""
    e, data = engine(case), rows(case.share_prompts, poison)
    if cut is None:
        cut = mine(case)
    elif dist.is_initialized():
        cut = cut[dist.get_rank() // (case.tp * case.cp)]
    else:
        cut = [micro for micros in cut for micro in micros]
    order = sorted(row for micro in cut for row in micro)
    local = data.select(order)
    cut = [[order.index(row) for row in micro] for micro in cut]  # a rank's batch holds its own rows alone
    want = case.want | {"hidden"} if case.kind == "shared" else case.want
    out = e.forward(local, cut, want, 0.8)
    if case.kind == "shared":
        local[HIDDEN] = out.pop("hidden")
    reports = [e.update(local, cut, loss_fn, case.want, 0.8) for _ in range(case.steps)]
    outputs = {name: dict(zip(order, map(torch.clone, column.rows()), strict=True)) for name, column in out.items()}
    return {
        "outputs": outputs,
        "reports": reports,
        "shards": {n: t.detach().to("cpu", copy=True) for n, t in e.shards()},
    }


def agree(alone: dict[str, Any], ranks: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    def close(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, msg=lambda m: f"{name}: {m}")

    seen: dict[str, set[int]] = {name: set() for name in alone["outputs"]}
    for rank in ranks:
        for name, found in rank["outputs"].items():
            seen[name] |= found.keys()
            for row, values in found.items():
                close(values, alone["outputs"][name][row], name)
        for ours, theirs in zip(rank["reports"], alone["reports"], strict=True):
            assert ours.skipped == theirs.skipped
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance, nan_ok=True)
            assert ours.stats == pytest.approx(theirs.stats, rel=tolerance, abs=tolerance, nan_ok=True)
        assert rank["shards"].keys() == alone["shards"].keys()
        for name, weights in rank["shards"].items():
            close(weights, alone["shards"][name], name)
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
    """Of a case: what isn't as usual."""
    if not isinstance(x, Case):
        return None
    return "-".join(f"{k}={v}" for k, v in vars(x).items() if v != getattr(Case, k) and k != "optimizer")


@pytest.fixture(scope="module")
def alone():
    """Each row by itself, nothing shared or recomputed: what everything else must equal."""
    return train(Case(micro_rows=1, share_prompts=False, recompute=False))


@pytest.mark.parametrize(("n", "case"), SPREADS, ids=named)
def test_the_same_numbers_however_the_model_is_spread(n, case, alone):
    """With 6 rows on 4 ranks some micro-batches are padding."""
    agree(alone, run(n, train, case))
    agree(alone, run(n, train, replace(case, micro_rows=1, share_prompts=False, recompute=False)))


CONTEXTS = [
    (2, Case(cp=2)),
    (2, Case("NO_SHARD", cp=2, micro_rows=1, share_prompts=False, recompute=False)),
    (2, Case("NO_SHARD", cp=2, model="gpt2", optimizer=PLAIN)),
    (2, Case(cp=2, model="tied")),  # its one key head is computed on both
    (2, Case(cp=2, model="window", optimizer=PLAIN)),
    (2, Case(cp=2, kind="lora", micro_rows=2)),
    (2, Case("SHARD_GRAD_OP", cp=2, kind="value", micro_rows=2, optimizer=PLAIN)),
    (2, Case("NO_SHARD", cp=2, kind="shared")),
    (4, Case(cp=2)),
    (4, Case("HYBRID_SHARD", cp=2, replicas=2, micro_rows=1)),
    (4, Case(cp=4, model="qwen3", optimizer=PLAIN)),
    (4, Case(cp=2, tp=2, model="qwen3", kind="lora", optimizer=PLAIN)),
    (4, Case(cp=2, kind="shared")),
]


@pytest.mark.parametrize(("n", "case"), CONTEXTS, ids=named)
def test_the_same_numbers_however_many_ranks_share_rows(n, case):
    """Each computes a run of every micro-batch's tokens."""
    agree(train(replace(case, micro_rows=1, share_prompts=False, recompute=False)), run(n, train, case))


def runs_of(full: Packed) -> list[tuple[list[int], list[int], list[list[int]], list[bool]]]:
    """Of this rank's part: ids, positions, what predicts each row's tokens, and whether a column comes back whole."""
    part = Part.of(full, dist.group.WORLD)
    column = torch.arange(len(full.predict.values)) + 1.5
    back = part.whole(part.own(column))
    return [
        part.ids.tolist(),
        part.positions.tolist(),
        [r.tolist() for r in part.predict.rows()],
        torch.equal(back, column),
    ]


def test_a_rank_computes_one_run_of_the_packed_tokens():
    prompts, responses = Ragged.from_rows([[5, 6], [5, 6]]), Ragged.from_rows([[7, 8, 9], [10, 11]])
    found = run(2, runs_of, pack(prompts, responses, [0, 0]))
    assert found[0] == [[5, 6, 7], [0, 1, 2], [[1, 2], [1]], True]
    assert found[1] == [[8, 10, 0], [3, 2, 0], [[0], [1]], True]


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
        (2, Case(model="gpt2", optimizer=PLAIN)),
        (2, Case("NO_SHARD", tp=2, model="qwen2", optimizer=PLAIN)),
        (4, Case(tp=2, model="qwen3", optimizer=PLAIN)),
        (2, Case("NO_SHARD", tp=2, model="qwen3", optimizer=PLAIN)),
        (2, Case(kind="lora")),
        (2, Case("NO_SHARD", tp=2, kind="lora")),
        (4, Case(tp=2, kind="lora")),
        (4, Case(kind="value", optimizer=PLAIN)),
        (4, Case(tp=2, kind="value", optimizer=PLAIN)),
        (2, Case("NO_SHARD", kind="value", optimizer=PLAIN)),
        (2, Case(kind="shared")),
        (2, Case("SHARD_GRAD_OP", kind="shared")),
        (2, Case("NO_SHARD", tp=2, kind="shared")),
        (4, Case(tp=2, kind="shared")),
        (4, Case(tp=2, optimizer=MUON)),
        (2, Case(optimizer=OptimizerConfig(name=torch.optim.NAdam, lr=1e-2))),
    ],
    ids=named,
)
def test_whatever_is_trained(n, case):
    agree(train(case), run(n, train, replace(case, micro_rows=2)))


class Watched(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives(micro_rows: int, sharding: Sharding) -> tuple[int, Counter[str]]:
    """Passes, and collectives during them, of one update after a first one."""
    case = Case(sharding, micro_rows=micro_rows, recompute=False)
    e, cut = engine(case), mine(case)
    e.update(rows(), cut, loss_fn, BOTH, 0.8)
    with Watched() as watched:
        e.update(rows(), cut, loss_fn, BOTH, 0.8)
    return len(cut), watched.counts


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_gradients_are_reduced_once_per_optimizer_step(sharding):
    (passes, one), (more, many) = (run(2, collectives, micro_rows, sharding)[0] for micro_rows in (6, 1))
    assert passes == 1 and more == 3
    reducing = "allreduce_" if sharding == "NO_SHARD" else "_reduce_scatter_base_"
    assert one[reducing] == many[reducing] > 0
    if sharding != "FULL_SHARD":  # which alone gathers parameters again for each pass
        assert one == many


def held(case: Case) -> list[float]:
    """Share of the policy's elements on this rank after a forward pass, and after an update."""
    e, data = engine(case), rows()
    module = e.module.policy if case.kind == "shared" else e.module
    shares = []
    for work in (
        lambda: e.forward(data, [[0, 1, 2, 3, 4, 5]], case.want, 1.0),
        lambda: e.update(data, mine(case), loss_fn, case.want, 1.0),
    ):
        work()
        here = [(local(p).numel(), p.numel()) for p in module.parameters()]
        shares.append(sum(part for part, _ in here) / sum(whole for _, whole in here))
    return shares


@pytest.mark.parametrize("case", [Case(), Case("SHARD_GRAD_OP"), Case("SHARD_GRAD_OP", kind="shared")], ids=named)
def test_between_calls_a_rank_holds_its_part_alone(case):
    assert run(2, held, case) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("case", [Case(), Case("NO_SHARD"), Case(tp=2)], ids=named)
def test_bf16_parameters_train_on_fp32_masters(case):
    """A step is bf16's rounding, so numbers agree to its digits; below them only masters learn."""
    case = replace(case, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-4), steps=8)
    ranks = run(2, train, case)
    agree(train(case), ranks, tolerance=0.06)
    start = dict(engine(case).shards())
    moved = [(t != start[n]).float().mean().item() for n, t in ranks[0]["shards"].items() if t.ndim == 2]
    assert all(t.dtype == torch.bfloat16 for t in ranks[0]["shards"].values())
    assert min(moved) > 0.1, "single steps of 1e-4 are below bf16's last digit of most weights"


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fp32_shards_may_compute_in_bf16(sharding):
    case = Case(sharding, compute_dtype="bfloat16")
    (ours, _), exact = run(2, train, case), train(case)
    assert {t.dtype for t in ours["shards"].values()} == {torch.float32}
    for ours_, theirs in zip(ours["reports"], exact["reports"], strict=True):
        assert ours_.grad_norm == pytest.approx(theirs.grad_norm, rel=0.1)
        assert ours_.grad_norm != theirs.grad_norm
    with pytest.raises(RequestError, match="compute_dtype"):
        FsdpEngine(policy(f_llama()), ADAM, compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
def test_g06_one_rank_fully_masked_of_two(sharding):
    case, poison = Case(sharding), {"masked": 3}
    cut = [[[0, 2], [1]], [[3, 4, 5], []]]
    alone = train(case, poison, cut)
    ranks = run(2, train, case, poison, cut)
    agree(alone, ranks)
    assert alone["reports"][0].skipped is None and alone["reports"][0].grad_norm > 0.1


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("poison", "skipped"), [({"masked": 0}, "empty"), ({"nan": 5}, "nonfinite")])
def test_all_ranks_agree_to_take_no_step(sharding, poison, skipped):
    """Only one of two ranks holds the row with the NaN."""
    start = dict(engine(Case()).shards())
    for rank in run(2, train, Case(sharding, micro_rows=2), poison):
        assert [report.skipped for report in rank["reports"]] == [skipped] * 3
        assert all(torch.equal(t, start[n]) for n, t in rank["shards"].items())


def test_g06_no_rows_anywhere_is_empty_too():
    for rank in run(2, updates, [[[]], [[]]], [[], []]):
        assert rank == ["empty", "empty"]


def updates(*cuts: list[list[list[int]]]) -> list[str | None]:
    e = engine(Case())
    return [e.update(rows(), cut[dist.get_rank()], loss_fn, BOTH, 0.8).skipped for cut in cuts]


def test_g23_a_token_budget_cuts_ranks_unlike_and_they_keep_step(alone):
    """One rank's rows fill a pass each; the other has passes without rows."""
    cut = seats(Case(share_prompts=False), 4, max_tokens=12)
    assert {len(micros) for micros in cut} == {2} and sum(not micro for micros in cut for micro in micros) == 2
    agree(alone, run(4, train, Case(share_prompts=False), None, cut))


Saved = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]


def saved_by(e: TrainEngine, steps: int, cut: list[list[int]], want: frozenset[str], start: Saved | None) -> Saved:
    """``steps`` more updates, and then everything as a checkpoint would keep it."""
    if start is not None:
        e.restore(*start)
    for _ in range(steps):
        e.update(rows(), cut, loss_fn, want, 0.8)
    shards = {name: t.detach().to("cpu", copy=True) for name, t in e.shards()}
    return shards, *saved_state(e)


def saved(case: Case, start: Saved | None = None) -> Saved:
    return saved_by(engine(case), case.steps, mine(case), case.want, start)


DECAYING = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kind": "lora"},
        {"kind": "value", "optimizer": PLAIN},
        {"dtype": "bfloat16"},
        {"optimizer": MUON},
        {"optimizer": OptimizerConfig(name=torch.optim.NAdam, lr=1e-2)},
    ],
    ids=["policy", "lora", "value", "bf16", "muon", "user's"],
)
def test_what_n_ranks_saved_goes_on_on_m_ranks(change):
    case = Case(optimizer=DECAYING, steps=2)
    case = replace(case, **change)
    first = run(4, saved, replace(case, tp=1 if case.kind == "value" else 2))[0]
    straight = saved(replace(case, steps=4))
    loose = 0.05 if case.dtype == "bfloat16" else 2e-5
    for n, spread in [(0, case), (1, case), (2, replace(case, sharding="NO_SHARD")), (2, case), (4, case)]:
        shards, state, facts = run(n, saved, spread, first)[0] if n else saved(spread, first)
        assert facts == straight[2] and shards.keys() == straight[0].keys() and state.keys() == straight[1].keys()
        for name, tensor in shards.items():
            torch.testing.assert_close(tensor, straight[0][name], atol=loose, rtol=loose, msg=name)


def test_on_the_same_ranks_it_goes_on_bit_for_bit():
    case = Case(optimizer=DECAYING, steps=2)
    straight = run(2, saved, replace(case, steps=4))[0]
    again = run(2, saved, case, run(2, saved, case)[0])[0]
    for ours, theirs in zip(again[:2], straight[:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def refused(case: Case) -> str:
    with pytest.raises(RequestError) as error:
        engine(case)
    return str(error.value)


@pytest.mark.parametrize(
    ("n", "case", "says"),
    [
        (4, Case(tp=4), "tensor_parallel_size 4 does not divide the model's num_attention_heads 2"),
        (2, Case(tp=2, model="tied"), "tensor_parallel_size 2 does not divide the model's num_key_value_heads 1"),
        (2, Case(tp=2, model="gpt2"), "GPT2Model has no plan"),
        (4, Case(cp=4), "context_parallel_size 4 does not divide the model's num_attention_heads 2"),
        (4, Case(cp=2, tp=2), "context_parallel_size 2 times tensor_parallel_size 2 does not divide"),
        (2, Case("HYBRID_SHARD"), "HYBRID_SHARD on a mesh of dp"),
        (2, Case(replicas=2), "FULL_SHARD on a mesh of replicate x dp"),
        (2, Case("HYBRID_SHARD", replicas=4), "4 replicas don't divide 2"),
    ],
)
def test_what_cant_be_spread_is_refused(n, case, says):
    assert all(says in message for message in run(n, refused, case))
