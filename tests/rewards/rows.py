"""Rows for reward tests."""

from __future__ import annotations

from typing import Any

from verl.rewards.base import RewardRow


def make_rows(
    responses: list[str], *, finish: str = "stop", prompt: str = "Q?", **columns: list[Any]
) -> list[RewardRow]:
    """One row per response; ``columns`` hold a value per row."""
    return [
        RewardRow(
            row_id=f"p0/{i}",
            prompt_id="p0",
            prompt=f"<user>{prompt}<assistant>",
            response=response,
            prompt_ids=(1, 2),
            response_ids=tuple(range(len(response))),
            finish_reason=finish,
            fields={"prompt": prompt} | {name: values[i] for name, values in columns.items()},
        )
        for i, response in enumerate(responses)
    ]
