"""The campaign against faults, for ``realmops serve``: no answer that was accepted is wrong, mixed or lost.

``make test`` runs it cut short, ``make faults PART=serve`` at full length.
"""

import http.client
import json
import math
import os
import random
import shutil
import signal
import socket
import threading
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from faults import CAMPAIGN, FailingDisk, times
from serving import QUESTION, Served, served, watching
from small_project import QUESTIONS, cli, run_command, wait_for, write_text
from small_world import DOCUMENTS

from realmops.answering.opened_model import Query
from realmops.artifacts import read_json, sha256_file, write_manifest
from realmops.serve.served_model import RunFolder

pytestmark = pytest.mark.faults
TEXTS = tuple(f"Anna Berg was born in {place}. She wrote The Cold Sea in 1931." for place in ("Bergen", "Fjell"))
LONG = pytest.mark.skipif(not CAMPAIGN, reason="one of the long parts, which make faults runs")
ASKED = [question for pairs in QUESTIONS.values() for question, _ in pairs]


@pytest.fixture(scope="module")
def updates(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of an update for each of two texts, both of the answering as it is."""
    found = []
    for number, text in enumerate(TEXTS):
        copy = tmp_path_factory.mktemp("updated") / str(number)
        shutil.copytree(answering, copy)
        write_text(copy, text)
        assert update(copy) == 0
        found += list((copy / "root" / "updates").iterdir())
    return found


def update(project: Path) -> int:
    return cli("update", "--params", project / "params.yaml", "--root", project / "root").exit_code


def put(root: Path, made: Path, number: int, damage: Callable[[Path], object] | None = None) -> Path:
    """An update as the ``number``-th of a run, as ``realmops update`` puts it there: whole, by its name."""
    stage, final = root / "updates" / f".new-{number}", root / "updates" / f"new-{number}"
    shutil.copytree(made, stage)
    manifest = read_json(stage / "manifest.json")
    (stage / "manifest.json").unlink()
    write_manifest(stage, "update", number=number, model=manifest["model"], corpus_hash=manifest["corpus_hash"])
    if damage is not None:
        damage(stage)
    stage.rename(final)
    return final


def alike(one: Any, other: Any) -> bool:
    """Equal but for the last digits of numbers, which depend on what is read in the same batch."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


class Crowd:
    """Callers that ask without a pause; every reply is compared with the first of its question and corpus."""

    def __init__(self, server: Served) -> None:
        self.answers = 0
        self.wrong: list[Any] = []
        self.snapshots: set[str] = set()
        self._server, self._lock = server, threading.Lock()
        self._known: dict[tuple[str, str], Any] = {}

    def check(self, question: str, record: dict[str, Any], before: int) -> int:
        """The number of the record's generation, which is none before the caller's last one."""
        about = record.pop("model")
        texts = {passage["passage_id"]: passage for passage in record["passages"]}
        quoted = [
            texts[one["passage_id"]]["text"][one["start"] - at : one["end"] - at] == one["quote"]
            for one in record["citations"]
            for at in (texts[one["passage_id"]]["start"],)
        ]
        with self._lock:
            self.answers += 1
            self.snapshots.add(about["snapshot"])
            known = self._known.setdefault((question, about["snapshot"]), record)
            if record["question"] != question or not alike(record, known) or not all(quoted):
                self.wrong.append((question, about, record, known))
            if about["index_generation"] < before:
                self.wrong.append((question, about, before))
        return int(about["index_generation"])

    @contextmanager
    def asking(self, callers: int = 3) -> Iterator[None]:
        """So many callers ask within the block."""
        end = threading.Event()

        def ask(place: int) -> None:
            number = 0
            for turn in range(1 << 60):
                if end.is_set():
                    return
                question = ASKED[(place + turn) % len(ASKED)]
                try:
                    number = self.check(question, self._server.ask(question), number)
                except Exception as error:
                    with self._lock:
                        self.wrong.append((question, repr(error)))
                    return

        with ThreadPoolExecutor(callers) as pool:
            for place in range(callers):
                pool.submit(ask, place)
            try:
                yield
            finally:
                end.set()


def test_swaps_of_generations_under_load(copy: Path, updates: list[Path]) -> None:
    """Each generation is put there and that before the last removed, while callers ask."""
    swaps = times(4, 200)
    with served(copy / "root") as server:
        crowd = Crowd(server)
        with crowd.asking():
            for number in range(1, swaps + 1):
                put(copy / "root", updates[number % 2], number)
                wait_for(lambda number=number: server.ask()["model"]["index_generation"] == number, 60, server.process)
                shutil.rmtree(copy / "root" / "updates" / f"new-{number - 2}", ignore_errors=True)
        assert crowd.wrong == []
        assert len(crowd.snapshots) == 3, "that of the stages and two updates"
        assert f'realmops_generations_total{{result="served"}} {swaps:.1f}' in server.call("/metrics")[2]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_damage_to_any_file_of_a_new_generation(copy: Path, updates: list[Path]) -> None:
    (copy / "root" / "updates").mkdir()
    names = [path.relative_to(updates[0]) for path in sorted(updates[0].rglob("*")) if path.is_file()]
    cases = [(name, damage) for name in names for damage in (cut, flip, Path.unlink)]
    with watching(RunFolder(copy / "root")) as (batcher, watcher):
        first = batcher.served
        [wanted] = first.answer([Query(QUESTION)])
        for number, (name, damage) in enumerate(cases[:: times(17, 1)], start=1):
            if not (updates[0] / name).stat().st_size and damage is not Path.unlink:
                continue
            bad = put(copy / "root", updates[0], number, lambda stage, name=name, damage=damage: damage(stage / name))
            assert not watcher.poll(), name
            if (name.name, damage) == ("manifest.json", Path.unlink) and len(name.parts) == 1:
                assert watcher.refused is None, "a folder without a manifest is no update"
            else:
                assert watcher.refused is not None, (name, damage)
                assert watcher.refused["reason"]
            assert batcher.served is first
            assert batcher.submit([Query(QUESTION)])[0].record.result(30) == wanted
            shutil.rmtree(bad)
            watcher.poll()
            assert watcher.refused is None
        put(copy / "root", updates[0], len(cases) + 1)
        assert watcher.poll()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
def test_a_full_disk_under_the_updater(copy: Path) -> None:
    at = times(5, 0)
    with watching(RunFolder(copy / "root")) as (batcher, watcher):
        write_text(copy, TEXTS[0])
        while True:
            with FailingDisk(at, "torn", lasting=True) as disk:
                try:
                    update(copy)
                except OSError:
                    assert disk.failed
            if not disk.failed:
                break
            there = len(list((copy / "root/updates").glob("[!.]*")))  # only its answers were not written any more
            another = there > batcher.served.number
            assert watcher.poll() == another, at
            assert watcher.refused is None
            assert batcher.submit([Query(QUESTION)])[0].record.result(30)["model"]["index_generation"] == there
            at += times(60, 3)
        watcher.poll()
        assert batcher.submit([Query(QUESTION)])[0].record.result(30)["model"]["index_generation"] == 1


@pytest.fixture(scope="module")
def server(answering: Path) -> Iterator[Served]:
    with served(answering / "root") as one:
        yield one


def test_clients_that_hang_up_or_send_garbage(server: Served) -> None:
    rng, count = random.Random(0), times(60, 3000)
    body = json.dumps({"question": QUESTION}).encode()
    whole = b"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole += b"Content-Length: %d\r\n\r\n" % len(body) + body
    address = urlsplit(server.url)
    files = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(files.iterdir()))
    crowd = Crowd(server)
    with crowd.asking(1):
        for _ in range(count):
            sent = rng.choice(
                (
                    whole, whole * rng.randrange(2, 5), whole[: rng.randrange(len(whole))],
                    rng.randbytes(rng.randrange(1, 400)), whole[:20] + rng.randbytes(50) + whole[20:],
                    whole.replace(b"Content-Length: ", b"Content-Length: -"),
                    whole.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"),
                )
            )  # fmt: skip
            with suppress(OSError), socket.create_connection((address.hostname, address.port), 30) as connection:
                connection.sendall(sent)
                if rng.random() < 0.3:  # a reset instead of an end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                elif rng.random() < 0.2:
                    connection.settimeout(0.05)
                    connection.recv(100)
    assert crowd.wrong == []
    wait_for(lambda: "realmops_waiting_questions 0.0" in server.call("/metrics")[2], 30, server.process)
    wait_for(lambda: len(list(files.iterdir())) <= before + 2, 60, server.process)
    assert "Traceback" not in "".join(server.log)


