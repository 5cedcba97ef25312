import gzip
from pathlib import Path

import numpy as np
import pytest

from realmops.train.conll import TaggedSentence, entity_scores, read_conll


def write(path: Path, text: str) -> Path:
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC
call NN I-NP O

Peter NNP B-NP I-PER
Blackburn NNP I-NP I-PER
"""


@pytest.mark.parametrize("name", ["a.conll", "a.conll.gz"])
def test_the_first_column_is_the_token_and_the_last_the_tag(tmp_path: Path, name: str) -> None:
    assert read_conll(write(tmp_path / name, CONLL_2003)) == [
        TaggedSentence(("EU", "rejects", "German", "call"), ("B-ORG", "O", "B-MISC", "O")),
        TaggedSentence(("Peter", "Blackburn"), ("B-PER", "I-PER")),
    ]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O I-A I-A O I-A", "O B-A I-A O B-A"), ("I-A I-B I-B", "B-A B-B I-B"), ("I-A B-A I-A", "B-A B-A I-A"),
        ("B-A I-A O B-A", "B-A I-A O B-A"), ("B-A I-B", "B-A B-B"), ("B-A-X I-A-X I-A", "B-A-X I-A-X B-A"),
    ],
    ids=["IO", "IO, types touch", "IOB1", "IOB2", "I of another type", "type with a dash"],
)  # fmt: skip
def test_every_scheme_becomes_iob2(tmp_path: Path, tags: str, expected: str) -> None:
    path = write(tmp_path / "a", "".join(f"w\t{tag}\n" for tag in tags.split()))
    assert read_conll(path) == [TaggedSentence(("w",) * len(tags.split()), tuple(expected.split()))]


def test_a_sentence_starts_fresh(tmp_path: Path) -> None:
    """I-A at a sentence's start begins an entity even though the sentence before ended in one."""
    first, second = read_conll(write(tmp_path / "a", "w B-A\n\nw I-A\n"))
    assert (first.tags, second.tags) == (("B-A",), ("B-A",))


def test_blank_lines_comments_and_docstart_are_skipped(tmp_path: Path) -> None:
    text = "\n\n# text = a b\n# id 7\na B-X\n# O\n-DOCSTART- -X- O\nb O\n \nc O"
    assert [(s.words, s.tags) for s in read_conll(write(tmp_path / "a", text))] == [
        (("a", "#"), ("B-X", "O")),
        (("b",), ("O",)),
        (("c",), ("O",)),
    ]


def test_dashes_behind_the_tag_are_stepped_over(tmp_path: Path) -> None:
    """Some sets, as WNUT and GermEval, have further columns of dashes."""
    assert read_conll(write(tmp_path / "a", "Oslo B-LOC - -\nis O -\n"))[0].tags == ("B-LOC", "O")


def test_numbered_lines_behind_a_comment(tmp_path: Path) -> None:
    """UNER's form: number, token, tag, and who said so. Numbers that are tokens themselves stay tokens."""
    uner = "# sent_id = 1\n# text = In Oslo\n1\tIn\tO\t-\tann\n2\tOslo\tB-LOC\t-\tann\n\n"
    counting = "# text = 1\n1 B-CARD\n\n1 O\n2 O\n\n# text = 1 3\n1 X O\n3 X B-CARD\n"
    assert [(s.words, s.tags) for s in read_conll(write(tmp_path / "a", uner + counting))] == [
        (("In", "Oslo"), ("O", "B-LOC")),
        (("1",), ("B-CARD",)),
        (("1", "2"), ("O", "O")),
        (("1", "3"), ("O", "B-CARD")),
    ]


def test_columns_end_at_tabs_and_blanks_alone(tmp_path: Path) -> None:
    text = "\ufeffOslo B-LOC\r\n10\u00a0000 O\r\na\u0085b\u2028c\td\te\tI-MISC\r\n \u00a0\r\nx O\r\n"
    first, second = read_conll(write(tmp_path / "a", text))
    assert first == TaggedSentence(("Oslo", "10\u00a0000", "a\u0085b\u2028c"), ("B-LOC", "O", "B-MISC"))
    assert second.words == ("x",)


def test_scores_are_those_of_seqeval() -> None:
    """Strict IOB2, on tags drawn at random: whole entities, broken ones, kinds that only one side has."""
    from seqeval.metrics import classification_report
    from seqeval.scheme import IOB2

    draw = np.random.default_rng(0)
    tags = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG"]
    for n in range(200):
        sides = [[list(draw.choice(tags[: 4 + n % 4], 12)) for _ in range(1 + n % 5)] for _ in range(2)]
        report = classification_report(*sides, mode="strict", scheme=IOB2, output_dict=True, zero_division=0)
        wanted = {f"f1_{name}": one["f1-score"] for name, one in report.items() if not name.endswith("avg")}
        found = entity_scores(*sides)
        assert found.pop("f1") == pytest.approx(report["micro avg"]["f1-score"])
        assert {name: value for name, value in found.items() if value} == pytest.approx(
            {name: float(value) for name, value in wanted.items() if value}
        )
