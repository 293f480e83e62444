"""Tensors of which several ranks write pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint.export import export
from verl.checkpoint.parts import write_parts
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tensorfile import Joined, Pieces
from verl.config.errors import RunError

WHOLE = {
    "matrix": torch.arange(35.0).view(5, 7), "row": torch.arange(3.0).to(torch.bfloat16), "step": torch.tensor(4.0),
    "none": torch.empty(0, 2),
}  # fmt: skip
CUTS = {  # rank: name: the piece
    0: {"matrix": (slice(0, 3), slice(0, 4)), "step": (), "none": (slice(0, 0), slice(0, 2))},
    1: {"matrix": (slice(3, 5), slice(0, 4))},
    2: {"matrix": (slice(0, 5), slice(4, 7)), "row": (slice(0, 3),)},
}


def pieces(cut: dict) -> Pieces:
    tensors = {name: WHOLE[name][box].clone() for name, box in cut.items()}
    return Pieces(tensors, {n: (tuple(WHOLE[n].shape), tuple(s.start for s in box)) for n, box in cut.items()})


def written(store: CheckpointStore, cuts: dict[int, dict], step: int = 1) -> Path:
    folder, entries = store.begin(step), {}
    for rank, cut in cuts.items():
        entries |= write_parts(folder, {f"actor_{rank}": pieces(cut)})
    return store.commit(step, entries)


def test_they_are_whole_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    written(store, CUTS)
    loaded = store.load()
    assert "actor" in loaded and "critic" not in loaded and "act" not in loaded
    found = loaded.tensors("actor")
    assert found.keys() == WHOLE.keys() and len(found) == len(WHOLE)
    for name, tensor in WHOLE.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_a_part_is_put_together_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    written(store, CUTS)
    parts = store.load().parts("actor")
    assert {name: (part.shape, part.dtype) for name, part in parts.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in WHOLE.items()
    }
    matrix = WHOLE["matrix"]
    for a, b, c, d in itertools.product(range(6), range(6), range(8), range(8)):
        assert torch.equal(parts["matrix"][a:b, c:d], matrix[a:b, c:d]), (a, b, c, d)
    assert torch.equal(parts["matrix"][...], matrix) and torch.equal(parts["matrix"][(slice(2, 4),)], matrix[2:4])
    assert parts["step"][...] == 4 and parts["step"][()] == 4 and parts["none"][...].shape == (0, 2)
    alone = parts["matrix"][1:3, :2]  # of one piece, which is not copied
    assert alone.untyped_storage().data_ptr() == parts["matrix"].parts[0].tensor.untyped_storage().data_ptr()


def test_pieces_that_are_one_memory_are_written_once(tmp_path: Path) -> None:
    step = torch.tensor(3.0)
    boxes = {name: ((), ()) for name in ("a/step", "b/step")}
    entries = write_parts(tmp_path, {"actor_0": Pieces({"a/step": step, "b/step": step}, boxes)})
    assert len(load_file(tmp_path / "actor_0.safetensors")) == 1 and entries.keys() == {"actor_0.safetensors"}
    joined = Joined([tmp_path / "actor_0.safetensors"])
    assert {name: t.item() for name, t in joined.items()} == {"a/step": 3.0, "b/step": 3.0}


@pytest.mark.parametrize("rank", CUTS)
def test_a_missing_piece_is_told(tmp_path: Path, rank: int) -> None:
    """The store knows the files that there are; that they are all is seen by counting."""
    store = CheckpointStore(tmp_path)
    written(store, {r: cut for r, cut in CUTS.items() if r != rank})
    held = 35 - WHOLE["matrix"][CUTS[rank]["matrix"]].numel()
    with pytest.raises(RunError, match=rf"step_1 is damaged: its files hold {held} of matrix's 35 values"):
        store.load().tensors("actor")


def test_a_policy_in_pieces_is_exported_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    folder, entries = store.begin(1), {}

    def config(target: Path) -> None:
        (target / "config.json").write_text('{"tie_word_embeddings": true}')

    for rank, cut in CUTS.items():
        files = {"hf": config} if rank == 0 else {}
        entries |= write_parts(folder, {f"actor_{rank}": pieces(cut)}, files)
    out = export(store.commit(1, entries), tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == WHOLE.keys() and all(torch.equal(exported[n], WHOLE[n]) for n in WHOLE)
