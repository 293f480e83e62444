"""The policy: a Hugging Face causal language model that computes on packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl.config.errors import RequestError
from verl.models.adapters import keep_copy, starts_at_base
from verl.models.decoder import Decoder, adapted, base_model, known
from verl.models.logprobs import head_logits, token_logprobs
from verl.models.packing import Packed, read

REFERENCE = "reference"  # the kept copy of the adapter that training started from


class Policy(Decoder):
    """Wraps ``lm``, a causal LM whose attention is ``packing.ATTENTION`` (``factory.load_model`` gives one).

    Logits follow the model's own treatment: ``logit_scale`` multiplies them (Granite, Cohere), then ``softcap``
    bounds them (Gemma 2).
    """

    reads_ends = False  # a response's last token predicts nothing

    def __init__(self, lm: nn.Module) -> None:
        super().__init__(lm)
        base = base_model(lm)
        head = base.get_output_embeddings()
        if head is None:
            raise RequestError(f"{type(base).__name__} has no output head, so it can't be a policy")
        if hasattr(head, "base_layer"):
            raise RequestError("lora_target_modules names the output head; leave it out (all-linear does)")
        config = base.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        if getattr(config, "logits_scaling", None):  # Granite divides
            self.logit_scale = 1.0 / config.logits_scaling
        self._starts_at_base: bool | None = None  # None: no reference was kept
        self.eval()

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

    @property
    def has_adapters(self) -> bool:
        return self.adapter is not None

    def keep_reference(self) -> None:
        """Keep what is needed to be the present policy again (``as_reference``). Before any training; again: anew.

        That is the base where the adapter is fresh, else a frozen copy of the adapter. ``RuntimeError`` without
        adapters: the reference of a policy that trains all its weights is a copy of the whole.
        """
        if not adapted(self.lm) or self.adapter is None:
            raise RuntimeError("the policy has no adapters to keep")
        self._starts_at_base = starts_at_base(self.lm, self.adapter)
        if not self._starts_at_base:
            keep_copy(self.lm, self.adapter, REFERENCE)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """While open, the policy is the one it was at ``keep_reference``; ``RuntimeError`` where nothing was kept."""
        if not adapted(self.lm) or self.adapter is None or self._starts_at_base is None:
            raise RuntimeError("keep_reference must come before training")
        if self._starts_at_base:
            with self.lm.disable_adapter():
                yield
            return
        trained = [(p, p.requires_grad) for p in self.lm.parameters()]  # peft changes them as it switches
        self.lm.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            self.lm.set_adapter(self.adapter)
            for p, flag in trained:
                p.requires_grad_(flag)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [N, D]`` -> float32 ``[N, V]``, before any temperature."""
        return head_logits(hidden, self.head_weight, self.head_bias, scale=self.logit_scale, softcap=self.softcap)

    def forward(self, packed: Packed, targets: Tensor, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """Log-probability and entropy (nats) of response tokens ``targets [R]`` under the tempered density.

        ``want`` names the outputs, of ``logprobs`` and ``entropy``, each ``[R]`` in float32; or only ``hidden``, the
        states ``[R, D]`` that they come from.
        """
        known(want, {"hidden"} if "hidden" in want else {"logprobs", "entropy"})
        hidden = read(self.hidden(packed.ids, packed.positions, packed), packed.predict.values)
        if "hidden" in want:
            return {"hidden": packed.whole(hidden)}
        logprobs, entropy = token_logprobs(
            hidden,
            self.head_weight,
            self.head_bias,
            packed.own(targets),
            temperature=temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            with_entropy="entropy" in want,
        )
        out = {"logprobs": logprobs}
        if entropy is not None:
            out["entropy"] = entropy
        return {name: packed.whole(x) for name, x in out.items() if name in want}
