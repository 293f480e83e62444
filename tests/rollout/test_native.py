"""The native engine keeps the contract, and what only it promises: one prefill per group, one thread, no copy."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from tests.rollout_contract import PROMPTS, RolloutContract, ask, collect, logprobs_of, requests
from tests.tiny import EOS, f_gpt2, f_llama
from verl.config.errors import RequestError, RunError
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout.base import Sampling
from verl.rollout.native import NativeEngine


def engine_of(lm: PreTrainedModel, eos=frozenset({EOS}), max_rows: int = 64, tokenizer=None) -> NativeEngine:
    lm.set_attn_implementation(ATTENTION)
    return NativeEngine(Policy(lm), eos, max_rows, tokenizer)


class TestContract(RolloutContract):
    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> NativeEngine:
        return engine_of(lm, eos, max_rows, tokenizer)

    def load(self, engine: NativeEngine, lm: PreTrainedModel, version: int) -> None:  # type: ignore[override]
        """As the trainer does: new values in the same storage."""
        with torch.no_grad():
            for mine, new in zip(engine.policy.lm.parameters(), lm.parameters(), strict=True):
                mine.copy_(new)
        engine.version = version


def test_one_prefill_per_prompt() -> None:
    """Also when a group is wider than what fits side by side, and when two callers ask for the same prompt."""
    engine = engine_of(f_llama(), eos=frozenset(), max_rows=3)
    asked = requests(samples=8)

    async def run() -> None:
        sampling = Sampling(max_new_tokens=5)
        await asyncio.gather(collect(engine, asked[::2], sampling), collect(engine, asked[1::2], sampling))

    asyncio.run(run())
    assert engine.counters.prefills == len(PROMPTS)
    assert engine.counters.prefill_tokens == sum(len(p) for p in PROMPTS)
    assert engine.counters.decode_rows == len(asked) * 4  # the first token costs no decode step


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
