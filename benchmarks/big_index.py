"""An index of up to 21 million passages whose embeddings lie on the disk: built, searched and swapped on few cores.

    python benchmarks/big_index.py --sizes 1000000 5000000 21000000 --threads 2 --embeddings FILE

FILE is a safetensors file with `embeddings` (passages x width) and `queries` of real text, which --encode makes; its
recall is measured as it is. For a larger size its rows are repeated with noise, as long as half of the way to a row's
nearest one (median). Without FILE both are invented, in 1,000 clusters.

Ours is `index.type: pq`, built as a stage builds it, until 256 queries find --target of the exact best ten; recall is
that of 256 other queries. Beside it are faiss Flat where it fits the memory, and usearch's graph (HNSW) where that is
installed and has no more than --graph passages. Each is a process of its own. Memory is the most that was resident: of
its own and of mapped files. A cold search is one whose file is not in the system's cache. With --swap ours then builds
a second generation while the first one stays, as a trainer does. Seconds are by the clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

BEST, WIDEN, QUERIES, FLAT, COLD = 10, 256, 256, 32, 32
BLOCK = 1 << 18
LIMIT = 8e9  # bytes of memory
RECALL = 0.95
WIDTH = 128  # of the real embeddings
FILE = "index.safetensors"


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """By the clock, and what the call gave."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def real(path: Path) -> tuple[Any, Any]:
    """Embeddings and queries of a file."""
    from safetensors.torch import load_file

    found = load_file(path)
    return found["embeddings"].float(), found["queries"].float()


def invented(size: int) -> tuple[Any, Any]:
    """The same without a file."""
    from search import vectors

    return vectors(size, WIDEN + QUERIES)


def principal_components(x_PD: Any, width: int) -> tuple[Any, Any]:
    """W (E x D) and b of the map W x + b to the first ``width`` principal components of the centred rows."""
    import torch

    mean_D = x_PD.double().mean(0)
    centred_PD = x_PD.double() - mean_D
    _, eigenvector_DD = torch.linalg.eigh(centred_PD.T @ centred_PD)
    weight_ED = eigenvector_DD.flip(1)[:, :width].T
    return weight_ED.float(), (-weight_ED @ mean_D).float()


def encode(encoder: Path, documents: list[Path], questions: Path, wordpieces: int, out: Path) -> None:
    """Real text as a sentence encoder sees it, by the first 128 principal components, of length 1."""
    import encode as encoders
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    from realmops.devices import resolve_precision

    against.one_thread()
    encoders.LIMIT = wordpieces
    ours = encoders.Ours(encoder, resolve_precision("auto", torch.device("cpu")))

    def records(path: Path) -> Iterator[dict[str, Any]]:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
            yield from map(json.loads, lines)

    passage_PD = ours([f"{record['title']} {record['text']}" for path in documents for record in records(path)])
    query_QD = ours([record["question"] for record in records(questions)])
    weight_ED, bias_E = principal_components(passage_PD, WIDTH)
    found = {"embeddings": passage_PD, "queries": query_QD}
    save_file({name: F.normalize(x @ weight_ED.T + bias_E, dim=-1) for name, x in found.items()}, out)


