"""``realmops serve`` against MLflow's scoring server with the same model, and under load.

    python benchmarks/serve.py --sizes 2000 60000
    python benchmarks/serve.py --root FOLDER
    python benchmarks/serve.py --sizes 100000 --clients 32 --seconds 600 --update

Generated passages of three sentences, and encoders of the laptop profile that are hardly trained: what they answer is
of no use, what they cost is the same. --root takes a finished run instead. The questions are the test questions, each
request asks one. Three sides take turns: the model alone in this process, one question after another
(``OpenQa.answer``); ``realmops serve``; and ``mlflow models serve`` of what ``realmops promote`` registered, both over
HTTP on connections that stay open, with 1, 8 and 32 callers. One thread for each. Latency is by the clock, as a caller
sees it; processor time is that of the server's processes.

With --edits one document is edited so often under ``realmops serve``: the seconds from the moment at which ``realmops
update`` has put the new corpus in its place until the new text is read for a question, beside the seconds until that
moment. With --root say what the run was trained with: --preset, --set.

With --clients so many clients load ``realmops serve`` instead, each route of --routes for --seconds, and with --update
documents are edited and updated next to ``/v1/answer`` all the time. Compared are p99 with p50, the replies with those
to one client, and the largest memory of the second half with that of the first. Any reply but 200 ends the benchmark.
The clients share the processor with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

from realmops.options import Options
from realmops.progress import SilentReport

CALLERS = (1, 8, 32)
LATENCY, THROUGHPUT, MEMORY = Goal(1.3, at_most=True), Goal(3), Goal(1.05, at_most=True)
TAIL, CORES = Goal(3, at_most=True), Goal(len(os.sched_getaffinity(0)))  # p99 by p50; replies by those to one client
FIELDS = {"/v1/search": "query", "/v1/answer": "question"}  # of a request's body
MODEL = "served"
PROJECT = Path(__file__).parents[1]
EDITED = "{title} keeps a lighthouse in Quornmouth, says edition {number}."
TICK = os.sysconf("SC_CLK_TCK")
SMALL = {
    "run.device": "cpu",
    "snapshot.warmup": "",
    "snapshot.whole_documents": True,
    "tag.method": "dates",
    "ict.steps": 1,
    "ict.reader_steps": 1,
    "pretrain.steps": 0,
    "pretrain.masked_sentences": 20,
    "finetune.epochs": 0.2,
    "tracking.enabled": False,
}


def prepare(root: Path, size: int) -> dict[str, Any]:
    """All stages over so many passages; returns the params."""
    import generated

    from realmops import config
    from realmops.stages import STAGES
    from realmops.stages.runner import run_stage

    documents = root / "documents.jsonl"
    generated.write_documents(documents, size)
    settings = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]
    values = config.load_params(PROJECT / "params.yaml", settings=[*settings, f"snapshot.documents={documents}"])
    for name in STAGES:
        run_stage(name, values, project=PROJECT, root=root, report=SilentReport())
    return values


@dataclass(frozen=True)
class Server:
    """A server process with what is sent to it."""

    process: subprocess.Popen[Any]
    port: int
    path: str
    wrap: Callable[[str], Any]  # a question to the body's JSON

    def request(self, question: str) -> bytes:
        """The bytes of a request on a connection that stays open."""
        body = json.dumps(self.wrap(question)).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def texts(self, question: str) -> str:
        """Of the passages that were read for it, one after another."""
        body, kind = json.dumps(self.wrap(question)).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{self.path}", body, kind)
        with urllib.request.urlopen(request) as reply:
            return " ".join(passage["text"] for passage in json.load(reply)["passages"])

    def family(self) -> list[int]:
        """The process and those that it started."""
        found, todo = [], [self.process.pid]
        while todo:
            found.append(todo.pop())
            todo += map(int, Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text().split())
        return found

    def processor_seconds(self) -> float:
        """Of the whole family so far."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.family()]
        return sum(int(one[11]) + int(one[12]) for one in fields) / TICK

    def mib(self) -> float:
        """Memory of the family."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in self.family()]
        return sum(int(one.partition("VmRSS:")[2].split()[0]) for one in status) / 1024


@dataclass(frozen=True)
class Turn:
    """What callers saw in one turn."""

    latency: list[float]  # seconds of each answer
    seconds: float
    processor: float  # seconds of the server
    mib: list[float] = field(default_factory=list)  # memory of the server, second by second

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds, and answers a second."""
        ranked = sorted(self.latency)
        return {
            "p50": 1e3 * statistics.median(ranked),
            "p99": 1e3 * ranked[int(0.99 * (len(ranked) - 1))],
            "answers": len(ranked) / self.seconds,
            "processor": 1e3 * self.processor / len(ranked),
        }


