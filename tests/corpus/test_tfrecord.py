"""The passages of published checkpoints: TensorFlow records by hand, cut anywhere, and arbitrary bytes."""

import gzip
import json
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realmops.corpus.tfrecord import convert_blocks, read_records
from realmops.readers.documents import read_json_lines


def frame(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"crc1" + data + b"crc2"


def write(path: Path, *texts: str) -> Path:
    path.write_bytes(b"".join(frame(text.encode()) for text in texts))
    return path


def test_blocks_and_titles_become_documents_in_order(tmp_path: Path) -> None:
    blocks = write(tmp_path / "blocks.tfr", "Oslo is a city.", "Zürich\nis one.", "")
    titles = write(tmp_path / "titles.tfr", "Oslo", "Zürich", "Nothing")
    out = tmp_path / "passages.jsonl.gz"
    assert convert_blocks(blocks, titles, out)[0] == 3
    found = [(record["title"], record["text"]) for _, record in read_json_lines(out)]
    assert found == [("Oslo", "Oslo is a city."), ("Zürich", "Zürich\nis one."), ("Nothing", "")]
    first = out.read_bytes()
    assert convert_blocks(blocks, titles, out)[0] == 3
    assert out.read_bytes() == first, "the same bytes, whenever it is made"
    assert convert_blocks(blocks, None, out)[0] == 3
    lines = gzip.decompress(out.read_bytes()).splitlines()
    assert json.loads(lines[0]) == {"title": "", "text": "Oslo is a city."}


def test_unequal_numbers_of_blocks_and_titles_are_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.tfr", "a"), write(tmp_path / "two.tfr", "a", "b")
    out = tmp_path / "out.gz"
    for blocks, titles in ((one, two), (two, one)):
        with pytest.raises(ValueError, match=r"only one of .*\.tfr and .*\.tfr has a record 2"):
            convert_blocks(blocks, titles, out)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.tfr"
        path.write_bytes(content)
        try:
            records = list(read_records(path))
        except ValueError as error:
            problem = str(error)
        else:
            problem = f"{path}: record" if sum(16 + len(record) for record in records) == len(content) else "lost bytes"
        assert problem.startswith(f"{path}: record")