def write(path: Path, size: int, base_PE: Any) -> None:
    """The file of a generation: rows of the base, then the same again with noise; block by block."""
    import torch

    from realmops.search.embeddings import index_header

    width = base_PE.shape[1]
    some = torch.randperm(len(base_PE), generator=torch.Generator().manual_seed(1))[:500]
    apart_QP = torch.cdist(base_PE[some], base_PE)
    nearest = float(apart_QP.kthvalue(2, dim=1).values.median())
    generator = torch.Generator().manual_seed(2)
    with open(path, "wb") as file:
        file.write(index_header(size, width))
        for first in range(0, size, BLOCK):
            row_R = torch.arange(first, min(first + BLOCK, size))
            grown_RE = base_PE[row_R % len(base_PE)].clone()
            noise_RE = torch.randn(grown_RE.shape, generator=generator) * (nearest / 2 / width**0.5)
            grown_RE += noise_RE * (row_R >= len(base_PE))[:, None]
            if first >= len(base_PE):
                grown_RE *= base_PE[row_R % len(base_PE)].norm(dim=1, keepdim=True) / grown_RE.norm(dim=1, keepdim=True)
            file.write(grown_RE.numpy().data)


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The most resident memory, MB: of all kinds, of its own, and mapped; looked at 20 times a second."""
    most = {"resident": 0.0, "own": 0.0, "files": 0.0}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            now = {words[0]: float(words[1]) / 1e3 * 1.024 for words in lines if words[0].startswith(("VmRSS", "Rss"))}
            for name, key in (("resident", "VmRSS:"), ("own", "RssAnon:"), ("files", "RssFile:")):
                most[name] = max(most[name], now[key])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def times(search: Callable[[Any], Any], query_QE: Any) -> dict[str, float]:
    """Milliseconds of one query at a time, and queries a second of many."""
    one = sorted(seconds_of(lambda q=q: search(query_QE[q : q + 1]))[0] for q in range(len(query_QE)))
    many, _ = seconds_of(lambda: search(query_QE))
    return {
        "p50": 1e3 * statistics.median(one), "p99": 1e3 * one[int(0.99 * (len(one) - 1))],
        "queries": len(query_QE) / many,
    }  # fmt: skip


def ours(path: Path, query_QE: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Our index, as a stage builds it."""
    import os

    import torch

    from realmops.memory_map import map_file
    from realmops.options import IndexOptions
    from realmops.search.approximate import ApproximateIndex, passage_index
    from realmops.search.embeddings import view_embeddings

    with open(path, "rb") as file:
        embedding_PE = view_embeddings(map_file(file))

    def built(seed: int) -> Any:
        options = IndexOptions(type="pq", target_recall=arguments.target)
        return passage_index(embedding_PE, options, torch.device("cpu"), seed, lambda: query_QE[:WIDEN], BEST)

    seconds, index = seconds_of(lambda: built(0))
    assert isinstance(index, ApproximateIndex)
    asked_QE = query_QE[WIDEN : WIDEN + QUERIES]
    found = {"build": seconds, "lists": index.recipe.lists, "width": index.recipe.width}
    found |= {"recall": index.recall(asked_QE, BEST)} | times(lambda q_QE: index.search(q_QE, BEST), asked_QE)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold = [seconds_of(lambda q=q: index.search(asked_QE[q : q + 1], BEST))[0] for q in range(COLD)]
    found["cold"] = 1e3 * statistics.median(cold)
    if arguments.swap:
        found["swap"], index = seconds_of(lambda: built(1))
    return found


