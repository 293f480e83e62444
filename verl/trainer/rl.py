"""``RLTrainer``: train a policy with any flow and any reward from Python."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config.errors import RequestError
from verl.config.load import load_config
from verl.config.model import REWARD_MODEL
from verl.config.recipes import RECIPES
from verl.config.run import RunConfig
from verl.config.section import Section, listed
from verl.data.feeds import Stopped
from verl.data.loader import TOY_PROMPTS
from verl.dataflow.graph import DataFlow
from verl.dataflow.nodes import Actor, Critic, Node, ProcessReward, RewardModel, Rollout, Teacher
from verl.runtime.controller import LapResult
from verl.trainer.base import Run, Summary
from verl.trainer.folder import holds_run

_SECTIONS: dict[type[Node], str] = {
    Actor: "actor_model_config",
    Critic: "critic_model_config",
    Teacher: "teacher_model_config",
    ProcessReward: "process_reward_model_config",
    Rollout: "rollout",
}


class RLTrainer:
    """Laps of rollout, reward and update. The constructor loads nothing; the first ``step`` or ``train`` does.

    ``flow``: a drawing whose nodes may name models and rewards; default: GRPO's. ``reward_fn``: a callable,
    ``module:function``, a rule's name, or a list of them. ``dataset``: anything ``PromptDataset`` takes; default:
    built-in toy prompts. ``num_rollout_steps``: laps; ``num_update_steps``: passes over each lap's batch. Other
    keywords are keys of the configuration (docs/configuration.md) and win over what the flow's nodes say. ``config``: a
    resolved configuration, in the place of all of them. Raises ``RequestError`` for what is missing or wrong, at the
    first step.

    Two runs never share a folder: without ``run_dir`` each takes the next free one of ``runs/default``,
    ``runs/default-2``, ...; a ``run_dir`` that holds a run is refused, or replaced with ``overwrite=True``, or gone on
    with from its latest checkpoint with ``resume=True`` (``allow_changes``: although data or settings are others now).
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
        overwrite: bool = False,
        resume: bool = False,
        allow_changes: bool = False,
        **keys: Any,
    ) -> None:
        self.flow = flow
        given = {"reward_fn": reward_fn, "dataset": dataset, "total_steps": num_rollout_steps}
        self._keys: dict[str, Any] = keys | {key: value for key, value in given.items() if value is not None}
        self._model, self._config, self._epochs = model_name, config, num_update_steps
        self._overwrite, self._resume, self._allow_changes = overwrite, resume, allow_changes
        self._run: Run | None = None

    def _values(self) -> dict[str, Any]:
        """Keywords as configuration keys; what the flow's nodes name fills in what isn't given."""
        keys = dict(self._keys)
        nodes = self.flow.nodes if self.flow is not None else []
        for kind, key in _SECTIONS.items():
            section = keys_of(keys.get(key))
            if kind is Actor and self._model is not None:
                section = {"model_name_or_path": self._model} | section
            for node in (n for n in nodes if isinstance(n, kind)):
                model = {} if node.model is None else {"model_name_or_path": node.model}
                section = keys_of(node.config) | model | section
            if section:
                keys[key] = section
        for node in nodes:
            if node.model is not None and not isinstance(node, (*_SECTIONS, RewardModel)):
                raise RequestError(f"{node!r} takes no model: a reference is the policy's start")
        _add_rewards(keys, [n for n in nodes if isinstance(n, RewardModel)])
        keys.setdefault("run_dir", _next_free(RunConfig.model_fields["run_dir"].default))
        algorithm = keys.get("algorithm", "ppo" if any(isinstance(n, Critic) for n in nodes) else "grpo")
        algorithm = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
        if self._epochs is not None:
            algorithm["update_epochs"] = self._epochs
        keys["algorithm"] = algorithm
        recipe = RECIPES.get(algorithm.get("name", ""))
        if recipe is None or recipe.samples:
            keys.setdefault("dataset", TOY_PROMPTS)
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
            if self._resume and (self._overwrite or ("run_dir" not in self._keys and self._config is None)):
                raise RequestError("resume=True goes on with the run in run_dir=, which overwrite=True would remove")
            if holds_run(Path(cfg.run_dir)) and not (self._overwrite or self._resume):
                raise RequestError(
                    f"{cfg.run_dir} already holds a run: continue it with resume=True, pass another run_dir=, or "
                    "replace it with overwrite=True"
                )
            run = Run(cfg, self.flow)
            last = run.last() if self._resume else None
            if last is None:
                self._before_run(cfg)
            try:
                run.prepare(last, overwrite=self._overwrite, allow_changes=self._allow_changes)
            except BaseException:
                run.close()
                raise
            if self._resume and last is None:
                run.say("there is no checkpoint yet: from the start")
            self._run, self._config = run, cfg
            self._overwrite = False  # what lies there from now on is this trainer's own run
        return self._run

    def _before_run(self, cfg: RunConfig) -> None:
        """What must be there before the run is prepared; a subclass may add to it."""

    def step(self) -> dict[str, float | None]:
        """One lap (rollout, reward, update); its metrics.

        A failure closes the trainer, after a save of the laps before it; so does a signal, after the lap unless that
        one still samples. Ctrl-C then raises ``KeyboardInterrupt``, another signal ``SystemExit``.
        """
        try:
            run = self.run
            with run.signals(), contextlib.suppress(Stopped):
                result: LapResult = run.step()
            if run.stop is not None:
                run.save_at_end()
                raise KeyboardInterrupt if run.stop is signal.SIGINT else SystemExit(128 + run.stop)
        except BaseException as error:
            if isinstance(error, Exception):
                with contextlib.suppress(Exception):  # what failed first is told
                    if self._run is not None and not self._run.controller.failed:  # finished laps are sound
                        self._run.save_at_end()
            self.close()
            raise
        return result.metrics

    def train(self) -> Summary:
        """All laps, with evaluations and checkpoints as configured. A signal ends them early, after a save:
        ``Summary.stopped_by``."""
        try:
            summary = self.run.train()
            if summary.stopped_by is not None:
                self.run.say(f"stopped after step {summary.step}: go on with resume=True, run_dir={summary.run_dir}")
            return summary
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


