"""What every section of the configuration has in common, and the values that may be Python objects.

A file holds names; from Python the same keys also take loaded modules, functions and data sets. They pass through
unchanged, ``dump`` writes importable functions as ``module:function`` and everything else as ``<name>``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

LONGEST = 1e9  # seconds; the system's own waits take not much more
_LONGEST_NAME = 255  # bytes of a file's or folder's name


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, types are not guessed, values never change afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True,
        protected_namespaces=(),
    )  # fmt: skip


def faults(error: ValidationError) -> str:
    """What is wrong with each key, in one line."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'values'}: {e['msg']}" for e in error.errors())


def _text(value: Any) -> Any:
    """Paths become text; empty names and the ``<name>`` of an object that was dumped are refused."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    if isinstance(value, str) and value.startswith("<"):
        raise ValueError("stands for a Python object, which a file can't hold: pass the object from Python again")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("holds a NUL character, which no name has")
    if isinstance(value, str) and any(
        len(part.encode(errors="surrogatepass")) > _LONGEST_NAME for part in value.split("/")
    ):
        raise ValueError(f"is too long for a name: a file's or folder's has at most {_LONGEST_NAME} bytes")
    return value


def _path(value: Any) -> Any:
    """As ``_text``; a leading ``~`` is the home folder."""
    value = _text(value)
    return os.path.expanduser(value) if isinstance(value, str) else value


def _model(value: Any) -> Any:
    value = _path(value)
    if value is not None and not isinstance(value, str) and not callable(getattr(value, "parameters", None)):
        raise ValueError(
            "must be a hub name, a folder or (from Python) a loaded module, such as 'gpt2' or 'models/mine'"
        )
    return value


def listed(value: Any) -> list[Any]:
    """One reward or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _rewards(value: Any) -> list[Any]:
    entries = listed(value)
    functions = [_text(e.get("name") if isinstance(e, Mapping) else e) for e in entries]
    if not all(isinstance(f, str) or callable(f) for f in functions):
        raise ValueError(
            "must be 'module:function', a rule's name, {name: one of these, option: value}, a list of these, or (from "
            "Python) functions"
        )
    for called in (e["as"] for e in entries if isinstance(e, Mapping) and e.get("as") is not None):
        if not isinstance(called, str) or not called.strip():
            raise ValueError(f"as is what a reward is called in metrics, a text, not {called!r}")
    return entries


def _function(value: Any) -> Any:
    value = _text(value)
    named = isinstance(value, str) and all(value.partition(":"))
    if value is not None and not named and not callable(value):
        raise ValueError("must be 'module:function' or (from Python) a function, such as 'my_game:turn'")
    return value


def _data(value: Any) -> Any:
    value = _text(value)
    if isinstance(value, Mapping) and not isinstance(value.get("name"), str):
        raise ValueError("a mapping needs its name, such as {name: arithmetic} or {name: reasoning-gym, task: gcd}")
    if value is not None and not _is_data(value):
        raise ValueError("must be a file, a folder, a hub name, {name: ...} or (from Python) a data set")
    return value


def _is_data(value: Any) -> bool:
    indexable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return not isinstance(value, bytes) and (indexable or hasattr(value, "__iter__"))


ModelSource = Annotated[Any, AfterValidator(_model)]
DataSource = Annotated[Any, AfterValidator(_data)]
FunctionSource = Annotated[Any, AfterValidator(_function)]
RewardSources = Annotated[list[Any], BeforeValidator(_rewards)]
PathText = Annotated[str, BeforeValidator(_path)]
