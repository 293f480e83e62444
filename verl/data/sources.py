"""Where rows come from: files, folders, the hub, loaded data sets, lists, procedural sets.

A source is either loaded (random access) or iterated (one row after the other, nothing kept).
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl.config.errors import DataError
from verl.data.procedural import SETS, make_rows

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Broken:
    """A row that its file doesn't give, e.g. a line that is no JSON; it keeps its place in the count of rows."""

    reason: str


SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
_SPLIT = re.compile(
    r"(?:^|[^a-z])(train|test|valid|validation|val|dev|eval|evaluation|held[-_ ]?out|hold[-_ ]?out)(?![a-z])"
)


@dataclass(frozen=True)
class Source:
    """``name`` for messages; ``load`` gives all rows, ``iterate`` gives them from the first on without keeping them."""

    name: str
    load: Callable[[], Sequence[Row | Broken]]
    iterate: Callable[[], Iterator[Row | Broken]]


def open_source(source: Any, cache_dir: str | Path | None = None) -> Source:
    """Recognise a data set; nothing is read before ``load`` or ``iterate``, except whether files exist.

    ``source``: a file, a folder (of files, or written by ``save_to_disk``), a hub name,
    ``{name: ..., split: ..., config: ...}`` of these, ``{name: arithmetic, ...}``, a ``datasets.Dataset``, or a list of
    rows, texts or message lists. ``cache_dir``: where hub data sets are kept.
    """
    if isinstance(source, str | Path):
        return _open_path(str(source), None, None, cache_dir)
    if _is_datasets(source):
        return _open_loaded(source)
    if isinstance(source, Mapping) and source.get("name") in SETS:
        return _listed(f"data set {source['name']}", lambda: make_rows(source))
    if isinstance(source, Mapping):
        unknown = set(source) - {"name", "split", "config"}
        if unknown or not isinstance(source.get("name"), str):
            raise DataError(
                f"data set {dict(source)}: it needs its name, and may have split and config; the procedural sets "
                f"{', '.join(sorted(SETS))} have their own keys"
            )
        return _open_path(source["name"], source.get("split"), source.get("config"), cache_dir)
    if isinstance(source, Sequence):
        return _listed("the data list", lambda: [r if isinstance(r, Mapping) else {"prompt": r} for r in source])
    raise DataError(f"a data set can't be a {type(source).__name__}: give a path, hub name, Dataset or list of rows")


def _listed(name: str, rows: Callable[[], Sequence[Row | Broken]]) -> Source:
    return Source(name, rows, lambda: iter(rows()))


def _is_datasets(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "datasets"


def _open_loaded(loaded: Any) -> Source:
    if isinstance(loaded, Mapping):
        return _open_loaded(loaded[_choose_split(list(loaded), None, "the DatasetDict")])
    if not hasattr(loaded, "__len__"):  # an IterableDataset

        def refuse() -> Sequence[Row | Broken]:
            raise DataError("an IterableDataset has no length: set `streaming: true`, or give a Dataset")

        return Source("the streamed data set", refuse, lambda: iter(loaded))
    return Source("the data set", lambda: loaded, lambda: iter(loaded))


def _choose_split(there: Sequence[str], wanted: str | None, name: str) -> str:
    chosen = wanted or ("train" if "train" in there else there[0] if len(there) == 1 else None)
    if chosen is None or chosen not in there:
        if not any(there):
            raise DataError(f"{name} has no splits: leave split out")
        splits = ", ".join(split for split in there if split)
        raise DataError(f"{name} has the splits {splits}; choose one: {{name: {name}, split: ...}}")
    return chosen


def _open_path(name: str, split: str | None, config: str | None, cache_dir: str | Path | None) -> Source:
    path = Path(name).expanduser()
    if path.is_file():
        if split is not None:
            raise DataError(f"{name} is one file, it has no split {split!r}")
        return _open_files(name, [path])
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _open_saved(path, split)
        return _open_files(name, _folder_files(path, split))
    local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if local or _kind(path) in SUFFIXES:
        raise DataError(f"no file or folder {name!r} (looked from {Path.cwd()})")
    return _open_hub(name, split, config, cache_dir)


def _open_saved(path: Path, split: str | None) -> Source:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} has a data set's state.json or dataset_dict.json, but can't be read as one: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_choose_split(list(loaded), split, str(path))]
    elif split is not None:
        raise DataError(f"{path} holds one data set, it has no split {split!r}")
    return Source(str(path), lambda: loaded, lambda: iter(loaded))


def _open_hub(name: str, split: str | None, config: str | None, cache_dir: str | Path | None) -> Source:
    def fetch(streaming: bool) -> Any:
        import datasets

        where = str(cache_dir) if cache_dir is not None else None
        try:
            chosen = _choose_split(datasets.get_dataset_split_names(name, config), split, name)
            return datasets.load_dataset(name, config, split=chosen, cache_dir=where, streaming=streaming)
        except DataError:
            raise
        except Exception as error:  # the hub client raises many kinds; all mean that there is no data set to use
            raise DataError(
                f"data set {name!r} is no file or folder here, and the hub gave none: {error} "
                "(offline? download it once and give its folder)"
            ) from error

    return Source(name, lambda: fetch(False), lambda: iter(fetch(True)))