def _add_rewards(keys: dict[str, Any], nodes: list[RewardModel]) -> None:
    """The rewards that nodes name join the configuration's, with the node's weight and under its name.

    The configuration's own have the weight of the node that names none. A model of an unnamed node is
    ``reward_model_config``.
    """
    named = [n for n in nodes if n.rewards or n.names_model]
    own = [n for n in nodes if n not in named]
    if len(own) > 1:
        raise RequestError(
            f"{own[0]!r} and {own[1]!r} name no reward: one of them can stand for the configuration's rewards; give "
            "the other model= or reward_fn="
        )
    weight = own[0].weight if own else 1.0
    entries = [(entry, weight) for entry in listed(keys.get("reward_fn"))]
    if own and named and not entries and keys.get("reward_model_config") is None:
        raise RequestError(
            f"{own[0]!r} names no reward, and neither does the configuration: give it model= or reward_fn="
        )
    for node in named:
        called = {} if node.name == node.kind else {"as": node.name}
        model = keys_of(node.config) | ({} if node.model is None else {"model_name_or_path": node.model})
        if node.rewards:
            if called and len(node.rewards) == 1:  # of several each keeps its own name
                (entry,) = node.rewards
                entries.append((called | (dict(entry) if isinstance(entry, Mapping) else {"name": entry}), node.weight))
            else:
                entries += [(entry, node.weight) for entry in node.rewards]
        elif called:
            entries.append(({"name": REWARD_MODEL} | called | model, node.weight))
        else:
            keys["reward_model_config"] = model | keys_of(keys.get("reward_model_config"))
            weight = node.weight
    weights = [w for _, w in entries] + ([weight] if keys.get("reward_model_config") is not None else [])
    if named:
        keys["reward_fn"] = [entry for entry, _ in entries]
    if any(w != 1 for w in weights):
        keys.setdefault("reward_weights", weights)


def keys_of(section: Any) -> dict[str, Any]:
    """The keys that were set in a section, a mapping or None."""
    if isinstance(section, Section):
        return {key: getattr(section, key) for key in section.model_fields_set}
    return dict(section or {})


def _next_free(folder: str) -> str:
    """``folder``, or the first of ``folder-2``, ``folder-3``, ... that holds no run."""
    names = (folder if i == 1 else f"{folder}-{i}" for i in count(1))
    return next(name for name in names if not holds_run(Path(name)))
