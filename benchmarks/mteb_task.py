"""nDCG@10 of an exported retriever by MTEB, as a custom task over the files of a BEIR folder.

    pip install 'realmops[bench]'
    realmops export FOLDER
    python benchmarks/mteb_task.py FOLDER BEIR --expected results/metrics.json

BEIR holds corpus.jsonl(.gz), queries.jsonl(.gz) and qrels/test.tsv. The export is scored twice: with title and text as
a pair, as the run embeds them (:class:`Pairs`, which the model card shows), and as MTEB does by itself, joined by a
blank. MTEB cuts a document at the encoder's maximum; a run does so too with snapshot.whole_documents=true, otherwise
it searches the passages of a document, and its score is the best one's. With --expected the exit code is 1 if the pairs
differ by more than .002 from the nDCG@10 that the run measured. Prints one JSON object; each figure is also shown on
stderr when it is known.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

TOLERANCE = 0.002


class Pairs(SentenceTransformerEncoderWrapper):
    """MTEB's wrapper of sentence-transformers, except that a document is the pair of its title and its text."""

    def encode(self, inputs: Any, *, prompt_type: Any = None, **options: Any) -> Any:
        if prompt_type != PromptType.document:
            return super().encode(inputs, prompt_type=prompt_type, **options)
        pairs = [
            (title or "", text)
            for batch in inputs
            for title, text in zip(batch.get("title") or [""] * len(batch["body"]), batch["body"], strict=True)
        ]
        return self.model.encode_document(pairs, batch_size=options.get("batch_size", 32))


def read_lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    path = folder / name
    with path.open("rt") if path.is_file() else gzip.open(f"{path}.gz", "rt") as file:
        yield from map(json.loads, file)


def task(folder: Path, split: str) -> AbsTaskRetrieval:
    """Return the task over a BEIR folder: what ``load_data`` would fetch is read from the files."""

    class BeirFolder(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="BeirFolder", description="A folder in BEIR's layout.", type="Retrieval", eval_splits=[split],
            eval_langs=["eng-Latn"], main_score="ndcg_at_10", dataset={"path": folder.name, "revision": "local"},
        )  # fmt: skip

        def load_data(self, *_: Any, **__: Any) -> None:
            judged: dict[str, dict[str, int]] = defaultdict(dict)
            with (folder / f"qrels/{split}.tsv").open() as file:
                for row in csv.DictReader(file, delimiter="\t"):
                    judged[row["query-id"]][row["corpus-id"]] = int(row["score"])
            corpus = [
                {"id": row["_id"], "title": row.get("title", ""), "text": row["text"]}
                for row in read_lines(folder, "corpus.jsonl")
            ]
            queries = [
                {"id": row["_id"], "text": row["text"]}
                for row in read_lines(folder, "queries.jsonl")
                if row["_id"] in judged
            ]
            data = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries)}
            self.dataset = {"default": {split: {**data, "relevant_docs": dict(judged), "top_ranked": None}}}
            self.data_loaded = True

    return BeirFolder()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("beir", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--expected", type=Path, metavar="METRICS", help="metrics.json of the run's stage evaluate")
    parser.add_argument("--metric", default="ndcg_at_10", help="name of the run's metric in that file")
    options = parser.parse_args()
    model = SentenceTransformer(str(options.export), local_files_only=True)
    figures: dict[str, Any] = {"mteb": version("mteb"), "sentence_transformers": version("sentence-transformers")}
    for name, wrapper in (("pair", Pairs), ("joined", SentenceTransformerEncoderWrapper)):
        result = mteb.evaluate(wrapper(model), task(options.beir, options.split), cache=None, co2_tracker=False)
        [scores] = result.task_results[0].scores[options.split]
        figures[f"ndcg_at_10_{name}"] = scores["ndcg_at_10"]
        print(f"nDCG@10, {name}: {scores['ndcg_at_10']:.4f}", file=sys.stderr)
    difference = 0.0
    if options.expected:
        figures["ndcg_at_10_run"] = json.loads(options.expected.read_text())[options.metric]
        difference = abs(figures["ndcg_at_10_pair"] - figures["ndcg_at_10_run"])
    print(json.dumps(figures))
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
