"""``RLTrainer``: train a policy with any flow and any reward from Python."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from verl.config.load import load_config
from verl.config.run import RunConfig
from verl.data.loader import TOY_PROMPTS
from verl.dataflow.graph import DataFlow
from verl.dataflow.nodes import Actor, Critic, RewardModel
from verl.runtime.controller import LapResult
from verl.trainer.base import Run, Summary


class RLTrainer:
    """Laps of rollout, reward and update. The constructor loads nothing; the first ``step`` or ``train`` does.

    ``flow``: a drawing whose nodes may name models; default: GRPO's. ``reward_fn``: a callable, ``module:function``,
    a rule's name, or a list of them. ``dataset``: anything ``PromptDataset`` takes; default: built-in toy prompts.
    ``num_rollout_steps``: laps; ``num_update_steps``: passes over each lap's batch. Other keywords are keys of the
    configuration (docs/configuration.md). Raises ``RequestError`` for what is missing or wrong, at the first step.
    """

    def __init__(
        self,
        model_name: Any = None,
        *,
        flow: DataFlow | None = None,
        reward_fn: Any = None,
        dataset: Any = None,
        num_rollout_steps: int | None = None,
        num_update_steps: int | None = None,
        config: RunConfig | None = None,
        **keys: Any,
    ) -> None:
        self.flow = flow
        given = {"reward_fn": reward_fn, "dataset": dataset, "total_steps": num_rollout_steps}
        self._keys: dict[str, Any] = keys | {key: value for key, value in given.items() if value is not None}
        self._model, self._config, self._epochs = model_name, config, num_update_steps
        self._run: Run | None = None

    def _values(self) -> dict[str, Any]:
        """Keywords as configuration keys; what the flow's nodes name fills in what isn't given."""
        keys = dict(self._keys)
        nodes = self.flow.nodes if self.flow is not None else []
        roles = {"actor": Actor, "critic": Critic, "reward": RewardModel}
        named = {role: node.model for role, kind in roles.items() for node in nodes if isinstance(node, kind)}
        if self._model is not None:
            named["actor"] = self._model
        for role, model in named.items():
            section = dict(keys.get(f"{role}_model_config") or {})
            if model is not None:
                section.setdefault("model_name_or_path", model)
            if section and not (role == "reward" and model is None):
                keys[f"{role}_model_config"] = section
        if "reward_model_config" in keys and named.get("reward") is None and not keys["reward_model_config"]:
            del keys["reward_model_config"]
        keys.setdefault("dataset", TOY_PROMPTS)
        algorithm = keys.get("algorithm", "ppo" if any(isinstance(n, Critic) for n in nodes) else "grpo")
        algorithm = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
        if self._epochs is not None:
            algorithm["update_epochs"] = self._epochs
        keys["algorithm"] = algorithm
        return keys

    @property
    def config(self) -> RunConfig:
        """The resolved configuration; ``ConfigError`` lists every violation."""
        return self._config if self._config is not None else load_config(None, **self._values())

    @property
    def run(self) -> Run:
        """The prepared run: its controller holds the models."""
        if self._run is None:
            cfg = self.config
            self._before_run(cfg)
            run = Run(cfg, self.flow)
            try:
                run.prepare()
            except BaseException:
                run.close()
                raise
            self._run = run
        return self._run

    def _before_run(self, cfg: RunConfig) -> None:
        """What must be there before the run is prepared; a subclass may add to it."""

    def step(self) -> dict[str, float | None]:
        """One lap (rollout, reward, update); its metrics."""
        result: LapResult = self.run.step()
        return result.metrics

    def train(self) -> Summary:
        """All laps, with evaluations and checkpoints as configured."""
        try:
            return self.run.train()
        finally:
            self.close()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
