"""Which passages explain the masked salient spans of the pre-training corpus X: alignments that nobody labelled.

Training on masked words alone leaves a p(z|x, y) that ties sentences of X to passages of the knowledge corpus Z (paper,
section 5). The Parquet file has a row for each masked span and each of its candidates z, see ``SCHEMA``.

Candidates are those of pre-training, with the weights that it ended with: the source passage itself and passages that
hold the whole sentence are left out. A sentence over pretrain.query_wordpieces was cut before it was read.
"""

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
from realmops.commands.masked import MASK, Pretrained, pretrained
from realmops.commands.trained import options_of
from realmops.commands.update import of_pipeline
from realmops.corpus.answers import contains_answer
from realmops.corpus.snapshot import Snapshot
from realmops.corpus.spans import Spans
from realmops.model import likelihood
from realmops.stages import STAGES, Report
from realmops.train.examples import Examples
from realmops.train.realm import Realm

FILE = "alignments.parquet"
SCHEMA = pa.schema(
    {
        "span_row": pa.int64(),  # the span's row in spans.npy of data/spans
        "sentence": pa.string(),  # its sentence, [MASK] in the place of the span
        "span": pa.string(),  # the words behind the mask (the first ones of a span over pretrain.max_masks)
        "source_passage_id": pa.string(),  # the passage of X that the sentence is from
        "aligned_passage_id": pa.string(),  # z; null for the null document, as title and rank
        "title": pa.string(),  # z's title
        "rank": pa.int32(),  # z's place by p(z|x), from 0
        "p_z": pa.float32(),  # p(z|x)
        "p_z_given_y": pa.float32(),  # p(z|x, y), y being the span; over the candidates of a span both sum to 1
        "utility": pa.float32(),  # log p(y|z, x) - log p(y|null, x), in nats; null of a REALM without a null document
        "contains_span": pa.bool_(),  # whether z holds the span by DPR's rule (token_boundary)
    }
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
    model = pretrained(root, of_pipeline(root))
    examples = _examples(root, model.realm)
    rng = np.random.default_rng(artifacts.seed_for(run.seed, "alignments"))
    chosen = np.sort(rng.permutation(len(examples.rows))[:limit])
    aligned = _alignments(chosen.tolist(), examples, rng, model, report.progress("masked spans", len(chosen)))
    rows = hits = 0
    with artifacts.atomic_file(out) as stage, pq.ParquetWriter(stage, SCHEMA) as writer:
        while group := list(islice(aligned, _WRITTEN_TOGETHER)):
            writer.write_table(pa.Table.from_pylist([row for one in group for row in one], SCHEMA))
            rows += sum(map(len, group))
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
    chosen: list[int], examples: Examples, rng: np.random.Generator, model: Pretrained, advance: Callable[[int], None]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each chosen span, the null document's last where there is one."""
    size, realm = model.realm.options.batch_size, model.realm
    for start in range(0, len(chosen), size):
        places = chosen[start : start + size]
        batch = [examples.example(place, rng) for place in places]
        with torch.no_grad():
            found, prior_BK, _ = model.candidates(batch)
            likelihood_BK = likelihood.log_likelihood_given_document(*realm.log_token(batch, found))
        posterior_BK = likelihood.log_posterior(prior_BK, likelihood_BK)
        utility_BK = likelihood.retrieval_utility(likelihood_BK, likelihood_BK[:, -1])
        values_BKN = torch.stack([prior_BK.exp(), posterior_BK.exp(), utility_BK], -1).tolist()
        for place, example, passages, values_KN in zip(places, batch, found, values_BKN, strict=True):
            masked = _masked(place, len(example.positions), examples)
            candidates = [_candidate(realm.snapshot, z, masked["span"]) | {"rank": r} for r, z in enumerate(passages)]
            values = values_KN[: len(passages)]
            if realm.options.null_document:
                candidates.append({"contains_span": False})
                values.append(values_KN[-1])
            else:
                values = [[*both, None] for *both, _ in values]
            names = ("p_z", "p_z_given_y", "utility")
            yield [masked | z | dict(zip(names, v, strict=True)) for z, v in zip(candidates, values, strict=True)]
        advance(len(batch))


def _masked(place: int, wordpieces: int, examples: Examples) -> dict[str, Any]:
    """A span of so many wordpieces, and its sentence."""
    text = examples.snapshot
    passage, first, end, start, _ = examples.rows[place].tolist()
    whole, characters = text.text(passage), text.chars(passage).tolist()
    left, right = characters[start][0], characters[start + wordpieces - 1][1]
    return {
        "span_row": place,
        "sentence": whole[characters[first][0] : left] + MASK + whole[right : characters[end - 1][1]],
        "span": whole[left:right],
        "source_passage_id": text.passage_id(passage),
    }


def _candidate(snapshot: Snapshot, z: int, span: str) -> dict[str, Any]:
    holds = contains_answer(snapshot.text(z), (span,), "token_boundary")
    return {"aligned_passage_id": snapshot.passage_id(z), "title": snapshot.title(z), "contains_span": holds}


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the largest p(z|x, y), the null document's only where there is no other."""
    return max(rows, key=lambda row: ("aligned_passage_id" in row, row["p_z_given_y"]))
