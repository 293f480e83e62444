"""Workers that hold models: actor, reference and critic. Each op reads and writes columns of the lap's batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.advantages import broadcast, gae, grpo, place_scores, rloo, subtract_kl
from verl.algorithms.kl import kl_estimate
from verl.algorithms.policy import ppo_loss
from verl.algorithms.reduce import masked_whiten, reduce_loss, row_sums
from verl.algorithms.value import value_loss
from verl.batch import Batch, Ragged
from verl.config.run import RunConfig
from verl.engines.base import TrainEngine, UpdateReport
from verl.models.policy import Policy
from verl.models.value import HIDDEN
from verl.seats import MiniBatch
from verl.workers.lap import Lap


class ActorWorker:
    """The policy: log-probabilities, advantages, updates."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        out = self.engine.forward(batch, lap.micro_batches, frozenset({"logprobs"}), self.cfg.rollout.temperature)
        batch["old_logprobs"] = out["logprobs"]

    def advantages(self, batch: Batch, lap: Lap) -> None:
        """Advantages and value targets of each response token (docs/algorithms.md)."""
        algorithm = self.cfg.algorithm
        mask = batch.ragged("response_mask")
        kept, row, n = mask.values, mask.row_index, len(batch)
        scores, rewards = batch.tensor("scores"), torch.zeros(len(mask.values))
        if algorithm.kl_place == "reward" and lap.kl_coef:
            old, ref = batch.ragged("old_logprobs").values, batch.ragged("ref_logprobs").values
            rewards = subtract_kl(rewards, old, ref, kept, lap.kl_coef)
        if algorithm.name == "ppo":
            rewards = rewards + place_scores(scores, kept, row, n)
            values = batch.ragged("values").values
            advantages, returns = gae(rewards, values, kept, row, algorithm.gamma, algorithm.lam)
            if algorithm.whiten_advantages:
                advantages = masked_whiten(advantages, kept)
        else:
            scores = scores + row_sums(rewards.double(), kept, row, n)
            groups = batch.tensor("group")
            if algorithm.name == "grpo":
                per_row = grpo(scores, groups, algorithm.scale, algorithm.allow_singletons)
            else:
                per_row = rloo(scores, groups, algorithm.allow_singletons)
            returns = advantages = broadcast(per_row, kept, row)
        batch["advantages"] = mask.with_values(advantages.float())
        batch["returns"] = mask.with_values(returns.float())

    def trained_rows(self, batch: Batch) -> list[bool]:
        """Rows with any gradient. A row whose advantages are all 0 has none, unless KL or entropy is in the loss."""
        a = batch.ragged("advantages")
        live = torch.zeros(len(batch), dtype=torch.bool).index_put_((a.row_index[a.values != 0],), torch.tensor(True))
        return live.tolist()

    def update(self, batch: Batch, lap: Lap) -> None:
        sums, skipped, norms, lr = UpdateReport(), {"empty": 0, "nonfinite": 0}, [], 0.0
        want = frozenset({"logprobs", "entropy"})
        for mini in lap.mini_batches:
            report = self.engine.update(batch, mini.ranks[0], self._loss(mini, lap), want, self.cfg.rollout.temperature)
            sums.add(report.stats)
            lr = report.lr
            if report.skipped:
                skipped[report.skipped] += 1
            else:
                norms.append(report.grad_norm)
        steps = len(norms)
        m = lap.metrics
        m["policy/loss"] = sums.stats.get("loss", 0.0) / max(1, steps)
        if sums.stats.get("tokens"):
            m["policy/entropy"] = _ratio(sums.stats, "entropy", "tokens")
        m["policy/clip_fraction"] = _ratio(sums.stats, "clipped", "tokens") or 0.0
        m["policy/kl_step"] = _ratio(sums.stats, "approx_kl", "tokens")
        m["policy/ratio_max"] = sums.stats.get("ratio_max")
        m["policy/grad_norm"] = sum(norms) / len(norms) if norms else 0.0
        m["policy/lr"] = lr
        m["policy/optimizer_steps"] = steps
        m["policy/empty_steps"] = skipped["empty"]
        m["policy/bad_steps"] = skipped["nonfinite"]
        if "kl" in sums.stats:
            m["kl/mean"] = _ratio(sums.stats, "kl", "tokens")
            m["kl/per_response"] = lap.kl_per_response = _ratio(sums.stats, "kl", "rows")
        if "old_logprobs" in batch:
            old, sampled = batch.ragged("old_logprobs"), batch.ragged("sampled_logprobs")
            gap = (old.values - sampled.values).abs()[batch.ragged("response_mask").values]
            m["rollout/logprob_diff_mean"] = gap.mean().item() if len(gap) else None
            m["rollout/logprob_diff_max"] = gap.max().item() if len(gap) else None
        elif "gap_max" in sums.stats:
            m["rollout/logprob_diff_mean"] = _ratio(sums.stats, "gap", "tokens")
            m["rollout/logprob_diff_max"] = sums.stats["gap_max"]

    def _loss(self, mini: MiniBatch, lap: Lap):
        """The policy loss of one micro-batch, already divided by the mini-batch's global totals."""
        cfg, algorithm = self.cfg, self.cfg.algorithm

        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, float]]:
            logprobs, entropy = outputs["logprobs"], outputs["entropy"]
            device = logprobs.device
            mask = micro.ragged("response_mask").to(device)
            on_policy = "old_logprobs" not in micro  # one optimizer step per lap: the policy is its own past
            old = logprobs.detach() if on_policy else micro.ragged("old_logprobs").to(device).values
            advantages = micro.ragged("advantages").to(device).values
            low, high = algorithm.clip_range
            out = ppo_loss(logprobs, old, advantages, mask.values, low, high, algorithm.dual_clip)
            losses = out.losses
            if "ref_logprobs" in micro and algorithm.kl_place == "loss" and lap.kl_coef:
                ref = micro.ragged("ref_logprobs").to(device).values
                losses = losses + lap.kl_coef * kl_estimate(logprobs, ref, mask.values, algorithm.kl_estimator)
            if algorithm.entropy_coef:
                losses = losses - algorithm.entropy_coef * entropy
            total = reduce_loss(
                losses, mask.values, mask.row_index, len(micro), algorithm.loss_reduction, mini.totals,
                fixed_length=cfg.max_response_length,
            )  # fmt: skip
            with torch.no_grad():
                m = mask.values
                stats = {
                    "loss": total.item(),
                    "tokens": m.sum().item(),
                    "rows": mask.row_index[m].unique().numel(),
                    "entropy": entropy[m].sum().item(),
                    "clipped": out.clipped.item(),
                    "approx_kl": out.approx_kl.item(),
                    "ratio_max": out.ratio_max.item(),
                }
                if on_policy:
                    gap = (logprobs - micro.ragged("sampled_logprobs").to(device).values).abs()[m]
                    stats |= {"gap": gap.sum().item(), "gap_max": gap.max().item() if len(gap) else 0.0}
                if "ref_logprobs" in micro:
                    ref = micro.ragged("ref_logprobs").to(device).values
                    stats["kl"] = kl_estimate(old, ref, m, algorithm.kl_estimator).sum().item()
            return total, {k: float(v) for k, v in stats.items()}

        return loss


