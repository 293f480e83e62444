"""Megatron's ranks beside one process of FSDP: the same numbers for every way of cutting the model."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM

import verl
from tests.engines import test_spread as spread
from tests.engines.ranks import run
from tests.engines.test_fsdp import ADAM, BOTH, loss_fn, policy
from tests.engines.test_spread import DECAYING, PLAIN, agree, rows
from tests.hybrid.engines import tokens
from tests.tiny import f_bpe, save
from verl.config.engine import HybridConfig
from verl.config.errors import RequestError
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.context_parallel import context_group
from verl.engines.megatron import MegatronEngine, megatron_mesh
from verl.hybrid.publish import Corridor
from verl.hybrid.table import parts_of
from verl.layout import Layout, Part
from verl.models.decoder import in_place
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.rollout.native import NativeEngine
from verl.seats import seat

PACKAGE = Path(verl.__file__).parent
FAST = OptimizerConfig(lr=0.1)


def padded() -> Any:
    """A word of the data is the one that pads, whose embedding isn't trained."""
    lm = spread.MODELS["llama"]()
    lm.get_input_embeddings().padding_idx = 7
    assert (rows().ragged("response_ids").values == 7).any()
    return lm


def deep() -> Any:
    """What four ranks can cut, layers or heads."""
    config = spread.MODELS["qwen3"]().config
    config.update({"num_hidden_layers": 4, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 4})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


spread.MODELS |= {"padded": padded, "deep": deep}


@dataclass(frozen=True)
class Case:
    """What is trained, how it is cut, and how its rows are."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    model: str = "llama"
    dtype: str = "float32"
    cpu_offload: bool = False
    micro_rows: int = 2
    share_prompts: bool = True
    recompute: bool = True
    optimizer: OptimizerConfig = ADAM
    steps: int = 2

    @property
    def alone(self) -> spread.Case:
        """In one process of FSDP."""
        kept = {n: getattr(self, n) for n in ("model", "dtype", "optimizer", "steps")}
        return spread.Case(**kept, micro_rows=1, share_prompts=False, recompute=False)


def named(x: Any) -> str | None:
    """Of a case: what isn't as usual."""
    if not isinstance(x, Case):
        return None
    return "-".join(f"{k}={v}" for k, v in vars(x).items() if v != getattr(Case, k) and k != "optimizer")


def layout_of(n: int, case: Case) -> Layout:
    return Layout.of(n, tp=case.tp, pp=case.pp, cp=case.cp)


def layout(case: Case) -> Layout:
    return layout_of(dist.get_world_size(), case)


def engine(case: Case) -> MegatronEngine:
    return built(case, policy(spread.MODELS[case.model](), getattr(torch, case.dtype)))


def built(case: Case, module: Policy) -> MegatronEngine:
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    mesh, context = megatron_mesh(layout(case), device), context_group(layout(case))
    return MegatronEngine(module, case.optimizer, None, case.recompute, mesh, context, case.cpu_offload)


def mine(case: Case) -> list[list[int]]:
    """This rank's micro-batches."""
    data, where = rows(), layout(case)
    lengths = [data.ragged(name).lengths.tolist() for name in ("prompt_ids", "response_ids")]
    shape = {"mini_batch_rows": 6, "micro_rows": case.micro_rows, "share_prompts": case.share_prompts}
    seats = seat(*lengths, data.tensor("group").tolist(), ranks=where.dp, **shape).mini_batches[0]
    return seats.ranks[where.place(dist.get_rank()).dp]


def train(case: Case) -> dict[str, Any]:
    """A forward pass and ``steps`` updates; what they gave, and the weights at the end."""
    e, data, cut = engine(case), rows(case.share_prompts), mine(case)
    order = sorted(row for micro in cut for row in micro)
    local = data.select(order)
    cut = [[order.index(row) for row in micro] for micro in cut]
    out = e.forward(local, cut, BOTH, 0.8)
    reports = [e.update(local, cut, loss_fn, BOTH, 0.8) for _ in range(case.steps)]
    outputs = {name: dict(zip(order, map(torch.clone, column.rows()), strict=True)) for name, column in out.items()}
    shards = {n: t.detach().to("cpu", copy=True) for n, t in e.shards()}
    return {"outputs": outputs, "reports": reports, "shards": shards}


