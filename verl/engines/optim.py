"""One optimizer step: fp32 masters, clipping by the global norm, learning-rate schedule, state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.config.errors import MisfitError, RequestError, RunError
from verl.config.model import OptimizerConfig
from verl.engines.adam8 import adamw8bit, moments, take_back
from verl.engines.muon import Muon
from verl.engines.sharding import copies, distributed, local, part_of


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
    """AdamW (moments in 32 or 8 bits), SGD, Muon or a user's own over named parameters.

    A parameter of fewer digits than float32 has a float32 *master* here. Its gradients are added up in the master's
    as they arrive (so micro-batches lose no digits and no second gradient is kept), the step changes the master, and
    the rounded result is written into the parameter in place: whoever computes with the parameter sees it at once.
    A float32 parameter is its own master. One-dimensional parameters (norms, biases) have no weight decay.

    Of a sharded parameter (a ``DTensor``) each rank steps its own part, as a plain tensor. A user's own optimizer gets
    the ``DTensor`` itself, so that what it does with whole matrices stays right.

    With ``offload`` every parameter has a master in CPU memory, and so have the optimizer's state and finished
    gradients; the step is computed there. Parameters stay where they are.

    Args:
        named: parameters by the names of their state.
        total_steps: for schedules that end.
        ranks: of all that share the parameters, each with a gradient of the same kind: see `square_sum`.
        matrices: names of what ``muon`` steps (a backbone's matrices); the rest has AdamW.
        offload: of everything but the parameters into CPU memory.

    Raises:
        RequestError: a schedule without an end, or ``offload`` of what a user's own optimizer has to see sharded.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        cfg: OptimizerConfig,
        total_steps: int | None,
        ranks: int = 1,
        matrices: Container[str] = (),
        offload: bool = False,
    ) -> None:
        self.cfg, self.total_steps, self.ranks = cfg, total_steps, ranks
        self.step_number = 0  # updates so far, skipped ones too: the schedule ends with the run
        self.params = dict(named)
        self.masters: dict[str, nn.Parameter] = {}
        self._written: dict[str, Tensor] = {}  # after a step, by the name of its master
        self._rounded: set[str] = set()  # and of these, those whose master is more than a copy
        for name, p in self.params.items():
            own = p if callable(cfg.name) else local(p)
            if own is p and p.dtype == torch.float32 and not offload:
                self.masters[name] = p
                continue
            if offload and isinstance(own, DTensor):
                raise RequestError("cpu_offload needs one of our optimizers where parameters are sharded")
            place = torch.device("cpu") if offload else own.device
            # without offload, a float32 shard's master is the same memory
            master = self.masters[name] = nn.Parameter(own.detach().to(place, torch.float32, copy=offload))
            if p.dtype != torch.float32 or offload:
                self._written[name] = own.detach()
            if p.dtype != torch.float32:
                self._rounded.add(name)
            p.register_post_accumulate_grad_hook(_into(master))
        learning_rate(cfg, cfg.warmup_steps, total_steps)  # a schedule without an end shows now, not after the warm-up
        self._torch = self._build(matrices)

    def _build(self, matrices: Container[str]) -> list[torch.optim.Optimizer]:
        cfg, masters = self.cfg, dict(self.masters)
        if callable(cfg.name):
            return [cfg.name(list(masters.values()), lr=cfg.lr)]
        built: list[torch.optim.Optimizer] = []
        if cfg.name == "muon":
            likes = {masters.pop(name): p for name, p in self.params.items() if name in matrices}
            built += [Muon(likes, cfg.lr, cfg.weight_decay)] if likes else []
        groups = [
            {"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        if not groups:
            return built
        if cfg.name == "sgd":
            return [torch.optim.SGD(groups, lr=cfg.lr, fused=True)]
        if cfg.name == "adamw8bit":
            return [adamw8bit(groups, cfg.lr, cfg.betas, cfg.eps)]
        return [*built, torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)]

    @property
    def lr(self) -> float:
        """Of the next update."""
        return learning_rate(self.cfg, self.step_number, self.total_steps)

    def square_sum(self) -> float:
        """Of the gradient's elements on this rank; those that n ranks hold count 1/n each, so that the sum over all
        ranks is the squared norm of the gradient."""
        named = [(name, local(p.grad)) for name, p in self.masters.items() if p.grad is not None]
        if not named:
            return 0.0
        norms = torch.stack(torch._foreach_norm([grad for _, grad in named])).double()
        share = torch.tensor([1 / copies(self.params[name], self.ranks) for name, _ in named], dtype=torch.float64)
        return norms.square().dot(share.to(norms.device)).item()

    def step(self, square_sum: float | None = None) -> tuple[float, bool]:
        """``(gradient norm before clipping, whether a step was made)``; none is made when the norm isn't finite.

        ``square_sum``: over all ranks (default: this one is all). Gradients are gone afterwards.
        """
        norm = math.sqrt(self.square_sum() if square_sum is None else square_sum)
        finite = math.isfinite(norm)
        if finite:
            grads = [local(p.grad) for p in self.masters.values() if p.grad is not None]
            if norm > self.cfg.max_grad_norm:
                torch._foreach_mul_(grads, self.cfg.max_grad_norm / norm)
            for optimizer in self._torch:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr
                optimizer.step()
            self._write()
        self.skip()
        return norm, finite

    @torch.no_grad()
    def _write(self) -> None:
        """Masters into their parameters."""
        if self._written:
            pairs = [(local(own), local(self.masters[name])) for name, own in self._written.items()]
            torch._foreach_copy_([own for own, _ in pairs], [master for _, master in pairs])

    def skip(self) -> None:
        """An update without a step: only the schedule moves on."""
        for master in self.masters.values():
            master.grad = None
        self.step_number += 1

    @property
    def facts(self) -> dict[str, Any]:
        """What is to be kept beside the tensors that are ``held``."""
        return {"step": self.step_number}

    def held(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """This rank's tensors as ``kind/parameter name`` (``master/...`` where the parameter is rounded), each with the
        parameter that it is cut like (``None``: whole)."""
        for name in self._written:
            if name in self._rounded:
                yield f"master/{name}", self.masters[name].detach(), self.params[name]
        states = {master: state for optimizer in self._torch for master, state in optimizer.state.items()}
        for name, master in self.masters.items():
            for kind, value in moments(states.get(master, {})).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise RunError(
                        f"the optimizer keeps {kind} of {name} as {type(value).__name__}, only tensors are saved"
                    )
                yield f"{kind}/{name}", value, self.params[name] if value.shape == master.shape else None

    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Take back all that was ``held``, whole tensors, and ``facts``; ``MisfitError`` for tensors of parameters
        that don't exist, or without those of some that do."""
        states: dict[Tensor, dict[str, Tensor]] = {}
        missing = {f"master/{name}" for name in self._rounded} - tensors.keys()
        if missing:
            raise MisfitError(f"the optimizer's state lacks {len(missing)} tensors: {', '.join(sorted(missing)[:8])}")
        for key, saved in tensors.items():
            kind, _, name = key.partition("/")
            if name not in self.masters:
                raise MisfitError(f"the optimizer's state has {key!r}, but no such parameter is trained")
            master, p = self.masters[name], self.params[name]
            if saved.shape == p.shape:
                mine = distributed(saved, p) if isinstance(master, DTensor) else part_of(saved, p)[...]
            else:
                mine = saved[...]
            mine = mine.detach()
            if kind == "master":
                with torch.no_grad():
                    master.copy_(mine)
            else:  # step counters stay where fused kernels want them: with their parameter
                states.setdefault(master, {})[kind] = mine.to(master.device, copy=True)
        with torch.no_grad():
            for name in self._written.keys() - self._rounded:  # of these the parameter is all there is to know
                self.masters[name].copy_(self._written[name])
        self._write()
        for optimizer in self._torch:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            if self.cfg.name == "adamw8bit":
                take_back(optimizer, states)
                continue
            optimizer.state.clear()
            optimizer.state.update({master: state for master, state in states.items() if master in own})
        self.step_number = int(facts["step"])


def _into(master: nn.Parameter):
    """Hook that moves a finished gradient into its master's."""

    def move(p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        if not isinstance(master, DTensor):
            grad = local(grad)
        grad = grad.to(master.device)
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad
        p.grad = None

    return move
