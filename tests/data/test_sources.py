"""Files, folders, loaded sets and lists all give the same rows."""

from __future__ import annotations

import csv
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import PromptDataset
from verl.data.sources import open_source

ROWS = [{"prompt": f"a{i}", "answer": str(i)} for i in range(3)]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if ".json" in name:
        text = json.dumps(rows) if ".jsonl" not in name else "\n".join(map(json.dumps, rows)) + "\n\n"
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0], delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.csv", "a.tsv"])
def test_files_load_and_stream_the_same(tmp_path, name):
    source = open_source(write(tmp_path / name))
    assert [dict(row) for row in source.load()] == list(source.iterate()) == ROWS
    assert source.load()[2] == ROWS[2]


def test_json_in_other_clothes(tmp_path):
    wrapped = tmp_path / "a.json"
    wrapped.write_text(json.dumps({"data": ROWS}))
    assert list(open_source(wrapped).load()) == ROWS
    wrapped.write_text("\n".join(map(json.dumps, ROWS)))  # JSON lines under the wrong suffix
    assert list(open_source(wrapped).load()) == ROWS


def test_a_folder_of_files_uses_the_wanted_split(tmp_path):
    write(tmp_path / "part" / "train-00000.parquet", ROWS[:2])
    write(tmp_path / "part" / "train-00001.parquet", ROWS[2:])
    write(tmp_path / "part" / "test.jsonl", ROWS[:1])
    write(tmp_path / ".cache" / "train.jsonl", ROWS)
    assert len(open_source(tmp_path).load()) == 3
    assert len(open_source({"name": str(tmp_path), "split": "test"}).load()) == 1
    with pytest.raises(DataError, match="splits test, train"):
        open_source({"name": str(tmp_path), "split": "dev"})


def test_files_that_are_held_out_are_not_trained_on(tmp_path):
    def rows(folder, *names):
        for i, name in enumerate(names):
            write(tmp_path / folder / name, [{"prompt": name}] * (i + 1))
        return {row["prompt"] for row in open_source(tmp_path / folder).load()}

    assert rows("a", "pairs.jsonl", "pairs_test.jsonl", "held-out.jsonl", "sub/eval/0.jsonl") == {"pairs.jsonl"}
    assert len(open_source({"name": str(tmp_path / "a"), "split": "test"}).load()) == 2
    assert rows("b", "train.jsonl", "more.jsonl", "dev.jsonl") == {"train.jsonl"}
    assert rows("c", "test-0.jsonl", "test-1.jsonl") == {"test-0.jsonl", "test-1.jsonl"}
    with pytest.raises(DataError, match="has the splits test, valid; choose one"):
        rows("d", "test.jsonl", "valid.jsonl")


def test_saved_and_loaded_datasets(tmp_path):
    loaded = datasets.Dataset.from_list(ROWS)
    loaded.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": loaded, "test": loaded.select([0])}).save_to_disk(tmp_path / "two")
    sets = [loaded, str(tmp_path / "one"), str(tmp_path / "two"), datasets.DatasetDict({"only": loaded})]
    for source in sets:
        assert list(PromptDataset(source)) == ROWS
    assert len(PromptDataset({"name": str(tmp_path / "two"), "split": "test"})) == 1


def test_lists_of_rows_texts_and_chats():
    chat = [{"role": "user", "content": "a"}]
    assert [row["prompt"] for row in PromptDataset(["x", chat, {"prompt": "c"}])] == ["x", chat, "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"), ('{"prompt": "a"}\n[1]\n', "line 2: a list")],
)
def test_broken_lines_are_named(tmp_path, text, said):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=said):
        len(PromptDataset(tmp_path / "a.jsonl"))


def test_what_is_not_there(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.parquet").write_text("x")
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "d").mkdir()
    for source, said in [
        ("data/none.jsonl", "no file or folder"),
        (tmp_path / "a.txt", "not a data file"),
        (tmp_path / "b.parquet", "b.parquet"),
        (tmp_path / "c.jsonl", "has no rows"),
        (tmp_path / "d", "holds no data file"),
        ([], "has no rows"),
        (3, "can't be a int"),
        ({"name": str(tmp_path / "c.jsonl"), "split": "test"}, "no split"),
    ]:
        with pytest.raises(DataError, match=said):
            len(PromptDataset(source))


def test_a_hub_name_without_hub(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="'someone/no-such-set' is no file or folder here, and the hub gave none"):
        len(PromptDataset("someone/no-such-set"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("short.jsonl.gz", gzip.compress(b'{"prompt": "ab"}\n' * 99)[:-20]),
        ("corrupt.jsonl.gz", gzip.compress(bytes(range(256)) * 99)[:40] + b"\xff" * 60),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000),
        ("digits.json", b'[{"prompt": "ab", "answer": ' + b"9" * 5000 + b"}]"),
        ("half.json", b'[{"prompt": "\\ud800"}]'),
        ("half.jsonl", b'{"prompt": "\\ud800"}\n'),
        ("deep.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
        ("digits.jsonl", b'{"prompt": "ab", "answer": ' + b"9" * 5000 + b"}\n"),
        ("from.jsonl", b'{"conversations": [{"from": ["human"], "value": "ab"}]}\n'),
        ("mark.jsonl", b'{"prompt": "\\n\\nHuman: a Assistant:"}\n'),
        ("marks.jsonl", b'{"prompt": "\\n\\nHuman:Assistant:"}\n'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_damaged_or_strange_are_named(tmp_path, name, data):
    """Some are prompts all the same; none ends in another error."""
    (tmp_path / name).write_bytes(data)
    try:
        PromptDataset(str(tmp_path / name)).feed(f_bpe(template="plain"), max_prompt_length=64).take(1)
    except DataError as error:
        assert str(tmp_path / name) in str(error)
    else:
        assert name.startswith("mark")


def test_a_folder_that_only_looks_like_a_saved_data_set_is_named(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json or dataset_dict\.json, but can't be read as one"):
        PromptDataset(str(tmp_path)).feed(f_bpe(), max_prompt_length=8)
