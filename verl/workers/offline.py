"""Workers that train on rows as they are: preference pairs, labelled answers, chats; a policy or a scorer.

Each has ``fit``, the update, and ``judge``, the same numbers on held-out rows without one. Losses are per pair, row or
token and divided by the mini-batch's global counts, so shares add over micro-batches and ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms import preference
from verl.algorithms.named import call
from verl.algorithms.preference import PairLoss, RowLoss
from verl.algorithms.reduce import last_tokens, reduce_loss, row_counts, row_sums, select
from verl.batch import Batch
from verl.config.run import RunConfig
from verl.engines.base import LossFn, Stats, TrainEngine, counted
from verl.models.packing import send
from verl.seats import MiniBatch, Totals
from verl.workers.lap import Lap
from verl.workers.update import mask_and_row, run_steps

# batch columns of KTO's rows that only serve the baseline, a prompt with another row's answer: the row whose prompt and
# group it shares (-1 elsewhere), and which of the answer's tokens are trained in its own row
MISMATCHED, ANSWER_MASK = "mismatched", "answer_mask"
Outputs = Mapping[str, Tensor]


class OfflineWorker:
    """``terms`` says what a subclass trains on; everything else is here."""

    want = "logprobs"

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg
        self.temperature = cfg.rollout.temperature  # of the sampler in online DPO; 1 where nothing is sampled
        self.numbers = cfg.algorithm.model_dump()

    def terms(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        """``(this micro-batch's share of the loss, sums that add)`` of rows whose ``outputs`` are flat ``[R]``."""
        raise NotImplementedError

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of added sums; a side without rows has none."""
        return {}

    def before_step(self, batch: Batch, mini: MiniBatch) -> None:
        """What a step needs of the weights as they are when its turn comes."""

    def fit(self, batch: Batch, lap: Lap) -> None:
        def loss_of(mini: MiniBatch) -> LossFn:
            self.before_step(batch, mini)
            return lambda outputs, micro: self._counted(outputs, micro, mini.totals)

        steps = run_steps(self.engine, batch, lap.mini_batches, loss_of, {self.want}, self.temperature)
        lap.metrics |= steps.policy_metrics()
        lap.metrics |= self.means(steps.sums)

    def judge(self, batch: Batch, lap: Lap) -> dict[str, float]:
        """Loss and metrics of all rows that an update would train, with the weights as they are; no step is made."""
        (mini,) = lap.mini_batches
        self.before_step(batch, mini)
        rows, micro_batches = _only(batch, mini.ranks[0])
        out = self.engine.forward(rows, micro_batches, frozenset({self.want}), self.temperature)
        with torch.no_grad():
            _, told = self._counted({name: column.values for name, column in out.items()}, rows, mini.totals)
        sums = counted([told])
        adding = [name for name in sums if not name.endswith("_max")]  # those are the same on all ranks
        sums |= zip(adding, self.engine.total([sums[name] for name in adding]), strict=True)
        return {"loss": sums["loss"], **self.means(sums)}

    def _counted(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        loss, sums = self.terms(outputs, rows, totals)
        return loss, {**sums, "loss": loss.detach()}


class PairWorker(OfflineWorker):
    """DPO and its kin. In online DPO the pairs are the best and the worst sampled answer of a prompt."""

    def __init__(self, engine: TrainEngine, cfg: RunConfig) -> None:
        super().__init__(engine, cfg)
        self.loss = preference.PAIR_LOSSES[cfg.algorithm.recipe.loss]

    def prefer(self, batch: Batch, lap: Lap) -> None:
        """The best and the worst row of each group; the others leave the loss."""
        mask = batch.ragged("response_mask")
        in_loss = row_counts(mask.values, mask.row_index, len(batch)) > 0  # others can't be a side of a pair
        scores = batch.tensor("scores").masked_fill(~in_loss, math.nan)
        preferred = preference.preferences_from_scores(scores, batch.tensor("group"))
        batch["preferred"] = preferred
        batch["response_mask"] = mask.with_values(mask.values & (preferred != 0)[mask.row_index])
        lap.trained = (preferred != 0).tolist()
        lap.metrics["preference/pairs"] = int((preferred > 0).sum())

    def terms(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        out = self._pairs(outputs["logprobs"], rows)
        return out.losses.sum() / max(totals.rows / 2, 1), preference.pair_statistics(out)

    def _pairs(self, logprobs: Tensor, rows: Batch) -> PairLoss:
        mask, row = mask_and_row(rows)
        chosen, rejected = _sides(rows, logprobs.device)
        sums, lengths = row_sums(logprobs, mask, row, len(rows)), row_counts(mask, row, len(rows))
        facts = self.numbers | {
            "chosen": sums[chosen], "rejected": sums[rejected],
            "chosen_lengths": lengths[chosen], "rejected_lengths": lengths[rejected],
        }  # fmt: skip
        if "ref_logprobs" in rows:
            ref = row_sums(rows.ragged("ref_logprobs").values, mask, row, len(rows))
            facts |= {"ref_chosen": ref[chosen], "ref_rejected": ref[rejected]}
        return call(self.loss, facts)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        return _pair_means(sums)


class LabelWorker(OfflineWorker):
    """KTO. The baseline is computed anew for every optimizer step, from prompts with another row's answer."""

    baseline = torch.zeros(())

    def before_step(self, batch: Batch, mini: MiniBatch) -> None:
        group = batch.tensor("group").tolist()
        partner = {group[i]: i for i, row in enumerate(batch.tensor(MISMATCHED).tolist()) if row >= 0}
        rows, micro_batches = _only(batch, [[partner[group[i]] for i in micro] for micro in mini.ranks[0]])
        now = self.engine.forward(rows, micro_batches, frozenset({"logprobs"}), self.temperature)["logprobs"].values
        gap = select(now - rows.ragged("ref_logprobs").values, rows.ragged(ANSWER_MASK).values)
        total, count = self.engine.total([gap.double().sum().item(), len(rows)])
        self.baseline = preference.kto_baseline(torch.tensor(total), int(count))

    def terms(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        logprobs, (mask, row) = outputs["logprobs"], mask_and_row(rows)
        gap = logprobs - rows.ragged("ref_logprobs").values
        good = send(rows.tensor("label") > 0.5, logprobs.device)
        facts = self.numbers | {"logratios": row_sums(gap, mask, row, len(rows)), "desirable": good}
        out: RowLoss = call(preference.kto, facts | {"baseline": self.baseline})
        sums = preference.kto_statistics(out, good)
        return out.losses.sum() / max(totals.rows, 1), {**sums, "baseline_max": self.baseline.item()}

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        sides = preference.kto_means(sums)
        found = {f"preference/{side}": value for side, value in sides.items()}
        if len(sides) == 2:
            found["preference/margin"] = sides["desirable_reward"] - sides["undesirable_reward"]
        return found | {"preference/kl_baseline": sums["baseline_max"]}


class ChatWorker(OfflineWorker):
    """Supervised fine-tuning: likelihood of the assistant's tokens."""

    def terms(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        mask, row = mask_and_row(rows)
        losses = preference.sft(outputs["logprobs"], mask)
        loss = reduce_loss(
            losses, mask, row, len(rows), self.cfg.algorithm.loss_reduction, totals,
            fixed_length=self.cfg.max_response_length,
        )  # fmt: skip
        return loss, {"nll": losses.detach().sum(), "tokens": mask.sum()}

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"sft/nll": sums["nll"] / sums["tokens"]} if sums.get("tokens") else {}


class ScorerWorker(OfflineWorker):
    """Reward models: a row's score is read at its last token. Trained on pairs, or on labels (outcome verifier)."""

    want = "scores"

    def terms(self, outputs: Outputs, rows: Batch, totals: Totals) -> tuple[Tensor, Stats]:
        mask, row = mask_and_row(rows)
        scores = outputs["scores"][last_tokens(mask, row, len(rows))]
        if self.cfg.algorithm.recipe.loss == "outcome":
            labels = send(rows.tensor("label"), scores.device)
            out = preference.outcome(scores, labels)
            right = ((out.rewards > 0) == (labels > 0.5)).sum()
            return out.losses.sum() / max(totals.rows, 1), {"right": right, "rows": len(rows)}
        chosen, rejected = _sides(rows, scores.device)
        margins = None
        if "margin" in rows:  # an unknown margin is none
            margins = torch.nan_to_num(send(rows.tensor("margin"), scores.device)[chosen])
        pairs = preference.pairwise(scores[chosen], scores[rejected], margins, self.cfg.algorithm.center_coef)
        return pairs.losses.sum() / max(totals.rows / 2, 1), preference.pair_statistics(pairs)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        if "rows" in sums:
            return {"preference/accuracy": sums["right"] / sums["rows"]}
        return _pair_means(sums)


def _only(batch: Batch, micro_batches: list[list[int]]) -> tuple[Batch, list[list[int]]]:
    """The rows of the micro-batches one after another, and the micro-batches in their numbers there."""
    number = itertools.count()
    rows = batch.select([i for micro in micro_batches for i in micro])
    return rows, [[next(number) for _ in micro] for micro in micro_batches]


def _sides(rows: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of the chosen and of the rejected rows, pair by pair, found on the host, where row columns are."""
    chosen, rejected = preference.pair_index(rows.tensor("group"), rows.tensor("preferred"))
    return send(chosen, device), send(rejected, device)


def _pair_means(sums: Mapping[str, float]) -> dict[str, float]:
    n = sums.get("pairs")
    if not n:
        return {}
    names = ("margin", "chosen_reward", "rejected_reward")
    return {"preference/accuracy": sums["accurate"] / n} | {f"preference/{name}": sums[name] / n for name in names}


def offline_worker(engine: TrainEngine, cfg: RunConfig) -> OfflineWorker:
    """The worker that trains as the recipe's loss asks."""
    recipe = cfg.algorithm.recipe
    if recipe.trains == "scorer":
        return ScorerWorker(engine, cfg)
    if recipe.loss in preference.PAIR_LOSSES:
        return PairWorker(engine, cfg)
    return {"kto": LabelWorker, "sft": ChatWorker}[recipe.loss](engine, cfg)
