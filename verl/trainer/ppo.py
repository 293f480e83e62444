"""``PPOTrainer``: PPO from Python, one lap per ``step``."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl.config.errors import RequestError
from verl.config.load import load_config
from verl.config.run import RunConfig
from verl.data.loader import PreferenceDataset
from verl.rewards.pairwise import fit_reward_head
from verl.runtime.launch import first_device
from verl.trainer.folder import holds_run
from verl.trainer.rl import RLTrainer, keys_of

log = logging.getLogger(__name__)

PARALLEL = ("fsdp", "tensor_parallel_size")


class PPOTrainer(RLTrainer):
    """PPO on a policy and a value model. The constructor loads nothing; the first ``step`` does.

    ``value_model``: a model of its own, or ``"value_head"`` (default) for a head on the policy's backbone.
    ``batch_size``: rows of one lap (``train_batch_size``). ``optimizer``: a name or a factory
    ``factory(parameters, lr=lr)``. ``parallel_config``: ``{"fsdp": True, "tensor_parallel_size": 2}`` spreads both
    models over all GPUs (without one: over so many CPU workers); ``device_map=`` names others.
    With a ``PreferenceDataset`` and no reward, a pairwise reward head is fitted on the pairs first.
    Other keywords are keys of the configuration (docs/configuration.md).
    """

    def __init__(
        self,
        policy_model: Any,
        value_model: Any = "value_head",
        *,
        optimizer: Any = "adamw",
        lr: float | None = None,
        batch_size: int | None = None,
        dataset: Any = None,
        parallel_config: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__(policy_model, dataset=dataset, **keys)
        self._value_model, self._batch_size = value_model, batch_size
        self._optimizer = {"name": optimizer} | ({} if lr is None else {"lr": lr})
        self._parallel = dict(parallel_config or {})

    def _values(self) -> dict[str, Any]:
        if unknown := self._parallel.keys() - set(PARALLEL):
            raise RequestError(f"parallel_config: unknown {sorted(unknown)}; it has {', '.join(PARALLEL)}")
        if "dataset" not in self._keys:
            raise RequestError("PPOTrainer has no data set: pass dataset=, e.g. PreferenceDataset('pairs.jsonl')")
        given = self._keys.get("algorithm", "ppo")
        name = given if isinstance(given, str) else dict(given).get("name", "ppo")
        if name != "ppo":
            raise RequestError(f"PPOTrainer trains ppo, not {name}: use RLTrainer(..., algorithm={name!r})")
        keys = super()._values()
        algorithm = keys["algorithm"]
        keys["algorithm"] = algorithm | {"name": "ppo"} if "algorithm" not in self._keys else algorithm
        keys["actor_model_config"] = {"optimizer": self._optimizer} | keys["actor_model_config"]
        if "critic_model_config" not in keys:
            own = {"model_name_or_path": self._value_model}
            keys["critic_model_config"] = {"shares": "actor"} if self._value_model == "value_head" else own
        if self._parallel:
            spread = {"tensor_parallel_size": self._parallel.get("tensor_parallel_size", 1)}
            spread["sharding_strategy"] = "FULL_SHARD" if self._parallel.get("fsdp", True) else "NO_SHARD"
            for section in ("actor_model_config", "critic_model_config"):
                keys[section] = {"fsdp_config": spread} | keys_of(keys[section])
            keys.setdefault("device_map", {"actor": _devices(spread["tensor_parallel_size"])})
        if self._batch_size is not None:
            keys.setdefault("train_batch_size", self._batch_size)
            keys.setdefault("rollout_batch_size", self._batch_size)
        return keys

    @property
    def config(self) -> RunConfig:
        if self._config is not None:
            return self._config
        values = self._values()
        if values.get("reward_fn") is None and values.get("reward_model_config") is None:
            if not isinstance(values["dataset"], PreferenceDataset):
                raise RequestError(
                    "PPOTrainer has no reward: pass reward_fn=, reward_model_config=, or a PreferenceDataset"
                )
            folder = Path(values["run_dir"]) / "reward_model"
            values["reward_model_config"] = {"model_name_or_path": str(folder)}
        return load_config(None, **values)

    def _before_run(self, cfg: RunConfig) -> None:
        """Fit the reward head that ``config`` has promised."""
        reward = cfg.reward_model_config
        folder = Path(cfg.run_dir) / "reward_model"
        if reward is None or reward.model_name_or_path != str(folder) or not isinstance(cfg.dataset, PreferenceDataset):
            return
        if holds_run(folder.parent) and folder.is_dir():  # the overwritten run's
            shutil.rmtree(folder)
        log.warning("no reward given: fitting a pairwise reward head on the %d preference pairs", len(cfg.dataset))
        policy = cfg.actor_model_config.model_name_or_path
        fit = fit_reward_head(policy, cfg.dataset, folder, first_device(cfg))
        held = "" if fit.held_out_accuracy is None else f", {fit.held_out_accuracy:.0%} of those held out"
        log.warning("reward head: right on %.0f%% of %d fitted pairs%s", 100 * fit.accuracy, fit.pairs, held)


def _devices(width: int) -> list[Any]:
    """Devices of a parallel run that names none: the most GPUs that ``width`` divides, or that many CPU workers."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return [f"cpu:{i}" for i in range(width)]
    if gpus < width:
        raise RequestError(
            f"parallel_config.tensor_parallel_size is {width}, but this machine has {gpus} GPUs: {gpus} would fit"
        )
    return list(range(gpus // width * width))
