"""Trainers of the Python interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.ppo import PPOTrainer
    from verl.trainer.rl import RLTrainer

__all__ = ["PPOTrainer", "RLTrainer"]
_DOORS = {"PPOTrainer": "verl.trainer.ppo", "RLTrainer": "verl.trainer.rl"}


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        import importlib

        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
