"""Question sets: convert them to one format, generate them from the corpus, and measure ceilings before training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.answering.own_questions import check_label_file, usage_lines
from realmops.corpus.masking import SentencesWithSpans
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.evaluate.ceilings import answer_fits_reader, answered_in_corpus, reader_can_answer
from realmops.evaluate.recall import RECALL_AT, hit_ranks_by_rule
from realmops.options import Finetune
from realmops.progress import Report
from realmops.questions.answer_matching import REGEX_RULES, WORD_RULES, compile_expression
from realmops.questions.cloze import KIND, cloze_questions, split_questions
from realmops.questions.question_sets import (
    JUDGED_RULE,
    Question,
    is_in_orqa_dev,
    read_judged_questions,
    read_questions,
    to_json_line,
)
from realmops.search.bm25 import Bm25, rank
from realmops.stages import STAGES
from realmops.stages.option_inputs import CLOZE

CLOZE_LIMIT = 20_000
CONVERTED = "converted questions"  # manifest kind of a conversion, which "cloze" does not replace


def convert_questions(
    files: Sequence[Path], out: Path, *, format: str, orqa_split: bool, drop: Sequence[str]
) -> list[str]:
    """Convert question files to JSON lines, without ids that begin with ``drop``; return lines with counts."""
    artifacts.check_replaceable(out, CONVERTED)
    if len(files) == 1 and (judged := read_judged_questions(files[0])):
        parts = {f"questions.{split}.jsonl": part for split, part in judged.items()}
        return _write(out, CONVERTED, parts, read=sum(map(len, parts.values())))
    unanswerable: list[Question] = []
    questions = read_questions(files, format=format, unanswerable=unanswerable) + unanswerable
    kept_questions = [question for question in questions if not question.id.startswith(tuple(drop))]
    parts = {"questions.jsonl": kept_questions}
    if orqa_split:
        parts = {
            f"questions.{name}.jsonl": [q for q in kept_questions if is_in_orqa_dev(q.question) == (name == "dev")]
            for name in ("train", "dev")
        }
    empty = [name for name, part in parts.items() if not part]
    if empty:
        raise ValueError(f"{empty[0]} would be empty: {len(questions)} questions read; give more files, or drop fewer")
    lines = [f"{len(questions)} questions read"]
    lines += [f"{len(unanswerable)} have no answers: they measure abstention"] if unanswerable else []
    lines += [f"{len(questions) - len(kept_questions)} dropped: the id starts with {' or '.join(drop)}"] if drop else []
    return lines + _write(out, CONVERTED, parts, read=len(questions))


def label(root: Path, out: Path, report: Report) -> Iterator[str]:
    from realmops.answering.labelling import label_questions
    from realmops.answering.opened_model import Query
    from realmops.opening import open_if_tuned, open_search

    check_label_file(out)
    opened = open_if_tuned(root)
    search = opened.passage_search if opened else open_search(root, report)

    def propose(question: str) -> str:
        return opened.answer([Query(question)])[0]["answer"] if opened else ""

    yield from label_questions(search.search, propose, out, input)
    yield from usage_lines(root, out)


def write_cloze_questions(root: Path, *, seed: int) -> list[str]:
    """Generate train, dev and test questions from the salient spans; keep those of equal inputs."""
    out = root / CLOZE
    artifacts.check_replaceable(out, KIND)
    folders = {name: root / STAGES[name].folder / "corpus" for name in ("snapshot", "tag")}
    snapshot = Snapshot.open(folders["snapshot"])
    spans = Spans.open(folders["tag"], corpus_hash=snapshot.corpus_hash)
    labels = [spans.labels[label] for label in spans.label_ids.tolist()]
    existing = artifacts.read_manifest(out, KIND) if out.is_dir() else {}
    # The seal covers the whole manifest of the spans: their labels determine the question words.
    inputs = {"corpus_hash": snapshot.corpus_hash, "spans": spans.manifest[artifacts.DIGEST_KEY], "seed": seed}
    inputs |= {"limit": CLOZE_LIMIT, "language": snapshot.language}
    if inputs.items() <= existing.items():
        return [f"nothing to do: {out} was generated from the same corpus"]
    questions = cloze_questions(snapshot, SentencesWithSpans(snapshot, spans)[:], labels, seed, CLOZE_LIMIT)
    parts = {f"questions.{name}.jsonl": part for name, part in split_questions(questions, seed).items()}
    line = f"{len(questions)} questions generated from {len(spans.rows)} salient spans in {len(snapshot)} passages"
    return [line, *_write(out, KIND, parts, **inputs)]


def _write(out: Path, kind: str, parts: Mapping[str, Sequence[Question]], **fields: Any) -> list[str]:
    counts = {name: len(questions) for name, questions in parts.items()}
    with artifacts.atomic_folder(out, kind) as stage:
        for name, questions in parts.items():
            (stage / name).write_bytes(b"".join(map(to_json_line, questions)))
        artifacts.write_manifest(stage, kind, **fields, written=counts)
    return [f"{count} written to {out / name}" for name, count in counts.items()]


def measure_ceilings(
    files: Sequence[Path],
    root: Path,
    limits: Finetune,
    *,
    format: str,
    progress: Callable[[str, int], Callable[[int], None]],
) -> Iterator[str]:
    """Yield the shares of questions that any model could answer from the corpus, and the recall of BM25, as lines."""
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    questions = read_questions(files, format=format)
    if any(question.match_rule == JUDGED_RULE for question in questions):
        raise ValueError(
            "questions with relevance judgements alone have no ceilings: they have no answers; run evaluate"
        )
    texts = snapshot.column("text")
    ranked = rank(
        Bm25.of(snapshot, verify=True), [q.question for q in questions], max(*RECALL_AT, limits.reader_candidates)
    )
    ranks = hit_ranks_by_rule(questions, ranked, texts.__getitem__)
    yield f"{len(questions)} questions against {len(texts)} passages"
    for rule in REGEX_RULES if questions[0].is_regex else WORD_RULES:
        bar = progress(f"passages, {rule}", len(texts))
        in_corpus = answered_in_corpus(questions, texts, rule=rule, known_Q=ranks[rule] < max(RECALL_AT), progress=bar)
        recall = ", ".join(f"{(ranks[rule] < k).mean():.1%} in {k}" for k in RECALL_AT)
        yield f"{rule}: answer in the corpus {in_corpus.mean():.1%}; in the top passages of BM25 {recall}"
    rule = questions[0].match_rule
    passages, longest = limits.reader_candidates, limits.answer_wordpieces
    spans = reader_can_answer(questions, ranked[:, :passages], snapshot, rule, longest)
    yield f"as a span of at most {longest} wordpieces in the top {passages} of BM25 ({rule}): {spans.mean():.1%}"
    if not questions[0].is_regex:
        fits = answer_fits_reader(questions, snapshot.tokenizer, longest)
        yield f"with an answer of at most {longest} wordpieces: {fits.mean():.1%}"
    slow = [q.id for q in questions if q.is_regex and any(compile_expression(a).timed_out for a in q.answers)]
    if slow:
        yield f"regular expressions that timed out: {len(slow)} ({', '.join(slow)})"
