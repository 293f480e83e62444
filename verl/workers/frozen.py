"""Frozen models that judge the rows: the starting policy, and a teacher."""

from __future__ import annotations

import contextlib

from verl.algorithms.kl import kl_estimate
from verl.batch import Batch, Ragged
from verl.config.run import RunConfig
from verl.engines.base import TrainEngine
from verl.models.policy import Policy
from verl.workers.lap import Lap


class ReferenceWorker:
    """The frozen starting policy: a copy of its own, or the actor's base weights with the adapters off."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig, adapters_of: Policy | None = None) -> None:
        self.engine, self.cfg, self.adapters_of = engine, cfg, adapters_of

    def _forward(self, batch: Batch, micro_batches: list[list[int]]) -> Ragged:
        with self.adapters_of.as_reference() if self.adapters_of else contextlib.nullcontext():
            out = self.engine.forward(batch, micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        return out["logprobs"]

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        batch["ref_logprobs"] = self._forward(batch, lap.micro_batches)

    def drift(self, batch: Batch, lap: Lap) -> None:
        """KL to the starting policy on the first ``kl_sample_rows`` rows; measured only, never trained on."""
        k = min(self.cfg.kl_sample_rows, len(batch))
        sample = batch.select(range(k))  # whole groups: their prompts cost once
        kept = [[i for i in micro if i < k] for micro in lap.micro_batches]
        ref = self._forward(sample, [micro for micro in kept if micro]).values
        mask = sample.ragged("response_mask").values
        kl = kl_estimate(sample.ragged("sampled_logprobs").values, ref, mask, self.cfg.algorithm.kl_estimator)
        lap.metrics["kl/mean"] = kl[mask].mean().item() if mask.any() else None


class TeacherWorker:
    """A frozen model with the student's vocabulary."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        out = self.engine.forward(batch, lap.micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        batch["teacher_logprobs"] = out["logprobs"]
