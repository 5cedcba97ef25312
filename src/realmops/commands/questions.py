"""Question sets on their own: brought into one form, made from the corpus, and measured before any training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.answering.feedback import feedback_file, questions_of, read_feedback
from realmops.config import Finetune
from realmops.corpus.cloze import KIND, cloze_questions, split
from realmops.corpus.question_sets import Question, in_orqa_dev, json_line, read_questions
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.ceilings import answer_fits_reader, answered_in_corpus, reader_can_answer
from realmops.evaluate.recall import RECALL_AT, hit_ranks_by_rule, hits_at
from realmops.search.bm25 import Bm25, rank
from realmops.stages import CLOZE, STAGES
from realmops.text.answer_matching import REGEX_RULES, WORD_RULES, expression
from realmops.text.languages import ENGLISH
from realmops.text.spans import Spans
from realmops.train.inverse_cloze import SentencesWithSpans

CLOZE_LIMIT = 20_000


def convert_questions(
    files: Sequence[Path], out: Path, *, format: str, orqa_split: bool, drop: Sequence[str]
) -> list[str]:
    """Write question files of any format as JSON lines into a folder; what was read, dropped and written, in words.

    The folder holds questions.jsonl, or with ``orqa_split`` questions.train.jsonl and questions.dev.jsonl.

    Args:
        drop: beginnings of ids; those questions are left out.
    """
    artifacts.check_replaceable(out, KIND)
    impossible: list[str] = []
    found = read_questions(files, format=format, unanswerable=impossible)
    kept = [question for question in found if not question.id.startswith(tuple(drop))]
    parts = {"questions.jsonl": kept}
    if orqa_split:
        parts = {
            f"questions.{name}.jsonl": [q for q in kept if in_orqa_dev(q.question) == (name == "dev")]
            for name in ("train", "dev")
        }
    empty = [name for name, questions in parts.items() if not questions]
    if empty:
        raise ValueError(f"no question is left for {empty[0]} of {len(found)} read; give more files or drop fewer")
    lines = [f"{len(found) + len(impossible)} questions read"]
    lines += [f"{len(impossible)} dropped: marked as impossible"] if impossible else []
    lines += [f"{len(found) - len(kept)} dropped: the id starts with {' or '.join(drop)}"] if drop else []
    return lines + _write(out, parts, read=len(found) + len(impossible))


def questions_from_feedback(root: Path, out: Path) -> list[str]:
    """Write the questions whose answers people confirmed or corrected, as dev questions into a folder; in words.

    Args:
        root: of the run whose answers they are.
    """
    artifacts.check_replaceable(out, KIND)
    path = feedback_file(root)
    found = list(read_feedback(path))
    kept = questions_of(found)
    if not kept:
        raise ValueError(f"{path}: no answer of {len(found)} was confirmed or corrected yet")
    line = f"{len(found)} judgements read"
    return [line, *_write(out, {"questions.dev.jsonl": kept}, read=len(found))]


def make_cloze(root: Path, out: Path | None, *, seed: int, limit: int | None = None) -> list[str]:
    """Write questions made from the corpus and its salient spans into a folder: train, dev and test; in words.

    What was made from the same corpus, spans and seed is left as it is.

    The folder is of the same kind as that of ``convert_questions``.

    Args:
        root: of the stages ``snapshot`` and ``tag``.
        out: ``CLOZE`` under the root if None.
        limit: of questions; None for that of the questions that are there, else ``CLOZE_LIMIT``.
    """
    out = root / CLOZE if out is None else out
    artifacts.check_replaceable(out, KIND)
    folders = {name: root / STAGES[name].folder / "corpus" for name in ("snapshot", "tag")}
    snapshot = Snapshot.open(folders["snapshot"])
    spans = Spans.open(folders["tag"], corpus_hash=snapshot.corpus_hash)
    labels = [spans.labels[label] for label in spans.label_ids.tolist()]
    there = artifacts.read_manifest(out, KIND) if out.is_dir() else {}
    limit = limit or there.get("limit", CLOZE_LIMIT)
    # the whole manifest of the spans: their labels choose the question words
    made_of = {
        "corpus_hash": snapshot.corpus_hash,
        "spans": spans.manifest[artifacts.SEAL],
        "seed": seed,
        "limit": limit,
    }
    if snapshot.language != ENGLISH:
        made_of["language"] = snapshot.language
    if made_of.items() <= there.items() and there.get("language", ENGLISH) == snapshot.language:
        return [f"nothing to do, {out} was made from the same corpus"]
    questions = cloze_questions(snapshot, SentencesWithSpans(snapshot, spans)[:], labels, seed, limit)
    parts = {f"questions.{name}.jsonl": part for name, part in split(questions, seed).items()}
    line = f"{len(questions)} questions made of {len(spans.rows)} salient spans in {len(snapshot)} passages"
    return [line, *_write(out, parts, **made_of)]


def _write(out: Path, parts: Mapping[str, Sequence[Question]], **fields: Any) -> list[str]:
    """Write each part as JSON lines, and a manifest with the fields; what was written, in words."""
    counts = {name: len(questions) for name, questions in parts.items()}
    with artifacts.atomic_folder(out) as stage:
        for name, questions in parts.items():
            (stage / name).write_bytes(b"".join(map(json_line, questions)))
        artifacts.write_manifest(stage, KIND, **fields, written=counts)
    return [f"{count} written to {out / name}" for name, count in counts.items()]


def measure_ceilings(
    files: Sequence[Path],
    root: Path,
    limits: Finetune,
    *,
    format: str,
    progress: Callable[[str, int], Callable[[int], None]],
) -> Iterator[str]:
    """What is possible with these questions on the corpus, whatever the model, and BM25 beside it, in words.

    Args:
        root: of the stage ``snapshot``.
        limits: passages and longest span of the reader.
        progress: gives, for a label and a total, the function that takes units done.
    """
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    questions = read_questions(files, format=format)
    texts = snapshot.column("text")
    ranked = rank(
        Bm25.of(snapshot, verify=True), [q.question for q in questions], max(*RECALL_AT, limits.reader_candidates)
    )
    ranks = hit_ranks_by_rule(questions, ranked, texts.__getitem__)
    yield f"{len(questions)} questions against {len(texts)} passages"
    for rule in REGEX_RULES if questions[0].is_regex else WORD_RULES:
        known = hits_at(ranks[rule], max(RECALL_AT))
        bar = progress(f"passages, {rule}", len(texts))
        in_corpus = answered_in_corpus(questions, texts, rule=rule, known_Q=known, progress=bar)
        recall = ", ".join(f"{hits_at(ranks[rule], k).mean():.1%} in {k}" for k in RECALL_AT)
        yield f"{rule}: answered in the corpus {in_corpus.mean():.1%}; by BM25's first passages {recall}"
    rule = questions[0].match_rule
    passages, most = limits.reader_candidates, limits.answer_wordpieces
    spans = reader_can_answer(questions, ranked[:, :passages], snapshot, rule, most)
    yield f"as a span of at most {most} wordpieces in BM25's first {passages} ({rule}): {spans.mean():.1%}"
    if not questions[0].is_regex:
        fits = answer_fits_reader(questions, snapshot.tokenizer, most)
        yield f"with an answer of at most {most} wordpieces: {fits.mean():.1%}"
    slow = [q.id for q in questions if q.is_regex and any(expression(a).timed_out for a in q.answers)]
    if slow:
        yield f"regular expressions given up as too slow: {len(slow)} ({', '.join(slow)})"
