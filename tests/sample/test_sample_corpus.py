import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realmops.sample import corpus as sample_corpus
from realmops.sample.corpus import build_world, write_sample
from realmops.sample.world import relations

FILES = (
    "corpus.jsonl.gz", "ner.dev.conll", "ner.train.conll", "questions.dev.jsonl.gz", "questions.test.jsonl.gz",
    "questions.train.jsonl.gz", "warmup.jsonl.gz",
)  # fmt: skip
DEFAULTS: dict[str, Any] = {"seed": 0, "subjects": 300, "warmup_worlds": 1}
SMALL = {**DEFAULTS, "subjects": 60}
TOKEN = re.compile(r"\w+|[^\w\s]")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sample")
    return folder, write_sample(folder, **DEFAULTS)


@pytest.fixture(scope="module")
def folder(written: tuple[Path, dict[str, Any]]) -> Path:
    return written[0]


@pytest.fixture(scope="module")
def world() -> sample_corpus.World:
    return build_world(seed=5, subjects=300)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def questions(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {split: lines(folder / f"questions.{split}.jsonl.gz") for split in ("train", "dev", "test")}


def padded(text: str) -> str:
    """Lower-cased tokens between spaces, so that a token match is a substring match."""
    return f" {' '.join(TOKEN.findall(text.lower()))} "


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_counts_are_those_of_the_files(written: tuple[Path, dict[str, Any]]) -> None:
    folder, counts = written
    assert tuple(sorted(path.name for path in folder.iterdir())) == FILES
    assert counts["documents"] == len(lines(folder / "corpus.jsonl.gz"))
    assert counts["warmup_documents"] == len(lines(folder / "warmup.jsonl.gz"))
    assert counts["questions"] == {split: len(asked) for split, asked in questions(folder).items()}
    assert counts["ner_sentences"] == {
        part: (folder / f"ner.{part}.conll").read_text().count("\n\n") for part in ("train", "dev")
    }
    assert 2000 <= counts["documents"] <= 2500
    assert 2000 <= counts["warmup_documents"] <= 2500
    assert counts["relations"] == len(relations()) == 40
    assert 700 <= counts["questions"]["train"] <= 1000
    assert 270 <= counts["questions"]["dev"] <= 330
    assert 500 <= counts["questions"]["test"] <= 600


def test_another_seed_changes_every_file_and_more_warmup_only_the_warmup(tmp_path: Path) -> None:
    made = {}
    for name, change in {"base": {}, "seed": {"seed": 1}, "warmup": {"warmup_worlds": 2}}.items():
        (tmp_path / name).mkdir()
        write_sample(tmp_path / name, **{**SMALL, **change})
        made[name] = digests(tmp_path / name)
    assert all(made["seed"][file] != made["base"][file] for file in FILES)
    assert [file for file in FILES if made["warmup"][file] != made["base"][file]] == ["warmup.jsonl.gz"]


def test_every_fact_is_in_three_or_four_passages_in_different_words(world: sample_corpus.World) -> None:
    told: list[list[sample_corpus.Sentence]] = [[] for _ in world.facts]
    for passage in world.passages:
        facts = [sentence.fact for sentence in passage.sentences if sentence.fact >= 0]
        assert len(set(facts)) == len(facts), passage.text
        for sentence in passage.sentences:
            if sentence.fact >= 0:
                told[sentence.fact].append(sentence)
    assert {len(tellings) for tellings in told} == {3, 4}
    assert all(len({sentence.template for sentence in tellings}) == len(tellings) for tellings in told)
    for fact, tellings in zip(world.facts, told, strict=True):
        for sentence in tellings:
            assert any(padded(answer) in padded(sentence.text) for answer in fact.answers), sentence.text


def test_entities_of_one_world_have_different_names_that_no_other_name_contains(world: sample_corpus.World) -> None:
    names = [padded(entity.name) for entity in world.entities]
    assert not [(one, other) for one in names for other in names if one is not other and one in other]


def test_the_text_is_clean(world: sample_corpus.World) -> None:
    doubled = r"\b(the|a|an|of|in|by|was|is) \1\b"
    slip = re.compile(rf"  |[{{}}]|\ba [aeiou]|\ban [^aeiou]|{doubled}| [.,?]|[.]{{2}}|^\s|\s$", re.I)
    assert all(slip.search(text) for text in ("a opera", "an novel", "{s} is", "is is", "no  one", "no ."))
    for passage in world.passages:
        assert not slip.search(passage.text), passage.text
        for sentence in passage.sentences:
            assert sentence.text[0].isupper(), sentence.text
            assert sentence.text[-1] in ".?", sentence.text
    assert {len(passage.sentences) for passage in world.passages} <= {1, 2, 3}
    assert np.mean([len(passage.sentences) == 1 for passage in world.passages]) < 0.02


def test_splits_share_no_subject_and_no_question(folder: Path) -> None:
    asked = questions(folder)
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for key in ("subject", "question", "id"):
            assert not {line[key] for line in asked[one]} & {line[key] for line in asked[other]}, (one, other, key)


def test_questions_are_answerable_in_words_that_the_corpus_knows(folder: Path) -> None:
    asked = [line for split in questions(folder).values() for line in split]
    texts = [padded(document["text"]) for document in lines(folder / "corpus.jsonl.gz")]
    known = {word for text in texts for word in text.split()}
    words = [word for line in asked for word in padded(line["question"]).split()]
    assert np.mean([word in known for word in words]) > 0.995
    answers: dict[str, list[str]] = {}
    for line in asked:
        assert line["question"][0].isupper(), line
        assert line["question"].endswith("?"), line
        assert all(1 <= len(answer.split()) <= 4 for answer in line["answers"]), line
        assert answers.setdefault(line["question"], line["answers"]) == line["answers"], line
        wanted = [padded(answer) for answer in line["answers"]]
        assert not any(answer in padded(line["question"]) for answer in wanted), line
        holders = sum(any(answer in text for answer in wanted) for text in texts)
        assert 3 <= holders <= 60, line


def test_spans_cover_the_names_by_type(world: sample_corpus.World) -> None:
    labels = {entity.name: entity.label for entity in world.entities}
    assert set(labels.values()) == {"PER", "LOC", "ORG", "MISC"}
    for passage in world.passages:
        for sentence in passage.sentences:
            spans = {sentence.text[start:end]: label for start, end, label in sentence.spans}
            assert spans == {name: labels[name] for name in labels if name in sentence.text}, sentence.text


def test_the_conll_files_are_iob2_without_dates(folder: Path) -> None:
    for part in ("train", "dev"):
        labels = Counter()
        for block in (folder / f"ner.{part}.conll").read_text().strip().split("\n\n"):
            before = "O"
            for line in block.split("\n"):
                token, tag = line.split("\t")
                assert re.fullmatch(r"O|[BI]-(PER|LOC|ORG|MISC)", tag)
                assert not tag.startswith("I-") or before[2:] == tag[2:], block
                assert tag == "O" or not token.isdigit(), block
                labels[tag[2:]] += 1
                before = tag
        assert min(labels[label] for label in ("PER", "LOC", "ORG", "MISC")) > 100


def test_more_worlds_than_there_are_names_for_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exhausted; lower sample\.subjects"):
        write_sample(tmp_path, **{**DEFAULTS, "subjects": 60, "warmup_worlds": 40})
    assert not list(tmp_path.iterdir())
