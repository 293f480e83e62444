"""The page of every key, from the schema. ``python -m verl.config.reference docs/configuration.md`` writes it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from verl.config import schema
from verl.config.run import RunConfig
from verl.config.section import Section

_OPENING = """\
# Configuration

One YAML file holds everything about a run. Only a model, a data set and a reward are needed:

```yaml
actor_model_config: {model_name_or_path: models/smollm2}
dataset: data/prompts.jsonl
reward_fn: my_rewards:score
```

- `verl train CONFIG key=value ...`: keys on the command line win over the file's. A dot goes into a section
  (`algorithm.name=grpo`, `actor_model_config.optimizer.lr=3e-5`), values are YAML (`rollout.stop=['\\n']`). `key=null`
  means the default; `key=` (an empty shell variable) is refused.
- `verl train CONFIG --dry-run` judges the file, prints every key with its final value and what a step is made of.
- Everything is judged before a model loads. All violations come in one message; each names the key, its value, the
  rule and settings that would be valid. An unknown key is an error that names the nearest known one.
- `null` means "the default" where it isn't listed as a value of its own. `${other.key}` refers to another key and
  `${oc.env:NAME}` to an environment variable, as text; a number is `${oc.decode:${oc.env:SEED,3}}`, 3 where there is no
  such variable. The resolved file is written to the run directory: no key holds a secret, and none should be put there
  (tokens for a hub stay in the environment).
- From Python the same keys are keyword arguments: `load_config("run.yaml", rollout_batch_size=16)`. There
  `model_name_or_path` also takes a loaded module, `reward_fn` functions, `dataset` a data set.

Sizes are explained in [batch-words.md](batch-words.md), formulas in [algorithms.md](algorithms.md).
A key with one allowed value is accepted so that files which name it keep working; other values are errors.
This page is made from the schema by `python -m verl.config.reference docs/configuration.md`.
"""


def reference() -> str:
    """The page: an opening, then one table per section, in the order of the file."""
    return _OPENING + "".join(_tables(RunConfig, "", "Keys of the file", {}))


def _tables(section: type[Section], path: str, title: str, seen: dict[type[Section], str]) -> Iterator[str]:
    """The section's table, then those of the sections in it. One class is listed once; a subclass, what differs."""
    seen[section] = path
    base = seen.get(section.__mro__[1])
    fields = {k: f for k, f in section.model_fields.items() if base is None or k in section.__annotations__}
    about = (inspect.getdoc(section) or "").replace("``", "`").replace("\n", " ")
    about += f" Other keys are those of `{base}`." if base else ""
    rows = [_row(name, field, seen) for name, field in fields.items()]
    yield (
        f"\n## {title}\n\n{about}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    for name, field in fields.items():
        inner = schema.section_of(field)
        if inner and inner not in seen:
            below = f"{path}.{name}" if path else name
            yield from _tables(inner, below, f"`{below}`", seen)


def _row(name: str, field: FieldInfo, seen: dict[type[Section], str]) -> str:
    inner = schema.section_of(field)
    allowed = schema.rule(field) if not inner else f"see `{seen[inner]}`" if inner in seen else "see below"
    cells = (f"`{name}`", _default(field), allowed, field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return ""
    if value is None:
        return "null" if schema.admits_none(field) else "derived"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
