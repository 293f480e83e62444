"""Whether a model has an embedding for every token that it may be given."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from verl.config.errors import RequestError
from verl.models.adapters import base_of, is_adapter_folder
from verl.models.decoder import base_model

log = logging.getLogger(__name__)


def embedding_rows(source: Any, trust_remote_code: bool = False) -> int | None:
    """Number of token ids that the model of a hub name or folder, or a loaded one, embeds; ``None``: it doesn't say."""
    try:
        if isinstance(source, nn.Module):
            return getattr(base_model(source).get_input_embeddings(), "num_embeddings", None)
        name = base_of(source) if is_adapter_folder(source) else source
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (AttributeError, NotImplementedError, OSError, ValueError):  # whoever loads it says what is wrong
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def check_embeddings(who: str, rows: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """``RequestError`` where ``tokenizer`` may give ids without one of the ``rows`` of embeddings of the model ``who``.

    Special tokens (padding, images) that neither it nor its chat template puts into a text are warned of alone: there
    are good models that have no row for one.
    """
    vocabulary = tokenizer.get_vocab()
    beyond = {token: i for token, i in vocabulary.items() if rows is not None and i >= rows}
    if not beyond:
        return
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token}
    template = str(tokenizer.chat_template or "")
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    unused = {token for token in special - used if token not in template}
    numbers = (
        f"the tokenizer gives ids up to {max(beyond.values())} ({len(vocabulary)} tokens), but the model has {rows} "
        "rows of embeddings"
    )
    if beyond.keys() <= unused:
        log.warning("%s: %s, so no text may have %s in it", who, numbers, ", ".join(sorted(beyond)[:3]))
        return
    raise RequestError(
        f"{who}: {numbers}; model and tokenizer must belong together; after adding tokens, resize_token_embeddings and "
        "save_pretrained of both"
    )
