"""PyTorch training engine. This form computes in one process on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.batch import Batch, Ragged
from verl.config.errors import RequestError
from verl.config.model import OptimizerConfig
from verl.engines.base import LossFn, UpdateReport
from verl.engines.optim import Optimizer
from verl.models.packing import Packed, pack
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import HIDDEN, SharedValue, Value


class FsdpEngine:
    """A ``TrainEngine`` around one model.

    Args:
        module: what is trained; one with no trainable parameter (a reference) can only ``forward``.
        optimizer: how.
        total_optimizer_steps: of the whole run, for schedules that end; ``None``: unknown.
        gradient_checkpointing: while training, keep only each layer's input and compute the layer again in the
            backward pass.
    """

    def __init__(
        self,
        module: Policy | Value | SharedValue | Scorer,
        optimizer: OptimizerConfig,
        total_optimizer_steps: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.module = module
        trainable = list(module.trainable())
        self.optimizer = Optimizer(trainable, optimizer, total_optimizer_steps) if trainable else None
        if gradient_checkpointing and trainable and not isinstance(module, SharedValue):
            _recompute_layers(module.backbone)

    def forward(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], want: frozenset[str], temperature: float
    ) -> dict[str, Ragged]:
        order = [row for rows in micro_batches for row in rows]
        if sorted(order) != list(range(len(batch))):
            raise ValueError(f"micro-batches hold {len(order)} rows, not each of the batch's {len(batch)} once")
        home = batch.ragged("response_ids").values.device
        parts: dict[str, list[Tensor]] = {name: [] for name in want}
        self.module.eval()
        with torch.no_grad():
            for rows in micro_batches:
                for name, values in self._outputs(batch.select(rows), want, temperature).items():
                    parts[name].append(values.to(home))
        lengths = batch.ragged("response_ids").lengths
        back = torch.tensor(order).argsort().tolist()
        return {name: Ragged(torch.cat(values), lengths[order]).select(back) for name, values in parts.items()}

    def update(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        want: frozenset[str],
        temperature: float,
    ) -> UpdateReport:
        if self.optimizer is None:
            raise RuntimeError("this engine's model has no trainable parameter")
        report = UpdateReport(lr=self.optimizer.lr)
        mask = batch.ragged("response_mask")
        if not any(mask.select(rows).values.any() for rows in micro_batches):
            self.optimizer.skip()
            report.skipped = "empty"
            return report
        self.module.train()
        for rows in micro_batches:
            micro = batch.select(rows)
            loss, stats = loss_fn(self._outputs(micro, want, temperature), micro)
            loss.backward()
            report.add(stats)
        self.module.eval()
        report.grad_norm, stepped = self.optimizer.step()
        if not stepped:
            report.skipped = "nonfinite"
        return report

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.shards()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.optimizer.state() if self.optimizer else ({}, {})

    def restore(self, shards: Mapping[str, Tensor], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.module.load(shards)
        if self.optimizer:
            self.optimizer.restore(tensors, facts)

    def _outputs(self, rows: Batch, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """The module's outputs ``[R]`` for rows computed together."""
        device = self.module.device
        if isinstance(self.module, SharedValue) and HIDDEN in rows:
            return self.module(None, None, want, temperature, hidden=rows.ragged(HIDDEN).values.to(device))
        targets = rows.ragged("response_ids").values.to(device)
        return self.module(self._pack(rows).to(device), targets, want, temperature)

    def _pack(self, rows: Batch) -> Packed:
        groups = rows.tensor("group").tolist() if "group" in rows else None
        prompts, responses = rows.ragged("prompt_ids").to("cpu"), rows.ragged("response_ids").to("cpu")
        return pack(prompts, responses, groups, ends=self.module.reads_ends)


def _recompute_layers(backbone: nn.Module) -> None:
    """Gradient checkpointing layer by layer while ``backbone`` is in training mode (there is no dropout, so the random
    state needs no saving). ``RequestError`` where the architecture has none."""
    # the first name is transformers' new one, the second the only one of older releases
    enable: Any = getattr(backbone, "activation_checkpointing_enable", None) or backbone.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise RequestError(f"gradient_checkpointing: {error}; set it to false") from error
