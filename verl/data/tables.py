"""Every row of a data set tokenised once into an Arrow table, which a later run may read back."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from verl.config.errors import DataError, writing
from verl.data.policies import BadRows, Encoder, Numbered

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
CHUNK = 1000  # rows tokenised in one call


class Encoded(Sequence[T]):
    """All items of a data set that passed the length policy, tokenised once.

    ``table`` has the counts in its metadata, as JSON; ``fields`` reads a row's columns by its number. ``counts``: kept,
    filtered, truncated (and bad). ``fingerprint`` changes with data, kind, template, tokenizer and limits; a checkpoint
    keeps it to know its data again.
    """

    def __init__(self, table: pyarrow.Table, fields: Callable[[str], dict[str, Any]], fingerprint: str) -> None:
        self._table, self._fields, self.fingerprint = table, fields, fingerprint
        self.counts: dict[str, int] = json.loads(table.schema.metadata[b"counts"])

    @classmethod
    def encode(
        cls,
        rows: Callable[[BadRows], Iterable[Numbered]],
        fields: Callable[[str], dict[str, Any]],
        encoder: Encoder[T],
        fingerprint: str,
        cache_dir: str | Path | None,
    ) -> Self:
        """Tokenise every row, or read the table that an earlier run left in ``cache_dir`` for the fingerprint.

        ``DataError`` where that folder can't be written to, or no row is left.
        """
        import pyarrow

        file = Path(cache_dir) / f"{encoder.kind}-{fingerprint}.arrow" if cache_dir is not None else None
        if file is not None:
            with _cache(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
                there = file.exists()
            if there:
                try:
                    table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
                except pyarrow.ArrowException as error:
                    raise DataError(f"the cached rows in {file} can't be read ({error}): delete the file") from error
                return cls(table, fields, fingerprint)
        schema = cls._schema()
        parts = [pyarrow.table(cls._columns(encoder(chunk)), schema=schema) for chunk in _chunks(rows(encoder.bad))]
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
        return cls(table, fields, fingerprint)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._item({name: self._table.column(name)[index].as_py() for name in self._table.column_names})

    @staticmethod
    def _schema() -> pyarrow.Schema:
        raise NotImplementedError

    @classmethod
    def _columns(cls, items: Sequence[T]) -> list[list[Any]]:
        """The values of the schema for some items."""
        raise NotImplementedError

    def _item(self, row: dict[str, Any]) -> T:
        """The way back."""
        raise NotImplementedError


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
