"""The text of each token of a response, by a tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from verl.config.errors import RequestError

Decode = Callable[[Sequence[int]], str]


def load_decoder(run: Path, model: str | None, trust_remote_code: bool = False) -> Decode:
    """Ids to text, special tokens too, by the tokenizer that the run saved or began with.

    Nothing is downloaded, and transformers, which takes seconds, is loaded only for a tokenizer without
    ``tokenizer.json``. ``RequestError`` where there is none here.
    """
    saved = sorted((run / "checkpoints").glob("step_*/hf/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    file = saved[-1] if saved else _file(model, "tokenizer.json")
    if file is not None:
        from tokenizers import Tokenizer

        own = Tokenizer.from_file(str(file))
        return lambda ids: str(own.decode(list(ids), skip_special_tokens=False))
    file = _file(model, "tokenizer_config.json")
    if file is None:
        raise RequestError(
            f"none in {Path(model).absolute()}, nor in the hub's cache"
            if model
            else "the run began with a loaded model"
        )
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=trust_remote_code, local_files_only=True)
    return lambda ids: str(other.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _file(model: str | None, name: str) -> Path | None:
    """A file of a folder, of an adapter's base, or of a hub name as it lies in the cache."""
    if model is None:
        return None
    folder = Path(model)
    if (file := folder / name).is_file():
        return file
    if (adapter := folder / "adapter_config.json").is_file():
        return _file(json.loads(adapter.read_text())["base_model_name_or_path"], name)
    if folder.exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name)
    return Path(cached) if isinstance(cached, str) else None


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each id; together they are the text of all.

    A character made of several ids stands at its last one, the others get "". Ids that no text knows get "" too.
    """
    texts = []
    first, read = 0, 0  # ids [first, read) have been told; what follows is decoded together with them
    for i in range(len(ids)):
        before, after = decode(ids[first:read]), decode(ids[first : i + 1])
        if after.endswith("\N{REPLACEMENT CHARACTER}") and i + 1 < len(ids) and i - read < 3:
            texts.append("")
            continue
        texts.append(after[len(before) :] if after.startswith(before) else decode(ids[read : i + 1]))
        if texts[-1] or i - first > 16:
            first = read
        read = i + 1
    return texts
