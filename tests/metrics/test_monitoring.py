"""What examples/monitoring names is what a run serves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from verl.metrics.names import METRICS
from verl.metrics.sinks import PrometheusSink, prometheus_name

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())


def labels(name: str) -> set[str]:
    """Of the family that is served under this name."""
    return {match[1] for m in METRICS for match in [re.search(r"<(\w+)>", m)] if match and prometheus_name(m) == name}


def served() -> set[str]:
    """Names of all series that a run can serve, by the sink itself."""
    sink = PrometheusSink(0)
    try:
        sink.write(1, {re.sub(r"<\w+>", "some part", name): 1.0 for name in METRICS})
        return {family.name for family in sink._registry.collect()}
    finally:
        sink.close()


def test_every_series_of_dashboard_and_alerts_is_served():
    there = served()
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    expressions += [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable
    ]
    named = {name for text in expressions for name in re.findall(r"\bverl_\w+", text)}
    assert len(named) > 30 and named <= there, named - there


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_legends_use_labels_that_the_series_have(panel):
    places = panel["gridPos"]
    assert 0 <= places["x"] < 24 and places["x"] + places["w"] <= 24
    for target in panel["targets"]:
        name = re.match(r"verl_\w+", target["expr"])[0]
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == {"run"} | labels(name)
        assert '{run=~"$run"}' in target["expr"]


def test_the_port_of_the_example_is_the_one_that_the_page_names():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (entry,) = job["static_configs"]
    assert entry["targets"] == ["127.0.0.1:9400"] and entry["labels"].keys() == {"run"}
    assert config["rule_files"] == ["alerts.yml"] and job["job_name"] == "verl"
    page = (FOLDER.parents[1] / "docs" / "metrics.md").read_text()
    assert "prometheus_port: 9400" in page and "examples/monitoring" in page