def _kind(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _folder_files(folder: Path, split: str | None) -> list[Path]:
    """The data files below a folder, sorted; of several splits only the wanted one.

    Default: those named train, else those that no split names, else there must be one split.
    """
    found = (p for p in folder.rglob("*") if p.is_file() and _kind(p) in SUFFIXES)
    described = ("dataset_info.json", "dataset_infos.json")  # what a hub folder says about itself
    files = sorted(p for p in found if p.name not in described and "/." not in f"/{p.relative_to(folder)}")
    if not files:
        raise DataError(f"folder {str(folder)!r} holds no data file ({', '.join(SUFFIXES)}, also with .gz)")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        named = _SPLIT.search(str(file.relative_to(folder)).lower())
        by_split.setdefault(named[1] if named else "", []).append(file)
    if split is None and "train" not in by_split and "" in by_split:
        return by_split[""]
    return by_split[_choose_split(sorted(by_split), split, str(folder))]


def _open_files(name: str, files: list[Path]) -> Source:
    for file in files:
        if _kind(file) not in SUFFIXES:
            raise DataError(f"{file}: not a data file I read ({', '.join(SUFFIXES)}, also with .gz)")

    def iterate() -> Iterator[Row | Broken]:
        for file in files:
            yield from _read_file(file)

    def load() -> Sequence[Row | Broken]:
        if all(_kind(file) == ".parquet" for file in files):
            import pyarrow
            import pyarrow.parquet

            try:
                tables = [pyarrow.parquet.read_table(file) for file in files]
                return ArrowRows(pyarrow.concat_tables(tables, promote_options="default"))
            except pyarrow.ArrowException as error:
                raise DataError(f"{name}: {error}") from error
        return list(iterate())

    return Source(name, load, iterate)


class ArrowRows(Sequence[Row]):
    """A table's rows as dictionaries, made when asked for."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table = table.combine_chunks()
        self.column_names: list[str] = table.column_names

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: Any) -> Any:
        return {name: self.table.column(name)[index].as_py() for name in self.column_names}

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches(max_chunksize=1000):
            yield from batch.to_pylist()


def _read_file(file: Path) -> Iterator[Row | Broken]:
    kind = _kind(file)
    if kind == ".parquet":
        yield from _read_parquet(file)
        return
    try:
        with _open_text(file) as stream:
            if kind in (".csv", ".tsv"):
                yield from _read_csv(stream, file, "\t" if kind == ".tsv" else ",")
            elif kind == ".json":
                yield from _read_json(stream.read(), file)
            else:
                yield from _read_lines(stream, file)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{file} can't be read: {error}") from error


def _open_text(file: Path) -> IO[str]:
    opener: Any = gzip.open if file.suffix == ".gz" else open
    return opener(file, "rt", encoding="utf-8-sig", newline="")


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1000):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: {error}") from error


def _read_csv(stream: IO[str], file: Path, delimiter: str) -> Iterator[Row | Broken]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(stream, delimiter=delimiter)
    for row in reader:
        if None in row:
            yield Broken(f"{file}, line {reader.line_num}: more values than the {len(row) - 1} columns")
        else:
            yield row


def _read_lines(lines: IO[str] | list[str], file: Path) -> Iterator[Row | Broken]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        yield read_line(line, f"{file}, line {number}")


def read_line(line: str | bytes, where: str) -> Row | Broken:
    """The row that a line of JSON holds."""
    try:
        row = json.loads(line)
        if (b"\\ud" if isinstance(line, bytes) else "\\ud") in line.lower():  # type: ignore[operator]
            json.dumps(row, ensure_ascii=False).encode()  # half a character can't be tokenised
        return _as_row(row, where)
    except json.JSONDecodeError as error:
        return Broken(f"{where}: not JSON ({error.msg} at column {error.colno})")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Broken(f"{where}: no text ({error.reason})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        return Broken(f"{where}: not to be read ({error})")


def _read_json(text: str, file: Path) -> Iterator[Row | Broken]:
    """A list of rows, ``{any name: list of rows}``, or, under the wrong suffix, one row a line."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _read_lines(text.split("\n"), file)
            return
        raise DataError(f"{file}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not to be read ({error})") from error
    halves = "\\ud" in text.lower()  # of characters, which can't be tokenised
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        whole = lists[0] if len(lists) == 1 and len(whole) == 1 else [whole]
    if not isinstance(whole, list):
        raise DataError(f"{file}: the JSON is a {type(whole).__name__}, not a list of rows")
    for number, row in enumerate(whole):
        where = f"{file}, row {number}"
        yield read_line(json.dumps(row), where) if halves else _as_row(row, where)


def _as_row(row: Any, where: str) -> Row | Broken:
    if isinstance(row, str):
        return {"prompt": row}
    return row if isinstance(row, dict) else Broken(f"{where}: a {type(row).__name__}, not an object or a text")
