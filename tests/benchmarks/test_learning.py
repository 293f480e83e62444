"""Every algorithm of the schema has a learning study and its row on the page."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from verl.config.load import load_config
from verl.config.recipes import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def learning():
    spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "learning.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["learning"] = module
    spec.loader.exec_module(module)
    return module


def test_every_recipe_is_studied(learning):
    assert learning.STUDIES.keys() == RECIPES.keys()


def test_every_recipe_has_its_row_on_the_page(learning):
    page = (ROOT / "docs" / "algorithms.md").read_text()
    table = page.split(learning.BEGIN)[1].split(learning.END)[0]
    rows = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")} - {"algorithm.name"}
    assert rows == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_every_study_is_a_valid_configuration(learning, name):
    study = learning.STUDIES[name]
    keys = [k.format(out="out", data="data") if "{out}" in k or "{data}" in k else k for k in study.overrides]
    cfg = load_config(ROOT / study.file, [f"algorithm.name={name}", *keys])
    assert cfg.algorithm.name == name and cfg.eval.dataset is not None


def test_seeds_stand_side_by_side_and_finished_runs_are_read(learning, tmp_path):
    folder = tmp_path / "grpo-0"
    folder.mkdir()
    lines = [{"reward/mean": 0.0}, {"reward/mean": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "eval.jsonl").write_text('{"eval/accuracy": 0.1}\n{"eval/accuracy": 0.7}\n')
    first = learning.read("grpo", 0, folder, 60.0, [0, 1])
    assert first.before == {"accuracy": 0.1} and first.after == {"accuracy": 0.7} and first.rewards == (0.0, 0.25)
    (folder / "result.json").write_text(json.dumps(first.__dict__))
    again = learning.run("grpo", 0, tmp_path, tmp_path, [0], [])
    assert learning.table([again, again]).count("accuracy 0.70") == 1
    row = "| `grpo` | accuracy 0.10 | accuracy 0.70 | 0.00 to 0.25, 0.00 to 0.25 | 2 | 1.0, 1.0 on 2 CPU cores |"
    assert row in learning.table([again, again])
