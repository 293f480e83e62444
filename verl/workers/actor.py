"""The policy where answers are sampled: log-probabilities, advantages, updates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages import ESTIMATORS, TokenAdvantages, broadcast, place_scores, subtract_kl
from verl.algorithms.correction import correction_weights, effective_share
from verl.algorithms.kl import kl_estimate
from verl.algorithms.named import call
from verl.algorithms.policy import POLICY_LOSSES, covariance_tokens
from verl.algorithms.reduce import masked_whiten, reduce_loss, row_counts, row_sums, select
from verl.batch import Batch, Ragged
from verl.config.run import RunConfig
from verl.engines.base import LossFn, Stats, TrainEngine
from verl.seats import MiniBatch
from verl.workers.lap import Lap, Mean, Most
from verl.workers.update import mask_and_row, run_steps

COVARIANCE = "covariance_tokens"  # batch column: tokens that clip_cov or kl_cov treat apart, chosen once per lap


class ActorWorker:
    """Advantages and policy losses are called by argument name; the recipe says which ones (config/recipes.py)."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg
        self.temperature = cfg.rollout.temperature

    def logprobs(self, batch: Batch, lap: Lap) -> None:
        out = self.engine.forward(batch, lap.micro_batches, frozenset({"logprobs"}), self.temperature)
        batch["old_logprobs"] = out["logprobs"]
        if "sampled_logprobs" in batch:
            gap = (_values(batch, "old_logprobs") - _values(batch, "sampled_logprobs")).abs()
            gap = gap[_values(batch, "response_mask")]
            lap.metrics["rollout/logprob_diff_mean"] = Mean.of(gap)
            lap.metrics["rollout/logprob_diff_max"] = Most.of(gap)

    def advantages(self, batch: Batch, lap: Lap) -> None:
        """Advantages and value targets of each response token (docs/algorithms.md)."""
        algorithm = self.cfg.algorithm
        column = batch.ragged("response_mask")
        mask, row, n = column.values, column.row_index, len(batch)
        scores, rewards = batch.tensor("scores"), torch.zeros(len(mask))
        if algorithm.kl_in == "reward" and lap.kl_coef:
            chosen = _values(batch, "chosen") if "chosen" in batch else mask  # of rows out of the loss, too
            rewards = subtract_kl(rewards, self._old(batch).values, _values(batch, "ref_logprobs"), chosen, lap.kl_coef)
            scores, rewards = scores + row_sums(rewards.double(), chosen, row, n), select(rewards, mask)
        facts: dict[str, Any] = self._numbers() | {
            "scores": scores,
            "rewards": rewards + place_scores(batch.tensor("scores"), mask, row, n),
            "mask": mask, "row": row, "n_rows": n, "group": batch.tensor("group"), "lengths": row_counts(mask, row, n),
        }  # fmt: skip
        for name in ("values", "token_rewards", "old_logprobs", "sampled_logprobs"):
            if name in batch:
                facts[name] = _values(batch, name)
        if "greedy_scores" in batch:
            facts["greedy_scores"] = batch.tensor("greedy_scores")
        if "reward_parts" in batch:
            facts["per_reward"], facts["reward_weights"] = parts_of(batch), self.cfg.reward_weights
        self._write(batch, lap, call(ESTIMATORS[str(algorithm.recipe.advantage)], facts))
        if "values" in batch:
            values, returns = facts["values"][mask], _values(batch, "returns")[mask]
            variance = returns.var().item() if len(returns) > 1 else 0.0
            explained = 1 - (returns - values).var().item() / variance if variance else None
            lap.metrics["critic/value_mean"] = values.mean().item() if len(values) else None
            lap.metrics["critic/explained_variance"] = explained

    def distill(self, batch: Batch, lap: Lap) -> None:
        """Advantages from a teacher's log-probabilities of the student's tokens; no reward takes part."""
        facts = self._numbers() | {"mask": _values(batch, "response_mask"), "old_logprobs": self._old(batch).values}
        facts["teacher_logprobs"] = _values(batch, "teacher_logprobs")
        self._write(batch, lap, call(ESTIMATORS[str(self.cfg.algorithm.recipe.advantage)], facts))
        kl = kl_estimate(facts["old_logprobs"], facts["teacher_logprobs"], facts["mask"], "k3")[facts["mask"]]
        lap.metrics["distill/kl"] = kl.mean().item() if len(kl) else None

    def _numbers(self) -> dict[str, Any]:
        """The algorithm's numbers by key; ``old_logprobs`` names a choice there and a column among the facts."""
        return {key: value for key, value in self.cfg.algorithm.model_dump().items() if key != "old_logprobs"}

    def _write(self, batch: Batch, lap: Lap, estimate: Tensor | TokenAdvantages) -> None:
        """The columns of the lap's rows, and which rows and tokens the update will treat apart."""
        algorithm, column = self.cfg.algorithm, batch.ragged("response_mask")
        mask = column.values
        if isinstance(estimate, Tensor):  # one per row
            spread = broadcast(estimate, mask, column.row_index)
            estimate = TokenAdvantages(spread, spread)
        advantages, returns = estimate
        if algorithm.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        batch["advantages"] = column.with_values(advantages.float())
        batch["returns"] = column.with_values(returns.float())
        lap.trained = self.trained_rows(batch)
        if algorithm.recipe.loss in ("clip_cov", "kl_cov"):
            facts = self._numbers() | {
                "old_logprobs": self._old(batch).values, "advantages": _values(batch, "advantages"),
                "mask": mask, "kind": algorithm.recipe.loss, "seed": self.cfg.seed + lap.step,
            }  # fmt: skip
            batch[COVARIANCE] = column.with_values(call(covariance_tokens, facts))

    def _old(self, batch: Batch) -> Ragged:
        """Where the ratio starts: the trainer's own log-probabilities, or the sampler's (bypass)."""
        return batch.ragged("sampled_logprobs" if self.cfg.algorithm.old_logprobs == "sampler" else "old_logprobs")

    def trained_rows(self, batch: Batch) -> list[bool]:
        """Rows whose advantages aren't all 0: the policy loss has no gradient in others."""
        a = batch.ragged("advantages")
        live = torch.zeros(len(batch), dtype=torch.bool).index_put_((a.row_index[a.values != 0],), torch.tensor(True))
        return live.tolist()

    def update(self, batch: Batch, lap: Lap) -> None:
        algorithm = self.cfg.algorithm
        want = {"logprobs", "entropy"}
        steps = run_steps(
            self.engine, batch, lap.mini_batches, lambda mini: self._loss(mini, lap), want, self.temperature
        )
        m = lap.metrics
        m |= steps.policy_metrics()
        if steps.sums.get("tokens"):
            m["policy/entropy"] = steps.mean("entropy", "tokens")
        m["policy/clip_fraction"] = steps.mean("clipped", "tokens") or 0.0
        m["policy/kl_step"] = steps.mean("approx_kl", "tokens")
        m["policy/ratio_max"] = steps.sums.get("ratio_max")
        if "kl" in steps.sums:
            m["kl/mean"] = steps.mean("kl", "tokens")
            m["kl/per_response"] = lap.kl_per_response = steps.mean("kl", "rows")
        m["rollout/kl"] = steps.mean("sampler_kl", "tokens")
        sums, tokens = steps.sums, steps.sums.get("tokens")
        if tokens:
            m["rollout/effective_share"] = effective_share(sums["ratio"], sums["ratio_squares"], tokens)
        if tokens and algorithm.correction != "none":
            m["correction/weight_mean"] = steps.mean("weight", "tokens")
            m["correction/effective_share"] = effective_share(sums["weight"], sums["weight_squares"], tokens)
            m["correction/changed"] = steps.mean("weight_changed", "tokens")
        if "gap_max" in steps.sums:  # else the pass before the update has told
            m["rollout/logprob_diff_mean"] = steps.mean("gap", "tokens")
            m["rollout/logprob_diff_max"] = steps.sums["gap_max"]

    def _loss(self, mini: MiniBatch, lap: Lap) -> LossFn:
        """The policy loss of one micro-batch, already divided by the mini-batch's global totals."""
        cfg, algorithm = self.cfg, self.cfg.algorithm
        numbers = self._numbers()
        numbers["clip_low"], numbers["clip_high"] = algorithm.clip_range
        policy_loss = POLICY_LOSSES[algorithm.recipe.loss]

        def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Stats]:
            logprobs, entropy = outputs["logprobs"], outputs["entropy"]
            (mask, row), n = mask_and_row(micro), len(micro)
            sampled = _values(micro, "sampled_logprobs")
            on_policy = "old_logprobs" not in micro  # one optimizer step per lap: the policy is its own past
            old = _values(micro, "old_logprobs") if not on_policy else logprobs.detach()
            if algorithm.old_logprobs == "sampler":
                old = sampled
            facts = numbers | {
                "logprobs": logprobs, "old_logprobs": old, "advantages": _values(micro, "advantages"),
                "mask": mask, "row": row, "n_rows": n,
            }  # fmt: skip
            if COVARIANCE in micro:
                facts[COVARIANCE] = _values(micro, COVARIANCE)
            out = call(policy_loss, facts)
            losses = out.losses
            trainer = old if algorithm.old_logprobs == "trainer" else logprobs.detach()
            apart = call(correction_weights, facts | {"old_logprobs": trainer, "sampled_logprobs": sampled})
            stats: dict[str, Tensor | float] = {
                "sampler_kl": apart.kl, "ratio": apart.ratio_total, "ratio_squares": apart.ratio_squares
            }  # fmt: skip
            if algorithm.correction != "none":
                losses = losses * apart.weights
                stats |= {"weight": apart.total, "weight_squares": apart.squares, "weight_changed": apart.changed}
            if "ref_logprobs" in micro and algorithm.kl_in == "loss" and lap.kl_coef:
                losses = losses + lap.kl_coef * kl_estimate(
                    logprobs, _values(micro, "ref_logprobs"), mask, algorithm.kl_estimator
                )
            if algorithm.entropy_coef:
                losses = losses - algorithm.entropy_coef * entropy
            total = reduce_loss(
                losses, mask, row, n, algorithm.loss_reduction, mini.totals, fixed_length=cfg.max_response_length
            )
            with torch.no_grad():
                stats |= {
                    "loss": total.detach(), "tokens": mask.sum(), "rows": (row_counts(mask, row, n) > 0).sum(),
                    "entropy": select(entropy, mask).double().sum(), "clipped": out.clipped, "approx_kl": out.approx_kl,
                    "ratio_max": out.ratio_max,
                }  # fmt: skip
                if on_policy:
                    gap = select((logprobs - sampled).abs(), mask).double()
                    stats |= {"gap": gap.sum(), "gap_max": gap.max() if len(gap) else 0.0}
                if "ref_logprobs" in micro:
                    kl = kl_estimate(old, _values(micro, "ref_logprobs"), mask, algorithm.kl_estimator)
                    stats["kl"] = kl.sum()
            return total, stats

        return loss


def _values(batch: Batch, name: str) -> Tensor:
    return batch.ragged(name).values


def parts_of(batch: Batch) -> dict[str, Tensor]:
    """Each reward by itself, ``[B]``; NaN where it abstained, and on rows without a score (one of them failed)."""
    rows: list[dict[str, float | None]] = batch["reward_parts"]  # type: ignore[assignment]
    unscored = torch.isnan(batch.tensor("scores"))
    values = {name: [r[name] for r in rows] for name in rows[0]}
    columns = {
        n: torch.tensor([math.nan if x is None else x for x in v], dtype=torch.float64) for n, v in values.items()
    }
    return {name: column.masked_fill(unscored, math.nan) for name, column in columns.items()}
