"""A policy of one parameter: every token is 1 with probability sigmoid(theta). Its gradients can be done by hand."""

from __future__ import annotations

import torch

from tests.algorithms.facts import NUMBERS, loss_of
from verl.algorithms.reduce import reduce_loss
from verl.config.algorithm import Reduction
from verl.seats import MiniBatch, Totals

Row = tuple[list[int], list[int], float]  # tokens (0 or 1), mask, advantage


def accumulate(
    rows: list[Row],
    micro_batches: list[list[int]],
    totals: Totals,
    mode: Reduction,
    policy_loss: str = "ppo",
) -> tuple[float, float]:
    """Loss and gradient at theta = 0 and ratio 1, summed over one rank's micro-batches.

    There every policy loss has the same gradient, -A times that of the log-probability.
    """
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = 0.0
    for micro in micro_batches:
        tokens, masks, advantages = [], [], []
        for i in micro:
            tokens += rows[i][0]
            masks += rows[i][1]
            advantages += [rows[i][2]] * len(rows[i][0])
        row = torch.repeat_interleave(torch.arange(len(micro)), torch.tensor([len(rows[i][0]) for i in micro]).long())
        mask = torch.tensor(masks, dtype=torch.bool)
        logprobs = torch.nn.functional.logsigmoid((2 * torch.tensor(tokens, dtype=torch.float64) - 1) * theta)
        logprobs = torch.where(mask, logprobs, torch.nan)
        facts = {
            "logprobs": logprobs, "old_logprobs": logprobs, "advantages": torch.tensor(advantages, dtype=torch.float64),
            "mask": mask, "row": row, "n_rows": len(micro), "covariance_tokens": torch.zeros_like(mask),
        }  # fmt: skip
        losses = loss_of(policy_loss, NUMBERS | facts).losses
        share = reduce_loss(losses, mask, row, len(micro), mode, totals)
        share.backward()
        loss += share.item()
    return loss, theta.grad.item() if theta.grad is not None else 0.0


def over_ranks(rows: list[Row], mini: MiniBatch, mode: Reduction, policy_loss: str = "ppo") -> tuple[float, float]:
    """Loss and gradient summed over the ranks of a mini-batch."""
    shares = [accumulate(rows, micros, mini.totals, mode, policy_loss) for micros in mini.ranks]
    loss, gradient = map(sum, zip(*shares, strict=True))
    return loss, gradient
