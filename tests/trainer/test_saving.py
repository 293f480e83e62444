"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from verl.checkpoint import parts
from verl.checkpoint.snapshot import Room
from verl.config.errors import RunError
from verl.runtime import host
from verl.runtime.host import Host
from verl.trainer.base import Run

EVERY = {"every_steps": 1, "keep": 4}


def weights(run):
    return {name: tensor.detach().clone() for name, tensor in run.controller.workers.actor.engine.shards()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_laps_go_on_beside_a_save_and_it_holds_the_weights_of_its_step(config, monkeypatch):
    go, late = threading.Event(), []

    def slow(folder, *given, **options):
        assert go.wait(60)
        late.append(run.controller.step)
        return parts.write_parts(folder, *given, **options)

    monkeypatch.setattr(host, "write_parts", slow)
    with Run(config(total_steps=3, checkpoint=EVERY), console=False) as run:
        run.prepare()
        run._more = True  # as within train
        run.step()
        first = weights(run)
        assert run.store.latest() is None
        lap = run._await(run.controller.lap())  # the save of step 1 waits; training doesn't
        assert lap.metrics["policy/optimizer_steps"] == 1 and not same(first, weights(run))
        assert run.store.latest() is None
        go.set()
        run.train()
        assert run.store.steps() == [1, 3] and late[0] == 2
        assert same(run.store.load(1).tensors("actor"), first)
        assert same(run.store.load(3).tensors("actor"), weights(run))


def test_memory_for_copies_is_got_after_the_first_lap_and_used(config, monkeypatch):
    """As on a GPU; a save that nothing goes on beside takes none."""
    made, found = [], []
    place = Room.place
    monkeypatch.setattr(Room, "place", lambda room, name, t: found.append(place(room, name, t)) or found[-1])

    def make_room(self):
        made.append(run.controller.step)
        self._rooms |= {name: Room(sizes, self.device) for name, sizes in self._sizes.items()}

    monkeypatch.setattr(Host, "make_room", make_room)
    with Run(config(total_steps=6, checkpoint={"every_steps": 2, "keep": 4}), console=False) as run:
        run.prepare()
        run._more = True
        run.step(), run.step()
        second = weights(run)
        run.train()
        assert made == [1] and len(found) > 2 * len(second) and all(t is not None for t in found)
        assert len({t.data_ptr() for t in found}) == len(found) / 2  # of steps 2 and 4
        assert same(run.store.load(2).tensors("actor"), second)
        assert same(run.store.load(6).tensors("actor"), weights(run))

    made.clear()
    with Run(config(total_steps=2, checkpoint={"every_steps": 2}), console=False) as run:
        run.prepare()
        run.train()
    assert not made


def test_memory_for_copies_waits_for_an_optimizer_step(config, tmp_path, monkeypatch):
    """The first lap's rewards are equal, so nothing is trained, and the optimizer has no state yet."""
    gate, made = tmp_path / "gate", []

    def of_second_lap(response_ids: list[int]) -> float:
        return sum(i < 16 for i in response_ids) if gate.exists() else 1.0

    def make_room(self):
        made.append((run.controller.step, any(name.startswith("exp_avg") for name in self._sizes["actor_optimizer"])))

    monkeypatch.setattr(Host, "make_room", make_room)
    with Run(config(total_steps=5, checkpoint={"every_steps": 4}, reward_fn=of_second_lap), console=False) as run:
        run.prepare()
        run._more = True
        assert run.step().metrics["policy/rows_trained"] == 0
        gate.touch()
        run.train()
    assert made == [(2, True)]


def test_where_copies_do_not_fit_training_waits_for_its_saves(config, monkeypatch, caplog):
    saves = []
    snapshot = Host.snapshot
    monkeypatch.setattr(Host, "snapshot", lambda self, copy, whole: saves.append(copy) or snapshot(self, copy, whole))
    for free, copied in ((1000, [False] * 3), (None, [True, True, False])):
        monkeypatch.setattr(host, "free_memory", lambda free=free: free)
        caplog.clear(), saves.clear()
        with Run(config(total_steps=3, checkpoint=EVERY), console=False) as run:
            run.prepare(overwrite=True)
            run.train()
            assert run.store.steps() == [1, 2, 3] and saves == copied
        told = [r.getMessage() for r in caplog.records if "wait for its saves" in r.getMessage()]
        assert (free is not None) == (len(told) == 1 and "don't fit into the 9.31e-07 GiB free on" in told[0]), told


def test_weights_that_may_be_lost_are_not_saved(config, monkeypatch, caplog):
    """What is due waits for a step without a gradient that isn't finite; at the end what stands stays."""
    with Run(config(total_steps=4, checkpoint={"every_steps": 1, "keep": 1}), console=False) as run:
        run.prepare()
        run._more = True
        lap, bad = run._lap, {2, 4}

        def spoiled(step, **how):
            result = lap(step, **how)
            result.metrics["policy/bad_steps"] = float(step in bad)
            return result

        monkeypatch.setattr(run, "_lap", spoiled)
        run.step()
        run.step()
        run._end_save()
        assert run.store.steps() == [1] and "not saved: policy/bad_steps in step 2" in caplog.text
        run.train()
        assert run.store.steps() == [3]
        assert "not saved at the end: policy/bad_steps in step 4" in caplog.text and "step_3" in caplog.text


@pytest.mark.parametrize("beside", [True, False])
def test_a_save_that_fails_ends_the_run_and_names_what_stands(beside, config, monkeypatch):
    def fail(folder, *given, **options):
        if folder.name.startswith(".step_2"):
            raise RunError(f"can't write checkpoint {folder}: No space left on device")
        return parts.write_parts(folder, *given, **options)

    monkeypatch.setattr(host, "write_parts", fail)
    cfg = config(total_steps=4, checkpoint=EVERY | {"beside_training": beside})
    with Run(cfg, console=False) as run:
        run.prepare()
        with pytest.raises(RunError, match=r"No space left on device. The last complete one is .*step_1"):
            run.train()
    assert run.store.latest() == 1 and not list(Path(cfg.run_dir).glob("checkpoints/.step_*"))


def test_a_checkpoint_written_beside_training_resumes_to_the_bit(config):
    cfg = config(total_steps=4, checkpoint={"every_steps": 2})
    with Run(cfg, console=False) as run:
        run.prepare()
        run.train()
        straight = weights(run)
    with Run(config(total_steps=4, run_dir=f"{cfg.run_dir}-again"), console=False) as again:
        again.prepare(run.store.load(2))
        again.train()
        assert same(weights(again), straight)


def test_a_save_is_due_after_minutes(config):
    with Run(config(total_steps=3, checkpoint={"every_steps": 0, "every_minutes": 5}), console=False) as run:
        run.prepare()
        run.step()
        run._saved_at -= 301
        run.step()
        run.train()
        assert run.store.steps() == [2, 3]


def test_a_save_is_whole_where_a_run_goes_step_by_step(config):
    """Between two steps of a user's own loop nothing is written any more, and the last one loses nothing."""
    with Run(config(total_steps=4, checkpoint=EVERY), console=False) as run:
        run.prepare()
        for step in 1, 2:
            run.step()
            assert run.store.latest() == step
        held = weights(run)
    assert same(run.store.load(2).tensors("actor"), held)


def test_a_failing_lap_does_not_cost_the_save_before_it(config, monkeypatch):
    def slow(folder, *given, **options):
        assert failed.wait(60)
        return parts.write_parts(folder, *given, **options)

    failed, failing = threading.Event(), Run._explain

    def fail(self, step, metrics):
        if step == 2:
            failed.set()
            raise RunError("broke")
        failing(self, step, metrics)

    monkeypatch.setattr(host, "write_parts", slow)
    monkeypatch.setattr(Run, "_explain", fail)
    with Run(config(total_steps=4, checkpoint={"every_steps": 1}), console=False) as run:
        run.prepare()
        with pytest.raises(RunError, match="broke"):
            run.train()
    assert run.store.latest() == 1