CASES = [
    (1, Case()),
    (2, Case(micro_rows=6)),  # rows of one prompt each on its rank: passes of both
    (2, Case(cpu_offload=True)),
    (2, Case(cp=2)),
    (2, Case(tp=2, model="padded")),
    (2, Case(tp=2, model="qwen2", optimizer=PLAIN)),
    (2, Case(pp=2, micro_rows=1)),
    (2, Case(pp=2, model="tied")),
    (2, Case(pp=2, model="window", optimizer=PLAIN)),
    (4, Case(tp=2, pp=2, recompute=False, share_prompts=False)),
    (4, Case(tp=2)),
    (4, Case(pp=2, micro_rows=6)),
    (4, Case(pp=2, model="tied")),
    (4, Case(tp=2, cp=2, model="qwen3", optimizer=PLAIN)),
]


_ALONE: dict[str, dict[str, Any]] = {}


def alone(case: Case) -> dict[str, Any]:
    """What one process of FSDP tells; it is computed once for all cuts."""
    key = repr(case.alone)
    if key not in _ALONE:
        _ALONE[key] = spread.train(case.alone)
    return _ALONE[key]


@pytest.mark.parametrize(("n", "case"), CASES, ids=named)
def test_the_same_numbers_as_fsdp(n, case):
    agree(alone(case), run(n, train, case))


@pytest.mark.parametrize("case", [Case(), Case(tp=2), Case(pp=2)], ids=named)
def test_bf16_parameters_train_on_fp32_masters(case):
    case = replace(case, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-4), steps=8)
    ranks = run(2, train, case)
    agree(alone(case), ranks, tolerance=0.06)
    start = dict(policy(spread.MODELS["llama"](), torch.bfloat16).shards())
    moved = [(t != start[n]).float().mean().item() for n, t in ranks[0]["shards"].items() if t.ndim == 2]
    assert min(moved) > 0.1, "single steps of 1e-4 are below bf16's last digit of most weights"


def saved(case: Case, start: spread.Saved | None = None) -> spread.Saved:
    return spread.saved_by(engine(case), case.steps, mine(case), BOTH, start)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_engine_saved_goes_on_on_another(n, dtype):
    """FSDP alone, then two stages, then two parts of every layer; at the end as if nothing had happened. Of four ranks
    two have the same parameters."""
    case = Case(dtype=dtype, optimizer=DECAYING, steps=2)
    straight = spread.saved(replace(case.alone, steps=6))
    first = spread.saved(case.alone)
    second, *_ = run(n, saved, replace(case, pp=2), first)
    third, *_ = run(n, saved, replace(case, tp=2), second)
    loose = 0.05 if dtype == "bfloat16" else 2e-5
    assert third[2] == straight[2]
    for ours, theirs in zip(third[:2], straight[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], atol=loose, rtol=loose, msg=lambda m, n=name: f"{n}: {m}")


GOING_ON = [
    (2, Case()),
    (2, Case(tp=2, model="qwen3")),
    (2, Case(pp=2, model="tied", dtype="bfloat16")),
    (4, Case(pp=2, model="tied", dtype="bfloat16")),
]


