"""G02: where a response ends is what the engine says, with every end-of-sequence id in force; no id is looked for."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.rollout_contract import collect
from tests.tiny import f_bpe
from verl.batch import Ragged
from verl.models.factory import eos_ids
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout.base import Request, Response, Sampling
from verl.rollout.native import NativeEngine

WIDTH = 6
SCRIPTS = {"A": (3, 4, 5, 6, 6, 6), "B": (3, 10, 6, 6, 6, 6), "C": (3, 4, 2, 6, 6, 6), "D": (3, 4, 5, 3, 4, 5)}
LIMITS = {"A": 3, "B": 6, "C": 6, "D": 6}


def scripted() -> GPT2LMHeadModel:
    """A GPT-2 that knows only positions: row ``i``'s prompt has ``1 + 6 i`` tokens, then its script follows."""
    config = GPT2Config(vocab_size=32, n_layer=1, n_embd=32, n_head=2, n_positions=32, tie_word_embeddings=False)
    lm = GPT2LMHeadModel(config).eval()
    tokens = [token for script in SCRIPTS.values() for token in script]
    with torch.no_grad():
        for p in lm.transformer.h.parameters():
            p.zero_()
        lm.transformer.wte.weight.zero_()
        lm.transformer.wpe.weight.zero_()
        lm.transformer.wpe.weight[range(len(tokens)), tokens] = 1.0
        lm.lm_head.weight.copy_(torch.eye(32) * 50)
    lm.config.eos_token_id = 2
    lm.generation_config.eos_token_id = [2, 10]
    lm.set_attn_implementation(ATTENTION)
    return lm


@pytest.fixture(scope="module")
def answers() -> dict[str, Response]:
    lm = scripted()
    engine = NativeEngine(Policy(lm), eos_ids(lm, f_bpe()))
    requests = {name: Request(name, name, (6,) * (1 + WIDTH * i)) for i, name in enumerate(SCRIPTS)}

    async def run() -> dict[str, Response]:
        parts = [collect(engine, [r], Sampling(max_new_tokens=LIMITS[name])) for name, r in requests.items()]
        return {name: row for part in await asyncio.gather(*parts) for name, row in part.items()}

    return asyncio.run(run())


def test_masks(answers: dict[str, Response]) -> None:
    ids = Ragged.from_rows([answers[name].ids for name in SCRIPTS])
    assert ids.padded(0).tolist() == [
        [3, 4, 5, 0, 0, 0], [3, 10, 0, 0, 0, 0], [3, 4, 2, 0, 0, 0], [3, 4, 5, 3, 4, 5],
    ]  # fmt: skip
    mask = ids.with_values(torch.ones_like(ids.values)).padded(0)
    assert mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_truncated_is_a_finish_reason(answers: dict[str, Response]) -> None:
    assert {name for name, row in answers.items() if row.finish_reason == "length"} == {"A", "D"}
    assert all(row.finish_reason == "stop" for name, row in answers.items() if name in "BC")


def test_every_id_in_force_is_known() -> None:
    lm = scripted()
    assert eos_ids(lm, f_bpe()) == {2, 10}
