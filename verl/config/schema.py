"""Questions about the schema itself: which keys exist, what each allows, which one a mistyped key meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from verl.config.run import RunConfig
from verl.config.section import Section

Path = tuple[str, ...]
_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
FAR = 0.5  # names that are less alike than this share aren't named for each other
_PLAIN_RULES: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
# Tried in order as examples of a valid setting, after the field's own examples and its default.
_CANDIDATES = (True, False, 0.1, 0.5, 0.9, 1.5, 2.0, 1, 2, 8, "text")


def section_of(field: FieldInfo | None) -> type[Section] | None:
    """The section that a key holds, None where it holds a value."""
    for kind in _alternatives(field.annotation) if field else ():
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def admits_none(field: FieldInfo) -> bool:
    """Whether ``null`` is a value of its own; elsewhere it means "the default"."""
    return any(kind in (Any, type(None)) for kind in _alternatives(field.annotation))


def every_key(section: type[Section] = RunConfig, above: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every key in file order, a section before its own keys."""
    for name, field in section.model_fields.items():
        yield (*above, name), field
        inner = section_of(field)
        if inner:
            yield from every_key(inner, (*above, name))


def locate(loc: tuple[int | str, ...]) -> tuple[Path, FieldInfo | None, tuple[int | str, ...]]:
    """Split pydantic's location into the key (up to a value or an unknown name), its field and what lies within."""
    section: type[Section] | None = RunConfig
    field: FieldInfo | None = None
    for depth, part in enumerate(loc):
        if section is None:
            return tuple(map(str, loc[:depth])), field, loc[depth:]
        field = section.model_fields.get(str(part))
        section = section_of(field)
    return tuple(map(str, loc)), field, ()


def holds_keys(path: Path) -> bool:
    """Whether a key is a section or another mapping, and nothing else."""
    _, field, within = locate(path)
    if field is None or within:
        return False
    return section_of(field) is not None or any(get_origin(kind) is dict for kind in _alternatives(field.annotation))


def rule(field: FieldInfo) -> str:
    """What a key allows, in words: ``an integer >= 1``, ``one of a, b``."""
    kinds = [k for k in _alternatives(field.annotation) if k is not type(None)]
    text = " or ".join(_kind_rule(k) for k in kinds) + _bounds(field.metadata)
    return text + (" or null" if admits_none(field) else "")


def valid_settings(field: FieldInfo) -> list[Any]:
    """Up to two settings that the key accepts, the field's own examples and its default first; none for a section."""
    if section_of(field):
        return []
    default = field.get_default(call_default_factory=True, validated_data={})
    choices = [a for kind in _alternatives(field.annotation) if get_origin(kind) is Literal for a in get_args(kind)]
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter = TypeAdapter[Any](kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    found: list[Any] = []
    for value in (*(field.examples or ()), default, *choices, *_CANDIDATES):
        if value is None or value in found:
            continue
        try:
            adapter.validate_python(value)
        except ValidationError:
            continue
        found.append(value)
    return found[:2]


def lists_its_values(field: FieldInfo) -> bool:
    """Whether ``rule`` already names every value, or at least one that a file can hold."""
    return any(get_origin(kind) is Literal or kind is bool for kind in _alternatives(field.annotation))


def nearest_key(path: Path) -> str:
    """The known key that an unknown one most likely meant, as a dotted path; empty where none is like it."""
    known = [p for p, _ in every_key()]
    leaf = path[-1]
    elsewhere = [p for p in known if p[-1] == leaf]
    if elsewhere:
        return ".".join(elsewhere[0])
    siblings = [p[-1] for p in known if p[:-1] == path[:-1]]
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return ".".join((*path[:-1], close[0]))
    initials = "".join(word[0] for word in leaf.split("_") if word)  # learning_rate: lr
    short = [p for p in known if p[-1] == initials]
    short.sort(key=lambda p: p[:-1] != path[:-1])
    alike = {p: difflib.SequenceMatcher(None, leaf, p[-1]).ratio() for p in known}
    best = max(known, key=alike.__getitem__)
    return ".".join(short[0] if short else best if alike[best] >= FAR else ())


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _bounds(metadata: Iterable[Any]) -> str:
    marks = [(sign, getattr(m, name)) for m in metadata for kind, name, sign in _BOUNDS if isinstance(m, kind)]
    shown = (f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}" for sign, bound in marks)
    return " " + " and ".join(shown) if marks else ""


def _kind_rule(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return "a name, a mapping or a Python object"
    if origin is Literal:
        names = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
        return names if len(args) == 1 else f"one of {names}"
    if origin in (list, tuple, Sequence):
        return f"a list, each {_kind_rule(args[0])}"
    if origin is Annotated:
        metadata = [m for mark in args[1:] for m in getattr(mark, "metadata", [mark])]
        return _kind_rule(args[0]) + _bounds(metadata)
    if origin is Callable:
        return "a function"
    return _PLAIN_RULES.get(kind, "a mapping" if origin is dict or isinstance(kind, type) else "a value")
