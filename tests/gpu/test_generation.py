"""The native engine's decode step on a GPU: the contract, graphs beside eager steps, the sampler beside the trainer."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
pytest.importorskip("triton", reason="needs triton, which comes with torch where there is CUDA")

from tests.rollout import test_native  # noqa: E402
from tests.rollout.test_graph import MODELS, model_of, same  # noqa: E402
from tests.rollout_contract import ask, collect, requests  # noqa: E402
from tests.tiny import EOS, f_llama  # noqa: E402
from verl.batch import Ragged  # noqa: E402
from verl.config.errors import RunError  # noqa: E402
from verl.models.adjacent import put_together  # noqa: E402
from verl.models.packing import ATTENTION, pack  # noqa: E402
from verl.models.policy import Policy  # noqa: E402
from verl.rollout import graph  # noqa: E402
from verl.rollout.base import Request, Sampling  # noqa: E402
from verl.rollout.graph import Decode, Pending  # noqa: E402
from verl.rollout.native import NativeEngine  # noqa: E402

BF16 = torch.bfloat16


class Plain(NativeEngine):
    """Without kernels and graphs."""

    fused = False


def engine_of(lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None, dtype=torch.float32, kind=NativeEngine):
    lm.set_attn_implementation(ATTENTION)
    lm.to("cuda", dtype)
    put_together(lm)
    return kind(Policy(lm), eos, max_rows, tokenizer)


def captured(engine: NativeEngine) -> int:
    assert engine._step is not None
    return sum(one is not None for one in engine._step.graphs.values())


class TestContract(test_native.TestContract):
    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> NativeEngine:
        return engine_of(lm, eos, max_rows, tokenizer)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("again", [0, graph.AGAIN], ids=["prompts together", ""])
def test_tokens_are_those_of_the_other_path(kind: str, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many lengths, more than fit side by side; steps of several sizes, captured and not."""
    monkeypatch.setattr(graph, "AGAIN", again)
    lengths = {r: 2 + 7 * i % 40 for i, r in enumerate(requests(samples=9))}
    fused, plain = (engine_of(model_of(MODELS[kind]), frozenset(), 20, kind=k) for k in (NativeEngine, Plain))
    got = test_native.ask_lengths(fused, lengths)
    assert fused._step is not None and fused._step.together == (again == 0)
    same(got, test_native.ask_lengths(plain, lengths), 1e-4)
    assert captured(fused) > 2 and plain._step is None
    same(test_native.ask_lengths(fused, lengths), got, 1e-6)  # from graphs alone


