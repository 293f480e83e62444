"""Which argument of a reward function gets what: matching by name, decided once, before anything is scored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.config.errors import RequestError

if TYPE_CHECKING:
    from verl.rewards.base import RewardRow

# what every row offers beside its data columns; the data's own prompt comes first, as its author wrote it
ROW_VALUES: dict[str, Callable[[RewardRow], Any]] = {
    "prompt": lambda row: row.fields.get("prompt", row.prompt),
    "prompt_text": lambda row: row.prompt,
    "response": lambda row: row.response,
    "prompt_ids": lambda row: row.prompt_ids,
    "response_ids": lambda row: row.response_ids,
    "transcript": lambda row: row.transcript,
    "finish_reason": lambda row: row.finish_reason,
    "truncated": lambda row: row.finish_reason == "length",
    "row_id": lambda row: row.row_id,
    "prompt_id": lambda row: row.prompt_id,
    "row": lambda row: row,
}
_ALIASES = {"completion": "response", "text": "response"}
_PLURALS = {
    "prompts": "prompt",
    "prompt_texts": "prompt_text",
    "responses": "response",
    "completions": "response",
    "texts": "response",
    "transcripts": "transcript",
    "finish_reasons": "finish_reason",
    "rows": "row",
}


@dataclass(frozen=True)
class Call:
    """One call of a reward function: for one row, or for all of them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Binding:
    """Where a function's arguments come from. ``batch``: one call gets lists over all rows, else a call per row."""

    batch: bool
    positional: tuple[str, ...] = ()  # sources, in order
    keyword: Mapping[str, str] = field(default_factory=dict)  # argument -> source
    options: Mapping[str, Any] = field(default_factory=dict)  # argument -> fixed value

    def calls(self, rows: Sequence[RewardRow]) -> list[Call]:
        """The calls that score ``rows``: one for a batch function, else one per row. A missing column gives None."""
        if self.batch:
            return [self._call(lambda source: [_value(row, source) for row in rows])]
        return [self._call(lambda source, row=row: _value(row, source)) for row in rows]  # type: ignore[misc]

    def _call(self, value: Callable[[str], Any]) -> Call:
        args = tuple(value(source) for source in self.positional)
        return Call(args, {name: value(source) for name, source in self.keyword.items()} | dict(self.options))


def bind(function: Callable, label: str, columns: Collection[str], options: Mapping[str, Any]) -> Binding:
    """Match ``function``'s arguments with what rows offer; ``columns`` are the data's, ``options`` are fixed values.

    A built-in name or a column gives one row's value. A plural built-in name, or ``<column>s``, makes the function a
    batch function, and then *every* matched argument is a list over the rows. ``**kwargs`` gets everything that is
    left. A single required argument with any other name gets the response's text, row by row.
    Raises ``RequestError`` naming the function, the argument and the names on offer.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RequestError(f"reward {label}: its arguments can't be read ({error}); wrap it in a function") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in options]
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name in options:
        if name not in known and not takes_any:
            raise RequestError(f"reward {label}: it has no argument {name!r}; it has {_listed(known)}")

    # built-in names mean the same whatever the data's columns are called
    single = {c: c for c in columns if c not in _PLURALS} | {name: name for name in ROW_VALUES} | _ALIASES
    plural = {f"{c}s": c for c in columns if f"{c}s" not in single} | _PLURALS
    batch = any(p.name in plural for p in named)
    sources = {p.name: single.get(p.name) or plural.get(p.name) for p in named}
    required = [p.name for p in named if p.default is p.empty]
    if not batch and len(required) == 1 and sources[required[0]] is None:
        sources[required[0]] = "response"
    if unmatched := [name for name in required if sources[name] is None]:
        raise RequestError(
            f"reward {label}: nothing matches its argument {_listed(unmatched)}. On offer row by row: "
            f"{', '.join(sorted(single))}; for all rows at once: {', '.join(sorted(plural))}"
        )
    matched = [(p, source) for p in named if (source := sources[p.name]) is not None]
    positional = tuple(source for p, source in matched if p.kind is p.POSITIONAL_ONLY)
    keyword = {p.name: source for p, source in matched if p.kind is not p.POSITIONAL_ONLY}
    if takes_any:
        taken = {*positional, *keyword.values(), *keyword, *options}
        taken |= {"row", *_ALIASES, *_PLURALS}  # a row repeats the rest; the others are taken names of the same values
        keyword |= {name: name for name in (*ROW_VALUES, *columns) if name not in taken}
    return Binding(batch, positional, keyword, options)


def _value(row: RewardRow, source: str) -> Any:
    read = ROW_VALUES.get(source)
    return row.fields.get(source) if read is None else read(row)


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"
