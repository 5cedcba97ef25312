"""Stage ``tag``: salient spans of the corpus and the warm-up text."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops.artifacts import seed_for
from realmops.corpus.phrases import Entity, find_phrases_and_dates
from realmops.corpus.snapshot_reader import GIVEN_SPANS, Snapshot
from realmops.corpus.spans import Spans, SpansWriter
from realmops.options import BertOptions, RunOptions, Tag
from realmops.stages import INIT, Job
from realmops.train.conll import entity_scores, read_conll

if TYPE_CHECKING:  # torch takes seconds to import, and only a tagger needs it
    from realmops.train.tagger import Tagger


def run(job: Job) -> dict[str, Any]:
    """Write a folder of spans for each snapshot; return counts and, for a trained tagger, seqeval's F1."""
    options = job.section(Tag)
    tagger: Tagger | None = None
    metrics: dict[str, Any] = {}
    if options.method in ("tagger", "dates"):
        from realmops.train.parallel import process_group

        if options.method == "tagger":
            tagger, metrics = _train(job, options)
        if not process_group().is_main_process:
            return {}
    for name in ("corpus", "warmup"):
        if (job.inputs["snapshot"] / name).is_dir():
            snapshot = Snapshot.open(job.inputs["snapshot"] / name, verify=False)  # verified with the stage's manifest
            counts = _tag(job, options, tagger, snapshot, job.out / name)
            metrics |= {("" if name == "corpus" else f"{name}_") + key: value for key, value in counts.items()}
    return metrics


def _train(job: Job, options: Tag) -> tuple[Tagger, dict[str, Any]]:
    import torch

    from realmops.devices import device_and_dtype
    from realmops.model.build import build_encoder
    from realmops.stages.common import StageTrainings, open_snapshot
    from realmops.train.tagger import HIDDEN, HIDDEN_SMALL, Tagger, predict_words, tag_names, train_tagger

    snapshot = open_snapshot(job)
    training, held_out = read_conll(job.inputs["tag.train"]), read_conll(job.inputs["tag.dev"])
    run, size = job.section(RunOptions), snapshot.tokenizer.get_vocab_size()
    encoder, _ = build_encoder(job.sections[INIT], job.section(BertOptions), size, run.seed)
    device, dtype = device_and_dtype(run, encoder)
    tagger = Tagger(encoder, tag_names(training))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed_for(run.seed, "tagger"))
        tagger.output.weight.normal_(0.0, 0.02, generator=generator)
        tagger.output.bias.zero_()
    tagger.to(device)
    context = StageTrainings(job).context(dtype, "tag", options.steps, "tagger")
    hidden = HIDDEN_SMALL if job.sections[INIT] == "small" else HIDDEN
    train_tagger(context, tagger, training, snapshot.tokenizer, options, hidden)
    if not context.processes.is_main_process:
        return tagger, {}
    predicted = predict_words(tagger, held_out, snapshot.tokenizer, dtype)
    return tagger, entity_scores([list(s.tags) for s in held_out], predicted)


def _tag(job: Job, options: Tag, tagger: Tagger | None, snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    if options.method == "given":
        source = snapshot.folder / GIVEN_SPANS
        if not source.is_dir():
            raise ValueError(
                f"{job.inputs['snapshot']}: tag.method is 'given', but no document has 'spans'; add "
                '"spans": [[start, end, label], ...] to each JSON line, or set tag.method to tagger or dates'
            )
        folder.mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, folder / file.name)
        return {"spans": len(Spans.open(folder).rows)}
    folder.mkdir()
    spans: Iterable[list[Entity]]
    if options.method == "phrases":
        spans = find_phrases_and_dates(snapshot)
    else:
        from realmops.stages.sharded_work import tag_in_shards

        spans = tag_in_shards(job, tagger, snapshot)
    with SpansWriter(folder) as writer:
        for passage, entities in enumerate(spans):
            writer.add(
                entities, snapshot.chars(passage), snapshot.sentences(passage), int(snapshot.sentence_offsets[passage])
            )
        manifest = writer.close(corpus_hash=snapshot.corpus_hash, vocabulary_hash=snapshot.vocabulary_hash)
    return {"spans": manifest["spans"], "spans_dropped": manifest["dropped"]["not_in_one_sentence"]}
