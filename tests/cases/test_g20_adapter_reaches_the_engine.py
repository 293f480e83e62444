"""G20: after an update the engine samples from the new policy, adapters included; names that match nothing are told."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.rollout_contract import ask, requests
from tests.tiny import f_llama
from verl.config.errors import RunError
from verl.config.model import ModelConfig
from verl.hybrid.publish import Corridor
from verl.hybrid.table import Table, parts_of
from verl.hybrid.transport import Alone
from verl.models.adapters import add_lora
from verl.models.decoder import in_place
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.rollout.base import Sampling
from verl.rollout.native import NativeEngine

SAMPLING = Sampling(max_new_tokens=6, seed=1)
CPU = torch.device("cpu")


def policy(*, lora: bool, head: bool = False) -> Policy:
    cfg = ModelConfig(model_name_or_path=f_llama(seed=0), dtype="fp32", use_lora=lora, lora_r=2)
    if not head:
        return Policy(load_model(cfg, "cpu", torch.float32))
    plain = load_model(cfg.model_copy(update={"use_lora": False}), "cpu", torch.float32)
    adapted = add_lora(plain, cfg)
    adapted.delete_adapter("default")
    from peft import LoraConfig

    keep = LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"], modules_to_save=["lm_head"])
    adapted.add_adapter("default", keep, autocast_adapter_dtype=False)
    adapted.set_adapter("default")
    return Policy(adapted)


def own(policy: Policy) -> dict[str, torch.Tensor]:
    return in_place(policy.lm, policy.adapter)


def change(trained: Policy) -> None:
    with torch.no_grad():
        for i, (_, tensor) in enumerate(own(trained).items()):
            tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i))


def answers(engine: NativeEngine) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    return {r.row_id: (r.ids, r.logprobs) for r in ask(engine, requests(), SAMPLING).values()}


@pytest.mark.parametrize(("lora", "head"), [(False, False), (True, False), (True, True)], ids=["whole", "lora", "head"])
def test_the_engine_samples_from_the_new_policy(lora: bool, head: bool):
    trained = policy(lora=lora, head=head)
    base = {name: p.detach().clone() for name, p in trained.lm.named_parameters() if not p.requires_grad}
    engine = NativeEngine(copy.deepcopy(trained), frozenset())
    before = answers(engine)
    corridor = Corridor(Table.of(parts_of(own(trained)), parts_of(own(engine.policy))), 0, Alone(CPU))

    def publish(version: int) -> None:
        with engine.updating(version):
            for _ in corridor.flow(version, parts_of(own(trained)), parts_of(own(engine.policy)), 0):
                pass

    change(trained)
    publish(1)
    assert engine.version == 1
    after, fresh = answers(engine), answers(NativeEngine(trained, frozenset()))
    assert after == fresh  # same numbers, same draws
    apart = [abs(a - b) for row in before for a, b in zip(before[row][1], after[row][1], strict=False)]
    assert max(apart) > 1e-2
    for name, p in trained.lm.named_parameters():
        assert name not in base or torch.equal(p, base[name])
    publish(2)
    assert answers(engine) == after
    assert all(p.requires_grad for _, p in trained.trainable())


def test_names_without_a_counterpart_are_counted_and_told():
    trained, generating = policy(lora=True), policy(lora=True)
    renamed = {name.replace("base_model.", "other."): part for name, part in parts_of(own(trained)).items()}
    n = len(renamed)
    with pytest.raises(RunError, match=rf"{n} of {n} weights held by what is trained .*; {n} of {n} weights wanted by"):
        Table.of(renamed, parts_of(own(generating)))
    some = dict(parts_of(own(trained)))
    gone = next(iter(some))
    del some[gone]
    with pytest.raises(RunError, match=rf"^1 of {n} weights wanted by what generates have no counterpart: {gone}$"):
        Table.of(some, parts_of(own(generating)))


def test_a_half_updated_engine_does_not_generate():
    trained = policy(lora=False)
    engine = NativeEngine(copy.deepcopy(trained), frozenset())
    target = parts_of(own(engine.policy))
    source = dict(parts_of(own(trained)))
    corridor = Corridor(Table.of(source, target), 0, Alone(CPU))
    last = list(source)[-1]
    source[last] = []  # lost on the way
    with pytest.raises(RunError, match=f"{last}: none of 0 parts"), engine.updating(1):
        for _ in corridor.flow(1, source, target):
            pass
    with pytest.raises(RunError, match="no whole weights: loading version 1 failed"):
        ask(engine, requests(), SAMPLING)
    with engine.updating(2):
        for _ in corridor.flow(2, parts_of(own(trained)), target):
            pass
    assert len(answers(engine)) == len(requests())
