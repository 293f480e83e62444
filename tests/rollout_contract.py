"""What every rollout engine must do. A test module subclasses ``RolloutContract`` and says how its engine is made."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.engine_table import REFUSED
from tests.tiny import EOS, f_bpe, f_gpt2, f_llama
from verl.config.errors import RequestError, RunError
from verl.models.naming import own_tensors
from verl.rollout.base import Request, Response, RolloutEngine, Sampling

PROMPTS = ((3, 4, 5), (6, 7, 8, 9, 10, 11), (4,), (12, 13, 14, 15, 16, 17, 18, 19))


def requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, samples: int = 3) -> list[Request]:
    return [Request(f"p{i}/{k}", f"p{i}", ids, k) for i, ids in enumerate(prompts) for k in range(samples)]


async def collect(engine: RolloutEngine, asked: Sequence[Request], sampling: Sampling) -> dict[str, Response]:
    return {r.row_id: r async for r in engine.generate(asked, sampling)}


def ask(engine: RolloutEngine, asked: Sequence[Request], sampling: Sampling) -> dict[str, Response]:
    return asyncio.run(collect(engine, asked, sampling))


def logprobs_of(lm: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0):
    """``[R, V]`` by one plain forward of one row."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = lm(ids, attention_mask=torch.ones_like(ids)).logits.float()
    return (logits / temperature).log_softmax(-1)[0, len(prompt) - 1 : -1]


def assert_stopped(whole: dict[str, Response], got: dict[str, Response], tokenizer: PreTrainedTokenizerBase) -> None:
    """``got`` are the rows of ``whole`` up to the token that completes ``ab`` or ``c:``; some have neither."""
    ends = 0
    for row_id, row in whole.items():
        texts = [tokenizer.decode(list(row.ids[: i + 1])) for i in range(len(row.ids))]
        at = next((i for i, text in enumerate(texts) if "ab" in text or "c:" in text), None)
        ends += at is not None
        assert got[row_id].ids == (row.ids if at is None else row.ids[: at + 1])
        assert got[row_id].finish_reason == ("length" if at is None else "stop")
    assert 0 < ends < len(whole)


