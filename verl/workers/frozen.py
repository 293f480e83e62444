"""Frozen models that judge the rows: the starting policy, and a teacher."""

from __future__ import annotations

import contextlib

from torch import Tensor

from verl.algorithms.kl import kl_estimate
from verl.batch import Batch, Ragged
from verl.config.run import RunConfig
from verl.engines.base import TrainEngine
from verl.models.policy import Policy
from verl.workers.lap import Lap, Mean


class ReferenceWorker:
    """The frozen starting policy: a copy of its own, or the actor's base weights with the adapters off."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig, adapters_of: Policy | None = None) -> None:
        self.engine, self.cfg, self.adapters_of = engine, cfg, adapters_of

    def _forward(self, batch: Batch, micro_batches: list[list[int]]) -> Ragged:
        with self.adapters_of.as_reference() if self.adapters_of else contextlib.nullcontext():
            out = self.engine.forward(batch, micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        return out["logprobs"]

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        batch["ref_logprobs"] = ref = self._forward(batch, lap.micro_batches)
        if "sampled_logprobs" in batch and self.cfg.algorithm.recipe.pairs_sampled:
            sampled = ~batch.ragged("sampled_logprobs").values.isnan()  # rows outside of pairs, too
            lap.metrics["kl/mean"] = self._kl(batch, ref, sampled)

    def drift(self, batch: Batch, lap: Lap) -> None:
        """KL to the starting policy on the lap's first ``kl_sample_rows`` rows; measured only, never trained on.

        Column ``row`` holds the rows' numbers in the lap; without it the batch is the lap.
        """
        numbers = batch.tensor("row").tolist() if "row" in batch else range(len(batch))
        place: dict[int, int] = {}  # of the sampled rows, by their place in the batch
        for i, number in enumerate(numbers):
            if number < self.cfg.kl_sample_rows:  # whole groups: their prompts cost once
                place[i] = len(place)
        kept = [[place[i] for i in micro if i in place] for micro in lap.micro_batches]
        passes = [micro for micro in kept if micro]
        busy = self.engine.total([float(i < len(passes)) for i in range(len(kept))])  # ranks that make an i-th pass
        passes += [[]] * (sum(n > 0 for n in busy) - len(passes))
        sample = batch.select(list(place))
        lap.metrics["kl/mean"] = self._kl(sample, self._forward(sample, passes), sample.ragged("response_mask").values)

    def _kl(self, rows: Batch, ref: Ragged, mask: Tensor) -> Mean:
        sampled = rows.ragged("sampled_logprobs").values
        return Mean.of(kl_estimate(sampled, ref.values, mask, self.cfg.algorithm.kl_estimator)[mask])


class TeacherWorker:
    """A frozen model with the student's vocabulary."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        out = self.engine.forward(batch, lap.micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        batch["teacher_logprobs"] = out["logprobs"]
