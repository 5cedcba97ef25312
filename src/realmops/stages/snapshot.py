"""Stage ``snapshot``: documents to passages, with one vocabulary for corpus and warm-up text."""

from __future__ import annotations

from typing import Any

from realmops.config import BertOptions, SnapshotOptions
from realmops.corpus.pretrained import read_encoder_vocabulary
from realmops.corpus.snapshot import write_snapshot
from realmops.corpus.vocabulary import UNCASED, train_vocabulary
from realmops.encoders import encoder_folder
from realmops.stages import Job


def run(job: Job) -> dict[str, Any]:
    """Write ``corpus`` and, where there is a warm-up text, ``warmup``; returns the counts of both."""
    options: SnapshotOptions = job.sections["snapshot"]
    bert: BertOptions = job.sections["bert"]
    texts = {"corpus": job.inputs["snapshot.documents"]}
    if options.use_warmup:
        texts["warmup"] = job.inputs["snapshot.warmup"]
    casing = UNCASED
    if bert.init == "small":
        progress = job.report.progress("vocabulary", 0)
        vocabulary = train_vocabulary(texts.values(), size=bert.vocabulary, progress=progress)
    else:
        vocabulary, casing = read_encoder_vocabulary(encoder_folder(bert.init))
    metrics: dict[str, Any] = {"vocabulary": len(vocabulary)}
    for name, path in texts.items():
        folder = job.out / name
        folder.mkdir()
        manifest = write_snapshot(
            [path],
            folder,
            vocabulary=vocabulary,
            casing=casing,
            whole_documents=options.whole_documents,
            block_wordpieces=options.block_wordpieces,
            drop_titles=options.wikipedia_titles,
            workers=options.workers,
            progress=job.report.progress(f"passages of {name}", 0),
        )
        prefix = "" if name == "corpus" else f"{name}_"
        metrics |= {prefix + key: manifest[key] for key in ("documents", "passages", "sentences", "tokens")}
    return metrics