def test_sigterm_under_load(answering: Path) -> None:
    """What is answered is answered whole; a caller who comes too late is refused or not let in."""
    for turn in range(times(1, 20)):
        with served(answering / "root") as server:
            outcomes: list[Any] = []

            def ask(server: Served = server, outcomes: list[Any] = outcomes) -> None:
                while True:
                    try:
                        status, _, reply = server.call("/v1/answer", {"questions": ASKED})
                    except (urllib.error.URLError, ConnectionError, http.client.RemoteDisconnected) as error:
                        outcomes.append(error)
                        return
                    except http.client.HTTPException as error:
                        outcomes.append(("cut off", error))
                        return
                    outcomes.append((status, [one["question"] for one in reply.get("answers", [])]))
                    if status == 503:
                        return

            with ThreadPoolExecutor(6) as pool:
                for _ in range(6):
                    pool.submit(ask)
                wait_for(lambda outcomes=outcomes, turn=turn: len(outcomes) > turn, 60, server.process)
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait() in (0, -signal.SIGTERM)
            replies = [one for one in outcomes if isinstance(one, tuple)]
            assert [one for one in replies if one not in ((200, ASKED), (503, []))] == []


@LONG
def test_our_commands_never_change_a_file_that_is_being_served(copy: Path) -> None:
    """They put new files beside old ones: a cut file under a memory map would end the server (SIGBUS)."""
    root = copy / "root"
    files = [path for folder in ("data", "models") for path in sorted((root / folder).rglob("*")) if path.is_file()]
    before = {path: sha256_file(path) for path in files}
    handles = {path: os.open(path, os.O_RDONLY) for path in files}
    with served(root) as server:
        crowd = Crowd(server)
        with crowd.asking(1):
            where = ("--params", copy / "params.yaml", "--root", root)
            for number, text in enumerate(TEXTS, start=1):
                write_text(copy, text)
                assert update(copy) == 0
                wait_for(lambda n=number: server.ask()["model"]["index_generation"] == n, 60, server.process)
            write_text(copy, DOCUMENTS[0][1])
            for stage in ("snapshot", "finetune"):
                done = run_command("run", stage, "--force", *where)
                assert done.returncode == 0, done.stderr
        assert [one for one in crowd.wrong if isinstance(one[-1], str)] == [], "no caller was left without a reply"
        assert server.process.poll() is None
    for path, handle in handles.items():
        assert sha256_file(Path(f"/proc/self/fd/{handle}")) == before[path], path
        os.close(handle)
