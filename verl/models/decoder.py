"""A Hugging Face decoder that computes on packed rows, with or without adapters: what policies and scorers share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl.config.errors import RequestError
from verl.models.naming import check_fit, copy_by_name, own_tensors
from verl.models.packing import Layout, last_hidden
from verl.models.unread import take

if TYPE_CHECKING:
    from peft import PeftModel


def adapted(lm: nn.Module) -> TypeGuard[PeftModel]:
    """Whether there are peft's adapters around the model. Who has none needs no peft, whose import takes seconds."""
    return "peft" in sys.modules and isinstance(lm, sys.modules["peft"].PeftModel)


def base_model(lm: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, with or without adapters around it."""
    return lm.get_base_model() if adapted(lm) else lm  # type: ignore[return-value]


def without_dropout(module: nn.Module) -> None:
    """Set every dropout (and the noise of a mixture's router) to 0, in place.

    A policy trained by reinforcement learning has none: the sampler drew without it, so with it the ratio to the
    sampled-from density would not be 1 before the first update (GPT-2's default is 0.1).
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)


def adapter_tensors(lm: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """The adapter's own tensors by the names of its file. Embeddings of the base are never among them: whether they
    should be, peft would ask the hub each time."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(lm, adapter_name=adapter, save_embedding_layers=False)


def in_place(lm: nn.Module, adapter: str | None) -> dict[str, Tensor]:
    """The model's own tensors, not copies, under names that copies of it share; with an ``adapter`` its alone."""
    return dict(own_tensors(lm)) if adapter is None else adapter_tensors(lm, adapter)


class Decoder(nn.Module):
    """Wraps ``lm``, a decoder with a head on it, whose attention is ``packing.ATTENTION``.

    The parameters are ``lm``'s own. With several adapters in ``lm`` the active one is trained.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.unread = take(lm)
        without_dropout(lm)
        self.adapter: str | None = None
        if adapted(lm):
            if len(lm.active_adapters) != 1:
                raise RequestError(f"one adapter is trained, but {', '.join(lm.active_adapters) or 'none'} are active")
            self.adapter = lm.active_adapters[0]

    @property
    def config(self):
        return base_model(self.lm).config

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its head; adapters act inside it."""
        return base_model(self.lm).get_decoder()

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that training changes, tied ones once; names are ``lm``'s."""
        return ((name, p) for name, p in self.lm.named_parameters() if p.requires_grad)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, tied ones once, by ``lm``'s names."""
        return self.lm.named_parameters()

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names that ``save_pretrained`` would give them; with adapters, the trained one's alone."""
        if self.adapter is not None:
            return iter(adapter_tensors(self.lm, self.adapter).items())
        return iter(revert_weight_conversion(base_model(self.lm), dict(own_tensors(self.lm))).items())

    def load(self, shards: Mapping[str, Tensor]) -> None:
        """Take back what ``shards`` gave, in place. ``MisfitError`` unless names and shapes are exactly those."""
        into = dict(self.shards())
        check_fit(into, shards)
        if self.adapter is None:
            own = dict(own_tensors(self.lm))
            if own.keys() != into.keys():  # a file layout of its own (a mixture's experts one by one): let HF convert
                base = base_model(self.lm)
                converted: Any = type(base).from_pretrained(
                    None, config=base.config, state_dict=dict(shards), dtype=base.dtype
                )
                shards = dict(own_tensors(converted))
            into = own
        copy_by_name(into, shards)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Final hidden states ``[T, D]`` of packed tokens ``ids [T]`` at ``positions [T]``."""
        return last_hidden(self.backbone, ids, positions, layout)


def known(want: frozenset[str], names: set[str]) -> None:
    """``ValueError`` unless some of ``names`` and nothing else is wanted."""
    if not want or want - names:
        raise ValueError(f"asked for {sorted(want)}; this model gives {sorted(names)}")
