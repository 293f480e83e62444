"""Every row of a data set tokenised once into an Arrow table, which a later run may read back."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.config.errors import DataError, writing
from verl.data.policies import BadRows, Encoder, Numbered

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
CHUNK = 1000  # rows tokenised in one call


def encode_all(
    rows: Callable[[BadRows], Iterable[Numbered]],
    encoder: Encoder[T],
    schema: pyarrow.Schema,
    columns: Callable[[Sequence[T]], list[list[Any]]],
    file: Path | None,
) -> pyarrow.Table:
    """Tokenise every row, or read the table that an earlier run left in ``file``, whose name is the fingerprint.

    ``columns`` gives the values of ``schema`` for some items. The counts are in the table's metadata, as JSON.
    ``DataError`` where the folder of ``file`` can't be written to.
    """
    import pyarrow

    if file is not None:
        with _cache(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            there = file.exists()
        if there:
            try:
                return pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
            except pyarrow.ArrowException as error:
                raise DataError(f"the cached rows in {file} can't be read ({error}): delete the file") from error
    parts = [pyarrow.table(columns(encoder(chunk)), schema=schema) for chunk in _chunks(rows(encoder.bad))]
    table = pyarrow.concat_tables(parts) if parts else schema.empty_table()
    if not table.num_rows:
        raise encoder.nothing_left()
    table = table.combine_chunks().replace_schema_metadata({"counts": json.dumps(encoder.counts)})
    if file is not None:
        partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        with _cache(file.parent):
            with pyarrow.ipc.new_file(str(partial), table.schema) as writer:
                writer.write_table(table)
            os.replace(partial, file)  # whole or not at all, also when two runs write it
    return table


def counts_of(table: pyarrow.Table) -> dict[str, int]:
    return dict(json.loads(table.schema.metadata[b"counts"]))


def _cache(folder: Path) -> AbstractContextManager[None]:
    return writing(folder, key="dataset_cache_dir", advice="name another folder, or null", kind=DataError)


def _chunks(rows: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    chunk: list[Numbered] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
