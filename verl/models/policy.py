"""The policy: a Hugging Face causal language model that computes on packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl.config.errors import RequestError
from verl.models.logprobs import head_logits, token_logprobs
from verl.models.naming import check_fit, copy_by_name, own_tensors
from verl.models.packing import Layout, Packed, last_hidden


def base_model(lm: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, with or without adapters around it."""
    return lm.get_base_model() if isinstance(lm, PeftModel) else lm  # type: ignore[return-value]


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


class Policy(nn.Module):
    """Wraps ``lm``, a causal LM whose attention is ``packing.ATTENTION`` (``factory.load_model`` gives one).

    The parameters are ``lm``'s own. Logits follow the model's own treatment: ``logit_scale`` multiplies them (Granite,
    Cohere), then ``softcap`` bounds them (Gemma 2).
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        without_dropout(lm)
        base = base_model(lm)
        head = base.get_output_embeddings()
        if head is None:
            raise RequestError(f"{type(base).__name__} has no output head, so it can't be a policy")
        if isinstance(head, BaseTunerLayer):
            raise RequestError("lora_target_modules names the output head; leave it out (all-linear does)")
        config = base.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        if getattr(config, "logits_scaling", None):  # Granite divides
            self.logit_scale = 1.0 / config.logits_scaling
        self.eval()

    @property
    def config(self):
        return base_model(self.lm).config

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its head; adapters act inside it."""
        return base_model(self.lm).get_decoder()

    @property
    def head_weight(self) -> Tensor:
        """``[V, D]``; with tied embeddings it is the embedding."""
        return base_model(self.lm).get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(base_model(self.lm).get_output_embeddings(), "bias", None)

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that training changes, tied ones once; names are ``lm``'s."""
        return ((name, p) for name, p in self.lm.named_parameters() if p.requires_grad)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names that ``save_pretrained`` would give them; with adapters, the adapter's alone."""
        if isinstance(self.lm, PeftModel):
            return iter(get_peft_model_state_dict(self.lm).items())
        return iter(revert_weight_conversion(base_model(self.lm), dict(own_tensors(self.lm))).items())

    def load(self, shards: Mapping[str, Tensor]) -> None:
        """Take back what ``shards`` gave, in place. ``RunError`` unless names and shapes are exactly those."""
        into = dict(self.shards())
        check_fit(into, shards)
        if not isinstance(self.lm, PeftModel):
            own = dict(own_tensors(self.lm))
            if own.keys() != into.keys():  # a file layout of its own (a mixture's experts one by one): let HF convert
                base = base_model(self.lm)
                converted: Any = type(base).from_pretrained(
                    None, config=base.config, state_dict=dict(shards), dtype=self.dtype
                )
                shards = dict(own_tensors(converted))
            into = own
        copy_by_name(into, shards)

    def adapters_off(self) -> AbstractContextManager[None]:
        """While open, the policy is its base model."""
        if not isinstance(self.lm, PeftModel):
            raise RuntimeError("the policy has no adapters to turn off")
        return self.lm.disable_adapter()

    def hidden(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Final hidden states ``[T, D]`` of packed tokens ``ids [T]`` at ``positions [T]``."""
        return last_hidden(self.backbone, ids, positions, layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [N, D]`` -> float32 ``[N, V]``, before any temperature."""
        return head_logits(hidden, self.head_weight, self.head_bias, scale=self.logit_scale, softcap=self.softcap)

    def forward(self, packed: Packed, targets: Tensor, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """Log-probability and entropy (nats) of response tokens ``targets [R]`` under the tempered density.

        ``want`` names the outputs, of ``logprobs`` and ``entropy``, each ``[R]`` in float32; or only ``hidden``, the
        states ``[R, D]`` that they come from.
        """
        _known(want, {"hidden"} if "hidden" in want else {"logprobs", "entropy"})
        hidden = self.hidden(packed.ids, packed.positions, packed)[packed.predict.values]
        if "hidden" in want:
            return {"hidden": hidden}
        logprobs, entropy = token_logprobs(
            hidden,
            self.head_weight,
            self.head_bias,
            targets,
            temperature=temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            with_entropy="entropy" in want,
        )
        out = {"logprobs": logprobs}
        if entropy is not None:
            out["entropy"] = entropy
        return {name: out[name] for name in want}


def _known(want: frozenset[str], names: set[str]) -> None:
    if not want or want - names:
        raise ValueError(f"asked for {sorted(want)}; this model gives {sorted(names)}")
