"""Small data sets about addition in formats that people have: pairs, labelled answers, chats; train and test.

    python examples/addition_data.py runs/addition

A good answer is the number alone. A bad one is a wrong number or hides the number in talk, half and half. Pairs of
operands in the test files never occur in the training files.

    pairs.jsonl     as UltraFeedback binarised: prompt, chosen and rejected as messages, score_chosen, score_rejected
    hh.jsonl        the same pairs as hh-rlhf has them: two whole dialogues as text
    labelled.jsonl  as TRL's unpaired preference: prompt, completion, label
    chats.jsonl     as OpenAI's chat format: messages
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.data.loader import PromptDataset

TALK = (
    "Let's see. To add these numbers we first look at both of them. The result could be {n}.",
    "I think that it is somewhere around {n}, but I am not sure about it.",
    "Adding numbers is fun! {n} is one of many numbers.",
)


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Each question with a good and a bad answer."""
    rng = random.Random(f"addition/{split}")
    questions = list(PromptDataset({"name": "arithmetic", "low": 0, "high": 19, "operations": ["+"], "split": split}))
    for row in questions:
        right = int(row["answer"])
        wrong = rng.choice([n for n in range(max(0, right - 9), right + 10) if n != right])
        talk = rng.choice(TALK).format(n=rng.choice((right, wrong)))
        yield {"prompt": row["prompt"], "good": str(right), "bad": str(wrong) if rng.random() < 0.5 else talk}


def files(split: str) -> dict[str, list[dict[str, Any]]]:
    """File name to lines."""
    found: dict[str, list[dict[str, Any]]] = {"pairs": [], "hh": [], "labelled": [], "chats": []}
    rng = random.Random(f"labels/{split}")
    for row in rows(split):
        asked = {"role": "user", "content": row["prompt"]}
        good, bad = ({"role": "assistant", "content": row[side]} for side in ("good", "bad"))
        scores = {"score_chosen": 1.0, "score_rejected": 0.0}
        found["pairs"].append({"prompt": row["prompt"], "chosen": [asked, good], "rejected": [asked, bad], **scores})
        start = f"\n\nHuman: {row['prompt']}\n\nAssistant: "
        found["hh"].append({"chosen": start + row["good"], "rejected": start + row["bad"]})
        label = rng.random() < 0.5
        found["labelled"].append(
            {"prompt": row["prompt"], "completion": row["good"] if label else row["bad"], "label": label}
        )
        found["chats"].append({"messages": [asked, good]})
    return found


def main(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for name, lines in files(split).items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / split / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
