"""Texts that end a response."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


class StopTexts:
    """Looks for stop texts in the decoded tail of a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        # a token is at least one byte of text; a few more, as decoding may strip or garble the first of a tail
        self.tail = max(len(text.encode()) for text in texts) + 4

    def ends(self, ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=False)
        return any(stop in text for stop in self.texts)
