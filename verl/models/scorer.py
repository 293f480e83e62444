"""The scorer: a reward model in training. One number per row, read at a response's tokens by one linear head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.errors import RequestError
from verl.models.decoder import Decoder, base_model, known
from verl.models.packing import Packed, read

ROWS = "pairs"
HEAD = "score"  # transformers' name of a decoder's classification head; peft trains it whole beside adapters


def is_scorer(base: nn.Module) -> bool:
    """Whether ``base`` is one of transformers' ``*ForSequenceClassification`` decoders."""
    return type(base).__name__.endswith("ForSequenceClassification") and hasattr(base, HEAD)


def new_head(model: PreTrainedModel, seed: int) -> None:
    """Draw the head anew: small, so that first scores are near 0 beside the margins that training looks for.

    Drawn in float32 on the CPU, so equal on every device and nearly so in every dtype.
    """
    weight = getattr(model, HEAD).weight
    drawn = torch.empty(weight.shape).normal_(
        0, 1 / (weight.shape[1] + 1), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        weight.copy_(drawn)


def mark(model: PreTrainedModel) -> None:
    """Let the configuration say what the model is, and that its rows end as training ended them (``is_marked``)."""
    model.config.architectures = [type(model).__name__]
    model.config.reward_rows = ROWS


def is_marked(config: Any) -> bool:
    """Whether a reward model was trained here: on a prompt's and a completion's ids of ``data.pairs``, with the
    end-of-sequence token where the completion ended. Others keep the form that their own makers trained them on."""
    return getattr(config, "reward_rows", None) == ROWS


class Scorer(Decoder):
    """Wraps ``lm``, a sequence-classification decoder with one label (``factory.load_scorer`` gives one)."""

    reads_ends = True  # the score of a row is read at its last token, end-of-sequence included

    def __init__(self, lm: nn.Module) -> None:
        super().__init__(lm)
        base = base_model(lm)
        if not is_scorer(base):
            raise RequestError(f"{type(base).__name__} is no sequence-classification decoder, so it can't score")
        if self.head.weight.shape[0] != 1:
            raise RequestError(
                f"{type(base).__name__} gives {self.head.weight.shape[0]} numbers per row (num_labels), a reward is one"
            )
        self.eval()

    @property
    def head(self) -> nn.Linear:
        """The head that computes: with adapters, the trained copy."""
        head: Any = getattr(base_model(self.lm), HEAD)
        return head.modules_to_save[self.adapter] if hasattr(head, "modules_to_save") else head  # peft's wrapper

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def forward(
        self, packed: Packed, targets: Tensor | None, want: frozenset[str], temperature: float
    ) -> dict[str, Tensor]:
        """``{"scores": [R]}`` in float32, each read at its response token: rows packed with ``ends=True``.

        What a row's last (unmasked) token has is the row's score. Targets and temperature play no part.
        """
        del targets, temperature
        known(want, {"scores"})
        hidden = read(self.hidden(packed.ids, packed.positions, packed), packed.predict.values)
        bias = None if self.head.bias is None else self.head.bias.float()
        return {"scores": packed.whole(nn.functional.linear(hidden.float(), self.head.weight.float(), bias)[:, 0])}
