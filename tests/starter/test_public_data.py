"""``realmops public-data``: data sets in the folders of the presets, downloaded or from a folder."""

import gzip
import hashlib
import io
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_project import cli

from realmops.config_yaml import read_yaml
from realmops.starter import public_data

ROOT = Path(__file__).parents[2]
CONTENT = b"Paris B-LOC\n"


def article(title: str, paragraphs: int = 5) -> dict[str, Any]:
    """An article of SQuAD's form with three questions a paragraph."""
    asked = [
        {"id": "x", "question": f"  Which {q}? ", "answers": [{"answer_start": 0, "text": title}]} for q in range(3)
    ]
    return {"title": title, "paragraphs": [{"context": f"{title} {p}", "qas": asked} for p in range(paragraphs)]}


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Answer(io.BytesIO):
    """Response of ``urlopen``."""

    def __init__(self, content: bytes, url: str = "https://example.org/") -> None:
        super().__init__(content)
        self.url = url

    def geturl(self) -> str:
        return self.url


def home(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Answer]) -> None:
    """Make the data set ``ner`` one file whose server answers so."""
    original = public_data.PublishedFile("https://example.org/names.conll", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(public_data, "COPIED", {"ner": (original,)})
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: answer())


def no_network() -> Answer:
    raise OSError("no network")


def fetched(*words: str | Path) -> str:
    """Return the output of ``realmops public-data``."""
    result = cli("public-data", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str | Path) -> str:
    result = cli("public-data", *words)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_squad_gives_passages_and_three_splits_of_questions(tmp_path: Path) -> None:
    titles = [f"Article_{n:02d}" for n in range(40)] + ["St._John%27s"]
    twice = article("Twice", 2)
    twice["paragraphs"][1]["context"] = twice["paragraphs"][0]["context"]
    original = {"data": [*map(article, reversed(titles)), twice], "version": "1.1"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train-v1.1.json").write_text(json.dumps(original))
    words = "squad", "--from", tmp_path / "mine", "--to", tmp_path, "--passages"
    assert fetched(*words, "1000") == fetched(*words, "1000")
    assert "passages.jsonl.gz exists with other content" in refused(*words, "10")
    passages = records(tmp_path / "squad", "passages")
    assert passages[0] == {"id": "sqt-000-000", "title": "Article 00", "text": "Article_00 0"}
    assert [row["title"] for row in passages[200:206]] == ["St. John's"] * 5 + ["Twice"]
    assert len(passages) == 206

    parts = {name: records(tmp_path / "squad", f"questions.{name}") for name in ("train", "dev", "dev_seen")}
    assert sum(map(len, parts.values())) == 41 * 15 + 6
    asked = {row["id"]: row for rows in parts.values() for row in rows}
    assert asked["sqt-003-002-q01"] == {
        "id": "sqt-003-002-q01", "question": "Which 1?", "answers": ["Article_03"], "passage_id": "sqt-003-002",
    }  # fmt: skip
    assert asked["sqt-041-001-q00"]["passage_id"] == "sqt-041-000"
    articles = {name: {row["passage_id"][:7] for row in rows} for name, rows in parts.items()}
    assert articles["dev"]
    assert articles["dev_seen"]
    assert not articles["dev"] & (articles["train"] | articles["dev_seen"])


def test_a_cut_takes_whole_articles_with_a_share_for_dev() -> None:
    sizes = {f"Article {n}": 10 for n in range(100)}
    dev = {title for title in sizes if title.endswith("7")}
    chosen = public_data.choose_articles(sizes, dev, 200)
    assert len(chosen) == 20
    assert len(chosen & dev) == 3  # 30 passages are the first that reach 12 % of 200
    assert chosen < public_data.choose_articles(sizes, dev, 400)


def test_the_articles_of_dev_are_those_of_the_documented_figures() -> None:
    """Their choice is a hash: another one would measure other questions under the same name."""
    titles = ["51st state", "2008 Sichuan earthquake", "Spanish language in the United States"]
    assert [public_data.stable_hash(f"dev:{title}") % 10 == 0 for title in titles] == [True, False, False]
    assert public_data.stable_hash("seen:sqt-000-000-q07") % 20 == 0


def test_a_file_with_the_right_digest_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home(monkeypatch, lambda: Answer(CONTENT))
    fetched("ner", "--to", tmp_path)
    assert (tmp_path / "ner/names.conll").read_bytes() == CONTENT
    git = public_data.PublishedFile("https://example.org/a", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
    assert (git.has_digest_of(b""), git.has_digest_of(b"a")) == (True, False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (no_network, "cannot be downloaded (no network); download names.conll from there manually into a folder"),
        (lambda: Answer(CONTENT[:-1]), ": cut or changed; download names.conll from there"),
        (lambda: Answer(CONTENT, "http://example.org/"), ", not https"),
    ],
)
def test_a_failed_download_is_reported_and_leaves_nothing(
    answer: Callable[[], Answer], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home(monkeypatch, answer)
    error = refused("ner", "--to", tmp_path)
    assert message in error
    assert "--from FOLDER" in error
    assert not list(tmp_path.iterdir())


def test_a_local_file_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home(monkeypatch, no_network)
    mine = tmp_path / "mine/deeper"
    mine.mkdir(parents=True)
    words = ["ner", "--from", str(tmp_path / "mine"), "--to", str(tmp_path / "to")]
    assert "has no names.conll or names.conll.gz; download it from https://example.org/" in refused(*words)
    (mine / "names.conll.gz").write_bytes(gzip.compress(CONTENT))
    assert "is not the file" not in fetched(*words)
    assert (tmp_path / "to/ner/names.conll").read_bytes() == CONTENT
    (mine / "names.conll.gz").write_bytes(gzip.compress(b"other"))
    assert f"{tmp_path / 'to/ner/names.conll'} exists with other content" in refused(*words)
    assert (tmp_path / "to/ner/names.conll").read_bytes() == CONTENT
    assert "is not the file at https://example.org/names.conll" in fetched(*words[:-1], tmp_path / "other")


def test_the_presets_name_the_files_that_are_written() -> None:
    fetched = {f"data/public/{name}/{file.name}" for name, files in public_data.COPIED.items() for file in files}
    fetched |= {f"data/public/squad/{name}.jsonl.gz" for name in public_data.build_open_squad([], 0)}
    for path in sorted((ROOT / "src/realmops/presets").rglob("*.yaml")):
        sections = read_yaml(path).values()
        named = {value for section in sections for value in section.values() if str(value).startswith("data/public/")}
        assert named <= fetched, path
