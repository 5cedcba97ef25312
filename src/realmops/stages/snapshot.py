"""Stage ``snapshot``: documents to passages, with one vocabulary for corpus and warm-up text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from realmops.artifacts import write_bytes
from realmops.config import BertOptions, SnapshotOptions
from realmops.corpus.formats import Source, sources
from realmops.corpus.snapshot_reader import REJECTS, Snapshot, rejects
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.word_counts import train_vocabulary
from realmops.hub import encoder_folder
from realmops.search import bm25
from realmops.search.bm25_writer import write_bm25
from realmops.stages import STAGES, Job, Report
from realmops.text.languages import AUTO, check_language, detect, languages
from realmops.text.pretrained import read_encoder_tokenizer
from realmops.text.vocabulary import UNCASED, Casing, read_vocabulary, vocabulary_bytes

VOCABULARY = "vocab.txt"
_LOOKED_AT, _SHORT, _MANY = 50, 100, 30  # passages, characters of one that tells its language, and how many must agree
_SHOWN = 3  # broken records, and files of each kind that could not be read


def run(job: Job) -> dict[str, Any]:
    """Write ``corpus``, its BM25 index and, where there is a warm-up text, ``warmup``; returns the counts of both."""
    options = job.section(SnapshotOptions)
    check_language(options.language)
    texts = {"corpus": sources(job.inputs["snapshot.documents"], options.format)}
    if options.use_warmup:
        texts["warmup"] = sources(job.inputs["snapshot.warmup"], "auto")
    vocabulary = _vocabulary(job, [source for found in texts.values() for source in found])
    try:
        return _write(job, texts, *vocabulary)
    except ValueError:
        (job.work / VOCABULARY).unlink(missing_ok=True)  # after bad input there is nothing to go on from
        raise


def _write(
    job: Job,
    texts: Mapping[str, Sequence[Source]],
    vocabulary: Sequence[str],
    casing: Casing,
    tokenizer: str | None,
) -> dict[str, Any]:
    options = job.section(SnapshotOptions)
    metrics: dict[str, Any] = {"vocabulary": len(vocabulary)}
    for name, found in texts.items():
        folder = job.out / name
        folder.mkdir()
        manifest = write_snapshot(
            found,
            folder,
            work=job.work / name,
            vocabulary=vocabulary,
            casing=casing,
            tokenizer=tokenizer,
            whole_documents=options.whole_documents,
            block_wordpieces=options.block_wordpieces,
            drop_titles=options.wikipedia_titles,
            language=options.language,
            broken_share=options.broken_share,
            workers=options.workers,
            progress=job.report.progress(f"passages of {name}", _bytes(found), "B"),
        )
        prefix = "" if name == "corpus" else f"{name}_"
        tell_rejects(job.report, name, manifest, folder, f"{STAGES['snapshot'].folder}/{name}/{REJECTS} under the root")
        if manifest["replaced"]:
            job.report.warn(
                f"{manifest['replaced']} of {manifest['documents']} documents of {name} hold U+FFFD, the mark for "
                "bytes that are no text in the file's encoding; save those files as UTF-8"
            )
        metrics |= {prefix + key: value for key, value in counts(manifest).items()}
    corpus = Snapshot.open(job.out / "corpus", verify=False)
    _tell_language(job.report, corpus)
    write_bm25(
        job.out / bm25.FOLDER,
        corpus,
        job.report.progress("words of corpus", len(corpus)),
        work=job.work / bm25.FOLDER,
        workers=options.workers,
    )
    return metrics


def _tell_language(report: Report, corpus: Snapshot) -> None:
    """Warn where most of some passages are in another language than the one that is set."""
    if corpus.language == AUTO:
        return
    texts = [corpus.text(row) for row in sorted({*np.linspace(0, len(corpus) - 1, _LOOKED_AT).astype(int).tolist()})]
    detected = [detect(text) for text in texts if len(text) >= _SHORT]
    sure = Counter(likely[0] for likely in detected if len(likely) == 1)
    code, count = max(sure.items(), key=lambda one: one[1], default=("", 0))
    if code != corpus.language and count >= _MANY:
        report.warn(
            f"{count} of {len(texts)} passages look {languages()[code].name}, and snapshot.language is "
            f"{corpus.language}: sentences, words and dates go by it; set snapshot.language={code}, or auto"
        )


def tell_rejects(report: Report, name: str, manifest: dict[str, Any], folder: Path, where: str) -> None:
    """Warn of the broken records of a snapshot in ``folder``, with the first of them and ``where`` all will be.

    The files that could not be read are told by kind, with the first of each.
    """
    if manifest["rejected"]:
        first = islice(rejects(folder), _SHOWN)
        told = "".join(f"\n  {one['place']}: {one['problem']}" for one in first)
        report.warn(
            f"{manifest['rejected']} of {manifest['records']} records of {name} are broken and left out; "
            f"{where} names all, the first are{told}"
        )
    if unread := manifest["unread"]:
        names: dict[str, list[str]] = defaultdict(list)
        for one in rejects(folder, unread=True):
            if len(names[one["kind"]]) < _SHOWN:
                names[one["kind"]].append(Path(one["place"]).name)
        kinds = sorted(unread, key=lambda kind: (-unread[kind], kind))
        told = "; ".join(f"{unread[kind]} {kind} ({', '.join(names[kind])})" for kind in kinds)
        report.warn(
            f"{sum(unread.values())} files of {name} could not be read and are left out: {told}. "
            f"{where} says of each why"
        )


def counts(manifest: dict[str, Any]) -> dict[str, int]:
    """How many records a snapshot's files had, what became of them, and what it holds."""
    dropped = {f"dropped_{reason}": count for reason, count in manifest["dropped"].items()}
    unread = {f"unread_{kind}": count for kind, count in manifest["unread"].items()}
    names = ("records", "documents", "replaced", "rejected", "passages", "sentences", "tokens")
    return {**{name: manifest[name] for name in names}, **dropped, **unread}


def _vocabulary(job: Job, found: Sequence[Source]) -> tuple[list[str], Casing, str | None]:
    """The encoder's vocabulary, casing and tokenizer.json (None for BERT's WordPiece).

    A vocabulary that is made here is made once, whatever kills come after.
    """
    bert = job.section(BertOptions)
    if bert.init != "small":
        return read_encoder_tokenizer(encoder_folder(bert.init))
    path = job.work / VOCABULARY
    if not path.is_file():
        progress = job.report.progress("vocabulary", _bytes(found), "B")
        workers = job.section(SnapshotOptions).workers
        pieces = train_vocabulary(found, size=bert.vocabulary, workers=workers, progress=progress)
        write_bytes(path, vocabulary_bytes(pieces))
    return read_vocabulary(path), UNCASED, None


def _bytes(found: Sequence[Source]) -> int:
    return sum(source.size for source in found)
