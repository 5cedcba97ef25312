"""Which passages explain the masked salient spans of the pre-training corpus X: alignments that nobody labelled.

Training on masked words alone leaves a p(z|x, y) that ties sentences of X to passages of the knowledge corpus Z (paper,
section 5). The Parquet file has a row for each masked span and each of its candidates z:

    span_row           int64    the span's row in spans.npy of data/spans
    sentence           string   its sentence, [MASK] in the place of the span
    span               string   the words behind the mask (the first ones of a span over pretrain.max_masks)
    source_passage_id  string   the passage of X that the sentence is from
    aligned_passage_id string   z; null for the null document
    title              string   z's title; null for the null document
    rank               int32    z's place by p(z|x), from 0; null for the null document
    p_z                float32  p(z|x)
    p_z_given_y        float32  p(z|x, y), y being the span; over the candidates of a span both sum to 1
    utility            float32  log p(y|z, x) - log p(y|null, x), in nats; null where REALM was trained without it
    contains_span      bool     whether z holds the span by DPR's rule (token_boundary); false for the null document

Candidates are those of pre-training, with the weights that it ended with: the source passage itself and passages that
hold the whole sentence are left out. A sentence over pretrain.query_wordpieces was cut before it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from realmops import artifacts
from realmops.commands.masked import MASK, pretrained
from realmops.commands.trained import options_of
from realmops.commands.update import of_pipeline
from realmops.corpus.answers import contains_answer
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans
from realmops.index.embed import embed, query_sequences
from realmops.index.source import Index
from realmops.model import likelihood
from realmops.stages import STAGES, Report
from realmops.train.candidates import Candidates
from realmops.train.examples import Example, Examples
from realmops.train.realm import Realm

FILE = "alignments.parquet"
SCHEMA = pa.schema(
    [
        ("span_row", pa.int64()),
        ("sentence", pa.string()),
        ("span", pa.string()),
        ("source_passage_id", pa.string()),
        ("aligned_passage_id", pa.string()),
        ("title", pa.string()),
        ("rank", pa.int32()),
        ("p_z", pa.float32()),
        ("p_z_given_y", pa.float32()),
        ("utility", pa.float32()),
        ("contains_span", pa.bool_()),
    ]
)
_WRITTEN_TOGETHER = 4096  # spans


def align(root: Path, out: Path, *, limit: int | None, report: Report) -> dict[str, Any]:
    """Write the alignments of all salient spans, or of ``limit`` drawn by ``run.seed``; returns what there is to say.

    ``best_contains_span`` is the share of spans for which the passage of the largest p(z|x, y) contains the span.
    The file is replaced when all is done. ValueError when ``out`` cannot be a file and when pre-training has not run.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"{out} cannot be written: name a file in a folder that exists")
    (run,) = options_of(root, ["pretrain"], ["run"])
    realm, index, _ = pretrained(root, of_pipeline(root))
    examples = _examples(root, realm)
    rng = np.random.default_rng(artifacts.seed_for(run.seed, "alignments"))
    chosen = np.sort(rng.permutation(len(examples.rows))[:limit])
    aligned = _alignments(chosen, examples, rng, realm, index, report.progress("masked spans", len(chosen)))
    rows = hits = 0
    with artifacts.atomic_file(out) as stage, pq.ParquetWriter(stage, SCHEMA) as writer:
        while group := list(islice(aligned, _WRITTEN_TOGETHER)):
            table = pa.Table.from_pylist([row for one in group for row in one], SCHEMA)
            writer.write_table(table)
            rows += len(table)
            hits += sum(_best(one)["contains_span"] for one in group)
    return {"spans": len(chosen), "rows": rows, "best_contains_span": hits / len(chosen)}


def _examples(root: Path, realm: Realm) -> Examples:
    """The masked sentences of pre-training, salient spans masked whatever it masked."""
    options = replace(realm.options, masking="salient")
    text = realm.snapshot
    if options.examples != "corpus":
        text = Snapshot.open(root / STAGES["snapshot"].folder / options.examples)
    spans = Spans.open(root / STAGES["tag"].folder / options.examples, corpus_hash=text.corpus_hash)
    return Examples(text, spans, options, elsewhere=text is not realm.snapshot)


def _alignments(
    chosen: np.ndarray,
    examples: Examples,
    rng: np.random.Generator,
    realm: Realm,
    index: Index,
    progress: Callable[[int], None],
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each chosen span."""
    size, candidates = realm.options.batch_size, Candidates(realm.snapshot, realm.options, realm.words)
    for start in range(0, len(chosen), size):
        places = chosen[start : start + size].tolist()
        batch = [examples.example(place, rng) for place in places]
        with torch.no_grad():
            query_BE = embed(index.retriever.query, query_sequences(realm.queries(batch)), realm.dtype)
            found = candidates.retrieve(batch, query_BE, index)
            prior_BK, _ = realm.log_prior(batch, found)
            likelihood_BK = likelihood.log_likelihood_given_document(*realm.log_token(batch, found))
        posterior_BK = likelihood.log_posterior(prior_BK, likelihood_BK)
        utility_BK = likelihood.retrieval_utility(likelihood_BK, likelihood_BK[:, -1])
        values_BKN = torch.stack([prior_BK.exp(), posterior_BK.exp(), utility_BK], -1).tolist()
        for place, example, passages, values_KN in zip(places, batch, found, values_BKN, strict=True):
            yield _rows(place, example, passages, values_KN, examples, realm)
        progress(len(batch))


def _rows(
    place: int, example: Example, passages: list[int], values_KN: list[list[float]], examples: Examples, realm: Realm
) -> list[dict[str, Any]]:
    """``values_KN``: p(z|x), p(z|x, y) and utility of the candidates, the null document last where there is one."""
    text, snapshot, has_null = examples.snapshot, realm.snapshot, realm.options.null_document
    passage, first, end, start, _ = (int(v) for v in examples.rows[place])
    whole, characters = text.text(passage), text.chars(passage).tolist()
    left, right = characters[start][0], characters[start + len(example.positions) - 1][1]
    span = whole[left:right]
    common = {
        "span_row": place,
        "sentence": whole[characters[first][0] : left] + MASK + whole[right : characters[end - 1][1]],
        "span": span,
        "source_passage_id": text.passage_id(passage),
    }
    named: list[dict[str, Any]] = [
        {
            "aligned_passage_id": snapshot.passage_id(z),
            "title": snapshot.title(z),
            "rank": rank,
            "contains_span": contains_answer(snapshot.text(z), (span,), "token_boundary"),
        }
        for rank, z in enumerate(passages)
    ]
    values = values_KN[: len(passages)]
    if has_null:
        named.append({"contains_span": False})
        values.append(values_KN[-1])
    return [
        {**common, **z, "p_z": p_z, "p_z_given_y": p_z_given_y, "utility": utility if has_null else None}
        for z, (p_z, p_z_given_y, utility) in zip(named, values, strict=True)
    ]


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the largest p(z|x, y), the null document's only where there is no other."""
    return max(rows, key=lambda row: ("aligned_passage_id" in row, row["p_z_given_y"]))
