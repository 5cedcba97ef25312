import gzip
from pathlib import Path

import numpy as np
import pytest

from realmops.train.conll import entity_scores, read_conll

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC

Peter NNP B-NP I-PER
Blackburn NNP I-NP I-PER
"""
UNER = "# sent_id = 1\n# text = In Oslo\n1\tIn\tO\t-\tann\n2\tOslo\tB-LOC\t-\tann\n\n"
NUMBERS = "# text = 1\n1 B-CARD\n\n1 O\n2 O\n\n# text = 1 3\n1 X O\n3 X B-CARD\n"


def read(folder: Path, text: str, name: str = "a.conll") -> list[tuple[str, str]]:
    """Return (words, tags) of each sentence, joined by spaces."""
    path, content = folder / name, text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return [(" ".join(s.words), " ".join(s.tags)) for s in read_conll(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONLL_2003, [("EU rejects German", "B-ORG O B-MISC"), ("Peter Blackburn", "B-PER I-PER")]),
        ("\n\n# id 7\na B-X\n# O\n-DOCSTART- -X- O\nb O\n \nc O", [("a #", "B-X O"), ("b", "O"), ("c", "O")]),
        ("w B-A\n\nw I-A\n", [("w", "B-A"), ("w", "B-A")]),
        ("Oslo B-LOC - -\nis O -\n", [("Oslo is", "B-LOC O")]),
        (
            UNER + NUMBERS,
            [("In Oslo", "O B-LOC"), ("1", "B-CARD"), ("1 2", "O O"), ("1 3", "O B-CARD")],
        ),
        (
            "\ufeffOslo B-LOC\r\n10\u00a0000 O\r\na\u0085b\u2028c\td\te\tI-MISC\r\n \u00a0\r\nx O\r\n",
            [("Oslo 10\u00a0000 a\u0085b\u2028c", "B-LOC O B-MISC"), ("x", "O")],
        ),
    ],
    ids=["CoNLL-2003", "comments", "tags start again", "columns of dashes", "numbered lines", "tabs and blanks"],
)
@pytest.mark.parametrize("name", ["a.conll", "a.conll.gz"])
def test_sentences_are_read(tmp_path: Path, name: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert read(tmp_path, text, name) == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O I-A I-A O I-A", "O B-A I-A O B-A"), ("I-A I-B I-B", "B-A B-B I-B"), ("I-A B-A I-A", "B-A B-A I-A"),
        ("B-A I-A O B-A", "B-A I-A O B-A"), ("B-A I-B", "B-A B-B"), ("B-A-X I-A-X I-A", "B-A-X I-A-X B-A"),
    ],
    ids=["IO", "IO, types touch", "IOB1", "IOB2", "I of another type", "type with a dash"],
)  # fmt: skip
def test_every_scheme_becomes_iob2(tmp_path: Path, tags: str, expected: str) -> None:
    assert read(tmp_path, "".join(f"w\t{tag}\n" for tag in tags.split()))[0][1] == expected


def test_scores_are_those_of_seqeval() -> None:
    """Strict IOB2, on tags drawn at random: whole entities, broken ones, kinds that only one side has."""
    from seqeval.metrics import classification_report
    from seqeval.scheme import IOB2

    draw = np.random.default_rng(0)
    tags = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG"]
    for n in range(200):
        sides = [[list(draw.choice(tags[: 4 + n % 4], 12)) for _ in range(1 + n % 5)] for _ in range(2)]
        report = classification_report(*sides, mode="strict", scheme=IOB2, output_dict=True, zero_division=0)
        expected = {f"f1_{name}": row["f1-score"] for name, row in report.items() if not name.endswith("avg")}
        expected["f1"] = report["micro avg"]["f1-score"]
        scores = entity_scores(*sides)
        assert {k: v for k, v in scores.items() if v} == pytest.approx({k: v for k, v in expected.items() if v})