class ReferenceWorker:
    """The frozen starting policy: a copy of its own, or the actor's base weights with the adapters off."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig, adapters_of: Policy | None = None) -> None:
        self.engine, self.cfg, self.adapters_of = engine, cfg, adapters_of

    def _forward(self, batch: Batch, micro_batches: list[list[int]]) -> Ragged:
        with self.adapters_of.adapters_off() if self.adapters_of else contextlib.nullcontext():
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
        sums, norms, lr, bad = UpdateReport(), [], 0.0, 0
        want = frozenset({"values"})
        for mini in lap.mini_batches:
            report = self.engine.update(batch, mini.ranks[0], self._loss(mini), want, self.cfg.rollout.temperature)
            sums.add(report.stats)
            lr = report.lr
            bad += report.skipped == "nonfinite"
            if not report.skipped:
                norms.append(report.grad_norm)
        m = lap.metrics
        m["critic/loss"] = sums.stats.get("loss", 0.0) / max(1, len(norms))
        m["critic/grad_norm"] = sum(norms) / len(norms) if norms else 0.0
        m["critic/lr"] = lr
        m["critic/bad_steps"] = bad
        m["critic/clip_fraction"] = _ratio(sums.stats, "clipped", "tokens") or 0.0
        mask = batch.ragged("response_mask").values
        returns, values = batch.ragged("returns").values[mask], batch.ragged("values").values[mask]
        m["critic/value_mean"] = values.mean().item() if len(values) else None
        variance = returns.var().item() if len(returns) > 1 else 0.0
        m["critic/explained_variance"] = 1 - (returns - values).var().item() / variance if variance else None

    def _loss(self, mini: MiniBatch):
        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, float]]:
            values = outputs["values"]
            device = values.device
            mask = micro.ragged("response_mask").to(device)
            old, returns = (micro.ragged(c).to(device).values for c in ("values", "returns"))
            out = value_loss(values, old, returns, mask.values, self.cfg.algorithm.value_clip)
            total = reduce_loss(out.losses, mask.values, mask.row_index, len(micro), "token-mean", mini.totals)
            return total, {
                "loss": total.item(),
                "tokens": mask.values.sum().item(),
                "clipped": out.clipped.item(),
            }

        return loss


def _ratio(sums: Mapping[str, float], name: str, count: str) -> float | None:
    """``name / count``; None when nothing was counted."""
    return sums[name] / sums[count] if sums.get(count) else None
