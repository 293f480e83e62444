"""Hugging Face reward models: one number per (question, answer), with the model's own tokenizer and limits.

The policy's tokens mean nothing to another tokenizer, so the model gets decoded text, in the form it was trained on:
messages through its own chat template where it has one; a (question, answer) pair for encoders such as DeBERTa;
else the question directly followed by the answer. A model trained here gets the very ids that training gave it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn

from verl.config.errors import RequestError, RewardError
from verl.config.model import RewardModelConfig
from verl.data import chat
from verl.data.pairs import encode_completions
from verl.models.adapters import is_adapter_folder
from verl.models.factory import load_tokenizer, resolve_dtype
from verl.models.scorer import is_marked
from verl.models.stored import read
from verl.models.vocabulary import check_embeddings, embedding_rows
from verl.rewards.base import RewardRow
from verl.rewards.functions import Model

# model types that pool a first token and are trained on text pairs
_PAIR_TYPES = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet"}
    | {"roberta", "xlm-roberta"}
)
# of these, the ones whose position numbers start behind the pad id, so that many positions can't be used
_SHIFTED_TYPES = frozenset(("camembert", "mpnet", "roberta", "xlm-roberta"))


@dataclass(frozen=True)
class _Input:
    ids: list[int]
    type_ids: list[int]  # 0: question, 1: answer
    cut: bool


class RewardModelScorer(Model):
    """A frozen sequence-classification model with one label that scores rows; may be called from several threads.

    ``cfg.model_name_or_path`` is a hub name, a folder, or a loaded module (which is frozen and moved to ``device``);
    ``tokenizer``: a loaded one, default the model's own. Raises ``RequestError`` when there is no such model, it has
    no trained head or several labels, or ``cfg.max_length`` is beyond its limit.
    """

    def __init__(self, cfg: RewardModelConfig, device: torch.device, tokenizer: Any = None) -> None:
        self._cfg, self._device = cfg, device
        source = cfg.model_name_or_path
        loaded = isinstance(source, nn.Module)
        self.model: Any = source if loaded else _load(cfg, resolve_dtype(cfg.dtype, device))
        _require_one_label(self.model.config)
        self.model.requires_grad_(False).eval().to(device)
        origin = getattr(self.model.config, "_name_or_path", "") if loaded else source
        if tokenizer is None and not origin:
            raise RequestError("reward model: the module names no tokenizer; save both to a folder, name that")
        self.tokenizer = load_tokenizer(origin, cfg.trust_remote_code) if tokenizer is None else tokenizer
        check_embeddings(f"reward model {origin!r}", embedding_rows(self.model), self.tokenizer)
        kind = self.model.config.model_type
        self._paired = kind in _PAIR_TYPES and not chat.has_template(self.tokenizer)
        # decoders find a row's last token by comparing ids with the pad id; see _pad
        self._pools_last = kind not in _PAIR_TYPES and not self.model.config.is_encoder_decoder
        self._backend = _pair_backend(self.tokenizer) if self._paired else None
        own = _own_limit(self.model.config, self.tokenizer)
        if cfg.max_length is not None and own is not None and cfg.max_length > own:
            raise RequestError(
                f"reward model {origin!r}: max_length {cfg.max_length} is over the model's own limit {own}"
            )
        self.max_length: int | None = cfg.max_length or own
        self._lock = threading.Lock()  # the pad id is set per forward, and the device is one

    def score(self, rows: Sequence[RewardRow]) -> list[float]:
        """One number per row; independent of which rows are scored together."""
        return self.evaluate(rows)[0]

    def evaluate(self, rows: Sequence[RewardRow]) -> tuple[list[float], int]:
        """``score``, and how many rows were cut to ``max_length``.

        Cut is the question's start first; of an answer that is too long by itself, a pair keeps the start and a
        dialogue the end. With ``overlong: error``, ``RewardError`` names the row and both lengths instead.
        """
        inputs = [self._input(row) for row in rows]
        return self._outputs(inputs)[:, 0].tolist(), sum(entry.cut for entry in inputs)

    def pooled(self, rows: Sequence[RewardRow]) -> Tensor:
        """``[B, N]`` float32, on the CPU: what the model's head gives (N = 1), or its input where the head is an
        ``nn.Identity``.
        """
        return self._outputs([self._input(row) for row in rows])

    def _outputs(self, inputs: Sequence[_Input]) -> Tensor:
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i].ids))  # equal lengths together: least padding
        size = self._cfg.micro_batch_size
        with self._lock, torch.inference_mode():
            parts = [
                self._forward([inputs[i] for i in order[start : start + size]]).cpu()
                for start in range(0, len(order), size)
            ]
        return torch.cat(parts)[torch.tensor(order).argsort()]

    def _input(self, row: RewardRow) -> _Input:
        prompt = row.fields.get("prompt", row.prompt)
        if self._backend is not None:
            return self._pair(row, chat.render_text(self.tokenizer, prompt))
        if is_marked(self.model.config):
            return self._cut(row, self._as_trained(prompt, row))
        if chat.has_template(self.tokenizer):
            messages = chat.join(prompt, [{"role": "assistant", "content": row.response}])
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            text = chat.render_text(self.tokenizer, prompt) + row.response
        return self._cut(row, chat.encode(self.tokenizer, [text])[0])

    def _as_trained(self, prompt: chat.Turns, row: RewardRow) -> list[int]:
        """Ids as preference pairs have them; a response that didn't end goes without the token that says so."""
        start, said = encode_completions(self.tokenizer, prompt, [row.response])
        if row.finish_reason != "stop" and said[-1:] == [self.tokenizer.eos_token_id]:
            del said[-1]
        return start + said

    def _cut(self, row: RewardRow, ids: list[int]) -> _Input:
        excess = self._excess(row, len(ids))
        if excess:
            lead = chat.leading_specials(self.tokenizer)
            ids = lead + ids[len(lead) + excess :]
        return _Input(ids, [0] * len(ids), excess > 0)

    def _pair(self, row: RewardRow, question: str) -> _Input:
        assert self._backend is not None
        ours = self._backend.encode(question, add_special_tokens=False)
        theirs = self._backend.encode(row.response, add_special_tokens=False)
        specials = self._backend.num_special_tokens_to_add(is_pair=True)
        excess = self._excess(row, len(ours) + len(theirs) + specials)
        if excess:
            answer = max(0, excess - len(ours))  # what the question alone can't give
            theirs.truncate(len(theirs) - answer)
            ours.truncate(len(ours) - (excess - answer), direction="left")
        both = self._backend.post_process(ours, theirs, True)
        return _Input(list(both.ids), list(both.type_ids), excess > 0)

    def _excess(self, row: RewardRow, length: int) -> int:
        if self.max_length is None or length <= self.max_length:
            return 0
        if self._cfg.overlong == "error":
            raise RewardError(
                f"reward model: row {row.row_id} has {length} tokens, max_length is {self.max_length}; "
                "overlong: truncate would cut the question's start"
            )
        return length - self.max_length

    def _forward(self, inputs: Sequence[_Input]) -> Tensor:
        """``[B, L]`` float32 outputs of one micro-batch."""
        lengths = torch.tensor([len(entry.ids) for entry in inputs])
        width = int(lengths.max())
        with self._pad(inputs) as pad:
            ids = torch.tensor([entry.ids + [pad] * (width - len(entry.ids)) for entry in inputs])
            batch = {"input_ids": ids, "attention_mask": (torch.arange(width) < lengths[:, None]).long()}
            if "token_type_ids" in self.tokenizer.model_input_names:
                types = [entry.type_ids + [0] * (width - len(entry.ids)) for entry in inputs]
                batch["token_type_ids"] = torch.tensor(types)
            logits = self.model(**{name: column.to(self._device) for name, column in batch.items()}).logits
        return logits.float().view(len(inputs), -1)

    @contextmanager
    def _pad(self, inputs: Sequence[_Input]) -> Iterator[int]:
        """The id that fills rows up (the attention mask hides it).

        Models that pool a row's last token look for the last id that differs from ``config.pad_token_id``. That is
        wrong where a row itself ends with that id (pad = end of sequence), and impossible without a pad token, so
        each micro-batch is padded with an id that none of its rows ends with, and the model is told.
        """
        config = self.model.config.get_text_config()
        if not self._pools_last:
            own = (config.pad_token_id, self.tokenizer.pad_token_id, 0)
            yield next(pad for pad in own if pad is not None)
            return
        last = {entry.ids[-1] for entry in inputs}
        before = config.pad_token_id
        config.pad_token_id = next(i for i in itertools.count() if i not in last)
        try:
            yield config.pad_token_id
        finally:
            config.pad_token_id = before


