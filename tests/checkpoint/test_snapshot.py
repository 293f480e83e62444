"""Copies to be written while training goes on."""

from __future__ import annotations

import pytest
import torch

from verl.checkpoint.snapshot import snapshot


def test_training_does_not_change_a_snapshot():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    turned = torch.arange(6.0).view(2, 3).t()
    copies = snapshot({"embed": weight, "head": weight.data, "turned": turned, "view": weight[:2], "none": turned[:0]})
    with torch.no_grad():
        weight.fill_(5), turned.fill_(5)
    assert copies["head"] is copies["embed"] and copies["embed"].eq(1).all() and copies["view"].eq(1).all()
    assert copies["turned"].is_contiguous() and copies["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copies["none"].shape == (0, 2) and not any(c.requires_grad for c in copies.values())
    memory = torch.empty(2)
    assert [t.tolist() for t in snapshot((str(i), memory.fill_(i)) for i in range(2)).values()] == [[0, 0], [1, 1]]
    with pytest.raises(TypeError, match="'w' can't be saved"):
        snapshot({"w": torch.zeros(1, device="meta")})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_snapshot_of_a_gpu():
    weight = torch.arange(2.0**20, device="cuda")
    copies = snapshot({"a": weight, "b": weight, "t": weight.view(2, -1).t()})
    weight.fill_(-1)
    assert copies["a"] is copies["b"] and copies["a"].is_pinned() and copies["a"].device.type == "cpu"
    assert torch.equal(copies["a"], torch.arange(2.0**20)) and torch.equal(copies["t"].t().reshape(-1), copies["a"])
