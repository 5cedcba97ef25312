"""Masked sentences that pre-training never sees: what its indexes and models are measured with, and the best models.

What is found and how likely the masked words are is asked here; whether questions are answered is asked by the stage.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from realmops import artifacts
from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import evaluating
from realmops.model.checkpoint_files import load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.search.embed import embed, query_sequences
from realmops.text.wordpieces import places
from realmops.train.candidates import Candidates
from realmops.train.examples import Example, Examples
from realmops.train.index_source import Index
from realmops.train.realm import Realm

FIGURES = "figures.json"
START = "start_hit_at_5"  # of the models that pre-training began with
MOST_HELD_OUT = 1000
WATCHED = 64  # masked sentences that are also read with every index: reading takes longer than finding


def held_out_rows(spans: int, seed: int, wanted: int = MOST_HELD_OUT) -> np.ndarray:
    """The spans that are held out, at most a tenth of all: small corpora are left something to learn from.

    ``ict``, which comes first and does not know how many are wanted, leaves out as many as can be.
    """
    rows: np.ndarray = np.random.default_rng(seed_for(seed, "evaluate", "masked")).permutation(spans)
    return rows[: min(wanted, MOST_HELD_OUT, max(1, spans // 10))]


def masked_at(examples: Examples, rows: np.ndarray, seed: int) -> list[Example]:
    """The sentences of these spans, masked the same way each time."""
    rng = np.random.default_rng(seed_for(seed, "evaluate", "masked", "words"))
    return [examples.example(int(row), rng) for row in rows]


def found_for(realm: Realm, masked: Sequence[Example], index: Index) -> list[list[int]]:
    """What an index finds for masked sentences, at least 5 passages; trivial candidates never count."""
    query = embed(index.retriever.query, query_sequences(realm.queries(masked)), realm.dtype)
    candidates = max(6, realm.options.candidates)
    options = realm.options.model_copy(update={"exclude_trivial": True, "candidates": candidates})
    return Candidates(realm.snapshot, options, realm.words).retrieve(masked, query, index)


def measure(realm: Realm, masked: Sequence[Example], index: Index) -> dict[str, float]:
    """hit@5 of an index, and log p(y|x) of the first ``WATCHED``; nothing where no sentence is held out."""
    if not masked:
        return {}
    found = found_for(realm, masked, index)
    hit = [any(_holds(realm.snapshot, p, e) for p in row[:5]) for e, row in zip(masked, found, strict=True)]
    log_p = [one["masked_log_p"] for one in _guesses(realm, masked[:WATCHED], found)]
    return {"hit_at_5": float(np.mean(hit)), "held_out_log_p": float(np.mean(log_p))}


def _holds(snapshot: Snapshot, passage: int, example: Example) -> bool:
    """Whether the masked words stand in a passage, as whole words: "art" does not stand in "arts".

    Where ``pretrain.max_masks`` ends within a word, any that begins like it will do.
    """
    body, continues, length = snapshot.body(passage), snapshot.continues(passage), len(example.targets)
    found = places(body, example.targets)
    return any(example.cut or not continues[p + length : p + length + 1].any() for p in found)


def masked_words(
    realm: Realm, masked: Sequence[Example], index: Index, progress: Callable[[int], None]
) -> dict[str, float]:
    """``Realm.guess`` of the masked sentences, their means."""
    found: list[dict[str, float]] = []
    for one in _guesses(realm, masked, found_for(realm, masked, index)):
        found.append(one)
        progress(1)
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _guesses(realm: Realm, masked: Sequence[Example], found: Sequence[Sequence[int]]) -> Iterator[dict[str, float]]:
    with evaluating(realm.retriever), evaluating(realm.reader):
        for example, row in zip(masked, found, strict=False):
            yield realm.guess(example, row[: realm.options.documents])


class BestModels:
    """The models under which held-out masked sentences are likeliest, of those that find no less than the start.

    Likely by p(y|x) (equation 1), and what is found is hit@5.  The retriever is that of the index which was measured,
    the reader the one of the step at which it came into use.  The start is the first.  Where no sentence is held out
    nothing can be compared, and the last ones count as the best.

    Each has a folder of its own, and the old one goes when the new one is whole: a kill between the two leaves both.
    """

    def __init__(self, folder: Path, vocabulary_hash: str) -> None:
        self.folder, self.vocabulary_hash = folder, vocabulary_hash

    def _all(self) -> list[Path]:
        """The folders, the best one last; a killed process may leave two."""
        found = [path.parent for path in self.folder.glob(f"step-*/{FIGURES}")]
        return sorted(found, key=lambda path: (_rank_of(artifacts.read_json(path / FIGURES)), -_step_of(path)))

    @property
    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = artifacts.read_json(self._all()[-1] / FIGURES)
        return figures

    @property
    def step(self) -> int:
        return _step_of(self._all()[-1])

    def offer(self, step: int, figures: Mapping[str, float], retriever: Retriever, reader: Reader) -> None:
        """Keep them if they are better than the best, and the first ones.

        What is not finite is never better; ValueError where the first ones have it.
        """
        before = self._all()
        broken = [f"{name} is {value:g}" for name, value in figures.items() if not math.isfinite(value)]
        if broken and before:
            return
        if broken:
            raise ValueError(
                f"{broken[0]} with the models of step {step}, with which pre-training begins: they are of no use; "
                "train ict again with lower learning rates or run.precision=fp32"
            )
        start = self.figures[START] if before else figures.get("hit_at_5", 0.0)
        worse = before and (figures.get("hit_at_5", start) < start or _rank_of(figures) <= _rank_of(self.figures))
        if worse and "hit_at_5" in figures:
            return
        mine = self.folder / f"step-{step:08d}"
        with artifacts.atomic_folder(mine) as stage:
            save_models(stage, retriever, reader, self.vocabulary_hash)
            artifacts.write_json(stage / FIGURES, {**figures, START: start})
        for old in before:
            if old != mine:
                shutil.rmtree(old)

    def models(self) -> tuple[Retriever, Reader]:
        return load_models(self._all()[-1], self.vocabulary_hash)

    def told(self, last: Mapping[str, float]) -> str:
        """Which step's models are handed on instead of the last ones, and why."""
        figures = self.figures
        which = "the start's models are" if self.step == 0 else f"the models of step {self.step} are"
        return (
            f"{which} handed on: held-out masked sentences have hit@5 {figures['hit_at_5']:.3f} and log p(y|x) "
            f"{figures['held_out_log_p']:.3f} with them, {last['hit_at_5']:.3f} and {last['held_out_log_p']:.3f} at "
            "the end"
        )


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _rank_of(figures: Mapping[str, float]) -> float:
    return figures.get("held_out_log_p", 0.0)
