"""The native engine keeps the contract, and what only it promises: one prefill per group, one thread, no copy."""

from __future__ import annotations

import asyncio
import copy
import heapq
import re
import weakref

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from tests.rollout_contract import PROMPTS, RolloutContract, ask, collect, logprobs_of, requests
from tests.tiny import EOS, f_gpt2, f_llama
from verl.config.errors import RequestError, RunError
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout.base import Request, Response, Sampling
from verl.rollout.cache import GIB, Store
from verl.rollout.native import NativeEngine

TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of a token of f_llama: keys and values, layers, heads, sizes, fp32


def engine_of(
    lm: PreTrainedModel, eos=frozenset({EOS}), max_rows: int = 64, tokenizer=None, cache_tokens: int | None = None
) -> NativeEngine:
    lm.set_attn_implementation(ATTENTION)
    gib = None if cache_tokens is None else cache_tokens * TOKEN / GIB
    return NativeEngine(Policy(lm), eos, max_rows, tokenizer, cache_gib=gib)


def ask_lengths(engine: NativeEngine, lengths: dict[Request, int]) -> dict[str, Response]:
    """Rows of such lengths in one batch: a call for each."""

    async def run() -> list[dict[str, Response]]:
        return await asyncio.gather(*(collect(engine, [r], Sampling(max_new_tokens=n)) for r, n in lengths.items()))

    return {i: row for answers in asyncio.run(run()) for i, row in answers.items()}


class TestContract(RolloutContract):
    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> NativeEngine:
        return engine_of(lm, eos, max_rows, tokenizer)

    def load(self, engine: NativeEngine, lm: PreTrainedModel, version: int) -> None:  # type: ignore[override]
        """As the trainer does: new values in the same storage."""
        with torch.no_grad():
            for mine, new in zip(engine.policy.lm.parameters(), lm.parameters(), strict=True):
                mine.copy_(new)
        engine.version = version