@pytest.mark.parametrize(("n", "case"), GOING_ON, ids=named)
def test_on_the_same_ranks_it_goes_on_bit_for_bit(n, case):
    case = replace(case, optimizer=DECAYING, steps=2)
    straight = run(n, saved, replace(case, steps=4))[0]
    again = run(n, saved, case, run(n, saved, case)[0])[0]
    for ours, theirs in zip(again[:2], straight[:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def taken(case: Case, folder: str) -> tuple[bool, bool, set[str]]:
    """Of weights read by parts: whether all come back bit for bit, whether what lies here is a rank's share of them
    (and its place is told right), and which weights those are."""
    lm: Any = load_model(ModelConfig(model_name_or_path=folder), "cpu", torch.float32, in_parts=True)
    module = Policy(lm)
    assert module.unread is not None
    e = built(case, module)
    whole = dict(policy(folder).shards())
    back = {name: t.cpu() for name, t in e.shards()}
    same = back.keys() == whole.keys() and all(torch.equal(t, whole[name]) for name, t in back.items())
    pieces = list(e.pieces())
    placed = all(torch.equal(t.cpu(), whole[n][tuple(slice(*ends) for ends in box)]) for n, t, box in pieces)
    return same, placed and all(p.is_meta for p in module.lm.parameters()), {name for name, *_ in pieces}


READ = [(1, Case()), (2, Case(tp=2)), (2, Case(pp=2)), (4, Case(tp=4)), (4, Case(pp=4)), (4, Case(tp=2, pp=2))]


@pytest.mark.parametrize(("n", "case"), READ, ids=named)
def test_each_rank_reads_its_part_of_the_files(n, case, tmp_path):
    folder = save(tmp_path, spread.MODELS["deep"](), f_bpe())
    ranks = run(n, taken, case, folder)
    assert all(same and placed for same, placed, _ in ranks)
    places = [layout_of(n, case).place(rank) for rank in range(n)]
    for here, (*_, names) in zip(places, ranks, strict=True):
        for there, (*_, others) in zip(places, ranks, strict=True):
            assert names == others if here.pp == there.pp else not names & others


def published(case: Case, folder: str) -> list[bool]:
    """After an update, by the corridor into an engine on each rank: whether every bit is there, whether it answers
    as one that is loaded with the gathered weights, and otherwise than before."""
    e = engine(case)
    samplers = [NativeEngine(policy(folder).to(e.device).requires_grad_(False), frozenset()) for _ in range(2)]
    target = parts_of(in_place(samplers[0].policy.lm, None))

    def source() -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for name, tensor, box in e.pieces():
            found.setdefault(name, []).append(Part(tensor, box))
        return found

    link: Any = e.device, HybridConfig(bucket_mib=1)
    corridor = Corridor.meet(source(), target, *link, rank=dist.get_rank(), group=dist.group.WORLD)
    before = tokens(samplers[0])
    e.update(rows(), mine(case), loss_fn, BOTH, 0.8)
    with samplers[0].updating(1):
        for _ in corridor.flow(1, source(), target, 0):
            pass
    samplers[1].load(((name, t.clone()) for name, t in e.shards()), 1)
    whole = dict(samplers[1].policy.shards())
    same = all(torch.equal(t, whole[name]) for name, t in samplers[0].policy.shards())
    answers = [tokens(sampler) for sampler in samplers]
    for sampler in samplers:
        sampler.close()
    return [same, answers[0] == answers[1], answers[0] != before]


@pytest.mark.parametrize("case", [Case(tp=2, optimizer=FAST), Case(pp=2, model="qwen3", optimizer=FAST)], ids=named)
def test_what_is_trained_is_what_generates(case, tmp_path):
    folder = save(tmp_path, spread.MODELS[case.model](), f_bpe())
    assert run(2, published, case, folder) == [[True, True, True]] * 2


def spoiled(case: Case, poison: dict[str, int]) -> list[Any]:
    """What became of an update, and whether no weight has moved."""
    e, data = engine(case), rows(poison=poison)
    before = {name: t.clone() for name, t in e.shards()}
    skipped = e.update(data, mine(case), loss_fn, BOTH, 0.8).skipped
    return [skipped, all(torch.equal(t, before[name]) for name, t in e.shards())]


@pytest.mark.parametrize(("poison", "skipped"), [({"masked": 0}, "empty"), ({"nan": 5}, "nonfinite")])
@pytest.mark.parametrize("case", [Case(), Case(pp=2)], ids=named)
def test_all_ranks_agree_to_take_no_step(case, poison, skipped):
    """Only one of two ranks holds the row with the NaN, or sees it first."""
    assert run(2, spoiled, case, poison) == [[skipped, True]] * 2


def test_who_does_not_use_megatron_does_not_import_it():
    """Nor need it be installed: its two modules are imported inside functions alone."""
    own, found = {"engines/megatron.py", "engines/megatron_model.py"}, set()
    for path in PACKAGE.rglob("*.py"):
        if "megatron" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        later = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if id(node) not in later and any(n.startswith(("megatron", "verl.engines.megatron")) for n in names):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == own


def refused(case: Case) -> str:
    with pytest.raises(RequestError) as error:
        engine(case)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case(tp=2, model="tied"), "tensor_parallel_size 2 does not divide the model's num_key_value_heads 1"),
        (Case(cp=2, optimizer=spread.MUON), "the optimizer must be adamw or sgd"),
        (Case(pp=2, model="gpt2"), "not gpt2"),
    ],
)
def test_what_cant_be_trained_is_refused(case, says):
    assert all(says in message for message in run(2, refused, case))
