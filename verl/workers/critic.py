"""Models that learn what rows are worth: the critic's values, and an implicit process reward."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.preference import implicit_outcome, implicit_token_rewards
from verl.algorithms.reduce import reduce_loss, row_counts
from verl.algorithms.value import value_loss
from verl.batch import Batch, Ragged
from verl.config.run import RunConfig
from verl.engines.base import LossFn, Stats, TrainEngine
from verl.models.packing import send
from verl.models.value import HIDDEN
from verl.seats import MiniBatch
from verl.workers.lap import Lap
from verl.workers.update import mask_and_row, run_steps

START = "process_reward_start"  # batch column: log-probabilities by the process reward model's frozen start


class CriticWorker:
    """The value model."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg
        self.shared = cfg.critic_model_config is not None and cfg.critic_model_config.shares == "actor"

    def values(self, batch: Batch, lap: Lap) -> None:
        want = frozenset({"values", "hidden"} if self.shared else {"values"})
        out = self.engine.forward(batch, lap.micro_batches, want, self.cfg.rollout.temperature)
        batch["values"] = out["values"]
        if self.shared:  # the backbone isn't trained by the value loss, so its hidden states serve the update too
            batch[HIDDEN] = out["hidden"]

    def update(self, batch: Batch, lap: Lap) -> None:
        steps = run_steps(self.engine, batch, lap.mini_batches, self._loss, {"values"})
        m = lap.metrics
        m["critic/loss"] = steps.loss
        m["critic/grad_norm"] = steps.grad_norm
        m["critic/lr"] = steps.lr
        m["critic/bad_steps"] = steps.bad
        m["critic/clip_fraction"] = steps.mean("clipped", "tokens") or 0.0

    def _loss(self, mini: MiniBatch) -> LossFn:
        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Stats]:
            mask, row = mask_and_row(micro)
            old, returns = (micro.ragged(name).values for name in ("values", "returns"))
            out = value_loss(outputs["values"], old, returns, mask, self.cfg.algorithm.value_clip)
            total = reduce_loss(out.losses, mask, row, len(micro), "token-mean", mini.totals)
            return total, {"loss": total.detach(), "tokens": mask.sum(), "clipped": out.clipped}

        return loss


class ProcessRewardWorker:
    """A language model whose log-ratio to its own start is each token's reward; it learns from the rows' outcomes.

    PRIME (arXiv 2502.01456). It is updated first, so that its rewards come from weights that know this lap.
    """

    def __init__(self, engine: TrainEngine, start: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.start, self.cfg = engine, start, cfg
        self.beta = cfg.algorithm.prime_beta

    def update(self, batch: Batch, lap: Lap) -> None:
        batch[START] = self._forward(self.start, batch, lap)
        steps = run_steps(self.engine, batch, lap.forward_steps, self._loss, {"logprobs"}, self.cfg.rollout.temperature)
        lap.metrics["process_reward/loss"] = steps.loss
        lap.metrics["process_reward/grad_norm"] = steps.grad_norm
        lap.metrics["process_reward/bad_steps"] = steps.bad
        lap.metrics["process_reward/accuracy"] = steps.mean("right", "rows")

    def rewards(self, batch: Batch, lap: Lap) -> None:
        now, mask = self._forward(self.engine, batch, lap), batch.ragged("response_mask").values
        start = batch.ragged(START).values
        batch["token_rewards"] = now.with_values(implicit_token_rewards(now.values, start, mask, self.beta).float())

    def _forward(self, engine: TrainEngine, batch: Batch, lap: Lap) -> Ragged:
        out = engine.forward(batch, lap.micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        return out["logprobs"]

    def _loss(self, mini: MiniBatch) -> LossFn:
        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Stats]:
            logprobs, start = outputs["logprobs"], micro.ragged(START).values
            (mask, row), n = mask_and_row(micro), len(micro)
            labels = torch.nan_to_num(micro.tensor("scores")).clamp(0, 1)  # a row without a score is masked
            labels = send(labels, logprobs.device)
            out = implicit_outcome(logprobs, start, mask, row, n, labels, self.beta)
            total = out.losses.sum() / max(mini.totals.rows, 1)
            counted = row_counts(mask, row, n) > 0
            right = ((out.rewards > 0) == (labels > 0.5)) & counted
            return total, {"loss": total.detach(), "right": right.sum(), "rows": counted.sum()}

        return loss