def _load(cfg: RewardModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source, trust = cfg.model_name_or_path, cfg.trust_remote_code
    if is_adapter_folder(source):
        raise RequestError(
            f"reward model: {source!r} holds an adapter without its base: name a folder of the merged model "
            "(verl export writes one)"
        )
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        _require_one_label(config)  # before gigabytes are read
        model, missing, _ = read(
            AutoModelForSequenceClassification, source, config, dtype=dtype, trust_remote_code=trust
        )
    except RequestError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise RequestError(f"reward model: can't load {source!r}: {error}") from error
    if missing:
        raise RequestError(
            f"reward model: {source!r} holds no weights for {', '.join(missing[:5])}: not a reward model"
        )
    return model


def _require_one_label(config: Any) -> None:
    if config.num_labels != 1:
        raise RequestError(
            f"reward model: {getattr(config, '_name_or_path', '') or 'it'} gives {config.num_labels} numbers per row "
            "(num_labels), a reward is one"
        )


def _pair_backend(tokenizer: Any) -> Tokenizer:
    """A copy for encoding the two texts apart, in which a written-out special token is text like other text."""
    if not tokenizer.is_fast:
        raise RequestError(f"reward model: {type(tokenizer).__name__} has no fast form, which pairs need")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _own_limit(config: Any, tokenizer: Any) -> int | None:
    """Tokens that model and tokenizer both allow; None where neither says."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions and config.model_type in _SHIFTED_TYPES:
        positions -= text.pad_token_id + 1
    # an unset model_max_length is about 1e30, an unset number of positions 0, -1 or absent
    limits = [n for n in (positions, tokenizer.model_max_length) if n is not None and 0 < n < 10**9]
    return int(min(limits)) if limits else None
