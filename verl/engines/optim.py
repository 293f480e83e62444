"""One optimizer step: fp32 masters, clipping by the global norm, learning-rate schedule, state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.errors import RequestError, RunError
from verl.config.model import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, step: int, total: int | None) -> float:
    """Of update ``step`` (from 0) of ``total``. Warm-up rises in equal parts and reaches ``lr`` in its last step;
    linear and cosine then fall so that an update after the last would have 0."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    if total is None:
        raise RequestError(
            f"schedule {cfg.schedule!r} needs the number of optimizer steps: set total_steps or total_epochs"
        )
    done = min(1.0, (step - cfg.warmup_steps) / max(1, total - cfg.warmup_steps))
    return cfg.lr * (1 - done if cfg.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


class Optimizer:
    """AdamW, SGD or a user's own over named parameters.

    A parameter of fewer digits than float32 has a float32 *master* here. Its gradients are added up in the master's
    as they arrive (so micro-batches lose no digits and no second gradient is kept), the step changes the master, and
    the rounded result is written into the parameter in place: whoever computes with the parameter sees it at once.
    A float32 parameter is its own master. One-dimensional parameters (norms, biases) have no weight decay.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], cfg: OptimizerConfig, total_steps: int | None
    ) -> None:
        self.cfg, self.total_steps = cfg, total_steps
        self.step_number = 0  # updates so far, skipped ones too: the schedule ends with the run
        self.masters: dict[str, nn.Parameter] = {}
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []  # (parameter, its master)
        for name, p in named:
            if p.dtype == torch.float32:
                self.masters[name] = p
                continue
            master = self.masters[name] = nn.Parameter(p.detach().float())
            self._rounded.append((p, master))
            p.register_post_accumulate_grad_hook(_into(master))
        learning_rate(cfg, cfg.warmup_steps, total_steps)  # a schedule without an end shows now, not after the warm-up
        self._torch = self._build()

    def _build(self) -> torch.optim.Optimizer:
        cfg, masters = self.cfg, list(self.masters.values())
        if callable(cfg.name):
            return cfg.name(masters, lr=cfg.lr)
        groups = [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        if cfg.name == "sgd":
            return torch.optim.SGD(groups, lr=cfg.lr, fused=True)
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)

    @property
    def lr(self) -> float:
        """Of the next update."""
        return learning_rate(self.cfg, self.step_number, self.total_steps)

    def step(self) -> tuple[float, bool]:
        """``(gradient norm before clipping, whether a step was made)``; none is made when the norm isn't finite.

        Gradients are gone afterwards.
        """
        grads = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).item() if grads else 0.0
        finite = math.isfinite(norm)
        if finite:
            if norm > self.cfg.max_grad_norm:
                torch._foreach_mul_(grads, self.cfg.max_grad_norm / norm)
            for group in self._torch.param_groups:
                group["lr"] = self.lr
            self._torch.step()
            if self._rounded:
                with torch.no_grad():
                    torch._foreach_copy_([p for p, _ in self._rounded], [m for _, m in self._rounded])
        self.skip()
        return norm, finite

    def skip(self) -> None:
        """An update without a step: only the schedule moves on."""
        self._torch.zero_grad(set_to_none=True)
        self.step_number += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors ``kind/parameter name`` (``master/...`` where the parameter is rounded) and ``{"step": int}``."""
        rounded = {id(master) for _, master in self._rounded}
        tensors = {f"master/{n}": m.detach() for n, m in self.masters.items() if id(m) in rounded}
        for name, master in self.masters.items():
            for kind, value in self._torch.state.get(master, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise RunError(
                        f"the optimizer keeps {kind} of {name} as {type(value).__name__}, only tensors are saved"
                    )
                tensors[f"{kind}/{name}"] = value
        return tensors, {"step": self.step_number}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave; ``RunError`` for tensors of parameters that don't exist."""
        rounded = {id(master): p for p, master in self._rounded}
        states: dict[Tensor, dict[str, Tensor]] = {}
        missing = {f"master/{n}" for n, m in self.masters.items() if id(m) in rounded} - tensors.keys()
        if missing:
            raise RunError(f"the optimizer's state lacks {len(missing)} tensors: {', '.join(sorted(missing)[:8])}")
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name not in self.masters:
                raise RunError(f"the optimizer's state has {key!r}, but no such parameter is trained")
            master = self.masters[name]
            if kind == "master":
                with torch.no_grad():
                    rounded[id(master)].copy_(master.copy_(tensor))
            else:  # step counters stay where fused kernels want them: with their parameter
                states.setdefault(master, {})[kind] = tensor.detach().to(master.device, copy=True)
        self._torch.state.clear()
        self._torch.state.update(states)
        self.step_number = int(facts["step"])


def _into(master: nn.Parameter):
    """Hook that moves a finished gradient into its master's."""

    def move(p: Tensor) -> None:
        assert p.grad is not None
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None

    return move
