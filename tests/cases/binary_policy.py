"""A policy of one parameter: every token is 1 with probability sigmoid(theta). Its gradients can be done by hand.

Run as a program it is one of several data-parallel ranks over gloo: see ``on_ranks``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.algorithms.facts import NUMBERS, loss_of
from verl.algorithms.policy import POLICY_LOSSES
from verl.algorithms.reduce import reduce_loss
from verl.config.algorithm import Reduction
from verl.seats import MiniBatch, Totals

Row = tuple[list[int], list[int], float]  # tokens (0 or 1), mask, advantage


def accumulate(
    rows: list[Row],
    micro_batches: list[list[int]],
    totals: Totals,
    mode: Reduction,
    after_each: Callable[[Tensor], None] = lambda theta: None,
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
        after_each(theta)
        loss += share.item()
    return loss, theta.grad.item() if theta.grad is not None else 0.0


def on_ranks(folder: Path, rows: list[Row], mini: MiniBatch, mode: Reduction) -> list[dict]:
    """Each rank's own process: a collective in every pass, then the gradient summed over ranks. At most 60 s.

    A rank reports PPO's ``loss``, ``gradient`` and ``passes``, and in ``every`` loss and gradient by policy loss.
    """
    (folder / "job.json").write_text(json.dumps({"rows": rows, "mini": asdict(mini), "mode": mode}))
    command = [sys.executable, "-m", "tests.cases.binary_policy", str(folder)]
    ranks = range(len(mini.ranks))
    processes = [subprocess.Popen([*command, str(rank)], cwd=Path(__file__).parents[2]) for rank in ranks]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0] * len(ranks)
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]


def _rank(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job.json").read_text())
    ranks = job["mini"]["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(ranks))
    passes = []

    def collective(theta: Tensor) -> None:  # stands for the parameter gathers of a sharded model
        dist.all_reduce(torch.ones(1))
        passes.append(theta.grad.item())

    totals = Totals(**job["mini"]["totals"])
    every = {}
    for name in POLICY_LOSSES:
        passes.clear()
        result = torch.tensor(
            accumulate(job["rows"], ranks[rank], totals, job["mode"], collective, name), dtype=torch.float64
        )
        dist.all_reduce(result)
        every[name] = result.tolist()
    loss, gradient = every["ppo"]
    report = {"loss": loss, "gradient": gradient, "passes": len(passes), "every": every}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