def flat(path: Path, query_QE: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """faiss Flat, its passages in memory."""
    import faiss
    import torch

    from realmops.memory_map import map_file, release_pages
    from realmops.search.embeddings import view_embeddings

    with open(path, "rb") as file:
        embedding_PE = view_embeddings(map_file(file))
    index = faiss.IndexFlatIP(embedding_PE.shape[1])

    def add() -> None:
        for rows_RE in torch.split(embedding_PE, BLOCK):
            index.add(rows_RE.numpy())
            release_pages(embedding_PE)

    seconds, _ = seconds_of(add)
    asked_QE = query_QE[WIDEN : WIDEN + QUERIES]
    return {"build": seconds, "recall": 1.0} | times(lambda q_QE: index.search(q_QE.numpy(), BEST), asked_QE[:FLAT])


def graph(path: Path, query_QE: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """usearch's graph, its passages in memory, at the first width that reaches the recall."""
    import torch
    from usearch.index import Index

    from realmops.memory_map import map_file
    from realmops.search.embeddings import view_embeddings
    from realmops.search.inner_products import search

    with open(path, "rb") as file:
        embedding_PE = view_embeddings(map_file(file))
    index = Index(ndim=embedding_PE.shape[1], metric="ip", dtype="f32")
    keys = torch.arange(len(embedding_PE)).numpy()
    seconds, _ = seconds_of(lambda: index.add(keys, embedding_PE.numpy(), threads=torch.get_num_threads()))
    asked_QE = query_QE[WIDEN : WIDEN + QUERIES]
    exact = search(asked_QE, embedding_PE, BEST)[1].tolist()

    def found(q_QE: Any) -> Any:
        return index.search(q_QE.numpy(), BEST, threads=torch.get_num_threads()).keys.reshape(-1, BEST)

    for width in (16, 32, 64, 128, 256, 512, 1024, 2048):
        index.expansion_search = width
        same = [len({*a} & {*b}) for a, b in zip(found(asked_QE).tolist(), exact, strict=True)]
        if sum(same) >= RECALL * BEST * len(same):
            break
    recall = sum(same) / BEST / len(same)
    return {"build": seconds, "recall": recall, "width": width} | times(found, asked_QE)


PARTS = {"ours": ours, "faiss Flat": flat, "usearch, HNSW": graph}


def part(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One index in this process."""
    import faiss
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    query_QE = load_file(folder / "queries.safetensors")["queries"]
    with watched() as most:
        found = PARTS[name](folder / FILE, query_QE, arguments)
    return found | most


def run(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One index in a process of its own."""
    given = {"threads": arguments.threads, "target": arguments.target, "swap": arguments.swap}
    words = [sys.executable, __file__, "--part", name, str(folder), json.dumps(given)]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    print(f"{name}: {json.dumps({key: round(value, 4) for key, value in found.items()})}", flush=True)
    return found


def compare(size: int, base_PE: Any, query_QE: Any, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one size."""
    from safetensors.torch import save_file

    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        print(f"{size:,} passages", flush=True)
        write(folder / FILE, size, base_PE)
        save_file({"queries": query_QE.contiguous()}, folder / "queries.safetensors")
        mine = run("ours", folder, arguments)
        note = (
            f"{mine['lists']:.0f} lists, of which {mine['width']:.0f} are looked at; "
            f"{mine['own']:,.0f} MB of its own, {mine['files']:,.0f} of mapped files at most"
        )
        whole = f"of {size:,}"
        rows.append(Row(f"recall@{BEST} {whole}", "exact", "", (mine["recall"],), (1.0,), Goal(RECALL), note))
        limit = Goal(1, at_most=True)
        rows.append(Row(f"resident memory {whole}", "8 GB", "MB", (mine["resident"],), (LIMIT / 1e6,), limit))
        if "swap" in mine:
            rows.append(Row(f"second generation {whole}", "the first", "s", (mine["swap"],), (mine["build"],)))
        rows.append(Row(f"cold search {whole}", "warm", "ms", (mine["cold"],), (mine["p50"],)))
        for other in [name for name in PARTS if name != "ours"]:
            reason = unfit(other, size, base_PE.shape[1], arguments)
            if reason:
                rows.append(against.not_run(f"search {whole}", other, None, reason))
                continue
            theirs = run(other, folder, arguments)
            told = f"{other}: recall {theirs['recall']:.3f}"
            for what, key, unit in (
                ("search", "p50", "ms"), ("search, 99th percentile", "p99", "ms"),
                ("many queries", "queries", "queries/s"), ("build", "build", "s"), ("memory", "resident", "MB"),
            ):  # fmt: skip
                rows.append(Row(f"{what} {whole}", other, unit, (mine[key],), (theirs[key],), None, told))
    return rows


def unfit(name: str, size: int, width: int, arguments: argparse.Namespace) -> str:
    """Why an index is not built; nothing where it is."""
    if name == "faiss Flat":
        return "its passages alone need more than 8 GB" if 4 * size * width > LIMIT else ""
    try:
        import usearch  # noqa: F401
    except ImportError:
        return "usearch is not installed"
    return f"--graph is {arguments.graph}" if size > arguments.graph else ""


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every size."""
    import torch

    if arguments.encode:
        encoder, *documents, questions = arguments.encode
        encode(encoder, documents, questions, arguments.wordpieces, arguments.embeddings)
    torch.set_num_threads(arguments.threads)
    if arguments.embeddings is None:
        return [row for size in arguments.sizes for row in compare(size, *invented(size), arguments)]
    base_PE, query_QE = real(arguments.embeddings)
    sizes = [len(base_PE), *(size for size in arguments.sizes if size > len(base_PE))]
    return [row for size in sizes for row in compare(size, base_PE, query_QE, arguments)]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000], help="passages (%(default)s)")
    parser.add_argument("--embeddings", type=Path, help="safetensors with embeddings and queries of real text")
    words = "make that file first: the folder of a sentence encoder, JSON lines of documents, JSON lines of questions"
    parser.add_argument("--encode", type=Path, nargs="+", metavar="PATH", help=words)
    parser.add_argument("--wordpieces", type=int, default=288, help="of a text at most, for --encode (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each index (%(default)s)")
    parser.add_argument("--target", type=float, default=0.96, help="index.target_recall (%(default)s)")
    parser.add_argument("--graph", type=int, default=1_000_000, help="passages at most for a graph (%(default)s)")
    parser.add_argument("--swap", action="store_true", help="build a second generation beside the first")
    parser.add_argument("--folder", type=Path, help="folder for the embeddings (the one for temporary files)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(part(sys.argv[2], Path(sys.argv[3]), argparse.Namespace(**json.loads(sys.argv[4])))))
    else:
        against.command(__doc__, "big_index", measure, options)
