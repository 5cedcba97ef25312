"""Files of every format around a text, for tests, and damage to them.

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
_BRACKETS = dict.fromkeys(map(ord, "()\\"))
MARKDOWN = "---\ntitle: A\n---\n# A *b*\n\n[c](d) `e`\n\n- f\n\n| g |\n|---|\n| 1 |\n\n```\ni\n```\n<b>\n"
WIKITEXT = (
    "{{Infobox|a=[[b]]}}'''Oslo''' is a [[city|town]] ([[:de:Oslo]]) of {{convert|5|km}}.<ref name=x>a</ref>"
    "\n== Life ==\n[[File:a.jpg|thumb|a [[b]]]]\n{| class=x\n|-\n| a || b\n|}\n* one\n*: [http://a b] &nbsp; <br/>"
    "\n== See also ==\n* [[Bergen]]\n<!-- c -->{{{1|d}}} <math>x</math> <nowiki>[[e]]</nowiki> [[fr:Oslo]]"
)


def damage(valid: bytes, seed: int) -> bytes:
    """The file with up to six pieces replaced, left out, inserted, repeated or moved, and now and then its end cut."""
    random = Random(seed)
    data = valid
    for _ in range(random.randint(1, 6)):
        start = random.randint(0, len(data))
        stop = min(len(data), start + random.choice((0, 1, 1, 2, 8, 40)))
        inserted = random.randbytes(random.randint(1, 4)), random.choice(_INSERTED), data[start:stop] * 9
        data = data[:start] + random.choice((b"", *inserted)) + data[stop:]
    return data if random.random() < 0.8 else data[: random.randint(0, len(data))]


def valid(text: str) -> str:
    """Without halves of surrogate pairs, which only JSON can hold."""
    return text.encode("utf-8", "ignore").decode()


def xml(text: str) -> str:
    """Without the characters that XML does not know."""
    kept = "".join(c for c in valid(text) if c in "\t\n\r" or (ord(c) >= 0x20 and ord(c) not in (0xFFFE, 0xFFFF)))
    return html.escape(kept)


def web_page(text: str) -> bytes:
    return f"<html><title>T</title><p>{html.escape(valid(text))}</p></html>".encode()


def page(number: int, text: str, title: str = "T", more: str = "") -> str:
    head = f"<page><title>{title}</title><ns>0</ns><id>{number}</id>"
    return f"{head}{more}<revision><timestamp>{more}</timestamp><text>{text}</text></revision></page>"


def dump(pages: str) -> str:
    names = '<siteinfo><namespaces><namespace key="6">Datei</namespace></namespaces></siteinfo>'
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{names}{pages}</mediawiki>'


def parquet(text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"title": ["T"], "text": [valid(text)], "more": [[1.0, None]]}), sink)
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, Callable[[str], bytes]] = {
    "a.jsonl": lambda text: json.dumps({"title": "T", "text": text, "more": text}).encode(),
    "a.txt": lambda text: valid(text).encode(),
    "a.md": lambda text: f"# T\n\n{valid(text)}".encode(),
    "a.html": web_page,
    "a.parquet": parquet,
    "a.csv": lambda text: 'title,text\nT,"{}"'.format(valid(text).replace('"', '""')).encode(),
    "a.rst": lambda text: valid(text).encode(),
    "a.pdf": lambda text: pdf("x", title=text.encode("cp1252", "ignore").decode("cp1252").translate(_BRACKETS)),
    "a.docx": lambda text: docx(xml(text)),
    "a.pptx": lambda text: pptx(xml(text)),
    "a.xlsx": lambda text: xlsx({"A": [["x", "".join(c for c in xml(text) if c >= " ")]]}),
    "a.epub": lambda text: epub(xml(text)),
    "a.eml": lambda text: f"Subject: T\nContent-Type: text/plain; charset=utf-8\n\n{valid(text)}".encode(),
    "a.ipynb": lambda text: json.dumps({"cells": [{"cell_type": "markdown", "source": f"# T\n\n{text}"}]}).encode(),
    "a.xml": lambda text: dump(page(1, xml(text))).encode(),
}
_TEXTS = {"a.xml": WIKITEXT, "a.md": MARKDOWN, "a.rst": "A\n=\n\n*b* :c:`d <e>`\n\n.. note:: f\n\n== ==\nA  B\n== ==\n"}
WHOLE = {name: write(_TEXTS.get(name, "Oslo is a city é.")) for name, write in WRITERS.items()}
WHOLE |= {f"{name}.gz": gzip.compress(WHOLE[name], mtime=0) for name in ("a.jsonl", "a.xml")}
WHOLE["a.xml.bz2"] = bz2.compress(WHOLE["a.xml"])