@pytest.mark.parametrize(
    "options", [{}, {"greedy": True}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}]
)
def test_a_graph_is_the_eager_step(options, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in bf16."""
    sampling = Sampling(max_new_tokens=30, **options)
    lm = model_of(MODELS["qwen2"])
    graphs = engine_of(copy.deepcopy(lm), frozenset(), dtype=BF16)
    got = ask(graphs, requests(), sampling)
    assert captured(graphs)

    def eager(self: Decode) -> Pending:
        self.graphs.clear()
        return launch(self)

    launch = Decode.launch
    monkeypatch.setattr(Decode, "launch", eager)
    expected = ask(engine_of(copy.deepcopy(lm), frozenset(), dtype=BF16), requests(), sampling)
    assert {i: (r.ids, r.logprobs) for i, r in got.items()} == {i: (r.ids, r.logprobs) for i, r in expected.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_agrees_with_the_trainer(temperature: float) -> None:
    """In bf16: same weights, other kernels."""
    engine = engine_of(model_of(MODELS["qwen2"]), frozenset(), dtype=BF16)
    asked = requests(samples=8)
    answers = ask(engine, asked, Sampling(max_new_tokens=60, temperature=temperature))
    prompts, responses = [list(r.prompt_ids) for r in asked], [list(answers[r.row_id].ids) for r in asked]
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), [i // 8 for i in range(len(asked))])
    targets = torch.tensor([i for ids in responses for i in ids])
    with torch.no_grad():
        out = engine.policy(packed.to("cuda"), targets.cuda(), frozenset({"logprobs"}), temperature)
    sampled = torch.tensor([x for r in asked for x in answers[r.row_id].logprobs])
    assert (out["logprobs"].cpu() - sampled).abs().mean() < 0.03


def test_weights_in_place_and_elsewhere() -> None:
    """New values in the same storage need no new graph; other storage gets one, and both change the tokens."""
    engine, sampling = engine_of(f_llama(), frozenset()), Sampling(max_new_tokens=12, greedy=True)
    seen = [ask(engine, requests(), sampling)]
    assert engine._step is not None
    graphs = dict(engine._step.graphs)
    for seed, in_place in ((1, True), (2, False)):
        with torch.no_grad():
            for mine, new in zip(engine.policy.lm.parameters(), f_llama(seed).parameters(), strict=True):
                if in_place:
                    mine.copy_(new)
                else:
                    mine.data = new.data.cuda()
        seen.append(ask(engine, requests(), sampling))
        assert (engine._step.graphs == graphs) == in_place
        same(seen[-1], ask(engine_of(f_llama(seed), frozenset(), kind=Plain), requests(), sampling), 1e-4)
    assert len({r["p0/0"].ids for r in seen}) > 1


def test_the_cache_goes_when_the_batch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a failure; with little memory fewer rows go side by side, with too little it says so."""
    engine, sampling = engine_of(f_llama(), frozenset(), dtype=BF16), Sampling(max_new_tokens=100)
    whole = ask(engine, requests(), sampling)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    same(ask(engine, requests(), sampling), whole)
    with torch.no_grad():
        engine.policy.head_weight[5] = float("nan")
    with pytest.raises(RunError, match=r"row p0/0.*not finite"):
        ask(engine, requests(), sampling)
    assert torch.cuda.memory_allocated() < before + 100_000  # a graph more
    assert engine._step is not None
    for rows, fits in ((3, True), (0.5, False)):
        limit = int(rows * 120 * engine._step.bytes_per_token / 0.8)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, limit=limit: (limit, limit))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
        small = engine_of(f_llama(), frozenset(), dtype=BF16)
        if fits:
            assert {i: len(r.ids) for i, r in ask(small, requests(), sampling).items()} == dict.fromkeys(whole, 100)
            assert small.counters.decode_steps > 150
        else:
            with pytest.raises(RunError, match="GiB are left for keys and values"):
                ask(small, requests(), sampling)


def test_many_ragged_rows() -> None:
    """No step is wider than asked, none computes rows that ended long ago, each row has its own tokens."""
    lengths = {Request(f"{i}", f"{i}", (3 + i % 29, 3 + i // 29), 0): 1 + 13 * i % 97 for i in range(300)}
    engine = engine_of(f_llama(), frozenset(), 128)
    got = test_native.ask_lengths(engine, lengths)
    assert all(len(got[r.row_id].ids) == n for r, n in lengths.items())
    steps = [n - 1 for n in lengths.values()]
    assert engine.counters.decode_rows == sum(steps)
    assert engine.counters.decode_steps < 1.4 * sum(steps) / 128 + 97
    some = dict(list(lengths.items())[:40])
    for i, row in test_native.ask_lengths(engine_of(f_llama(), frozenset(), 128, kind=Plain), some).items():
        assert got[i].ids == row.ids


def test_an_abort_ends_a_row_within_two_steps() -> None:
    engine = engine_of(f_llama(), frozenset())

    async def run() -> dict:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=400)))
        while not engine.counters.decode_steps > 5:
            await asyncio.sleep(0.001)
        engine.abort(["p0/0"])
        return await task

    answers = asyncio.run(run())
    assert answers["p0/0"].finish_reason == "abort" and 5 < len(answers["p0/0"].ids) < 400
    assert all(len(r.ids) == 400 for i, r in answers.items() if i != "p0/0")
