"""What adapting an encoder to documents brings: BM25, the encoder as it comes, adapted, and each with BM25.

    realmops init runs/docs --documents FOLDER --encoder ENCODER --no-reader && realmops run all --root runs/docs
    python benchmarks/adapting.py runs/docs QUESTIONS

The folder is a run of the stages up to finetune. The documents are ranked for the questions of a file by BM25, by
the encoder that ict began with, by the retriever of ict, and by both with BM25 in the fitted weights of finetune; with
retriever_epochs also by the retriever of finetune. Questions with judgements measure documents (nDCG@10, recall@5,
recall@100), others count a passage with an answer (recall@5, recall@20).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import resolve_precision
from realmops.evaluate.exact_match import bootstrap_interval
from realmops.evaluate.ranking_measures import DEPTH, measure_run, passage_depth, rank_documents
from realmops.evaluate.recall import first_relevant_ranks
from realmops.model.build import build_models
from realmops.model.retriever import DENSE_ONLY, FusionWeights, Retriever
from realmops.model.retriever_files import load_retriever
from realmops.opening import trained_options
from realmops.options import ENCODER, ReaderOptions
from realmops.process import configure_process
from realmops.questions.question_sets import Question, read_questions
from realmops.questions.relevance import RelevantPassages
from realmops.search.bm25 import Bm25, rank
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.embeddings import INDEX, embed_corpus, load_passages
from realmops.search.exact import PassageIndex, exact_index
from realmops.search.hybrid import HybridSearch
from realmops.stages import STAGES

Rows = NDArray[np.int64]
JUDGED = {"nDCG@10": "ndcg_at_10", "recall@5": "recall_at_5_judged", "recall@100": "recall_at_100_judged"}


def start_of(root: Path, snapshot: Snapshot) -> Retriever:
    """Return the retriever that stage ict began with; its projection is none, as with the preset minilm."""
    trained = trained_options(root, "ict")
    bert, options = trained.bert, trained.retriever
    reader = ReaderOptions(init=ENCODER, copies=False, apart=False, matches=False)
    return build_models(bert, options, reader, snapshot.tokenizer.get_vocab_size(), 0)[0]


class Measures:
    """Measures of rankings for the questions of a file."""

    def __init__(self, snapshot: Snapshot, questions: list[Question]) -> None:
        self.questions, self.relevant = questions, RelevantPassages(snapshot)
        self.qrels = self.relevant.qrels(questions)
        self.judged = len(self.qrels) == len(questions)
        self.depth = max(DEPTH, passage_depth(self.relevant.largest_documents)) if self.judged else 20

    def row(self, name: str, ids_QK: Rows) -> str:
        """Return the means with 95 % intervals over questions as a row of a table."""
        if self.judged:
            ids = [rank_documents(row, self.relevant.document_of) for row in ids_QK.tolist()]
            values = measure_run(self.qrels, {q.id: row for q, row in zip(self.questions, ids, strict=True)})
            columns = [values[metric] for metric in JUDGED.values()]
        else:
            ranks_Q = first_relevant_ranks(self.questions, ids_QK, self.relevant.is_relevant)
            columns = [ranks_Q < 5, ranks_Q < 20]
        cells = [bootstrap_interval(values_Q, seed=0, resamples=1000) for values_Q in columns]
        return " | ".join([name, *(f"{cell.mean:.3f} ({cell.low:.3f} to {cell.high:.3f})" for cell in cells)])


def rows_of(root: Path, file: Path, precision: str) -> Iterator[str]:
    """Yield the table of a run."""
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    tuned = root / STAGES["finetune"].folder
    options = trained_options(root, "finetune").finetune
    questions = read_questions([file], format="auto")
    measures, words = Measures(snapshot, questions), Bm25.of(snapshot)
    texts, dtype = [question.question for question in questions], resolve_precision(precision, torch.device("cpu"))
    names = " | ".join(JUDGED if measures.judged else ("recall@5", "recall@20"))
    documents = len(measures.relevant.largest_documents)
    yield f"{root}: {documents} documents, {len(snapshot)} passages, {len(texts)} questions"
    yield f"ranked by | {names}"
    yield measures.row("BM25", rank(words, texts, measures.depth))
    fitted = load_retriever(tuned, snapshot.vocabulary_hash)
    retrievers: dict[str, Callable[[], Retriever]] = {
        "the encoder as it comes": lambda: start_of(root, snapshot),
        "adapted": lambda: load_retriever(root / STAGES["ict"].folder, snapshot.vocabulary_hash),
    }
    if options.retriever_epochs:
        retrievers["trained on questions"] = lambda: fitted
    last = [*retrievers][-1]
    for name, build in retrievers.items():
        retriever = build()
        passages: PassageIndex
        if name == last and (tuned / INDEX).is_file():
            passages = load_passages(tuned, snapshot, torch.device("cpu"), retriever.vectors)
        else:
            passages = exact_index(embed_corpus(retriever, snapshot, dtype), retriever.vectors)
        queries = text_queries(snapshot, texts, options.query_wordpieces)
        query_QE = embed(retriever.query, query_sequences(queries), dtype)

        def ranking(
            weights: FusionWeights, passages: PassageIndex = passages, query_QE: torch.Tensor = query_QE,
            scale: float = retriever.scale,
        ) -> Rows:  # fmt: skip
            search = HybridSearch(passages, words, weights, scale)
            ids_QK: Rows = search.search(query_QE, texts, measures.depth).id_QK.numpy()
            return ids_QK

        yield measures.row(name, ranking(DENSE_ONLY))
        yield measures.row(f"{name}, with BM25", ranking(fitted.mixture))
    yield f"weights: {fitted.mixture.dense:g} * embedding score + {fitted.mixture.lexical:g} * BM25 / maximum BM25"


def main() -> None:
    """Print the table of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("questions", type=Path, help="file of questions")
    parser.add_argument("--precision", default="auto", help="of embeddings (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (%(default)s)")
    arguments = parser.parse_args()
    configure_process(arguments.threads)
    for line in rows_of(arguments.run, arguments.questions, arguments.precision):
        print(line, flush=True)


if __name__ == "__main__":
    main()
