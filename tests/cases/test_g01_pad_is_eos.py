"""G01: a tokenizer whose pad token is its end-of-sequence token trains the same tokens as one that has its own."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.rollout_contract import collect
from tests.tiny import EOS, f_bpe, f_llama
from verl.batch import Ragged
from verl.models.factory import eos_ids
from verl.models.packing import ATTENTION, pack
from verl.models.policy import Policy
from verl.rollout.base import Request, Sampling
from verl.rollout.native import NativeEngine

PROMPT = (8, EOS, 3)  # the EOS in it is a turn marker
ROWS = ((3, 5, EOS), (3, 4, 5, 6, 7))  # the first is padded to 5 by whoever pads


def logprobs_and_gradient(policy: Policy, rows: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """By the packed path: ``[R]`` and the head's gradient of their sum."""
    responses = Ragged.from_rows(rows, torch.int64)
    packed = pack(Ragged.from_rows([PROMPT] * len(rows), torch.int64), responses, [0] * len(rows))
    policy.zero_grad()
    logprobs = policy(packed, responses.values, frozenset({"logprobs"}), 1.0)["logprobs"]
    logprobs.sum().backward()
    assert policy.head_weight.grad is not None
    return logprobs.detach(), policy.head_weight.grad.clone()


@pytest.mark.parametrize("pad", ["<eos>", "<pad>", None])
def test_the_mask_is_the_length(pad: str | None) -> None:
    """Rows as the engine gives them: the EOS that ended a row is inside its mask, whatever the pad id is."""
    lm = f_llama()
    lm.config.pad_token_id = f_bpe(pad=pad).pad_token_id
    lm.set_attn_implementation(ATTENTION)
    engine = NativeEngine(Policy(lm), eos_ids(lm, f_bpe(pad=pad)))
    asked = [Request(f"p/{k}", "p", PROMPT, k) for k in range(64)]
    answers = asyncio.run(collect(engine, asked, Sampling(max_new_tokens=24, seed=1)))
    stopped = [row for row in answers.values() if row.finish_reason == "stop"]
    assert stopped
    for row in stopped:
        assert row.ids.index(EOS) == len(row.ids) - 1 == len(row.logprobs) - 1
    responses = Ragged.from_rows([row.ids for row in answers.values()], torch.int64)
    assert (responses.values == EOS).sum() == len(stopped)


def test_masks_of_the_case() -> None:
    responses = Ragged.from_rows(ROWS)
    mask = responses.with_values(torch.ones_like(responses.values)).padded(0)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_eos_is_trained_once_and_the_turn_marker_is_seen() -> None:
    lm = f_llama()
    ids = torch.tensor([PROMPT + ROWS[0]])
    plain = lm(ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)[0, 2:-1]
    plain = plain.gather(1, torch.tensor(ROWS[0])[:, None])[:, 0]
    plain.sum().backward()
    expected = lm.lm_head.weight.grad.clone()

    lm.set_attn_implementation(ATTENTION)
    policy = Policy(lm)
    logprobs, gradient = logprobs_and_gradient(policy, ROWS[:1])
    assert len(logprobs) == 3
    torch.testing.assert_close(logprobs, plain.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    both, _ = logprobs_and_gradient(policy, ROWS)  # a longer neighbour changes nothing
    torch.testing.assert_close(both[:3], logprobs, atol=1e-5, rtol=0)
