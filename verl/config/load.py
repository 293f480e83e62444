"""Read a configuration, judge all of it before anything loads, fill in what is derived; and write it back."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from verl.config import batch_words, schema
from verl.config.errors import ConfigError
from verl.config.model import CriticConfig, optimizer_by_name
from verl.config.notes import memory_advice, notes
from verl.config.rules import (
    SAMPLING_KEYS,
    check_context,
    default_correction,
    default_kl_coef,
    number_of_rewards,
    violations,
)
from verl.config.run import RunConfig
from verl.config.section import Section

__all__ = ["check_context", "dump", "load_config", "memory_advice", "notes"]


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, partial: bool = False, **values: Any
) -> RunConfig:
    """The resolved configuration: file, then ``overrides`` (``"a.b=value"``, the value in YAML), then ``values``.

    ``values`` are top-level keys from Python: plain values, mappings (merged key by key), sections, and Python objects
    where a key admits them (loaded modules, functions, data sets). ``partial``: model, data set and reward may still
    be missing. Every derived key is filled in. Raises ``ConfigError`` with all violations in one message.
    """
    raw = _merged(_read(path, overrides), _plain_sections(values))
    where = f"{path}: " if path is not None else ""
    _check_keys(raw, where)
    cfg, details = _validate(_without_nulls(raw, RunConfig))
    wrong = [".".join(key) for key in details]
    messages = [_message(detail, cfg) for detail in details.values()] + [
        v.text for v in violations(cfg, partial=partial) if not any(_touches(k, w) for k in v.keys for w in wrong)
    ]
    if messages:
        count = "1 setting is wrong" if len(messages) == 1 else f"{len(messages)} settings are wrong"
        raise ConfigError(f"{where}{count}\n" + "\n".join(f"  {m}" for m in messages))
    return _resolved(cfg)


def dump(cfg: RunConfig) -> str:
    """YAML of every key, which ``load_config`` reads back to an equal configuration.

    Importable functions become ``module:function``, other Python objects ``<name>``, which must be passed again from
    Python. Keys about sampling are left out where nothing is sampled, and ``gradient_accumulation_steps`` always
    (``mini_batch_size`` says it), so one override changes the micro-batch of a finished file.
    """
    plain = _plain(cfg)
    del plain["gradient_accumulation_steps"]
    if not cfg.algorithm.recipe.samples:
        for key in SAMPLING_KEYS:
            del plain[key]
    return OmegaConf.to_yaml(OmegaConf.create(plain))


# -- read ----------------------------------------------------------------------------------------------------------


def _read(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The file's keys with the overrides in place."""
    bad = [o for o in overrides if not o.partition("=")[0].strip() or "=" not in o]
    if bad:
        raise ConfigError(f"not an override: {', '.join(map(repr, bad))}; write key=value, such as algorithm.name=grpo")
    keys: Any = _parsed(path, lambda: OmegaConf.load(path)) if path is not None else {}
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: must hold keys and values, such as `seed: 1`")
    for override in overrides:
        over = _parsed(f"override {override!r}", lambda text: OmegaConf.from_dotlist([text]), override)
        _check_override(override)
        keys = _merged(keys, over)  # omegaconf's own merge refuses a list in a mapping's place
    return _parsed(path or "overrides", lambda: OmegaConf.create(keys), resolve=True)


def _parsed(where: object, read: Callable[..., Any], *given: str, resolve: bool = False) -> Any:
    """What ``read`` finds as plain data; ``ConfigError`` that begins with ``where`` for what can't be read."""
    try:
        return OmegaConf.to_container(read(*given), resolve=resolve)
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        told = getattr(error, "problem", None) if given else None  # its line and column are those of the value alone
        raise ConfigError(f"{where}: can't be read: {told or error}") from error