@pytest.mark.parametrize("cache_tokens", [None, 8 + 3 * 4, 8 + 5])
def test_one_prefill_per_prompt(cache_tokens: int | None) -> None:
    """Also when a group is wider than what fits side by side, when there is room for one prompt and three rows, or
    one, and when two callers ask for the same prompt. A later call prefills anew."""
    engine = engine_of(f_llama(), eos=frozenset(), max_rows=3, cache_tokens=cache_tokens)
    asked = requests(samples=8)

    async def run() -> None:
        sampling = Sampling(max_new_tokens=5)
        await asyncio.gather(collect(engine, asked[::2], sampling), collect(engine, asked[1::2], sampling))

    for calls in (1, 2):
        asyncio.run(run())
        assert engine.counters.prefills == calls * len(PROMPTS)
        assert engine.counters.prefill_tokens == calls * sum(len(p) for p in PROMPTS)
        assert engine.counters.decode_rows == calls * len(asked) * 4  # the first token costs no decode step
    side_by_side = engine.counters.decode_rows / engine.counters.decode_steps
    assert side_by_side == (1 if cache_tokens == 8 + 5 else pytest.approx(3, rel=0.2))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_the_cache_keeps_to_its_budget(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all its tensors, those being replaced included, over a ragged run; the tokens are the same."""
    held: list[weakref.ref[torch.Tensor]] = []
    measured: list[int] = []
    grown = Store._grown

    def watched(self: Store, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        store = grown(self, old, new)
        held.append(weakref.ref(store))
        measured.append(sum(t.untyped_storage().nbytes() for ref in held if (t := ref()) is not None))
        return store

    lm, eos, sampling = f_llama(), frozenset(range(0, 32, 8)), Sampling(max_new_tokens=40)
    free = ask(engine_of(copy.deepcopy(lm), eos), requests(samples=8), sampling)
    assert len({len(r.ids) for r in free.values()}) > 5
    monkeypatch.setattr(Store, "_grown", watched)
    tokens = int(share * (len(PROMPTS) * 8 + 32 * 39))  # 1: all that can come, at once
    engine = engine_of(copy.deepcopy(lm), eos, cache_tokens=tokens)
    got = ask(engine, requests(samples=8), sampling)
    assert {i: r.ids for i, r in got.items()} == {i: r.ids for i, r in free.items()}
    assert 0.8 * tokens * TOKEN < max(measured) <= tokens * TOKEN
    assert len(held) == 2 * 2 * 2  # reserved once
    assert engine.counters.prefills == len(PROMPTS)


def test_a_budget_below_one_row_says_the_least() -> None:
    """Of the longest row that a run can have when the engine is made, of a longer one when it is asked for."""
    lm = f_llama()
    lm.set_attn_implementation(ATTENTION)
    least = 0.0000196  # 41 tokens of 512 bytes, in GiB: 0.00001955
    for gib in (1e-9, 40 * TOKEN / GIB):
        with pytest.raises(RequestError, match=rf"max_response_length = 41 tokens .*rollout.cache_gib {least:.7f} or"):
            NativeEngine(Policy(lm), frozenset(), cache_gib=gib, max_tokens=41)
    engine = NativeEngine(Policy(lm), frozenset(), cache_gib=least, max_tokens=41)
    asked = [Request("short", "short", (3,)), Request("long", "long", (3,) * 8)]
    with pytest.raises(
        RequestError, match=r"row long with 8 prompt tokens and max_new_tokens 34 takes ([\d.]+) GiB"
    ) as e:
        ask(engine, asked, Sampling(max_new_tokens=34))
    assert engine.counters.prefills == 0
    more = re.search(r"cache_gib ([\d.]+) or more", str(e.value))
    assert more is not None
    engine = NativeEngine(Policy(lm), frozenset(), cache_gib=float(more[1]))
    assert all(len(r.ids) == 34 for r in ask(engine, asked, Sampling(max_new_tokens=34)).values())


@pytest.mark.parametrize("cache_tokens", [None, 110])
def test_calls_that_do_not_fit_together_wait(cache_tokens: int | None) -> None:
    """A long prompt with a short response and the reverse: each fits, a row of both lengths would not."""
    engine = engine_of(f_llama(), eos=frozenset(), cache_tokens=cache_tokens)
    answers = ask_lengths(engine, {Request("a", "a", (3,) * 100): 10, Request("b", "b", (4,) * 10): 100})
    assert {i: len(r.ids) for i, r in answers.items()} == {"a": 10, "b": 100}
    assert engine.counters.decode_steps == (99 if cache_tokens is None else 99 + 9)


def test_ragged_rows_cost_their_lengths() -> None:
    """90 short rows and 10 long ones, 20 side by side: no padding is computed, and a place that gets free is taken at
    once. Batches of 20 that wait for their longest row would take more than twice the steps, five places in six of
    them padding."""
    prompts = [(3 + i % 29, 3 + i // 29) for i in range(100)]
    lengths = {r: 40 if i % 10 == 3 else 4 for i, r in enumerate(requests(prompts, samples=1))}
    engine = engine_of(f_llama(), eos=frozenset(), max_rows=20)
    answers = ask_lengths(engine, lengths)
    assert all(len(answers[r.row_id].ids) == n for r, n in lengths.items())
    steps = [n - 1 for n in lengths.values()]
    assert engine.counters.decode_rows == sum(steps)
    assert engine.counters.prefill_tokens == sum(len(p) for p in prompts)
    free = [0] * 20  # when each place gets free
    for n in steps:
        heapq.heapreplace(free, free[0] + n)
    assert engine.counters.decode_steps == max(free)
    static = sum(max(steps[i : i + 20]) for i in range(0, 100, 20))
    assert engine.counters.decode_steps < static / 2 and sum(steps) < 20 * static / 5


def test_ended_rows_cost_nothing() -> None:
    engine = engine_of(f_llama(), eos=frozenset(range(0, 32, 8)))
    answers = ask(engine, requests(samples=8), Sampling(max_new_tokens=20))
    assert engine.counters.decode_rows == sum(len(r.ids) - 1 for r in answers.values())
    assert len({len(r.ids) for r in answers.values()}) > 3


def test_rows_come_as_they_end() -> None:
    engine = engine_of(f_llama(), eos=frozenset(range(0, 32, 8)))
    lengths = [len(r.ids) for r in ask(engine, requests(samples=8), Sampling(max_new_tokens=20)).values()]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_long_prompts_are_prefilled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sampling = f_llama(), Sampling(max_new_tokens=6, greedy=True)
    whole = ask(engine_of(copy.deepcopy(lm)), requests(), sampling)
    monkeypatch.setattr("verl.rollout.native.PREFILL_TOKENS", 7)
    parts = ask(engine_of(copy.deepcopy(lm)), requests(), sampling)
    assert {i: r.ids for i, r in parts.items()} == {i: r.ids for i, r in whole.items()}


SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 4, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_windows_and_soft_caps(kind: str) -> None:
    """Mistral: every layer sees 4 keys. Gemma 2: every other layer does, and scores and logits are capped."""
    torch.manual_seed(0)
    if kind == "mistral":
        lm: PreTrainedModel = MistralForCausalLM(MistralConfig(**SMALL))
    else:
        lm = Gemma2ForCausalLM(
            Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
        )
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(4)
    lm.eval().set_attn_implementation("eager")
    answers = ask(engine_of(copy.deepcopy(lm)), requests(), Sampling(max_new_tokens=12, seed=1))
    for r in requests():
        answer = answers[r.row_id]
        chosen = logprobs_of(lm, r.prompt_ids, answer.ids).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=2e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_training_mode_changes_nothing() -> None:
    """GPT-2 has dropout 0.1 by default; gradient checkpointing is for training only."""
    engine = engine_of(f_gpt2())
    sampling = Sampling(max_new_tokens=6)
    first = ask(engine, requests(), sampling)
    engine.policy.train()
    engine.policy.backbone.gradient_checkpointing_enable()
    second = ask(engine, requests(), sampling)
    assert {i: r.logprobs for i, r in first.items()} == {i: r.logprobs for i, r in second.items()}


def test_a_failure_reaches_every_caller_and_the_next_call_works() -> None:
    engine = engine_of(f_llama())
    good = engine.policy.head_weight.detach().clone()
    with torch.no_grad():
        engine.policy.head_weight[5] = float("nan")

    async def run() -> list:
        calls = (collect(engine, requests()[i::2], Sampling(max_new_tokens=4)) for i in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, RunError) and "row p0/0" in str(error) and "not finite" in str(error)
    with torch.no_grad():
        engine.policy.head_weight.copy_(good)
    assert len(ask(engine, requests(), Sampling(max_new_tokens=4))) == len(requests())


def test_a_cancelled_caller_leaves_no_work_behind() -> None:
    async def run() -> int:
        engine = engine_of(f_llama(), eos=frozenset())
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=500)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = engine.counters.decode_steps
        await collect(engine, requests(samples=1), Sampling(max_new_tokens=3))
        assert engine.counters.decode_steps <= steps + 4  # the step under way, and the second call's
        return steps

    assert asyncio.run(run()) < 499


def test_calls_of_one_turn_are_one_batch_of_equal_sampling() -> None:
    engine = engine_of(f_llama(), eos=frozenset())

    async def run() -> None:
        hot, cold = Sampling(max_new_tokens=5), Sampling(max_new_tokens=5, greedy=True)
        await asyncio.gather(*(collect(engine, requests()[i : i + 1], hot) for i in range(6)))
        assert engine.counters.decode_steps == 4
        await asyncio.gather(collect(engine, requests(), hot), collect(engine, requests(), cold))
        assert engine.counters.decode_steps == 12

    asyncio.run(run())


def test_bad_requests() -> None:
    engine = engine_of(f_llama())
    with pytest.raises(RequestError, match="p0/0 is requested twice"):
        ask(engine, requests(samples=1) * 2, Sampling(max_new_tokens=1))
    with pytest.raises(RequestError, match="tokenizer"):
        ask(engine, requests(), Sampling(max_new_tokens=1, stop=("x",)))
    with pytest.raises(RequestError, match=r"temperature.*top_p.*max_new_tokens"):
        Sampling(temperature=0, top_p=0, max_new_tokens=0)
    assert ask(engine, [], Sampling()) == {}
