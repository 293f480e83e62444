"""Completions of a prompt as token ids: all continue the same prompt ids, and none is empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl.config.errors import DataError
from verl.data import chat
from verl.data.policies import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.data.chat import Turns


def encode_completions(
    tokenizer: PreTrainedTokenizerBase, prompt: Turns, completions: Sequence[Turns]
) -> list[list[int]]:
    """``[prompt_ids, completion_ids, ...]``: prompt ids plus a completion's ids decode to the original text.

    Tokens may merge over the boundary (``xa`` + ``b`` is ``x``, ``ab``), and only for some of the completions. So the
    whole texts are tokenised and all are cut where the first of them, or the bare prompt, differs. Where that would
    leave no prompt token, the parts are tokenised apart. An end-of-sequence token is added unless the text has it.
    """
    start = chat.render_text(tokenizer, prompt)
    ends = [chat.render_completion(tokenizer, prompt, completion) for completion in completions]
    bare, *whole = chat.encode(tokenizer, [start, *(start + end for end in ends)])
    shared = chat.shared_start(bare, *whole)
    if shared > len(chat.leading_specials(tokenizer)):
        prompt_ids, sides = bare[:shared], [ids[shared:] for ids in whole]
    else:
        prompt_ids = bare
        sides = tokenizer(ends, add_special_tokens=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [prompt_ids, *(ids if eos is None or ids[-1:] == [eos] else [*ids, eos] for ids in sides)]


class TooLong(DataError):
    """A row is over the limit, and ``overlong: error`` says to stop."""


def room_for(prompt: int, completions: Mapping[str, int], max_length: int, policy: Overlong) -> int | None:
    """How many tokens each completion may keep beside the prompt's; None: the policy leaves the row out.

    ``truncate`` cuts the end of a completion, never the prompt; where the prompt leaves no room for one token, the
    row is left out. ``filter`` leaves out a row with a completion that is too long. ``error`` raises ``TooLong`` with
    the lengths. DataError when a part is empty.
    """
    if not prompt or not all(completions.values()):
        lengths = ", ".join(f"{name} {n}" for name, n in {"prompt": prompt, **completions}.items())
        raise DataError(f"{lengths} tokens; none may be empty")
    room = max_length - prompt
    too_long = max(completions.values()) > room
    if too_long and policy == "error":
        lengths = " / ".join(f"{name} {n}" for name, n in completions.items())
        raise TooLong(f"prompt {prompt} + {lengths} tokens, the limit for a side is {max_length}")
    return None if room < 1 or (too_long and policy == "filter") else room