def _check_override(override: str) -> None:
    """``ConfigError`` where no value is given (an empty shell variable must not mean the default), or a comment."""
    name, _, text = (part.strip() for part in override.partition("="))
    node = yaml.compose(text)
    if node is None:
        raise ConfigError(f"override {override!r} gives no value; write {name}=null for the default")
    if text[node.end_mark.index :].strip().startswith("#"):
        raise ConfigError(f"override {override!r}: what follows # is a comment in YAML; put the value in quotes")


def _check_keys(raw: Any, where: str, within: str = "") -> None:
    """``ConfigError`` for a key that is no text: YAML reads ``on``, ``yes`` and ``no`` as true and false."""
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if not isinstance(key, str):
            raise ConfigError(
                f"{where}{_shown(key)}{f' in {within}' if within else ''} is no key: keys are text (YAML reads on, yes "
                "and no as true and false); put it in quotes"
            )
        name = f"{within}.{key}" if within else key
        if schema.section_of(schema.locate(tuple(name.split(".")))[1]) is not None:  # other mappings are its reader's
            _check_keys(value, where, name)


def _plain_sections(value: Any) -> Any:
    """Sections become mappings of the keys that were set; everything else stays the object it is."""
    if isinstance(value, Section):
        return {
            key: _plain_sections(getattr(value, key))
            for key in type(value).model_fields
            if key in value.model_fields_set
        }
    return {k: _plain_sections(v) for k, v in value.items()} if isinstance(value, dict) else value


def _merged(under: Any, over: Any, key: schema.Path = ()) -> Any:
    """``over`` wins; mappings are merged key by key, and an optimizer's name is short for one.

    ``ConfigError`` where ``under`` is a value that only keys may replace: it was meant, too.
    """
    if key[-1:] == ("optimizer",) and dict in (type(under), type(over)):
        under, over = optimizer_by_name(under), optimizer_by_name(over)
    if not isinstance(over, dict):
        return over
    if isinstance(under, dict):
        return under | {name: _merged(under.get(name), value, (*key, name)) for name, value in over.items()}
    if under is not None and schema.holds_keys(key):
        raise ConfigError(
            f"{'.'.join(key)} is {_shown(under)} in the file or an earlier override, but it holds keys, so nothing can "
            f"be set in it ({', '.join(map(str, over))}); give it there as a mapping of keys"
        )
    return over


def _without_nulls(raw: Any, section: type[Section]) -> Any:
    """Drop ``null`` where it isn't a value of the key's own, such as that of a section whose keys are all left out."""
    if not isinstance(raw, dict):
        return raw
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        field = section.model_fields.get(key)
        if value is None and field is not None and not schema.admits_none(field):
            continue
        inner = schema.section_of(field)
        kept[key] = _without_nulls(value, inner) if inner else value
    return kept


# -- judge ---------------------------------------------------------------------------------------------------------


def _validate(raw: dict[str, Any]) -> tuple[RunConfig, dict[schema.Path, Any]]:
    """The configuration without its wrong keys, and pydantic's first finding on each of those."""
    found: dict[schema.Path, Any] = {}
    while True:
        try:
            return RunConfig.model_validate(raw), found
        except ValidationError as error:
            before = len(found)
            for detail in error.errors(include_url=False):
                key, _, _ = schema.locate(detail["loc"])
                if key not in found:
                    found[key] = detail
                    raw = _without(raw, key)
            if len(found) == before:  # nothing left to take away: the schema's own defaults are wrong
                raise


