"""Files of every format with a given text, for tests, and damage to them.

REALMOPS_FUZZ is the number of damaged files for each reader; without it there are 100.
"""

import bz2
import gzip
import html
import json
import os
from collections.abc import Callable
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from paged_files import docx, epub, pdf, pptx, xlsx

fuzz = settings(
    max_examples=int(os.environ.get("REALMOPS_FUZZ", "100")),
    deadline=20_000,  # milliseconds for one file; they take a few
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**32 - 1)
_INSERTED = (*b"< > [[ ]] {{ }} {| \0 \xff \" & -1 \\ ( ) ' : ,".split(), b"\t", b"\n", b"\r\n\r\n", b"9" * 20)
_MARKDOWN = "---\ntitle: A\n---\n# A *b*\n\n[c](d) `e`\n\n- f\n\n| g |\n|---|\n| 1 |\n\n```\ni\n```\n<b>\n"
_RST = "A\n=\n\n*b* :c:`d <e>`\n\n.. note:: f\n\n== ==\nA  B\n== ==\n"
_WIKITEXT = (
    "{{Infobox|a=[[b]]}}'''Oslo''' is a [[city|town]] ([[:de:Oslo]]) of {{convert|5|km}}.<ref name=x>a</ref>"
    "\n== Life ==\n[[File:a.jpg|thumb|a [[b]]]]\n{| class=x\n|-\n| a || b\n|}\n* one\n*: [http://a b] &nbsp; <br/>"
    "\n== See also ==\n* [[Bergen]]\n<!-- c -->{{{1|d}}} <math>x</math> <nowiki>[[e]]</nowiki> [[fr:Oslo]]"
)


def damage(valid: bytes, seed: int) -> bytes:
    """Replace, remove, insert, repeat or move up to six pieces of a file, and sometimes cut its end."""
    random = Random(seed)
    data = valid
    for _ in range(random.randint(1, 6)):
        start = random.randint(0, len(data))
        stop = min(len(data), start + random.choice((0, 1, 1, 2, 8, 40)))
        inserted = random.randbytes(random.randint(1, 4)), random.choice(_INSERTED), data[start:stop] * 9
        data = data[:start] + random.choice((b"", *inserted)) + data[stop:]
    return data if random.random() < 0.8 else data[: random.randint(0, len(data))]


def _unicode(text: str) -> str:
    """Remove unpaired surrogates, which only JSON can hold."""
    return text.encode("utf-8", "ignore").decode()


def _xml(text: str) -> str:
    """Escape a text for XML, without the characters that XML forbids."""
    return html.escape("".join(c for c in _unicode(text) if c in "\t\n\r" or (c >= " " and c not in "\ufffe\uffff")))


def dump(pages: str) -> str:
    names = '<siteinfo><namespaces><namespace key="6">Datei</namespace></namespaces></siteinfo>'
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{names}{pages}</mediawiki>'


def page(text: str, title: str = "T") -> str:
    return f"<page><title>{title}</title><ns>0</ns><id>1</id><revision><text>{text}</text></revision></page>"


def parquet(text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"title": ["T"], "text": [_unicode(text)], "more": [[1.0, None]]}), sink)
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, Callable[[str], bytes]] = {
    "a.jsonl": lambda text: json.dumps({"title": "T", "text": text, "more": text}).encode(),
    "a.txt": lambda text: _unicode(text).encode(),
    "a.md": lambda text: f"# T\n\n{_unicode(text)}".encode(),
    "a.html": lambda text: f"<html><title>T</title><p>{html.escape(_unicode(text))}</p></html>".encode(),
    "a.parquet": parquet,
    "a.csv": lambda text: 'title,text\nT,"{}"'.format(_unicode(text).replace('"', '""')).encode(),
    "a.rst": lambda text: _unicode(text).encode(),
    "a.pdf": lambda text: pdf(text.encode("cp1252", "ignore").decode("cp1252")),
    "a.docx": lambda text: docx(_xml(text)),
    "a.pptx": lambda text: pptx(_xml(text)),
    "a.xlsx": lambda text: xlsx({"A": [["x", "".join(c for c in _xml(text) if c >= " ")]]}),
    "a.epub": lambda text: epub(_xml(text)),
    "a.eml": lambda text: f"Subject: T\nContent-Type: text/plain; charset=utf-8\n\n{_unicode(text)}".encode(),
    "a.ipynb": lambda text: json.dumps({"cells": [{"cell_type": "markdown", "source": f"# T\n\n{text}"}]}).encode(),
    "a.xml": lambda text: dump(page(_xml(text))).encode(),
}
_TEXTS = {"a.xml": _WIKITEXT, "a.md": _MARKDOWN, "a.rst": _RST}
WHOLE = {name: write(_TEXTS.get(name, "Oslo is a city é.")) for name, write in WRITERS.items()}
WHOLE |= {f"{name}.gz": gzip.compress(WHOLE[name], mtime=0) for name in ("a.jsonl", "a.xml")}
WHOLE["a.xml.bz2"] = bz2.compress(WHOLE["a.xml"])
