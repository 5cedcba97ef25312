"""Search without answers: ``Search.search`` over many passages, with a filter and without one, and over HTTP.

    python benchmarks/find.py
    python benchmarks/find.py --documents FILE.jsonl.gz ... --work FOLDER

Generated passages as long as prose, or JSON lines of your own, under a vocabulary that is learned from them; a MiniLM
(6 layers, width 384) with random weights, and random vectors of passages: what is found is of no use, what it costs is
the same. Queries are eight words that follow each other in a passage. One thread. A turn asks all queries, and p50 and
p95 are of their times by the clock, "processor" is the median of processor time. The filter lets one passage in a
hundred through, and what it finds is compared with the scores of all passages, those that it does not let through left
out. Where the query is embedded too, the product of numpy with all passages is beside ours. --work keeps the snapshot.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

from realmops.progress import SilentReport

PROJECT = Path(__file__).parents[1]
MILLISECONDS = 10.0
FILTER = {"hundredth": 7}
WAYS = ("run", "embeddings", "words")
CHOSEN = {"snapshot.warmup": "", "snapshot.block_wordpieces": 288, "bert.vocabulary": 30_522}


def documents(files: Sequence[Path], size: int) -> Iterator[dict[str, Any]]:
    """Records with the field that is filtered by."""
    import generated
    import numpy as np

    if files:
        records = (json.loads(line) for file in files for line in (gzip.open if file.suffix == ".gz" else open)(file))
        for number, record in enumerate(records):
            yield {"title": record["title"], "text": record["text"], "hundredth": number % 100}
        return
    rng = np.random.default_rng(0)
    for number, length in enumerate(generated.lognormal_lengths(size, rng).tolist()):
        text = generated.text_of(length, rng)
        yield {"title": f"Document {number}", "text": text, "hundredth": number % 100}


def prepare(root: Path, files: Sequence[Path], size: int) -> None:
    """The stage ``snapshot``, where it was not made yet."""
    from realmops import config
    from realmops.stages.runner import run_stage

    lines = root / "documents.jsonl"
    if not lines.is_file():
        lines.write_text("".join(f"{json.dumps(record)}\n" for record in documents(files, size)))
    settings = [f"{name}={json.dumps(value)}" for name, value in CHOSEN.items()]
    values = config.load_params(PROJECT / "params.yaml", settings=[*settings, f"snapshot.documents={lines}"])
    run_stage("snapshot", values, project=PROJECT, root=root, report=SilentReport())


@dataclass(frozen=True)
class Untrained:
    """The generation whose weights are random (``serve.model_sources.ModelSource``)."""

    root: Path
    name: str = "untrained"

    def mark(self) -> str:
        """It never changes."""
        return ""

    def open(self) -> Any:
        """The model over the snapshot."""
        import generated
        import torch

        from realmops import config
        from realmops.answering.opened_model import OpenedModel
        from realmops.answering.openqa import OpenQa
        from realmops.corpus.snapshot_reader import Snapshot
        from realmops.devices import device_and_dtype, freeze_linear_weights
        from realmops.model.reader import Reader, SpanHead
        from realmops.model.retriever import Embedder, FusionWeights, Retriever
        from realmops.search.bm25 import Bm25
        from realmops.search.exact import exact_index
        from realmops.stages import STAGES

        torch.manual_seed(0)
        snapshot = Snapshot.open(self.root / STAGES["snapshot"].folder / "corpus", verify=False)
        encoder, _ = generated.random_bert("MiniLM-L6")
        width = encoder.width
        tower = Embedder(encoder, width, "cosine", pooling="mean", projection="identity")
        retriever, reader = Retriever(tower, tower), Reader(*generated.random_bert("MiniLM-L6"))
        retriever.mixture, reader.spans = FusionWeights(1.0, 1.0), SpanHead(width, 256)
        values = config.load_params(PROJECT / "params.yaml", settings=["run.device=cpu"])
        _, dtype = device_and_dtype(values.run, retriever, reader)
        for part in (retriever, reader):
            freeze_linear_weights(part.eval(), dtype)
        vectors = torch.nn.functional.normalize(torch.randn(len(snapshot), width), dim=1)
        options, words = values.finetune, Bm25.of(snapshot)
        model = OpenQa(retriever, reader, snapshot, exact_index(vectors, 1), options, dtype, bm25=words)
        return OpenedModel(model, "untrained", None, 0, None)

    def before(self, generation: Any) -> None:
        """It was not updated."""

    def examples(self) -> Sequence[str]:
        """None."""
        return ()


def eight_words(snapshot: Any, count: int) -> list[str]:
    """Queries from passages all over the corpus."""
    import numpy as np

    rng = np.random.default_rng(1)
    texts = [snapshot.text(int(n)).split() for n in rng.integers(len(snapshot), size=count)]
    firsts = [int(rng.integers(max(1, len(words) - 8))) for words in texts]
    return [" ".join(words[first : first + 8]) for words, first in zip(texts, firsts, strict=True)]


def turn(ask: Callable[[str], object], queries: Sequence[str]) -> dict[str, float]:
    """Milliseconds of one query after another, by the clock, and of this process' processor."""
    taken, worked = [], []
    for query in queries:
        start, busy = time.perf_counter(), time.process_time()
        ask(query)
        taken.append(1e3 * (time.perf_counter() - start))
        worked.append(1e3 * (time.process_time() - busy))
    p95 = sorted(taken)[int(0.95 * (len(taken) - 1))]
    return {"p50": statistics.median(taken), "p95": p95, "processor": statistics.median(worked)}