class RolloutContract:
    """``make`` gives an engine that samples from (its own copy of) ``lm``; ``load`` gives it other weights.

    ``llama`` and ``gpt2`` make the models, for engines that don't compute those of ``tests/tiny.py``.
    """

    llama = staticmethod(f_llama)
    gpt2 = staticmethod(f_gpt2)
    # what an engine can't keep, it says here
    ordered = True  # rows end in the same order each time
    greedy_temperature: float | None = None  # of greedy rows' logprobs; None: the one asked for
    truncates = True  # False: top_k and top_p are refused
    draws = 3000  # where a distribution is measured
    long = 100  # tokens of rows that something happens to on the way
    close = 1e-5  # of log-probabilities

    def make(
        self,
        lm: PreTrainedModel,
        eos: frozenset[int] = frozenset({EOS}),
        max_rows: int = 64,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> RolloutEngine:
        raise NotImplementedError

    def load(self, engine: RolloutEngine, lm: PreTrainedModel, version: int) -> None:
        raise NotImplementedError

    @pytest.mark.parametrize("greedy", [True, False])
    @pytest.mark.parametrize("kind", ["gqa", "tied", "gpt2"])
    def test_logprobs_are_those_of_a_plain_forward(self, kind: str, greedy: bool) -> None:
        """Rows of different lengths together, more of them than fit at once; absolute and rotary positions."""
        lm = self.gpt2() if kind == "gpt2" else self.llama(kv_heads=1) if kind == "gqa" else self.llama(tied=True)
        engine = self.make(copy.deepcopy(lm), max_rows=5)
        sampling = Sampling(temperature=0.9, greedy=greedy, max_new_tokens=12, seed=3)
        answers = ask(engine, requests(), sampling)
        assert answers.keys() == {r.row_id for r in requests()}
        for r in requests():
            answer = answers[r.row_id]
            expected = logprobs_of(lm, r.prompt_ids, answer.ids, self.greedy_temperature or 0.9 if greedy else 0.9)
            chosen = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=self.close, rtol=0)
            if greedy:
                assert list(answer.ids) == expected.argmax(-1).tolist()

    def test_greedy_equals_generate(self) -> None:
        lm = self.gpt2(seed=1)
        answers = ask(self.make(copy.deepcopy(lm)), requests(samples=1), Sampling(greedy=True, max_new_tokens=10))
        for r in requests(samples=1):
            ids = torch.tensor([r.prompt_ids])
            expected = lm.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=EOS
            )
            assert list(answers[r.row_id].ids) == expected[0, len(r.prompt_ids) :].tolist()

    def test_batching_changes_no_token(self) -> None:
        """Neither the number of rows side by side, nor their order, nor the number of callers."""
        lm, sampling = self.llama(), Sampling(max_new_tokens=12, seed=1)
        wide = ask(self.make(copy.deepcopy(lm)), requests(), sampling)
        narrow = ask(self.make(copy.deepcopy(lm), max_rows=2), requests()[::-1], sampling)

        async def callers() -> dict[str, Response]:
            engine = self.make(copy.deepcopy(lm))
            parts = await asyncio.gather(*(collect(engine, requests()[i::3], sampling) for i in range(3)))
            return parts[0] | parts[1] | parts[2]

        for other in (narrow, asyncio.run(callers())):
            assert {i: r.ids for i, r in other.items()} == {i: r.ids for i, r in wide.items()}

    def test_same_call_same_bits(self) -> None:
        lm, sampling = self.llama(), Sampling(max_new_tokens=12, seed=1)
        first, second = (ask(self.make(copy.deepcopy(lm), max_rows=5), requests(), sampling) for _ in range(2))
        assert list(first) == list(second) or not self.ordered
        assert {i: (r.ids, r.logprobs) for i, r in first.items()} == {i: (r.ids, r.logprobs) for i, r in second.items()}

    def test_noise_differs_between_samples_prompts_and_seeds(self) -> None:
        engine = self.make(self.llama(), eos=frozenset())
        asked = requests([(3, 4, 5)] * 3, samples=4)
        rows = [r.ids for seed in (0, 1) for r in ask(engine, asked, Sampling(max_new_tokens=12, seed=seed)).values()]
        assert len(set(rows)) == 24

    @pytest.mark.parametrize(
        "options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.7}], ids=["all", "k", "p", "both"]
    )
    def test_the_first_token_is_drawn_from_the_distribution(
        self, options: dict[str, float], record_property: Callable[[str, object], None]
    ) -> None:
        """Chi-square of draws at temperature 0.7; the logprob is of the truncated distribution."""
        lm, n = self.llama(seed=2), self.draws
        sampling = Sampling(temperature=0.7, max_new_tokens=1, seed=5, **options)  # type: ignore[arg-type]
        if options and not self.truncates:
            with pytest.raises(RequestError, match="top_p"):
                ask(self.make(copy.deepcopy(lm)), requests(), sampling)
            record_property(REFUSED, "refused")
            return
        answers = ask(self.make(copy.deepcopy(lm)), requests([(3, 4, 5)], samples=n), sampling)
        p = logprobs_of(lm, (3, 4, 5), (0,), 0.7)[0].double().exp()
        order = p.argsort(descending=True)
        kept = order[: int(options.get("top_k", len(p)))]
        before = (p[kept] / p[kept].sum()).cumsum(0) - p[kept] / p[kept].sum()
        kept = kept[before < options.get("top_p", 1.0)]
        truncated = torch.zeros_like(p).index_copy(0, kept, p[kept] / p[kept].sum())
        counts = torch.zeros_like(p)
        for token, count in Counter(r.ids[0] for r in answers.values()).items():
            counts[token] = count
        assert not counts[truncated == 0].any()
        for r in answers.values():
            assert r.logprobs[0] == pytest.approx(truncated[r.ids[0]].log().item(), abs=self.close)
        likely = truncated * n >= 5
        observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
        expected = torch.cat([truncated[likely], truncated[~likely].sum()[None]]) * n
        expected, observed = expected[expected > 0], observed[expected > 0]
        free = len(expected) - 1
        chi2 = ((observed - expected) ** 2 / expected).sum().item()
        assert chi2 < free + 4 * (2 * free) ** 0.5 + 4  # four deviations above the mean of the chi-square distribution

    def test_the_end_of_a_row(self) -> None:
        """Any id in force ends a row and stays in it; a row that ended computes no more; else ``length``."""
        lm = self.llama()
        free = ask(self.make(copy.deepcopy(lm), eos=frozenset()), requests(), Sampling(max_new_tokens=10, seed=4))
        assert all(len(r.ids) == len(r.logprobs) == 10 and r.finish_reason == "length" for r in free.values())
        eos = frozenset(token for token, _ in Counter(t for r in free.values() for t in r.ids).most_common(2))
        ended = ask(self.make(copy.deepcopy(lm), eos=eos), requests(), Sampling(max_new_tokens=10, seed=4))
        for row_id, whole in free.items():
            at = next((i for i, token in enumerate(whole.ids) if token in eos), None)
            got = ended[row_id]
            assert got.ids == (whole.ids if at is None else whole.ids[: at + 1])
            assert got.finish_reason == ("length" if at is None else "stop")
        assert {r.ids[-1] for r in ended.values() if r.finish_reason == "stop"} == eos

    def test_stop_texts(self) -> None:
        """The tokens that complete the text stay; ``ab`` ends a row as one token (7) or as two (4, 5)."""
        lm, tokenizer = self.llama(), f_bpe()
        whole = ask(self.make(copy.deepcopy(lm), eos=frozenset()), requests(samples=5), Sampling(max_new_tokens=24))
        engine = self.make(copy.deepcopy(lm), eos=frozenset(), tokenizer=tokenizer)
        got = ask(engine, requests(samples=5), Sampling(max_new_tokens=24, stop=("ab", "c:")))
        assert_stopped(whole, got, tokenizer)

    def test_new_weights_change_the_next_token(self) -> None:
        """The same prompts before and after: nothing of the old weights, cached keys included, is left."""
        old, new, sampling = self.llama(seed=0), self.llama(seed=1), Sampling(greedy=True, max_new_tokens=8)
        engine = self.make(copy.deepcopy(old))
        before = ask(engine, requests(), sampling)
        self.load(engine, new, version=7)
        after = ask(engine, requests(), sampling)
        assert {r.version for r in before.values()} == {0} and {r.version for r in after.values()} == {7}
        for r in requests():
            expected = logprobs_of(new, r.prompt_ids, after[r.row_id].ids)
            assert list(after[r.row_id].ids) == expected.argmax(-1).tolist()
        assert any(before[i].ids[0] != after[i].ids[0] for i in before)

    def test_weights_that_do_not_fit_are_refused_until_some_do(self) -> None:
        """A broken ``load`` leaves an engine that says so instead of sampling from a mixture."""
        new, sampling = self.llama(seed=1), Sampling(greedy=True, max_new_tokens=4)
        engine = self.make(self.llama(seed=0))
        engine.load(own_tensors(new), 1)
        whole = dict(own_tensors(new))
        last = list(whole)[-1]
        for broken in (whole | {last: whole[last][:-1]}, {n: t for n, t in whole.items() if n != last}):
            with pytest.raises(RunError, match=last):
                engine.load(broken.items(), 2)
            with pytest.raises(RunError, match="version 2 failed"):
                ask(engine, requests(), sampling)
        engine.load(own_tensors(new), 3)
        answers = ask(engine, requests(), sampling)
        for r in requests():
            answer = answers[r.row_id]
            assert answer.version == 3
            assert list(answer.ids) == logprobs_of(new, r.prompt_ids, answer.ids).argmax(-1).tolist()

    def test_refused_requests_name_row_and_numbers(self) -> None:
        engine = self.make(self.gpt2())  # 32 positions
        with pytest.raises(RequestError, match=r"row long.* 20 .* 13 .*33.* 32 "):
            ask(engine, [Request("ok", "ok", (3,)), Request("long", "long", (3,) * 20)], Sampling(max_new_tokens=13))
        with pytest.raises(RequestError, match="row none"):
            ask(engine, [Request("none", "none", ())], Sampling(max_new_tokens=1))
        assert len(ask(engine, [Request("r", "r", (3,) * 20)], Sampling(max_new_tokens=12))["r"].ids) <= 12

    def test_abort(self) -> None:
        """An aborted row comes back with what it has; the others are untouched."""
        lm, sampling = self.llama(), Sampling(max_new_tokens=self.long, seed=2)
        asked = requests()[:7]

        async def run() -> dict[str, Response]:
            engine = self.make(copy.deepcopy(lm), eos=frozenset(), max_rows=6)
            task = asyncio.create_task(collect(engine, asked, sampling))
            await asyncio.sleep(0.005)
            engine.abort([asked[0].row_id, asked[-1].row_id, "unknown"])
            return await task

        whole = ask(self.make(copy.deepcopy(lm), eos=frozenset(), max_rows=6), asked, sampling)
        cut = asyncio.run(run())
        for i, r in enumerate(asked):
            row = cut[r.row_id]
            if i in (0, len(asked) - 1):
                assert row.finish_reason == "abort" and len(row.ids) == len(row.logprobs) < self.long
            else:
                assert row.finish_reason == "length"
            assert row.ids == whole[r.row_id].ids[: len(row.ids)]
        assert cut[asked[-1].row_id].ids == ()  # it was still waiting

    def test_a_caller_may_stop_early(self) -> None:
        async def run() -> int:
            engine = self.make(self.llama(), eos=frozenset(), max_rows=2)
            rows = engine.generate(requests(), Sampling(max_new_tokens=self.long))
            await anext(rows)
            await rows.aclose()  # type: ignore[attr-defined]
            return len(await collect(engine, requests(samples=1), Sampling(max_new_tokens=3)))

        assert asyncio.run(run()) == len(PROMPTS)
