"""Which worker hosts which role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.config.samples import load
from verl.config.devices import Device
from verl.config.errors import ConfigError, RequestError
from verl.dataflow.placement import place

CPU, GPU = Device("cpu", 0), Device("cuda", 0)
PPO = ("rollout", "critic", "actor", "reference", "reward_model")


def test_one_device_hosts_everything():
    placed = place(load(), CPU, PPO)
    assert placed.devices == (CPU,)
    assert placed.roles == dict.fromkeys(PPO, (0,))


def test_groups_of_their_own():
    cfg = load(device_map={"critic": [2, 3], "actor": [1, 0], "rollout": [0, 4]})
    placed = place(cfg, GPU, PPO)
    assert [str(d) for d in placed.devices] == ["cuda:1", "cuda:0", "cuda:2", "cuda:3", "cuda:4"]
    assert placed.ranks("actor") == placed.ranks("reference") == (0, 1)
    assert placed.ranks("critic") == (2, 3)
    assert placed.ranks("rollout") == placed.ranks("reward_model") == (1, 4)
    assert placed.ranks("teacher") == ()
    assert placed.disjoint("actor", "critic") and not placed.disjoint("actor", "rollout")
    assert placed.hosted(1) == ("actor", "reference", "reward_model", "rollout")
    assert placed.hosted(2) == ("critic",)


def test_devices_that_share_an_engine():
    """The first of each group samples for all of it; the others' devices are taken, too."""
    cfg = load(device_map={"actor": [0, 1], "rollout": "1-4"}, rollout={"tensor_parallel_size": 2})
    placed = place(cfg, GPU, PPO)
    assert placed.ranks("rollout") == (1, 3) and placed.spans == {1: (1, 2), 3: (3, 4)}
    assert placed.reach("rollout") == (1, 2, 3, 4) and placed.reach("actor") == placed.ranks("actor") == (0, 1)
    assert placed.hosted(2) == ("reward_model",) and not placed.disjoint("rollout", "actor")
    critic = load(device_map={"actor": [0], "rollout": "1-2", "critic": [2]}, rollout={"tensor_parallel_size": 2})
    assert not place(critic, GPU, PPO).disjoint("critic", "rollout")
    with pytest.raises(RequestError, match="devices 3, 4 do not exist"):
        replace(placed, roles={"rollout": (1, 3)}).check(3)


def test_ranks_ascend_in_whatever_order_devices_are_named():
    placed = place(load(device_map={"actor": [0, 1], "critic": [1, 0]}), GPU, PPO)
    assert placed.devices == (GPU, Device("cuda", 1))
    assert placed.ranks("critic") == (0, 1)


def test_an_actor_without_an_entry_is_on_the_default_device():
    cfg = load(device_map={"critic": [0]})
    assert place(cfg, GPU, PPO).devices == (GPU,)
    apart = place(cfg, CPU, PPO)
    assert apart.devices == (CPU, GPU) and apart.disjoint("actor", "critic")


def test_an_entry_of_a_role_that_the_plan_lacks_makes_no_worker():
    assert place(load(device_map={"actor": [0], "teacher": [5]}), CPU, PPO).devices == (GPU,)


def test_the_missing_device_s_role_is_named():
    placed = place(load(device_map={"actor": [0], "critic": [0, 3]}), GPU, PPO)
    placed.check(4)
    with pytest.raises(RequestError, match=r"device_map\.critic: device 3 does not exist; .* GPUs 0 to 1 and cpu"):
        placed.check(2)


class Module:
    def parameters(self):
        return iter(())


def test_a_loaded_module_has_one_worker():
    cfg = load(actor_model_config={"model_name_or_path": Module()}, device_map={"critic": [0]})
    assert place(cfg, GPU, PPO).devices == (GPU,)
    with pytest.raises(ConfigError, match=r"a loaded Module, but device_map makes 2 workers.*name or folder"):
        place(cfg, CPU, PPO)