def recall(searching: Any, passages: Sequence[int], query: str, by: str) -> float:
    """The share of the best ten of these passages, by scores of the corpus, that a filtered search finds."""
    import torch

    vectors_PE, words_P = searching.passages.vectors(slice(None)), searching.bm25.scores(query)
    dense_A = searching.retriever.scale * (vectors_PE @ searching.embed([query])[0])[passages]
    words_A = torch.from_numpy(words_P[passages])
    hybrid_A = searching.retriever.mixture.combine(dense_A, words_A / words_A.max().clamp(min=1e-6))
    score_A = {"run": hybrid_A, "embeddings": dense_A, "words": words_A}[by]
    best = score_A.topk(10).values
    least = float(best[-1]) - 1e-5  # of passages that are as good any will do
    good_A = (score_A >= least) & ((score_A > 0) | (by != "words"))
    wanted = {searching.snapshot.passage_id(passages[place]) for place in good_A.nonzero()[:, 0].tolist()}
    count = int((best > 0).sum()) if by == "words" else len(best)
    found = {one["passage_id"] for one in searching.search(query, 10, [FILTER], by)["passages"]}
    return len(found & wanted) / count if count else 1.0


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows."""
    against.one_thread()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.work or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        prepare(root, arguments.documents, arguments.size)
        return rows_of(root, arguments)


def rows_of(root: Path, arguments: argparse.Namespace) -> list[Row]:
    """Each way of searching beside the goal, its filter beside it, and HTTP beside this process."""
    from serve import free_port, running

    searching = Untrained(root).open().passage_search
    queries = eight_words(searching.snapshot, arguments.queries)
    allowed = [n for n in range(len(searching.snapshot)) if searching.snapshot.extra(n) == FILTER]
    named, rows = f"{len(searching.snapshot):,} passages", []
    port = free_port()
    words = [sys.executable, __file__, "--serve", str(port), "--work", str(root)]
    with running(words, port, "/v1/search", lambda query: {"query": query}, OMP_NUM_THREADS="1"):
        url = f"http://127.0.0.1:{port}/v1/search"

        def over_http(query: str) -> None:
            body = json.dumps({"query": query}).encode()
            with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as got:
                json.load(got)

        vectors_PE = searching.passages.vectors(slice(None)).numpy()

        def by_numpy(query: str) -> object:
            score_P = vectors_PE @ searching.embed([query])[0].numpy()
            return score_P.argpartition(-10)[-10:]

        sides: list[Callable[[str], object]] = [over_http, by_numpy]
        for by in WAYS:
            sides += [
                lambda query, by=by: searching.search(query, by=by),
                lambda query, by=by: searching.search(query, 10, [FILTER], by),
            ]
        for side in sides:
            turn(side, queries)  # what is read or made once
        http, plainly, *turns = against.interleave(
            [lambda s=side: turn(s, queries) for side in sides], arguments.repeats
        )

    def row(what: str, name: str, key: str, mine: Any, other: Any, goal: Goal | None = None) -> None:
        both = (tuple(one[key] for one in side) for side in (mine, other))
        rows.append(Row(f"{key}, {what}, {named}", name, "ms", *both, goal))

    limit = [dict.fromkeys(("p50", "p95", "processor"), MILLISECONDS)] * arguments.repeats
    for by, plain, filtered in zip(WAYS, turns[::2], turns[1::2], strict=True):
        row(f"by {by}", f"{MILLISECONDS:g} ms", "p50", plain, limit, Goal(1, at_most=True))
        row(f"by {by}", f"{MILLISECONDS:g} ms", "p95", plain, limit)
        row(f"by {by}", f"{MILLISECONDS:g} ms", "processor", plain, limit)
        for key in ("p50", "p95"):
            goal = Goal(1, at_most=True) if key == "p50" else None
            row(f"by {by}, a filter of 1 %", "without it", key, filtered, plain, goal)
        shares = tuple(recall(searching, allowed, query, by) for query in queries)
        whole, exact = (statistics.fmean(shares),), (1.0,)
        rows.append(Row(f"recall by {by} with the filter", "all that it lets through", "", whole, exact, Goal(1)))
    row(
        "by embeddings",
        "the query's embedding and numpy's product",
        "processor",
        turns[2],
        plainly,
        Goal(0.9, at_most=True),
    )
    for key in ("p50", "p95"):
        row("by run, over HTTP", "in this process", key, http, turns[0])
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--size", type=int, default=60_000, help="passages that are generated (%(default)s)")
    parser.add_argument("--documents", type=Path, nargs="+", default=[], help="JSON lines with title and text instead")
    parser.add_argument("--queries", type=int, default=100, help="of a turn (%(default)s)")
    parser.add_argument("--work", type=Path, help="a folder that is kept")


def serve_untrained(port: str, root: str) -> None:
    """The child process of ``rows_of``."""
    from realmops.serve.server import serve

    against.one_thread()
    serve(Untrained(Path(root)), host="127.0.0.1", port=int(port), token=None, every=3600, log=print)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_untrained(sys.argv[2], sys.argv[4])
    else:
        against.command(__doc__, "find", measure, options)
