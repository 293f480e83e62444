"""Models that load with no code of their own: one policy's numbers are the plain model's, in training and sampling."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tests.models.zoo import FAMILIES, built, loaded, rows
from verl.batch import Ragged
from verl.models.packing import pack
from verl.rollout.base import Request, Sampling
from verl.rollout.native import NativeEngine

TEMPERATURE = 0.7


def plain_logits(plain, prompt, response):
    """``[n, V]`` tempered logits that predict the response."""
    logits = plain(torch.cat([prompt, response])[None], use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_the_plain_model_row_by_row(family):
    """Log-probabilities, entropy, and the gradient of every parameter."""
    plain = built(FAMILIES[family])
    policy = loaded(copy.deepcopy(plain))
    plain.set_attn_implementation("eager")
    prompts, responses, groups = rows()
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)
    out = policy(packed, torch.cat(responses), frozenset({"logprobs", "entropy"}), TEMPERATURE)
    log_p = [plain_logits(plain, p, r).log_softmax(-1) for p, r in zip(prompts, responses, strict=True)]
    chosen = torch.cat([x.gather(1, r[:, None])[:, 0] for x, r in zip(log_p, responses, strict=True)])
    whole = torch.cat(log_p)
    torch.testing.assert_close(out["logprobs"], chosen, atol=1e-4, rtol=0)
    torch.testing.assert_close(out["entropy"], -(whole.exp() * whole).sum(-1), atol=1e-4, rtol=0)
    out["logprobs"].sum().backward()
    chosen.sum().backward()
    theirs = dict(plain.named_parameters())
    total = 0.0
    for name, p in policy.trainable():
        got, expected = (torch.zeros_like(p) if x.grad is None else x.grad for x in (p, theirs[name]))
        assert (got - expected).norm() <= 1e-3 * expected.norm() + 1e-4, name
        total += got.norm().item()
    assert total > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probabilities_are_the_trainer_s(family):
    """Long enough to leave a window of 4; two samples of a prompt share it."""
    policy = loaded(built(FAMILIES[family]))
    prompts, _, _ = rows()
    prompts = [prompts[0], prompts[0], prompts[2]]
    asked = [Request(str(i), str(len(p)), tuple(p.tolist()), i) for i, p in enumerate(prompts)]

    async def sample():
        engine = NativeEngine(policy, frozenset(), max_rows=2)
        sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=9, seed=3)
        return [response async for response in engine.generate(asked, sampling)]

    answers = {r.row_id: r for r in asyncio.run(sample())}
    ids = Ragged.from_rows([torch.tensor(answers[str(i)].ids) for i in range(3)])
    sampled = torch.tensor([x for i in range(3) for x in answers[str(i)].logprobs])
    packed = pack(Ragged.from_rows(prompts), ids, [0, 0, 1])
    with torch.no_grad():
        trained = policy(packed, ids.values, frozenset({"logprobs"}), TEMPERATURE)["logprobs"]
    torch.testing.assert_close(sampled, trained, atol=1e-4, rtol=0)
