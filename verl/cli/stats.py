"""``verl stats``: token lengths of a data set and the limits they suggest."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from verl.data.stats import token_stats
from verl.models.factory import load_tokenizer


def stats(data: str, model: str) -> None:
    """Print the table."""
    found = token_stats(data, load_tokenizer(model))
    table = Table("tokens", *(("count", "p50", "p90", "p95", "max")), box=None)
    for name, lengths in (("prompt", found.prompts), ("response", found.responses)):
        if lengths is not None:
            numbers = (lengths.count, lengths.p50, lengths.p90, lengths.p95, lengths.max)
            table.add_row(name, *(str(n) for n in numbers))
    console = Console()
    console.print(table)
    console.print(f"max_prompt_length: {found.max_prompt_length}", highlight=False)
    if found.max_response_length is not None:
        console.print(f"max_response_length: {found.max_response_length}", highlight=False)
