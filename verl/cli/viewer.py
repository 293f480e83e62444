"""What the page of ``verl view`` asks for, answered from a run directory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.cli.pieces import Decode, load_decoder, pieces
from verl.config.errors import RequestError
from verl.config.recipes import RECIPES
from verl.metrics.follow import Samples, Steps, thinned

PAGE = 200  # rows of the list in one answer
MOST = 1000
FIRST = 1 << 20  # bytes of each file that are read before the page can be opened
QUIET = 10  # times the usual step without a new line: probably it has stopped

# curves, each with its held-out counterpart; those without a value don't appear
SAMPLED = {
    "reward/mean": "eval/reward_mean",
    "kl/mean": "",
    "policy/entropy": "",
    "response/length_mean": "eval/length_mean",
    "policy/grad_norm": "",
}
OFFLINE = {
    "policy/loss": "eval/loss",
    "preference/accuracy": "eval/accuracy",
    "preference/margin": "eval/margin",
    "sft/nll": "eval/nll",
    "policy/grad_norm": "",
}


@dataclass(frozen=True)
class About:
    """What the page needs of a run's ``config.yaml``; keys of any version may be missing there."""

    algorithm: str
    model: str | None
    trust_remote_code: bool
    total_steps: int | None
    total_epochs: float

    @staticmethod
    def read(path: Path) -> About:
        """``RequestError`` where there is no such file, or another thing in it."""
        try:
            cfg = yaml.safe_load(path.read_text())
            model = cfg.get("actor_model_config") or {}
            return About(
                str(cfg["algorithm"]["name"]),
                model.get("model_name_or_path"),
                model.get("trust_remote_code") is True,
                cfg.get("total_steps"),
                cfg.get("total_epochs") or 1,
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(f"{path.parent} is no run directory: it has no config.yaml") from error
        except OSError as error:
            raise RequestError(f"can't read {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{path} is not the configuration of a run") from error

    @property
    def samples(self) -> bool:
        """Whether answers are sampled."""
        return self.algorithm not in RECIPES or RECIPES[self.algorithm].samples


class Viewer:
    """What the page asks for. One question at a time."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.about = About.read(run / "config.yaml")
        self._samples = Samples(run / "samples.jsonl")
        names = SAMPLED | OFFLINE
        self._metrics = Steps(run / "metrics.jsonl", [*names, "time/step", "data/epoch"])
        self._held_out = Steps(run / "eval.jsonl", [name for name in names.values() if name])
        self._files = (self._samples, self._metrics, self._held_out)
        self._lock = threading.Lock()
        self._decoders: dict[str | None, Decode | str] = {}
        for file in self._files:
            file.refresh(FIRST)

    def problems(self) -> list[str]:
        """Lines that could not be read, file by file."""
        return [
            f"{file.path}: can't read line {', '.join(map(str, file.bad[:5]))}"
            + (f" and {len(file.bad) - 5} others" if len(file.bad) > 5 else "")
            + "; left out"
            for file in self._files
            if file.bad
        ]

    def state(self, mark: str = "") -> dict[str, Any]:
        """How far the run is; curves only where something is new since ``mark``."""
        with self._lock:
            try:
                self.about = About.read(self.run / "config.yaml")  # a resume may have changed it
                for file in self._files:
                    file.refresh()
            except RequestError as error:
                return {"mark": mark, "status": str(error)}
            now = " ".join(f"{file.generation}.{file.end}" for file in self._files)
            state: dict[str, Any] = {
                "mark": now,
                "status": self._status(),
                "behind": max(file.behind for file in self._files),
            }
            if now != mark:
                state |= {
                    "run": str(self.run),
                    "about": f"{self.about.algorithm}, {self.about.model}",
                    "generation": self._samples.generation,
                    "rows": len(self._samples.rows),
                    "finish_reasons": sorted(self._samples.finish_reasons),
                    "curves": self._curves(),
                    "warnings": self._metrics.last.get("health/warnings") or 0,
                    "problems": self.problems(),
                    "note": self._note(),
                }
            return state

    def _curves(self) -> list[dict[str, Any]]:
        chosen = SAMPLED if self.about.samples else OFFLINE
        points, held_out = self._metrics.points, self._held_out.points
        return [
            {"name": name, "points": thinned(points[name]), "eval": thinned(held_out.get(other, []))}
            for name, other in chosen.items()
            if points[name] or held_out.get(other)
        ]

    def _note(self) -> str:
        """Why there are no rows; empty where there are."""
        if self._samples.rows:
            return ""
        if not self.about.samples:
            return f"{self.about.algorithm} trains on rows of the data set as they are: nothing is sampled, curves only"
        return "no samples yet: the first ones come at the end of a step"

    def _status(self) -> str:
        about, points = self.about, self._metrics.points
        step, epochs = self._metrics.last.get("step", 0), points["data/epoch"]
        of = f" of {about.total_steps}" if about.total_steps is not None else ""
        if step and (
            step >= about.total_steps if about.total_steps else epochs and epochs[-1][1] >= about.total_epochs
        ):
            return f"step {step}{of}: the run has ended"
        try:
            since = max(0.0, time.time() - (self._metrics if step else self._samples).path.stat().st_mtime)
        except OSError:
            return "no step yet"
        seconds = sorted(value for _, value in points["time/step"][-20:])
        usual = seconds[len(seconds) // 2] if seconds else 60.0
        ago = f"{since:.0f} s" if since < 120 else f"{since / 60:.0f} min" if since < 7200 else f"{since / 3600:.0f} h"
        quiet = "; stopped?" if since > max(60.0, QUIET * usual) else ""
        return f"step {step}{of}, {ago} ago{quiet}" if step else f"no step yet, begun {ago} ago"

    def rows(
        self,
        order: str = "newest",
        finish: str = "",
        step: str = "",
        prompt: str = "",
        text: str = "",
        first: str = "0",
        count: str = str(PAGE),
    ) -> dict[str, Any]:
        """A part of the list."""
        with self._lock:
            found = self._samples.find(
                order,
                finish_reason=finish or None,
                step=int(step) if step else None,
                prompt=int(prompt) if prompt else None,
                text=text,
            )
            start = max(0, int(first))
            rows = [(i, self._samples.rows[i]) for i in found[start : start + min(MOST, max(0, int(count)))]]
        keys = ("step", "row_id", "reward", "length", "finish_reason", "logprob", "text")
        return {"total": len(found), "rows": [{"n": i} | {key: getattr(row, key) for key in keys} for i, row in rows]}

    def row(self, n: str) -> dict[str, Any]:
        """All of one row, with the text of each token."""
        with self._lock:
            values, prompt = self._samples.read(int(n)), self._samples.rows[int(n)].prompt
            decode = self._decoder()
        ids = values["response_ids"]
        same = [key for key in ("token_logprobs", "response_mask") if len(values.get(key) or ()) == len(ids)]
        plain = ("step", "row_id", "prompt", "response", "response_ids", "finish_reason", "reward", "rewards")
        kept = (*plain, "group_rewards", "logprobs", "version", *same)
        texts = None
        try:
            texts = None if isinstance(decode, str) else pieces(decode, ids)
        except (OverflowError, TypeError):
            decode = "the ids of this row are none of the tokenizer's"
        return {key: values[key] for key in kept if key in values} | {
            "n": int(n),
            "prompt_number": prompt,
            "texts": texts,
            "no_texts": decode if isinstance(decode, str) else "",
        }

    def _decoder(self) -> Decode | str:
        """Of the run's tokenizer, or why there is none."""
        model = self.about.model
        if model not in self._decoders:
            try:
                self._decoders[model] = load_decoder(self.run, model, self.about.trust_remote_code)
            except Exception as error:  # whatever a tokenizer's own code raises
                self._decoders[model] = f"{model} has no tokenizer here, so tokens are ids ({_first_line(error)})"
        return self._decoders[model]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
