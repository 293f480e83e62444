"""Muon: steps with all singular values near 1, of AdamW's size, on matrices alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engines.test_fsdp import ALL, BOTH, batch, loss_fn, policy
from tests.tiny import f_llama
from verl.config.model import OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.engines.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)])
def test_singular_values_end_near_one_in_the_same_directions(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 100
    out = orthogonalise(matrix)
    values = torch.linalg.svdvals(out)
    assert out.shape == shape and values.min() > 0.3 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ out @ vh.T  # diagonal, were it exactly U S V^T with other singular values
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()), atol=1e-3, rtol=0)
    assert (inside.diagonal() > 0).all()


def test_no_gradient_is_no_step_and_zero_is_no_nan():
    p, q = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = Muon({p: p, q: q}, lr=0.1, weight_decay=0.0)
    p.grad = torch.zeros(3, 4)
    optimizer.step()
    assert torch.equal(p, torch.ones(3, 4)) and torch.equal(q, torch.ones(3, 4)) and q not in optimizer.state


def test_a_step_by_hand():
    p = nn.Parameter(torch.full((2, 3), 5.0))
    optimizer = Muon({p: p}, lr=0.5, weight_decay=0.1)
    grads = [torch.tensor([[1.0, 0, 0], [0, 2, 0]]), torch.tensor([[0.0, 0, 3], [1, 0, 0]])]
    expected, momentum = p.detach().clone(), torch.zeros(2, 3)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * grad
        direction = orthogonalise(0.05 * grad + 0.95 * momentum)
        expected = expected * (1 - 0.5 * 0.1) - 0.5 * 0.2 * 3**0.5 * direction
    torch.testing.assert_close(p.detach(), expected)


def test_the_engine_gives_it_the_backbone_s_matrices():
    engine = FsdpEngine(policy(f_llama()), OptimizerConfig(name="muon", lr=1e-2))
    muon, adam = engine.optimizer._torch
    names = {id(p): name for name, p in engine.optimizer.masters.items()}
    mine = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adam.param_groups for p in group["params"]}
    assert len(mine) == 14 and all("proj" in name for name in mine)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= rest and not mine & rest
    losses = [engine.update(batch(), ALL, loss_fn, BOTH, 1.0).stats["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
