"""KL to the reference policy: per-token estimators and the coefficient's controller.

``d = logprob - ref_logprob`` of the sampled token; a positive KL is a cost. Estimators: Schulman, "Approximating KL
divergence" (joschu.net/blog/kl-approx.html); adaptive coefficient: Ziegler et al., arXiv 1909.08593, section 2.2.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from verl.algorithms.reduce import select

Estimator = Literal["k1", "k2", "k3", "k3+"]
MAX_LOG_RATIO = 20.0  # e^20 is 4.9e8: large, but finite in value and gradient


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator) -> Tensor:
    """``[T]`` estimate of KL(policy, reference) per token, 0 outside the mask; float32 at least.

    - ``k1`` = d: unbiased, may be negative on one token
    - ``k2`` = d^2 / 2
    - ``k3`` = exp(-d) + d - 1: unbiased, never negative; -d is clamped to +-20 *before* exp, because a cap on the
      result would still multiply 0 by the infinite slope of exp in the backward pass
    - ``k3+``: value of k3, gradient of k2 (which is the gradient of the KL itself, in expectation on policy)
    """
    d = select(logprobs, mask) - select(ref_logprobs, mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    x = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(x) - x  # expm1: exp(x) - 1 - x loses every digit for small x and can come out negative
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        k2 = d.square() / 2
        return k3.detach() + (k2 - k2.detach())
    raise ValueError(f"unknown KL estimator {estimator!r}")


class KLController:
    """The KL coefficient: fixed, or steered towards ``target`` when one is given.

    ``update`` after each lap: ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon``.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10_000) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rows: int) -> None:
        """``kl``: the lap's mean KL as the target counts it; ``rows``: the lap's rows.

        A lap longer than the horizon counts as one horizon, which keeps the factor within 0.8 and 1.2.
        ``ValueError`` on a KL that is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the lap's KL is {kl}; the coefficient stays at {self.coef}")
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(rows / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; plain JSON."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from ``state()``."""
        self.coef = state["coef"]