def _message(detail: Any, cfg: RunConfig) -> str:
    """What pydantic found on one key. ``cfg``: the configuration without it, for settings that suit the rest."""
    key, field, within = schema.locate(detail["loc"])
    name = ".".join(key)
    if field is None:
        return f"{name} is not a key{_instead(key)}"
    spot = "".join(f"[{part}]" for part in within[:1] if isinstance(part, int))
    text = f"{name}{spot} is {_shown(detail['input'])}: "
    if detail["type"] == "value_error":
        error = detail["ctx"]["error"].args[0]
        if not isinstance(error, ValidationError):
            return text + str(error)
        # of a reward model among the rewards
        inner = [{**d, "loc": ("reward_model_config", *d["loc"])} for d in error.errors(include_url=False)]
        return f"{name}: " + "; ".join(_message(d, cfg) for d in inner).replace("reward_model_config.", "")
    if schema.section_of(field):
        return text + "must be a mapping of keys (see docs/configuration.md)"
    text += f"must be {schema.rule(field)}"
    settings = batch_words.valid(batch_words.words_of(cfg), name) if name in batch_words.KEYS else ()
    settings = settings or schema.valid_settings(field)
    if len(settings) == 2 and not schema.lists_its_values(field):
        text += f", such as {' or '.join(_shown(s) for s in settings)}"
    elif len(settings) == 1:
        text += ", nothing else is built yet"
    return f"{text} ({field.description})"


def _instead(key: schema.Path) -> str:
    """What an unknown key most likely meant."""
    if key[-1] == "prefetch":
        return (
            ": there is nothing to set, the data set is read and tokenised before the first lap (with streaming, rows "
            "are read as they are drawn)"
        )
    if "." in key[-1] and tuple(".".join(key).split(".")) in dict(schema.every_key()):
        return f": a file nests it, {': {'.join(key[-1].split('.'))}: ...{'}' * key[-1].count('.')}"
    near = schema.nearest_key(key)
    return f"; did you mean {near}?" if near else "; docs/configuration.md lists them all"


def _without(raw: dict[str, Any], key: schema.Path) -> dict[str, Any]:
    """A copy that lacks one key."""
    head, rest = key[0], key[1:]
    if rest and isinstance(raw.get(head), dict):
        return raw | {head: _without(raw[head], rest)}
    return {k: v for k, v in raw.items() if str(k) != head}  # also where a name is short for the section


def _touches(key: str, wrong: str) -> bool:
    return key == wrong or key.startswith(wrong + ".")


def _shown(value: Any) -> str:
    """A value as YAML spells it, cut when long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return reprlib.repr(value)


# -- derive and write ----------------------------------------------------------------------------------------------


def _resolved(cfg: RunConfig) -> RunConfig:
    """Everything derived filled in, as if the file had said it."""
    filled: dict[str, Any] = {**batch_words.derived(cfg), "init_kl_coef": default_kl_coef(cfg)}
    filled["algorithm"] = cfg.algorithm.filled
    if cfg.max_staleness is None:
        filled["max_staleness"] = cfg.hybrid_config.reshard_interval - 1
    if default_correction(cfg):
        filled["algorithm"] = filled["algorithm"].model_copy(update={"correction": "tis"})
    if cfg.total_steps is None and cfg.total_epochs is None:
        filled["total_epochs"] = 1.0
    if cfg.reward_weights is None and number_of_rewards(cfg):
        filled["reward_weights"] = [1.0] * number_of_rewards(cfg)
    if cfg.process_reward_model_config is not None:
        own = {
            key: getattr(cfg.process_reward_model_config, key)
            for key in cfg.process_reward_model_config.model_fields_set
        }
        filled["process_reward_model_config"] = cfg.actor_model_config.model_copy(update=own)
    if cfg.algorithm.needs_critic:
        critic = cfg.critic_model_config or CriticConfig()
        filled["critic_model_config"] = critic.model_copy(update={"dtype": cfg.actor_model_config.dtype})
    return cfg.model_copy(update=filled)


def _plain(value: Any) -> Any:
    """Only mappings, lists and scalars; text that omegaconf would read as a reference is escaped."""
    if isinstance(value, Section):
        return {key: _plain(getattr(value, key)) for key in type(value).model_fields}
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value if value is None or isinstance(value, bool | int | float) else _name(value)


def _name(value: Any) -> str:
    """``module:function`` where a new process could import it, else ``<name>``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and module != "__main__" and "<" not in name:
        return f"{module}:{name}"
    return f"<{(name or type(value).__name__).strip('<>')}>"