async def _caller(server: Server, requests: Iterator[bytes], end: Any, latency: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        while not end():
            start = time.perf_counter()
            writer.write(next(requests))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = re.search(rb"content-length: (\d+)", head)
            body = await reader.readexactly(int(found[1]) if found else 0)
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"the server refused: {head.decode()}{body.decode()[:500]}")
            latency.append(time.perf_counter() - start)
    finally:
        writer.close()


def ask(server: Server, questions: list[str], callers: int, *, seconds: float = 1e9, count: int = 1 << 60) -> Turn:
    """So many callers ask, each one question after another, until the time is over or so many were asked."""
    latency: list[float] = []
    mib: list[float] = []
    source = itertools.cycle([server.request(question) for question in questions])
    start, processor = time.perf_counter(), server.processor_seconds()

    def end() -> bool:
        if time.perf_counter() - start >= len(mib):
            mib.append(server.mib())
        return time.perf_counter() - start > seconds or len(latency) + callers > count

    async def all_callers() -> None:
        await asyncio.gather(*(_caller(server, source, end, latency) for _ in range(callers)))

    asyncio.run(all_callers())
    return Turn(latency, time.perf_counter() - start, server.processor_seconds() - processor, mib)


def alone(model: Any, questions: list[str], seconds: float) -> Turn:
    """The model in this process, one question after another."""
    from realmops.questions.question_sets import Question

    latency: list[float] = []
    begin, processor = time.perf_counter(), time.process_time()
    for question in itertools.cycle(questions):
        start = time.perf_counter()
        if start - begin > seconds:
            break
        model.answer([Question("", question, ())], ranked=1, batch_size=1)
        latency.append(time.perf_counter() - start)
    return Turn(latency, time.perf_counter() - begin, time.process_time() - processor)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


@contextmanager
def running(words: list[str], port: int, path: str, wrap: Any, **variables: str) -> Iterator[Server]:
    """A server until the end of the block, once it listens."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            while True:
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(words)} ended:\n{log.read().decode()[-3000:]}")
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield Server(process, port, path, wrap)
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def ours(root: Path, path: str = "/v1/answer") -> Iterator[Server]:
    """``realmops serve`` of a run."""
    port = free_port()
    words = [sys.executable, "-m", "realmops", "serve", "--root", str(root), "--port", str(port)]
    with running(words, port, path, lambda question: {FIELDS[path]: question}) as server:
        yield server


@contextmanager
def theirs(root: Path) -> Iterator[Server]:
    """MLflow's scoring server with the same run, promoted."""
    from realmops import config
    from realmops.commands.promote import promote
    from realmops.tracking.client import resolve_tracking_uri
    from realmops.tracking.runs import tracking_folder

    values = config.load_params(PROJECT / "params.yaml", settings=["tracking.enabled=true"])
    promote(values, project=PROJECT, root=root, name=MODEL, margin=0.0, copy=False)
    port = free_port()
    words = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", f"models:/{MODEL}@champion"]
    words += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it looks for uvicorn there
    variables = {"MLFLOW_TRACKING_URI": resolve_tracking_uri(tracking_folder(root)), "PATH": path}
    with running(words, port, "/invocations", lambda question: {"inputs": [question]}, **variables) as server:
        yield server


def opened(root: Path, arguments: argparse.Namespace) -> tuple[Any, list[str]]:
    """The model of a run, and the questions to ask."""
    from realmops.opening import open_run
    from realmops.questions.question_sets import read_questions

    file = arguments.questions or root / "data" / "sample" / "questions.test.jsonl.gz"
    return open_run(root).model, [one.question for one in read_questions([file], format="auto")]


