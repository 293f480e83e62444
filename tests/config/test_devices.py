"""``device_map``: how devices are written, which roles follow which, what is refused, and the page about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.samples import load, refusal
from verl.config.devices import FOLLOWS, ROLES, Device, check_exists, devices_of, parse, workers, written
from verl.config.errors import RequestError
from verl.config.load import dump, load_config, notes
from verl.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "placement.md"


def from_yaml(text: str):
    return OmegaConf.to_container(OmegaConf.create(f"device_map: {{actor: {text}}}"))["device_map"]["actor"]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", "cuda:0"),
        ("[1, 0]", "cuda:1 cuda:0"),
        ("0-3", "cuda:0 cuda:1 cuda:2 cuda:3"),
        ("[0-1, 4]", "cuda:0 cuda:1 cuda:4"),
        ("cpu", "cpu:0"),
        ("cpu:1", "cpu:1"),
        ("cpu:0-2", "cpu:0 cpu:1 cpu:2"),
        ("[cpu, cpu:3]", "cpu:0 cpu:3"),
        ("node1:0-1", "node1/cuda:0 node1/cuda:1"),
        ("10.0.0.7:cpu", "10.0.0.7/cpu:0"),
        ("node-1:cpu:2-3", "node-1/cpu:2 node-1/cpu:3"),
        ("[node1:0, node2:0]", "node1/cuda:0 node2/cuda:0"),
        ("{label: a100, count: 2}", "label:a100/cuda:0 label:a100/cuda:1"),
        ("[{label: a100, count: 1}, node1:0-2]", "label:a100/cuda:0 node1/cuda:0 node1/cuda:1 node1/cuda:2"),
    ],
)
def test_forms(text, devices):
    found = parse(from_yaml(text))
    assert " ".join(map(str, found)) == devices
    assert parse(from_yaml(written(found))) == found


REFUSED = [
    ("[]", "actor has no device: it needs at least 1, such as cpu or [0]"),
    ("-1", "actor names GPU -1: GPUs are numbered from 0, such as [0] or [0, 1]"),
    ("3-1", "actor has the range '3-1', which runs backwards; 1-3 or [3, 1] would fit"),
    ("cpu:2-0", "actor has the range 'cpu:2-0', which runs backwards; cpu:0-2 or [cpu:2, cpu] would fit"),
    ("node1:3-1", "which runs backwards; node1:1-3 or [node1:3, node1:1] would fit"),
    ("0-99999999999", "over 4096 devices; 0-3 or 0-7 would fit"),
    ("[0, 0]", "actor names cuda:0 twice: a device is one worker; [0, 1] or [0] would fit"),
    ("[0-2, 1]", "actor names cuda:1 twice: a device is one worker; 0-2 or [1] would fit"),
    ("[cpu, cpu:0]", "actor names cpu:0 twice: a device is one worker; [cpu, cpu:1] or cpu would fit"),
    ("[0, cpu]", "actor is on GPUs and on the CPU: a role is on one of them; [0] or cpu would fit"),
    ("{label: a100}", "such as {label: a100, count: 4} or {label: l4, count: 1}"),
    ("{label: a100, count: true}", "such as {label: a100, count: 4} or {label: l4, count: 1}"),
    ("{label: a100, count: 0}", "from 1 to 4096, such as count 1 or 4"),
    *(
        (text, "is no device: a GPU is its number, the CPU is cpu, such as [0, 1] or cpu")
        for text in ("true", "1.5", "node1", "cuda:0", "node1:cuda:0", "gpu:0", "'cpu:'", "0-", "''", "[[0]]")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refused_forms(text, words):
    message = refusal(device_map={"actor": from_yaml(text)})
    assert message.startswith("1 setting is wrong") and words in message, message


@pytest.mark.parametrize("words", [words for _, words in REFUSED if words.endswith(" would fit")])
def test_what_a_refusal_offers_is_valid(words):
    for offered in words.rpartition("; ")[2].removesuffix(" would fit").split(" or "):
        assert parse(from_yaml(offered))


def test_faults_of_several_roles_come_together():
    text = refusal(device_map={"actr": "cpu", "actor": [], "critic": "3-1"})
    assert "'actr' is no role: one of actor, critic, reference, reward_model, rollout, teacher, process_reward" in text
    assert "actor has no device" in text and "critic has the range '3-1'" in text


def test_a_role_without_an_entry_is_where_the_one_it_follows_is():
    default, given = Device("cpu", 7), {"rollout": "cpu:1"}
    found = {role: [str(d) for d in devices_of(given, role, default)] for role in ROLES}
    assert found == {role: ["cpu:7"] for role in ROLES} | {"rollout": ["cpu:1"], "reward_model": ["cpu:1"]}
    assert devices_of(given, "actor") == []
    hosted = workers({"critic": [3, 0], "actor": [0]}, ["rollout", "critic", "actor"])
    assert {str(device): roles for device, roles in hosted.items()} == {
        "cuda:0": ["actor", "critic", "rollout"],
        "cuda:3": ["critic"],
    }


@pytest.mark.parametrize(
    ("gpus", "there", "fits"),
    [
        (0, "no GPU, only cpu", ["{actor: cpu}", "{actor: [cpu, cpu:1]}"]),
        (1, "GPU 0 and cpu", ["{actor: [0]}", "{actor: cpu}"]),
        (2, "GPUs 0 to 1 and cpu", ["{actor: [0], critic: [1]}", "{actor: [0, 1]}"]),
    ],
)
def test_devices_that_do_not_exist(gpus, there, fits):
    with pytest.raises(RequestError) as caught:
        check_exists([Device("cuda", 0), Device("cuda", 3)], gpus, "critic")
    what = "devices 0, 3 do not exist" if gpus == 0 else "device 3 does not exist"
    text = f"device_map.critic: {what}; this machine has {there}; device_map: {' or '.join(fits)} would fit"
    assert str(caught.value) == text
    for fit in fits:
        for place in OmegaConf.to_container(OmegaConf.create(fit)).values():
            check_exists(parse(place), gpus)
    check_exists([Device("cpu", 9), Device("cuda", 9, "node1")], gpus)


@pytest.mark.parametrize(
    "given",
    [
        {"actor": 0, "critic": [0]},
        {"actor": (0, 1), "critic": "2-3"},
        {"actor": ["cpu", "cpu:1"]},
        {"actor": ["node1:0-3", {"label": "a100", "count": 2}], "reference": "node1:cpu"},
    ],
)
def test_dump_keeps_what_was_written(given, tmp_path):
    cfg = load(device_map=given, cluster={"backend": "ray"})
    path = tmp_path / "config.yaml"
    path.write_text(dump(cfg))
    assert load_config(path) == cfg
    assert load_config(path, ["device_map.critic=null"]).device_map.keys() == given.keys() - {"critic"}


def test_overrides_name_devices(tmp_path):
    overrides = ["device_map.actor=0-1", "device_map.critic=cpu:1", "device_map={reference: [2]}"]
    assert load_config(None, overrides, partial=True).device_map == {
        "actor": "0-1", "critic": "cpu:1", "reference": [2],
    }  # fmt: skip


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S))
def test_the_page_s_examples_load(block):
    keys = OmegaConf.to_container(OmegaConf.create(block))
    cfg = load_config(None, partial=True, **keys)
    assert cfg.device_map.keys() == keys.get("device_map", {}).keys()


def test_the_page_s_first_example_prints_what_it_says():
    blocks = re.findall(r"```(?:yaml)?\n(.*?)```", PAGE.read_text(), re.S)
    keys = OmegaConf.to_container(OmegaConf.create(blocks[0]))
    cfg = load(**keys, init_kl_coef=0.0, reward_model_config={"model_name_or_path": "r"})
    assert blocks[1].strip() in notes(cfg)


def test_the_page_names_every_role_and_where_it_is_by_default():
    table = PAGE.read_text().partition("## Defaults")[2].partition("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.M))
    assert list(rows) == list(ROLES)
    assert {role: f"the {FOLLOWS[role]}'s devices" for role in FOLLOWS} == {r: rows[r] for r in FOLLOWS}


def test_forms_of_the_page_are_read():
    text = PAGE.read_text().partition("| written | means |")[2].partition("\n\n")[0]
    forms = [form for cell in re.findall(r"^\| (`[^|]*) \|", text, re.M) for form in re.findall(r"`([^`]+)`", cell)]
    assert len(forms) == 9
    assert all(parse(from_yaml(form)) for form in forms)


def test_the_schema_s_examples_are_sound():
    for example in RunConfig.model_fields["device_map"].examples or []:
        assert load(device_map=example).device_map == example
