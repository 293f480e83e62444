"""Reinforcement-learning post-training of language models. Doors only: each opens its module on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.dataflow.graph import DataFlow
    from verl.dataflow.nodes import Actor, Critic, Data, Reference, RewardModel, Rollout
    from verl.runtime.hybrid_engine import HybridEngine
    from verl.trainer.ppo import PPOTrainer
    from verl.trainer.rl import RLTrainer

__version__ = "0.1.0"

_DOORS = {
    "DataFlow": "verl.dataflow.graph",
    "Actor": "verl.dataflow.nodes",
    "Critic": "verl.dataflow.nodes",
    "Data": "verl.dataflow.nodes",
    "Reference": "verl.dataflow.nodes",
    "RewardModel": "verl.dataflow.nodes",
    "Rollout": "verl.dataflow.nodes",
    "HybridEngine": "verl.runtime.hybrid_engine",
    "PPOTrainer": "verl.trainer.ppo",
    "RLTrainer": "verl.trainer.rl",
}
__all__ = [
    "Actor",
    "Critic",
    "Data",
    "DataFlow",
    "HybridEngine",
    "PPOTrainer",
    "RLTrainer",
    "Reference",
    "RewardModel",
    "Rollout",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        import importlib

        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
