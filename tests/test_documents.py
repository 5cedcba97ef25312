import gzip
import json
import re
from pathlib import Path

import pytest

from realmops.corpus.documents import LINE_LIMIT, Document, document_of, read_json_lines

GOOD = '{"title": "Oslo", "text": "Oslo is a city."}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[Document]:
    return [document_of(record, place) for place, record in read_json_lines(path)]


def problem(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read(path)
    return str(caught.value)


def test_documents_come_in_the_order_of_files_and_lines(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.jsonl", '{"title": "A", "text": "é 東京 😀", "id": 7}', "", '{"title": "B", "text": "b"}'
    )
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b'\xef\xbb\xbf{"title": "C", "text": "c", "spans": [[0, 1, "X"]]}\n'))
    documents = [*read(first), *read(second)]
    assert [(d.title, d.text, d.id) for d in documents] == [("A", "é 東京 😀", "7"), ("B", "b", None), ("C", "c", None)]
    assert [d.place for d in documents] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    assert documents[2].spans == ((0, 1, "X"),)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"title": "A", "text": ', "not valid JSON"),
        ('["A", "text"]', "JSON list; each line must be one JSON object"),
        ('{"text": "a"}', "'title' is missing (keys found: text); add it to this line"),
        ('{"title": "A"}', "'text' is missing"),
        ('{"title": null, "text": "a"}', "'title' is NoneType, wanted a string; correct this line"),
        ('{"title": "A", "text": ["a"]}', "'text' is list"),
        ('{"title": "A", "text": "a", "title": "B"}', "'title' stands twice"),
        ('{"title": "A", "text": "a", "score": NaN}', "NaN"),
        ('{"title": "A", "text": "\\ud800"}', "surrogate"),
        ('{"title": "A", "text": "a", "id": ""}', "'id' is empty"),
        ('{"title": "A", "text": "a", "id": true}', "'id' is bool"),
        (
            '{"title": "A", "text": "ab", "spans": [[1, 3, "X"]]}',
            "is not [start, end, label] with 0 <= start < end <= 2",
        ),
        ('{"title": "A", "text": "ab", "spans": [[0, 1]]}', "[0, 1]"),
        ('{"title": "A", "text": "ab", "spans": {}}', "'spans' is dict"),
        ("[" * 100_000, "nested too deeply"),
        ('{"title": "A", "text": "a", "n": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_damaged_line_is_named_with_file_and_number(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "corpus.jsonl", GOOD, line)
    message = problem(path)
    assert message.startswith(f"{path}:2: ")
    assert says in message


def test_invalid_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"title": "A", "text": "\xff"}\n')
    said = problem(path)
    assert said.startswith(f"{path}:2: invalid UTF-8 at byte 24 ")
    assert said.endswith("save the file as UTF-8")


def test_a_line_of_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(GOOD.encode() + b"\n" + b'{"title": "A", "text": "')
        for _ in range(100):
            file.write(b"a" * 1_000_000)
    said = problem(path)
    assert said.startswith(f"{path}:2: the line is longer than 16 MiB")
    assert "one document on each line" in said


def test_a_line_at_the_limit_is_read(tmp_path: Path) -> None:
    frame = len('{"title": "A", "text": ""}\n')
    path = write(tmp_path / "corpus.jsonl", json.dumps({"title": "A", "text": "a" * (LINE_LIMIT - frame)}))
    assert path.stat().st_size == LINE_LIMIT
    assert len(read(path)[0].text) == LINE_LIMIT - frame


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    whole = gzip.compress(f"{GOOD}\n".encode() * 5)
    path.write_bytes(whole[:-4])
    assert problem(path) == f"{path}:6: the gzip file ends in the middle; it was cut: copy or download it again"
    damaged = bytearray(whole)
    damaged[-6] ^= 1  # in the checksum
    path.write_bytes(damaged)
    assert "no valid gzip data" in problem(path)
    path.write_text(GOOD)
    assert problem(path).startswith(f"{path}:1: no valid gzip data")


def test_blank_lines_are_no_documents_and_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert read(write(tmp_path / "empty.jsonl", "", " ")) == []
    assert "cannot be read" in problem(tmp_path / "absent.jsonl")
