"""Value models: the expected return before each response token, from a backbone and one linear head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from verl.models.decoder import base_model, known, without_dropout
from verl.models.naming import copy_by_name
from verl.models.packing import Packed, last_hidden, read
from verl.models.policy import Policy
from verl.models.unread import take

HIDDEN = "critic_hidden"  # batch column: the backbone's hidden states [R, D], kept by a shared critic between its ops


class _Head(nn.Linear):
    """``[N, D] -> [N]`` in float32 whatever the backbone's dtype: one row costs nothing and values need the digits."""

    def __init__(self, width: int, device: torch.device, seed: int) -> None:
        super().__init__(width, 1, dtype=torch.float32)
        with torch.no_grad():  # values start near 0; drawn on the CPU, so equal on every device
            self.weight.normal_(0, 1 / (width + 1), generator=torch.Generator().manual_seed(seed))
            self.bias.zero_()
        if device.type != "meta":  # where the backbone is unread still
            self.to(device)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())[:, 0].clone()  # FSDP wants no view


class _Valuing(nn.Module):
    """What both value models share: their checkpoint is what they train."""

    reads_ends = False  # a value stands before its token
    value_head: _Head

    @property
    def device(self) -> torch.device:
        return self.value_head.weight.device

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that training changes; a backbone's names are those of the causal LM."""
        return ((f"value_head.{name}", p) for name, p in self.value_head.named_parameters() if p.requires_grad)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        return self.trainable()

    def load(self, shards: Mapping[str, Tensor]) -> None:
        """Take back what ``shards`` gave, in place. ``RunError`` unless names and shapes are exactly those."""
        copy_by_name(dict(self.shards()), shards)


class Value(_Valuing):
    """A backbone of its own, taken out of the causal LM ``lm`` (whose head is dropped), with a new value head."""

    def __init__(self, lm: nn.Module, seed: int = 0) -> None:
        super().__init__()
        base = base_model(lm)
        without_dropout(base)
        self.prefix = base.base_model_prefix
        self.config = base.config
        self.unread = take(lm)
        self.backbone = base.get_decoder()
        self.value_head = _Head(base.config.get_text_config().hidden_size, base.device, seed)
        self.eval()

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The backbone's parameters by the names of the causal LM."""
        return self.backbone.named_parameters(prefix=self.prefix)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, p) for name, p in self.weights() if p.requires_grad)
        yield from super().trainable()

    def forward(
        self, packed: Packed, targets: Tensor | None, want: frozenset[str], temperature: float
    ) -> dict[str, Tensor]:
        """``{"values": [R]}``: before each response token. Targets and temperature play no part."""
        del targets, temperature
        known(want, {"values"})
        hidden = last_hidden(self.backbone, packed.ids, packed.positions, packed)
        return {"values": packed.whole(self.value_head(read(hidden, packed.predict.values)))}


class SharedValue(_Valuing):
    """A value head on the policy's backbone. Only the head is its own, and only the head learns from the value loss."""

    policy: Policy

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # not a submodule: its parameters, mode and state belong to the actor
        self.value_head = _Head(policy.config.get_text_config().hidden_size, policy.device, seed)
        self.eval()

    def forward(
        self,
        packed: Packed | None,
        targets: Tensor | None,
        want: frozenset[str],
        temperature: float,
        hidden: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """``values [R]``, and with ``"hidden"`` in ``want`` also the hidden states ``[R, D]`` that they come from.

        Given these again as ``hidden`` (the backbone not having changed meanwhile), ``packed`` isn't looked at.
        """
        known(want, {"values", "hidden"})
        if hidden is None:
            assert packed is not None, "either packed rows or their hidden states"
            with torch.no_grad():  # the policy's own forward: it may be sharded, and is whole only then
                hidden = self.policy(packed, targets, frozenset({"hidden"}), temperature)["hidden"]
        out = {"hidden": hidden}
        if "values" in want:
            out["values"] = self.value_head(hidden)
        return {name: out[name] for name in want}
