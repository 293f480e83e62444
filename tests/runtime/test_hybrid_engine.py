"""The HybridEngine in loops of one's own: it trains, generates with what was trained, and says what moved."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.own_loop import ROWS, on_ranks, play
from tests.tiny import f_gpt2, f_llama
from verl import HybridEngine
from verl.config.errors import RequestError, RunError
from verl.runtime.hybrid_engine import _Places

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def alone() -> dict:
    return play("cpu", "cpu", range(4))


def test_the_example_learns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["own_loop.py"])
    runpy.run_path(str(OWN_LOOP))
    said = capsys.readouterr().out.splitlines()
    first, last = (float(line.split("reward ")[1].split(",")[0]) for line in (said[0], said[-1]))
    assert first < 0.75 and last > 0.9 and said[-1].endswith("version 40, 0 bytes published")


def test_generation_is_transformers_own_on_the_trained_weights():
    lm = f_gpt2(seed=1)
    with HybridEngine(model=lm, actor_devices="cpu", critic_devices="cpu") as engine:
        actor = engine.actor_model
        prompts = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        for _ in range(2):
            ours = actor.generate(prompts, mask, max_new_tokens=5, do_sample=False)
            theirs = lm.generate(prompts, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert torch.equal(ours, theirs)
            before = ours
            with torch.no_grad():  # any change of the trained parameters is one of what generates
                for i, p in enumerate(actor.parameters()):
                    p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            engine.step()
        assert not torch.equal(actor.generate(prompts, mask, max_new_tokens=5, do_sample=False), before)
        assert actor.config is lm.config and actor.responses[0].version == 2
        sampled = [actor.generate(prompts, mask, max_new_tokens=8, num_return_sequences=2) for _ in range(2)]
        assert sampled[0].shape[0] == 4 and not torch.equal(sampled[0], sampled[1])  # each call has noise of its own


def test_an_interval_leaves_older_weights_to_generation():
    with HybridEngine(f_llama(), hybrid_config={"reshard_interval": 8}) as engine:
        actor = engine.actor_model
        reports = []
        for _ in range(9):
            with torch.no_grad():
                next(actor.lm.parameters()).add_(0.1)
            reports.append(engine.step())
            trained, generating = (next(m.parameters()) for m in (actor.lm, actor.engine.policy.lm))
            assert torch.equal(trained, generating) == reports[-1].published
        assert [r.published for r in reports] == [False] * 7 + [True, False] and reports[-1].version == 8


def test_weights_that_generation_does_not_use_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_DEBUG", "1")
    with HybridEngine(f_llama(), hybrid_config={"reshard_interval": 2}) as engine:
        actor = engine.actor_model
        actor.generate(ROWS[:1], max_new_tokens=4)
        engine.step()
        engine.step()
        monkeypatch.setattr(actor, "publish", lambda version: (0, 0.0))
        with torch.no_grad():
            for p in actor.lm.parameters():
                p.mul_(1.5)
        engine.step()
        with pytest.raises(RunError, match=r"step 4: .* it doesn't use the published weights"):
            engine.step()


def test_ranks_train_as_one_process_does(alone: dict):
    """Two processes with half of the actor each, two that answer as the critic: the numbers of one process, and bytes
    that are only what each side lacks."""
    shares = [(0, 1), (2, 3)]
    told = on_ranks(4, ["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"], shares)
    size = sum(p.nbytes for p in alone["weights"].values())
    for rank, share in enumerate(shares):
        mine = told[rank]
        assert mine["remote"] and mine["versions"] == [2, 2]
        for step in range(2):
            torch.testing.assert_close(mine["values"][step], alone["values"][step][list(share)], atol=1e-5, rtol=1e-5)
            report = mine["reports"][step]
            assert size / 2 <= report.bytes <= size / 2 + 16 * 40
            tokens = len(share) * ROWS.shape[1]
            assert dict(report.crossed) == {
                "ids": 4 * tokens,
                "mask": tokens,
                "values": 4 * tokens,
                "gradients": 4 * tokens,
            }
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(mine["weights"][name], weight, atol=1e-5, rtol=1e-5)
            assert torch.equal(mine["generating"][name], mine["weights"][name])
    assert not alone["remote"] and not alone["reports"][0].crossed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor_devices": ["cpu:0", "cpu:1"]}, r"torchrun --nproc-per-node=2 "),
        ({"actor_devices": ["cpu:0", "cpu:1"], "critic_devices": ["cpu:2", "cpu:3"]}, r"torchrun --nproc-per-node=4 "),
        ({"actor_devices": [97]}, "97"),
        ({"hybrid_config": {"reshard": 1}}, r"hybrid_config: .*reshard"),
        ({"hybrid_config": {"reshard_interval": 0}}, "hybrid_config: reshard_interval: .*greater than or equal to 1"),
    ],
)
def test_wrong_requests(keys: dict, message: str):
    with pytest.raises(RequestError, match=message):
        HybridEngine("nowhere", **keys)


@pytest.mark.parametrize(("processes_here", "expected"), [("2", 3), ("1", 0)], ids=["one machine", "two"])
def test_the_gpus_asked_for_are_used(monkeypatch: pytest.MonkeyPatch, processes_here: str, expected: int):
    """Of one machine; of several, torchrun's own count on each is all that tells them apart."""
    monkeypatch.setenv("LOCAL_RANK", "1" if processes_here == "2" else "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    given = {"is_initialized": True, "get_world_size": 2, "get_rank": 1, "new_group": None, "DeviceMesh": None}
    for name, value in given.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value, **__: value)
    assert _Places.of([2, 3], None).actor == torch.device("cuda", expected)


def test_what_it_does_not_take_is_said():
    with pytest.raises(RequestError, match=r"hybrid_config: no key reshard, it has reshard_interval, "):
        HybridEngine(f_llama(), hybrid_config={"reshard": 2})
    with HybridEngine(f_llama()) as engine, pytest.raises(RequestError, match="padded on the left"):
        engine.actor_model.generate([[1, 2, 3]])
