"""Token lengths and the limits they suggest."""

from __future__ import annotations

from tests.tiny import f_bpe
from verl.data.stats import Lengths, token_stats


def test_percentiles_are_lengths_that_occur():
    assert Lengths.of(list(range(1, 101))) == Lengths(100, 51, 91, 96, 100)
    assert Lengths.of([5]) == Lengths(1, 5, 5, 5, 5)


def test_prompts_are_measured_rendered_and_responses_with_their_end():
    rows = [{"prompt": "x" * n, "response": "c" * (2 * n)} for n in range(1, 21)]
    stats = token_stats(rows, f_bpe(template="plain"))
    assert stats.prompts == Lengths(20, 16, 24, 25, 25)  # x + 5 tokens of the template
    assert stats.responses is not None and stats.responses.max == 42  # 40, the template's newline, EOS
    assert stats.max_prompt_length == 25
    assert stats.max_response_length == stats.responses.p90


def test_without_responses_there_is_no_suggestion():
    stats = token_stats({"name": "arithmetic", "size": 5}, f_bpe())
    assert stats.responses is None and stats.max_response_length is None


def test_columns_and_preference_sides():
    rows = [{"q": "xa", "good": "b", "chosen": "cc", "rejected": [{"role": "assistant", "content": "cccc"}]}]
    stats = token_stats(rows, f_bpe(), {"prompt": "q", "response": "good"})
    assert stats.prompts.max == 2
    assert stats.responses == Lengths(3, 3, 5, 5, 5)
