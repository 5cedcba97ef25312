"""Held-out masked sentences: evaluation of the indexes and models of a pre-training, and its best checkpoint."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from realmops import artifacts
from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import eval_mode
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, save_models
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat
from realmops.search.embed import embed, query_sequences
from realmops.train.index_source import Index
from realmops.train.masked_sentences import Example, Examples
from realmops.train.pretraining import Candidates, find_run
from realmops.train.realm import Realm

FIGURES = "figures.json"
START = "start_hit_at_5"  # of the initial models
MOST_HELD_OUT = 1000
READ_PER_INDEX = 64  # masked sentences read with every index: reading takes longer than retrieval


def held_out_rows(spans: int, seed: int, limit: int = MOST_HELD_OUT) -> list[int]:
    """Return the rows of the held-out spans, at most a tenth of all; ``ict``, which has no limit, leaves out most."""
    rows: list[int] = np.random.default_rng(seed_for(seed, "evaluate", "masked")).permutation(spans).tolist()
    return rows[: min(limit, MOST_HELD_OUT, max(1, spans // 10))]


def mask_spans(examples: Examples, rows: Sequence[int], seed: int) -> list[Example]:
    """Return the masked sentences of these spans, the same for the same seed."""
    rng = np.random.default_rng(seed_for(seed, "evaluate", "masked", "words"))
    return [examples.example(row, rng) for row in rows]


def retrieve_candidates(realm: Realm, masked: Sequence[Example], index: Index) -> list[list[int]]:
    """Retrieve at least 5 passages for each masked sentence, trivial ones always excluded."""
    query = embed(index.retriever.query, query_sequences(realm.queries(masked)), realm.dtype)
    candidates = max(6, realm.options.candidates)
    options = realm.options.model_copy(update={"exclude_trivial": True, "candidates": candidates})
    return Candidates(realm.snapshot, options, realm.bm25).retrieve(masked, query, index)


def measure(realm: Realm, masked: Sequence[Example], index: Index) -> dict[str, float]:
    """Return hit@5 of an index and mean log p(y|x) of the first ``READ_PER_INDEX`` sentences, {} without sentences."""
    if not masked:
        return {}
    passages = retrieve_candidates(realm, masked, index)
    hit = [
        any(_contains_target(realm.snapshot, p, e) for p in row[:5]) for e, row in zip(masked, passages, strict=True)
    ]
    log_p = [guess["masked_log_p"] for guess in _guesses(realm, masked[:READ_PER_INDEX], passages)]
    return {"hit_at_5": float(np.mean(hit)), "held_out_log_p": float(np.mean(log_p))}


def _contains_target(snapshot: Snapshot, passage: int, example: Example) -> bool:
    """Return whether a passage contains the masked words as whole words: "arts" does not contain "art".

    If ``MAX_MASKS`` cuts the last word, any word with that prefix matches.
    """
    body, continues, length = snapshot.body(passage), snapshot.continues(passage), len(example.targets)
    starts = find_run(body, example.targets)
    return any(example.cut or not continues[p + length : p + length + 1].any() for p in starts)


def evaluate_masked_words(
    realm: Realm, masked: Sequence[Example], index: Index, progress: Callable[[int], None]
) -> dict[str, float]:
    guesses: list[dict[str, float]] = []
    for guess in _guesses(realm, masked, retrieve_candidates(realm, masked, index)):
        guesses.append(guess)
        progress(1)
    return {name: float(np.mean([guess[name] for guess in guesses])) for name in guesses[0]}


def _guesses(realm: Realm, masked: Sequence[Example], passages: Sequence[Sequence[int]]) -> Iterator[dict[str, float]]:
    with eval_mode(realm.retriever), eval_mode(realm.reader):
        for example, row in zip(masked, passages, strict=False):
            yield realm.guess(example, row[: realm.options.documents])


class BestCheckpoint:
    """The checkpoint with the highest held-out p(y|x) (equation 1) whose hit@5 is at least that of the initial models.

    A checkpoint is the retriever that built an index and the reader at the step that adopted the index; the initial
    models are the first. Without held-out sentences the last checkpoint counts as the best. An older one is deleted
    after the new one is committed, so that a process killed in between leaves both.
    """

    def __init__(self, folder: Path, text: TextFormat) -> None:
        self.folder, self.text = folder, text

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @property
    def step(self) -> int:
        """Training step of the best checkpoint, the newest one; -1 before the first."""
        return max((int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")), default=-1)

    @property
    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = artifacts.read_json(self._folder(self.step) / FIGURES)
        return figures

    def offer(self, step: int, figures: Mapping[str, float], retriever: Retriever, reader: Reader) -> None:
        """Save models if they are the first or better than the best so far; NaN and infinity are never better.

        Raises:
            ValueError: a metric of the first models is not finite.
        """
        best = self.figures if self.step >= 0 else None
        broken = [f"{name} is {value:g}" for name, value in figures.items() if not math.isfinite(value)]
        if broken and best:
            return
        if broken:
            raise ValueError(
                f"{broken[0]} with the models of step {step}, the initial models of pre-training; a finite number is "
                "required: train ict again with lower learning rates or run.precision=fp32"
            )
        if best and "hit_at_5" in figures:  # otherwise the last is the best
            is_worse = figures["hit_at_5"] < best[START] or figures["held_out_log_p"] <= best["held_out_log_p"]
            if is_worse:
                return
        start = best[START] if best else figures.get("hit_at_5", 0.0)
        with artifacts.atomic_folder(self._folder(step), None) as stage:
            save_models(stage, retriever, reader, self.text)
            artifacts.write_json(stage / FIGURES, {**figures, START: start})
        for old in self.folder.glob("step-*"):
            if old != self._folder(step):
                shutil.rmtree(old)

    def models(self) -> tuple[Retriever, Reader]:
        return load_models(self._folder(self.step), self.text.vocabulary_hash)

    def describe(self, last: Mapping[str, float]) -> str:
        """Return a log line on why the best checkpoint, not the last one with metrics ``last``, is the result."""
        best, which = self.figures, f"the models of step {self.step}" if self.step else "the initial models"
        return (
            f"pretrain: {which} are better than the last and are saved: held-out hit@5 {best['hit_at_5']:.3f} "
            f"(last {last['hit_at_5']:.3f}), log p(y|x) {best['held_out_log_p']:.3f} "
            f"(last {last['held_out_log_p']:.3f})"
        )