def compare(root: Path, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one run."""
    model, questions = opened(root, arguments)
    named = f"{len(model.snapshot):,} passages"
    rows: list[Row] = []
    with ExitStack() as stack:
        serve, mlflow = stack.enter_context(ours(root)), stack.enter_context(theirs(root))
        seconds = arguments.seconds
        alone(model, questions[:20], 0.5)  # the first ones take longer
        sides = [lambda: alone(model, questions, seconds).figures]
        for callers in CALLERS:
            for server in (serve, mlflow):
                ask(server, questions, callers, count=20 + 3 * callers)
                sides.append(lambda s=server, n=callers: ask(s, questions, n, seconds=seconds).figures)
        limit, *pairs = against.interleave(sides, arguments.repeats)

        def row(what: str, name: str, unit: str, key: str, mine: Any, other: Any, goal: Goal | None = None) -> None:
            both = (tuple(turn[key] for turn in side) for side in (mine, other))
            rows.append(Row(f"{what}, {named}", name, unit, *both, goal))

        row("p50, 1 caller", "the model alone", "ms", "p50", pairs[0], limit, LATENCY)
        row("p99, 1 caller", "the model alone", "ms", "p99", pairs[0], limit)
        for n, callers in enumerate(CALLERS):
            mine, other, by = pairs[2 * n], pairs[2 * n + 1], f"{callers} caller{'s' * (callers > 1)}"
            row(f"p50, {by}", "MLflow's scoring server", "ms", "p50", mine, other)
            row(f"p99, {by}", "MLflow's scoring server", "ms", "p99", mine, other)
            goal = THROUGHPUT if callers == max(CALLERS) else None
            row(f"answers, {by}", "MLflow's scoring server", "1/s", "answers", mine, other, goal)
            row(f"answers, {by}", "the model alone", "1/s", "answers", mine, limit)
            row(f"processor time of an answer, {by}", "MLflow's scoring server", "ms", "processor", mine, other)
            row(f"processor time of an answer, {by}", "the model alone", "ms", "processor", mine, limit)
    return rows


class Edits:
    """The documents of a run in a file, of which the first one is edited again and again."""

    def __init__(self, root: Path, values: Options, file: Path) -> None:
        from realmops.corpus.ingest import iter_batches, parse_records
        from realmops.readers.documents import Document
        from realmops.readers.sources import list_sources

        documents = list_sources(PROJECT / values.snapshot.documents, values.snapshot.format)
        outcomes = (outcome for batch in iter_batches(documents) for outcome in parse_records(batch))
        kept = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        lines = [{"title": one.title, "text": one.text} | ({"id": one.id} if one.id else {}) for one in kept]
        self._first, self._rest = lines[0], "".join(f"{json.dumps(line)}\n" for line in lines[1:])
        self._values = values.replace({"snapshot.documents": str(file)})
        self.count, self._root, self._file = len(lines), root, file

    def start(self, number: int) -> tuple[str, Any]:
        """Edit the document and start ``realmops update``; returns the new text and the process."""
        from realmops.commands.update import update

        new = EDITED.format(title=self._first["title"], number=number)
        self._file.write_text(json.dumps({**self._first, "text": f"{new} {self._first['text']}"}) + "\n" + self._rest)
        options = {"project": PROJECT, "root": self._root, "report": SilentReport()}
        updating = multiprocessing.get_context("spawn").Process(target=update, args=(self._values,), kwargs=options)
        updating.start()
        return new, updating


def edits(root: Path, values: Options, times: int) -> Row:
    """One document is edited again and again under ``realmops serve``, and asked for until the new text is read."""
    from realmops.answering.corpus_states import UPDATES

    def updates() -> set[Path]:
        return set((root / UPDATES).glob("[!.]*/manifest.json"))

    until_read, until_there = [], []
    with tempfile.TemporaryDirectory() as folder, ours(root) as server:
        edited = Edits(root, values, Path(folder) / "documents.jsonl")
        for number in range(times + 1):
            found, begin = updates(), time.perf_counter()
            new, updating = edited.start(number)
            while updates() == found:
                if updating.exitcode is not None:
                    raise SystemExit(f"realmops update ended with {updating.exitcode} and without an update")
                time.sleep(0.02)
            there = time.perf_counter()
            while new not in server.texts(f"Who keeps a lighthouse in Quornmouth, says edition {number}?"):
                time.sleep(0.02)
            if number:  # the first one also takes all documents over, as this file has them
                until_read.append(time.perf_counter() - there)
                until_there.append(there - begin)
            updating.join()  # the answers to the test questions
    what = f"until an edit is read, {edited.count:,} documents"
    return Row(what, "realmops update, until it is there", "s", tuple(until_read), tuple(until_there))


@contextmanager
def updating(root: Path, values: Options) -> Iterator[list[int]]:
    """Update the corpus again and again until the end of the block; the list gets each update's exit code."""
    stop, codes = threading.Event(), []
    with tempfile.TemporaryDirectory() as folder:
        edited = Edits(root, values, Path(folder) / "documents.jsonl")

        def work() -> None:
            while not stop.is_set():
                _, process = edited.start(len(codes))
                process.join()
                codes.append(process.exitcode)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield codes
        finally:
            stop.set()
            thread.join()
    if any(codes):
        raise SystemExit(f"realmops update ended with {codes}")


def load(root: Path, values: Options, arguments: argparse.Namespace) -> list[Row]:
    """The rows of many clients at once."""
    (model, questions), clients, rows = opened(root, arguments), arguments.clients, []
    named = f"{len(model.snapshot):,} passages"
    for path in arguments.routes:
        with ours(root, path) as server, ExitStack() as stack:
            ask(server, questions, clients, count=20 + 3 * clients)
            alone = ask(server, questions, 1, seconds=arguments.seconds / 10).figures
            updated: list[int] = []
            if arguments.update and path == "/v1/answer":
                updated = stack.enter_context(updating(root, values))
            turn = ask(server, questions, clients, seconds=arguments.seconds)
            note = f"{len(turn.latency):,} replies, all of them 200; {len(updated)} updates"
        figures, what, half = turn.figures, f"{path} with {clients} clients, {named}", len(turn.mib) // 2
        rows.append(Row(f"p99, {what}", "their p50", "ms", (figures["p99"],), (figures["p50"],), TAIL, note))
        for key, unit, goal in (("answers", "1/s", CORES), ("p50", "ms", None), ("processor", "ms", None)):
            rows.append(Row(f"{key}, {what}", "1 client", unit, (figures[key],), (alone[key],), goal))
        first, second = max(turn.mib[:half]), max(turn.mib[half:])
        rows.append(Row(f"memory, {what}", "the first half", "MiB", (second,), (first,), MEMORY))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of a named run, or of every size."""
    from realmops import config

    against.one_thread()

    def rows_of(root: Path, values: Options) -> list[Row]:
        if arguments.clients:
            return load(root, values, arguments)
        rows = compare(root, arguments)
        return [*rows, edits(root, values, arguments.edits)] if arguments.edits else rows

    if arguments.root is not None:
        presets = [config.PACKAGE / "presets" / f"{name}.yaml" for name in arguments.preset]
        return rows_of(
            arguments.root, config.load_params(PROJECT / "params.yaml", presets=presets, settings=arguments.settings)
        )
    rows = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(Path(folder), prepare(Path(folder), size))
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 60_000], help="passages (%(default)s)")
    parser.add_argument("--root", type=Path, help="a finished run, instead of generated ones")
    parser.add_argument("--preset", action="append", default=[], help="the run was made with it; for --edits")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="the same")
    parser.add_argument("--questions", type=Path, help="a question file (the run's sample questions)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn (%(default)s)")
    parser.add_argument("--edits", type=int, default=3, help="of a document; 0 leaves it out (%(default)s)")
    parser.add_argument(
        "--clients", type=int, default=0, help="of the load, instead of all else (%(default)s: no load)"
    )
    parser.add_argument("--routes", nargs="+", choices=FIELDS, default=[*FIELDS], help="that are loaded (%(default)s)")
    parser.add_argument("--update", action="store_true", help="the corpus while /v1/answer is loaded")


if __name__ == "__main__":
    against.command(__doc__, "serve", measure, options)
