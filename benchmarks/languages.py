"""BM25 by language: each language's paragraphs alone, and those of all languages as one corpus.

    python benchmarks/languages.py XQUAD/de XQUAD/es XQUAD/zh XQUAD/ro --and en=SQUAD/cut_tiny
    python benchmarks/languages.py ... --encoder FOLDER --temperature 0.01

Each folder has passages.jsonl.gz and questions*.jsonl.gz, as XQuAD's paragraphs in their languages; its name is the
language's code. Shown is the share of questions whose own paragraph is among the first 1, 5 and 20: of our index over
the language's paragraphs, of bm25s with the same stemmer (in Chinese over our pairs of characters), and of our index
over the paragraphs of all languages, where the language of each paragraph and question is detected. With --encoder a
second table has its embeddings, untrained, alone and with BM25, whose weights nothing fits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from realmops.config import parse_options
from realmops.corpus.encoder_tokenizer import read_encoder_tokenizer
from realmops.corpus.languages import AUTO, load_languages
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import UNCASED
from realmops.corpus.word_counts import train_vocabulary
from realmops.devices import resolve_precision
from realmops.model import retriever as retriever_module
from realmops.model.build import build_models
from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS, DENSE_ONLY, Retriever
from realmops.questions.question_sets import Question, read_questions
from realmops.readers.sources import list_sources
from realmops.search import bm25
from realmops.search.bm25 import Bm25, query_words, rank, titled_texts
from realmops.search.bm25_writer import write_bm25
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.embeddings import embed_corpus
from realmops.search.exact import exact_index
from realmops.search.hybrid import HybridSearch

AT = (1, 5, 20)
QUERY = 64  # wordpieces at most


def snapshot_of(folder: Path, files: Sequence[Path], language: str, encoder: Path | None = None) -> Snapshot:
    """The snapshot of files of passages, each a passage as it stands, with its BM25 index beside it."""
    found = [source for file in files for source in list_sources(file, AUTO)]
    (folder / "snapshot").mkdir(parents=True)
    vocabulary, casing, tokenizer = (
        (train_vocabulary(found, size=2000), UNCASED, None) if encoder is None else read_encoder_tokenizer(encoder)
    )
    write_snapshot(
        found, folder / "snapshot", vocabulary=vocabulary, casing=casing, tokenizer=tokenizer,
        block_wordpieces=288, whole_documents=True, language=language,
    )  # fmt: skip
    snapshot = Snapshot.open(folder / "snapshot")
    write_bm25(folder / bm25.FOLDER, snapshot)
    return snapshot


def recalls(found_QK: npt.NDArray[np.int64], snapshot: Snapshot, questions: Sequence[Question]) -> str:
    """The share of questions whose own passage is among the first k, for each k, as cells of a table."""
    row_of = {name: row for row, name in enumerate(snapshot.column("document_id"))}
    right_Q1 = np.array([[row_of[str(question.passage_id)]] for question in questions])
    return " / ".join(f"{(found_QK[:, :k] == right_Q1).any(1).mean():.3f}".lstrip("0") for k in AT)


def theirs(texts: Sequence[str], questions: Sequence[str], language: str) -> npt.NDArray[np.int64]:
    """The first passages by bm25s, with the words of its own where there is a stemmer for them."""
    import bm25s
    import Stemmer

    def words(some: Sequence[str]) -> list[list[str]]:
        name = load_languages()[language].stemmer
        if not name:
            return [query_words(text, language) for text in some]
        known = ("german", "spanish", "english", "french", "italian", "portuguese", "dutch", "russian")
        stopped, stemmer = name if name in known else None, Stemmer.Stemmer(name)
        cut = bm25s.tokenize(list(some), stopwords=stopped, stemmer=stemmer, return_ids=False, show_progress=False)
        return [list(one) for one in cut]

    index = bm25s.BM25(backend="numpy")
    index.index(words(texts), show_progress=False)
    asked = [one or [""] for one in words(questions)]
    rows = [index.retrieve([one], k=min(max(AT), len(texts)), show_progress=False).documents[0] for one in asked]
    return np.array(rows, np.int64)


def questions_in(folders: dict[str, Path]) -> dict[str, list[Question]]:
    """Of each language."""
    return {
        code: read_questions(sorted(folder.glob("questions*.jsonl.gz")), format="jsonl")
        for code, folder in folders.items()
    }


def table(folders: dict[str, Path], place: Path) -> list[str]:
    """A row for each language."""
    files = {code: folder / "passages.jsonl.gz" for code, folder in folders.items()}
    questions = questions_in(folders)
    together = snapshot_of(place / "together", list(files.values()), AUTO)
    one_corpus = Bm25.of(together)
    names = "".join(f", {code} {(together.code_P == code.encode()).sum()}" for code in folders)
    lines = [
        f"{len(together)} passages together, detected as{names[1:]}",
        "",
        f"| recall@{' / '.join(map(str, AT))} | questions | ours | bm25s, same stemmer | all languages as one corpus |",
        "|---|---|---|---|---|",
    ]
    for code in folders:
        alone = snapshot_of(place / code, [files[code]], code)
        asked = [question.question for question in questions[code]]
        cells = [
            recalls(rank(Bm25.of(alone), asked, max(AT)), alone, questions[code]),
            recalls(theirs(titled_texts(alone), asked, code), alone, questions[code]),
            recalls(rank(one_corpus, asked, max(AT)), together, questions[code]),
        ]
        lines.append(f"| {load_languages()[code].name} | {len(asked):,} | {' | '.join(cells)} |")
    return lines


def retriever_of(encoder: Path, vocabulary: int, temperature: float) -> Retriever:
    """The sentence encoder of a folder as it came."""
    options = {"projection": "identity", "embedding_width": 0, "head": "cosine"}
    values = parse_options(("languages.py", {"retriever": {**options, "init": str(encoder)}}))
    retriever_module.TEMPERATURE = temperature
    return build_models(values.bert, values.retriever, values.reader, vocabulary, 0)[0].eval()


def encoder_table(folders: dict[str, Path], place: Path, encoder: Path, temperature: float) -> list[str]:
    """A row for each language: embeddings, and with BM25; of the language alone, and of all as one corpus."""
    dtype = resolve_precision("auto", torch.device("cpu"))
    files = {code: folder / "passages.jsonl.gz" for code, folder in folders.items()}
    together = snapshot_of(place / "together", list(files.values()), AUTO, encoder)
    retriever = retriever_of(encoder, together.tokenizer.get_vocab_size(), temperature)
    all_PE = embed_corpus(retriever, together, dtype)
    row_of = {name: row for row, name in enumerate(together.column("document_id"))}
    lines = [
        f"| recall@{' / '.join(map(str, AT))} | embeddings | with BM25 | as one corpus | with BM25 |",
        "|---|---|---|---|---|",
    ]
    for code, questions in questions_in(folders).items():
        alone = snapshot_of(place / code, [files[code]], code, encoder)
        asked = [question.question for question in questions]
        query_QE = embed(retriever.query, query_sequences(text_queries(together, asked, QUERY)), dtype)
        mine_PE = all_PE[[row_of[name] for name in alone.column("document_id")]]
        cells = []
        for snapshot, embedding_PE in ((alone, mine_PE), (together, all_PE)):
            for words, mixture in ((None, DENSE_ONLY), (Bm25.of(snapshot), DEFAULT_FUSION_WEIGHTS)):
                search = HybridSearch(exact_index(embedding_PE, 1), words, mixture, retriever.scale)
                cells.append(recalls(search.search(query_QE, asked, max(AT)).id_QK.numpy(), snapshot, questions))
        lines.append(f"| {load_languages()[code].name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="named by the code of their language")
    parser.add_argument("--and", action="append", default=[], dest="more", metavar="CODE=FOLDER")
    parser.add_argument("--encoder", type=Path, metavar="FOLDER", help="of a sentence encoder, for a second table")
    parser.add_argument("--temperature", type=float, default=0.05, help="its cosines are divided by it beside BM25")
    arguments = parser.parse_args()
    folders = {folder.name: folder for folder in arguments.folders}
    folders |= {code: Path(folder) for code, _, folder in (one.partition("=") for one in arguments.more)}
    with tempfile.TemporaryDirectory() as place:
        print("\n".join(table(folders, Path(place, "words"))), flush=True)
        if arguments.encoder is not None:
            torch.set_num_threads(1)
            print("\n".join(encoder_table(folders, Path(place, "encoder"), arguments.encoder, arguments.temperature)))


if __name__ == "__main__":
    main()
