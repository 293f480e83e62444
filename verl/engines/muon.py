"""Muon: momentum made orthogonal (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon).

A gradient's momentum ``M`` is replaced by about ``U V^T`` of its singular value decomposition, through five steps of a
Newton-Schulz iteration, and scaled to the size of an AdamW step, so that AdamW's learning rates and weight decay fit
(arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from verl.engines.sharding import local, part_of, whole

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0, and bounded: singular values end between about 0.7 and 1.2
STEPS = 5
RMS = 0.2  # of an AdamW step's elements, in units of the learning rate


def orthogonalise(matrix: Tensor) -> Tensor:
    """``[m, n]`` -> about ``U V^T``, in float32; in bf16 inside on a GPU, which the iteration stands."""
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)  # the largest singular value is at most 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Of float32 matrices, or each rank's parts of them.

    Args:
        likes: matrix (or part) -> the parameter that says how the part is cut. Parts become whole for the iteration,
            one matrix at a time, and every rank does the same arithmetic: a step is the same on any number of ranks.
    """

    def __init__(self, likes: Mapping[nn.Parameter, Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(list(likes), {"lr": lr, "weight_decay": weight_decay})
        self.likes = likes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                ahead = p.grad.lerp(momentum, MOMENTUM)  # Nesterov's
                like = self.likes[p]
                full = orthogonalise(whole(ahead, like).to(like.device))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(local(part_of(full, like)).to(p.device), alpha=-group["lr"] * RMS * max(full.shape) ** 0.5)
