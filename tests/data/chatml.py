"""A byte-level tokenizer with a ChatML template: every text survives, so that masks can be read as text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data.examples import Example

START, END, EOT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# opens a turn with a mark that a finished turn doesn't have
THINKING = TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
# ends a whole text, but no earlier turn, with the end-of-sequence token
ENDING = TEMPLATE.replace(
    "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{{ eos_token }}{% else %}"
)
USER, BOT = f"{START}user\n", f"{START}assistant\n"


def chatml(
    template: str | None = TEMPLATE, eos: str = END, merges: tuple[tuple[str, str], ...] = (), swallow: bool = False
):
    """A token is a byte, or what ``merges`` make of two; ``eos`` ends a response.

    ``swallow``: the special token ``END`` takes the white space after it, too.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    end = AddedToken(END, special=True, normalized=False, rstrip=swallow)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, end, EOT]})
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> str:
    return f"{USER}{text}{END}\n"


def shown(tokenizer, example: Example) -> tuple[str, ...]:
    """The prompt's ids as text, and each completion's, in which ``[`` and ``]`` enclose what is trained."""
    sides = []
    for side in example.completions:
        assert len(side.ids) == len(side.mask) and any(side.mask)
        text, trained = "", False
        for id, mask in zip(side.ids, side.mask, strict=True):
            text += ("[" if mask else "]") if mask != trained else ""
            text += tokenizer.decode([id])
            trained = mask
        sides.append(text + "]" * trained)
    return (tokenizer.decode(list(example.prompt_ids)), *sides)
