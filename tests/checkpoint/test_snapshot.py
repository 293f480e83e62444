"""Copies to be written while training goes on."""

from __future__ import annotations

import itertools

import pytest
import torch

from verl.checkpoint import snapshot as module
from verl.checkpoint.snapshot import Room, snapshot


def test_training_does_not_change_a_snapshot():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    turned = torch.arange(6.0).view(2, 3).t()
    copies = snapshot({"embed": weight, "head": weight.data, "turned": turned, "view": weight[:2], "none": turned[:0]})
    with torch.no_grad():
        weight.fill_(5), turned.fill_(5)
    assert copies["head"] is copies["embed"] and copies["embed"].eq(1).all() and copies["view"].eq(1).all()
    assert copies["turned"].is_contiguous() and copies["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copies["none"].shape == (0, 2) and not any(c.requires_grad for c in copies.values())
    with pytest.raises(TypeError, match="'w' can't be saved"):
        snapshot({"w": torch.zeros(1, device="meta")})


DTYPES = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8


def mixed(device: torch.device) -> dict[str, torch.Tensor]:
    """Of many sizes and dtypes; one is larger than a chunk of the test below."""
    found = {f"{n}": torch.randint(0, 2, (n,), device=device).to(DTYPES[n % 5]) for n in (0, 1, 3, 512, 513, 4000, 99)}
    return found | {"turned": torch.randn(7, 5, device=device).t(), "scalar": torch.tensor(2.5, device=device)}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_copies_lie_in_a_room_made_before_and_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(module, "CHUNK", 2048)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    tensors = mixed(device)
    room = Room({name: t.nbytes for name, t in tensors.items()}, device)
    places = []
    for _ in range(2):
        expected = {name: t.clone().cpu() for name, t in tensors.items()}
        copies = snapshot(tensors, room)
        for tensor in tensors.values():
            tensor.zero_()
        assert copies.keys() == expected.keys() and all(torch.equal(copies[n], t) for n, t in expected.items())
        assert all(c.is_contiguous() and c.shape == tensors[n].shape for n, c in copies.items())
        assert kind == "cpu" or all(c.is_pinned() for c in copies.values() if c.numel())
        spans = sorted((c.data_ptr(), c.data_ptr() + c.nbytes) for c in copies.values() if c.numel())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        places.append([c.data_ptr() for c in copies.values() if c.numel()])
        tensors = {name: torch.ones_like(t) for name, t in tensors.items()}
    assert places[0] == places[1]
    other = snapshot({"513": torch.ones(514, device=device), "new": torch.ones(3, device=device)}, room)
    assert other["513"].shape == (514,) and other["513"].eq(1).all() and other["new"].eq(1).all()
    assert not {c.data_ptr() for c in other.values()} & set(places[0])
    room.close(), room.close()


def test_memory_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies go elsewhere then."""
    monkeypatch.setattr(module, "CHUNK", 512)
    get = module._Chunk.__init__

    def some(chunk, size, device):
        if size == 1024:
            raise OSError(12, "no memory")
        get(chunk, size, device)

    monkeypatch.setattr(module._Chunk, "__init__", some)
    tensors = {"a": torch.ones(64), "b": torch.arange(200.0), "c": torch.ones(3)}
    room = Room({name: t.nbytes for name, t in tensors.items()}, torch.device("cpu"))
    copies = snapshot(tensors, room)
    assert all(torch.equal(copies[name], t) for name, t in tensors.items())
    assert [room.place(name, t) is None for name, t in tensors.items()] == [False, True, False]
    room.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_snapshot_of_a_gpu():
    weight = torch.arange(2.0**20, device="cuda")
    copies = snapshot({"a": weight, "b": weight, "t": weight.view(2, -1).t()})
    weight.fill_(-1)
    assert copies["a"] is copies["b"] and copies["a"].is_pinned() and copies["a"].device.type == "cpu"
    assert torch.equal(copies["a"], torch.arange(2.0**20)) and torch.equal(copies["t"].t().reshape(-1), copies["a"])
