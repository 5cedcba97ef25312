"""Stage ``snapshot``: documents to passages, with one vocabulary for corpus and warm-up text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from realmops.artifacts import write_bytes
from realmops.corpus.encoder_tokenizer import read_encoder_tokenizer
from realmops.corpus.languages import AUTO, check_language, detect_language, load_languages
from realmops.corpus.snapshot_reader import REJECTS, SOURCES, Snapshot, read_rejects
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import UNCASED, Casing, read_vocabulary, vocabulary_bytes
from realmops.corpus.word_counts import train_vocabulary
from realmops.hub import encoder_folder
from realmops.options import BertOptions, SnapshotOptions
from realmops.progress import Report
from realmops.readers.documents import PAGE_WITHOUT_TEXT
from realmops.readers.ocr import INSTALL, OFF
from realmops.readers.paged import SCANS
from realmops.readers.sources import Source, list_sources
from realmops.search import bm25
from realmops.search.bm25_writer import write_bm25
from realmops.stages import INIT, STAGES, Job

VOCABULARY, WAITING = "vocab.txt", "scans_waiting"
_SAMPLES, _MIN_CHARACTERS, _MIN_AGREEING = 50, 100, 30  # passages checked for their language
_INCOMPLETE_SHARE = 0.05  # of the documents, from which on a warning names what was left out
_SHOWN = 3  # broken records, and unreadable files of each kind, in a warning


def run(job: Job) -> dict[str, Any]:
    """Write ``corpus``, its BM25 index and, with a warm-up text, ``warmup``; return the counts of both."""
    options = job.section(SnapshotOptions)
    check_language(options.language)
    ocr = tuple(str(path) for key, path in job.inputs.items() if key.startswith("snapshot.ocr/"))
    texts = {"corpus": list_sources(job.inputs["snapshot.documents"], options.format, ocr)}
    if options.warmup:
        texts["warmup"] = list_sources(job.inputs["snapshot.warmup"], "auto", ocr)
    vocabulary = _vocabulary(job, [source for group in texts.values() for source in group])
    try:
        return _write(job, texts, *vocabulary)
    except ValueError:
        (job.work / VOCABULARY).unlink(missing_ok=True)  # after bad input it is trained again
        raise


def _write(
    job: Job, texts: Mapping[str, Sequence[Source]], vocabulary: Sequence[str], casing: Casing, tokenizer: str | None
) -> dict[str, Any]:
    options = job.section(SnapshotOptions)
    metrics: dict[str, Any] = {"vocabulary": len(vocabulary)}
    for name, group in texts.items():
        folder = job.out / name
        folder.mkdir()
        manifest = write_snapshot(
            group,
            folder,
            vocabulary=vocabulary,
            casing=casing,
            tokenizer=tokenizer,
            whole_documents=options.whole_documents,
            block_wordpieces=options.block_wordpieces,
            drop_titles=options.wikipedia_titles,
            language=options.language,
            broken_share=options.broken_share,
            workers=options.workers,
            progress=job.report.progress(f"passages of {name}", sum(source.size for source in group), "B"),
        )
        prefix = "" if name == "corpus" else f"{name}_"
        warn_of_rejects(
            job.report, name, manifest, folder, f"{STAGES['snapshot'].folder}/{name}/{REJECTS} under the root"
        )
        if manifest["replaced"]:
            job.report.warn(
                f"{manifest['replaced']} of {manifest['documents']} documents of {name} contain U+FFFD, which replaces "
                "bytes that are invalid in the file's encoding; save those files as UTF-8"
            )
        warn_of_omitted(job.report, name, manifest, f"{STAGES['snapshot'].folder}/{name}/{SOURCES} under the root")
        counts = snapshot_counts(manifest)
        if options.ocr != OFF and WAITING in counts:
            job.report.warn(f"{counts[WAITING]:,} scanned files and pages of {name} wait for OCR; {INSTALL}")
        metrics |= {prefix + key: value for key, value in counts.items()}
    corpus = Snapshot.open(job.out / "corpus", verify=False)
    _check_corpus_language(job.report, corpus)
    progress = job.report.progress("words of corpus", len(corpus))
    write_bm25(job.out / bm25.FOLDER, corpus, progress, workers=options.workers)
    return metrics


def _check_corpus_language(report: Report, corpus: Snapshot) -> None:
    """Warn if most of a sample of passages are in another language than ``snapshot.language``."""
    if corpus.language == AUTO:
        return
    texts = [corpus.text(row) for row in sorted({*np.linspace(0, len(corpus) - 1, _SAMPLES).astype(int).tolist()})]
    detected = [detect_language(text) for text in texts if len(text) >= _MIN_CHARACTERS]
    unambiguous = Counter(codes[0] for codes in detected if len(codes) == 1)
    code, count = max(unambiguous.items(), key=lambda item: item[1], default=("", 0))
    if code != corpus.language and count >= _MIN_AGREEING:
        report.warn(
            f"snapshot.language is {corpus.language}, but {count} of {len(texts)} sampled passages are in "
            f"{load_languages()[code].name}; it determines sentences, words and dates: set snapshot.language={code}, "
            "or auto"
        )


def warn_of_rejects(report: Report, name: str, manifest: dict[str, Any], folder: Path, where: str) -> None:
    """Warn of broken records and unreadable files of a snapshot; ``where`` is the path of the complete list."""
    if manifest["rejected"]:
        first = islice(read_rejects(folder), _SHOWN)
        lines = "".join(f"\n  {record['place']}: {record['problem']}" for record in first)
        report.warn(
            f"{manifest['rejected']} of {manifest['records']} records of {name} are broken and left out; "
            f"{where} lists all, the first are{lines}"
        )
    if unread := manifest["unread"]:
        names: dict[str, list[str]] = defaultdict(list)
        for file in read_rejects(folder, unread=True):
            if len(names[file["kind"]]) < _SHOWN:
                names[file["kind"]].append(Path(file["place"]).name)
        kinds = sorted(unread, key=lambda kind: (-unread[kind], kind))
        summary = "; ".join(f"{unread[kind]} {kind} ({', '.join(names[kind])})" for kind in kinds)
        report.warn(f"files of {name} could not be read and are left out: {summary}. {where} has the reasons")


def warn_of_omitted(report: Report, name: str, manifest: dict[str, Any], where: str) -> None:
    """Warn if every twentieth document is incomplete (``OutcomeCounts``), or if a page has no text."""
    incomplete, omitted = manifest["incomplete"], manifest["omitted"]
    if omitted and (incomplete >= _INCOMPLETE_SHARE * manifest["documents"] or PAGE_WITHOUT_TEXT in omitted):
        kinds = sorted(omitted, key=lambda kind: (-omitted[kind], kind))
        named = [f"{file}: {', '.join(map(str, pages))}" for file, pages in manifest["empty_pages"].items()]
        places = {PAGE_WITHOUT_TEXT: f" ({'; '.join(named[:_SHOWN])})"}
        summary = ", ".join(f"{kind} {omitted[kind]:,}{places.get(kind, '')}" for kind in kinds)
        of = f"{incomplete:,} of {manifest['documents']:,} documents of {name}"
        report.warn(f"left out of {of}: {summary}; {where} has the counts by file")


def snapshot_counts(manifest: dict[str, Any]) -> dict[str, int]:
    dropped = {f"dropped_{reason}": count for reason, count in manifest["dropped"].items()}
    unread = {f"unread_{kind}": count for kind, count in manifest["unread"].items()}
    names = ("records", "documents", "replaced", "rejected", "passages", "sentences", "tokens")
    omitted = {f"omitted_{kind.replace(' ', '_')}": count for kind, count in manifest["omitted"].items()}
    scans = sum((manifest["unread"] | manifest["omitted"]).get(kind, 0) for kind in SCANS)
    waiting = {WAITING: scans} if scans else {}
    return {**{name: manifest[name] for name in names}, **dropped, **unread, **omitted, **waiting}


def _vocabulary(job: Job, group: Sequence[Source]) -> tuple[list[str], Casing, str | None]:
    """Return the encoder's vocabulary, casing and tokenizer.json (None for BERT's WordPiece).

    A vocabulary trained here is stored in the work folder, so that a killed stage does not train it again.
    """
    if (init := job.sections[INIT]) != "small":
        return read_encoder_tokenizer(encoder_folder(init))
    path = job.work / VOCABULARY
    if not path.is_file():
        progress = job.report.progress("vocabulary", sum(source.size for source in group), "B")
        workers = job.section(SnapshotOptions).workers
        pieces = train_vocabulary(group, size=job.section(BertOptions).vocabulary, workers=workers, progress=progress)
        write_bytes(path, vocabulary_bytes(pieces))
    return read_vocabulary(path), UNCASED, None
