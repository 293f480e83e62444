"""docs/adding-an-algorithm.md does what it says, and docs/algorithms.md tells every algorithm, key and metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.policy import POLICY_LOSSES
from verl.algorithms.preference import PAIR_LOSSES
from verl.config.algorithm import AlgorithmConfig
from verl.config.errors import ConfigError
from verl.config.load import load_config, notes
from verl.config.recipes import RECIPES, Recipe, table
from verl.metrics.names import METRICS
from verl.trainer import RLTrainer
from verl.workers import actor, offline

DOCS = Path(__file__).parents[1] / "docs"
FORMULAS, PAGE = (DOCS / "algorithms.md").read_text(), (DOCS / "adding-an-algorithm.md").read_text()
REGISTRIES: tuple[dict[str, Any], ...] = (ESTIMATORS, POLICY_LOSSES, PAIR_LOSSES, RECIPES)
PAIRS = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in (("xa", "ab", "c"), ("b", "ca", "xx"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), tiny.f_llama(), tiny.f_bpe(template="plain"))


@pytest.fixture
def first_lap(model, tmp_path):
    """Metrics of an algorithm's first lap on a tiny model."""

    def train(name: str, **keys: Any) -> dict[str, float | None]:
        if RECIPES[name].samples:
            sizes = {"rollout_batch_size": 8, "group_size": 4 if "group" in RECIPES[name].needs else 1}
            data = {"dataset": ["xa", "b", "xc"], "reward_fn": lambda response_ids: response_ids[0] / 32}
        else:
            sizes, data = {"train_batch_size": 4}, {"dataset": PAIRS}
        lengths = {"max_prompt_length": 16, "max_response_length": 8}
        settings = {"run_dir": str(tmp_path / name), "metrics": {"tensorboard": False}, "algorithm": name}
        with RLTrainer(model, **(sizes | data | lengths | settings | keys)) as trainer:
            return trainer.step()

    return train


@pytest.fixture
def restored():
    """What a test registers goes again."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def page(restored, model, tmp_path, monkeypatch):
    """The names that the page's Python defines, all of it run in order: function, recipe, test, one lap of training."""
    monkeypatch.chdir(tmp_path)  # default run folders
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block.replace("models/smollm2", model), names)
    return names


def test_the_page_runs_from_function_to_training(page):
    assert ESTIMATORS["median"] is page["median"]
    page["test_median"]()
    assert page["metrics"]["policy/optimizer_steps"] == 1 and page["metrics"]["policy/grad_norm"] > 0


def test_its_test_finds_a_wrong_function(page):
    page["median"] = ESTIMATORS["reinforce_plus_plus_baseline"]  # the mean
    with pytest.raises(AssertionError):
        page["test_median"]()


def test_its_policy_loss_trains(page, first_lap):
    lap = first_lap("two_sided", mini_batch_size=4, algorithm={"name": "two_sided", "update_epochs": 4},
                    actor_model_config={"optimizer": {"lr": 0.01}})  # fmt: skip
    assert lap["policy/grad_norm"] > 0 and 0 < lap["policy/clip_fraction"] < 1


def test_its_pair_loss_trains_offline_and_online(page, first_lap):
    lap = first_lap("hinge")
    assert lap["policy/loss"] == pytest.approx(1) and lap["policy/grad_norm"] > 0  # policy and reference are one
    RECIPES["online_hinge"] = Recipe("", None, "hinge", frozenset({"reward", "group", "reference"}))
    lap = first_lap("online_hinge", rollout_batch_size=16)
    assert lap["policy/loss"] == pytest.approx(1) and lap["preference/pairs"] == 4
    assert not [
        n for n in notes(load_config(None, partial=True, algorithm={"name": "hinge", "beta": 0.3})) if "beta" in n
    ]


def test_recipes_may_join_later_and_set_any_key(restored):
    with pytest.raises(ConfigError, match=r"algorithm\.name is 'mine': must be one of ppo, "):
        load_config(None, partial=True, algorithm={"name": "mine"})
    RECIPES["mine"] = Recipe("", "gae", defaults={"gamma": 0.9, "clip_ratio": 0.3, "init_kl_coef": 0.5})
    cfg = load_config(None, partial=True, algorithm={"name": "mine"})
    assert (cfg.algorithm.gamma, cfg.algorithm.clip_range, cfg.init_kl_coef) == (0.9, (0.3, 0.3), 0.5)
    cfg = load_config(None, partial=True, algorithm={"name": "mine", "gamma": 1.0})
    assert cfg.algorithm.gamma == 1.0 and cfg.algorithm.filled == cfg.algorithm


@pytest.mark.parametrize(
    ("kind", "registry", "recipes"),
    [
        ("an estimator", ESTIMATORS, ("ppo", "remax", "gdpo", "prime")),
        ("a policy loss", POLICY_LOSSES, ("grpo", "clip_cov")),
        ("a pair loss", PAIR_LOSSES, ("dpo",)),
    ],
)
def test_the_page_lists_every_argument_name(first_lap, monkeypatch, kind, registry, recipes):
    found: set[str] = set()

    def call(function, facts):
        found.update(facts if function in registry.values() else ())
        return really(function, facts)

    really = actor.call
    for worker in (actor, offline):
        monkeypatch.setattr(worker, "call", call)
    for name in recipes:
        first_lap(name)
    rows = PAGE.partition(f"| {kind} may name |")[2].partition("\n\n")[0].splitlines()[2:]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == found - (AlgorithmConfig.model_fields.keys() - told)  # old_logprobs is a key and a column


def test_the_table_is_the_code_s():
    assert table() in FORMULAS, "run: python -m verl.config.recipes"


@pytest.mark.parametrize("key", AlgorithmConfig.model_fields)
def test_every_key_is_told(key):
    assert re.search(rf"`(algorithm\.)?{key}\b", FORMULAS)


def test_every_metric_that_is_named_exists():
    watched = FORMULAS.partition("## What to watch")[2].partition("\n## ")[0]
    names = set(re.findall(r"`(\w+/\w+)`", watched))
    assert len(names) > 20 and names <= METRICS.keys()
