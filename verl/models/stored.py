"""Models read whole from their files, and whether the files have what the model needs."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from verl.config.errors import RequestError

log = logging.getLogger(__name__)


MARKED = {".safetensors", ".bin", ".json"}


def mark(name: str) -> str:
    """Another one where the weights or the configuration of a folder, or the commit of a hub name, are others. Of a
    large file it reads its size and pieces all over it, 1 MiB in all; '' where nothing is known."""
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else ""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in MARKED and "token" not in p.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(min(256, -(-size // 4096))):
                file.seek(i * max(4096, size // 256))
                digest.update(file.read(4096))
    return digest.hexdigest()


def read(kind: Any, name: str, config: Any, **how: Any) -> tuple[PreTrainedModel, list[str], list[str]]:
    """``kind.from_pretrained`` of a folder or hub name: the model; its parameters that no file has, which were drawn;
    and names in the files that have no place in it.

    ``RequestError`` where shapes in the files aren't those of config.json; else what ``from_pretrained`` raises.
    """
    try:
        # with other shapes it would raise and tell which in its log alone
        model, info = kind.from_pretrained(
            name, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):  # no memory, say
            raise
        raise RequestError(
            f"{name}: weights in its files are missing, or fit neither its config.json nor each other"
        ) from error
    wrong = {tensor: (tuple(stored), tuple(wanted)) for tensor, stored, wanted in info["mismatched_keys"]}
    if wrong:
        tensor = next((n for n in model.state_dict() if n in wrong), min(wrong))
        stored, wanted = wrong[tensor]
        others = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise RequestError(
            f"{name}: {tensor} has shape {stored} in its files and {wanted} by its config.json{others}: config.json "
            "must be the one that was saved with the weights"
        )
    absent = [n for n, _ in model.named_parameters() if n in info["missing_keys"]]
    return model, absent, sorted(info["unexpected_keys"])


def incomplete(name: str, model: nn.Module, absent: Sequence[str], rest: Sequence[str] = ()) -> RequestError:
    """What to raise where the files have no weights for the parameters ``absent``; ``rest``: names without a place."""
    kind, total = type(model).__name__, sum(1 for _ in model.parameters())
    instead = f"; {rest[0]} is there, which {kind} has no place for" if rest else ""
    return RequestError(
        f"{name} holds no weights for {len(absent)} of the {total} parameters of {kind} ({_some(absent)}){instead}: "
        "name a folder that has them all, as save_pretrained and verl export write it; they would be drawn at random"
    )


@functools.cache
def warn_of_rest(name: str, kind: str, rest: tuple[str, ...]) -> None:
    """Say once what is in the files and is left out of the model: perhaps config.json is of another one."""
    log.warning(
        "%s: %d tensors in its files have no place in %s by its config.json and are left out (%s)",
        name, len(rest), kind, _some(rest),
    )  # fmt: skip


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
