"""The campaign against faults, for ``realmops serve``: no answer that was accepted is wrong, mixed or lost.

``make test`` runs it cut short, ``make faults PART=serve`` at full length.
"""

import http.client
import shutil
import signal
import threading
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import times
from serving import QUESTION, Served, near, served, update, watching
from small_project import QUESTIONS, wait_for

from realmops.answering.opened_model import Query
from realmops.artifacts import read_json, write_manifest
from realmops.serve.model_sources import RunFolder

pytestmark = pytest.mark.faults
TEXTS = tuple(f"Anna Berg was born in {place}. She wrote The Cold Sea in 1931." for place in ("Bergen", "Fjell"))
ASKED = [question for pairs in QUESTIONS.values() for question, _ in pairs]


@pytest.fixture(scope="module")
def updates(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of an update for each of two texts."""
    folders: list[Path] = []
    for number, text in enumerate(TEXTS):
        copy = Path(shutil.copytree(answering, tmp_path_factory.mktemp("updated") / str(number)))
        update(copy, text)
        folders += (copy / "root" / "updates").iterdir()
    return folders


def put(root: Path, source: Path, number: int, damage: Callable[[Path], object] | None = None) -> Path:
    """Put an update into place as the ``number``-th of a run, as ``realmops update`` does: whole, by its name."""
    stage, final = root / "updates" / f".new-{number}", root / "updates" / f"new-{number}"
    shutil.copytree(source, stage)
    manifest = read_json(stage / "manifest.json")
    (stage / "manifest.json").unlink()
    write_manifest(stage, "update", number=number, model=manifest["model"], corpus_hash=manifest["corpus_hash"])
    if damage is not None:
        damage(stage)
    stage.rename(final)
    return final


class Crowd:
    """Callers that ask without a pause; every reply is compared with the first of its question and corpus."""

    def __init__(self, server: Served) -> None:
        self.wrong: list[Any] = []
        self.snapshots: set[str] = set()
        self._server, self._lock = server, threading.Lock()
        self._known: dict[tuple[str, str], Any] = {}

    def _check(self, question: str, before: int) -> int:
        """Ask, and return the update of the reply, which is not before the caller's last one."""
        record = self._server.ask(question)
        about = record.pop("model")
        with self._lock:
            self.snapshots.add(about["snapshot"])
            known = self._known.setdefault((question, about["snapshot"]), record)
            if record["question"] != question or record != near(known) or about["index_generation"] < before:
                self.wrong.append((question, about, record, known))
        return int(about["index_generation"])

    @contextmanager
    def asking(self, callers: int = 3) -> Iterator[None]:
        """Ask from several threads within the block."""
        end = threading.Event()

        def ask(caller: int) -> None:
            number = 0
            while not end.is_set():
                caller += 1
                try:
                    number = self._check(ASKED[caller % len(ASKED)], number)
                except Exception as error:
                    self.wrong.append(repr(error))
                    return

        with ThreadPoolExecutor(callers) as pool:
            for caller in range(callers):
                pool.submit(ask, caller)
            try:
                yield
            finally:
                end.set()


def test_swaps_under_load_mix_no_answers(copy: Path, updates: list[Path]) -> None:
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


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_damage_to_any_file_of_an_update_is_found(copy: Path, updates: list[Path]) -> None:
    (copy / "root" / "updates").mkdir()
    names = [path.relative_to(updates[0]) for path in sorted(updates[0].rglob("*")) if path.is_file()]
    cases = [(name, damage) for name in names for damage in (truncate, flip, Path.unlink)]
    with watching(RunFolder(copy / "root")) as (batcher, watcher):
        first = batcher.served
        [expected] = first.answer([Query(QUESTION)])
        for number, (name, damage) in enumerate(cases[:: times(17, 1)], start=1):
            if not (updates[0] / name).stat().st_size and damage is not Path.unlink:
                continue
            bad = put(copy / "root", updates[0], number, lambda stage, name=name, damage=damage: damage(stage / name))
            assert not watcher.poll(), name
            is_no_update = (str(name), damage) == ("manifest.json", Path.unlink)
            assert is_no_update or watcher.refused, (name, damage)
            assert batcher.served is first
            assert batcher.submit([Query(QUESTION)])[0].record.result(30) == expected
            shutil.rmtree(bad)
            watcher.poll()
            assert watcher.refused is None
        put(copy / "root", updates[0], len(cases) + 1)
        assert watcher.poll()


def test_sigterm_under_load_answers_accepted_requests_completely(answering: Path) -> None:
    for attempt in range(times(1, 20)):
        with served(answering / "root") as server:
            outcomes: list[Any] = []

            def ask(server: Served = server, outcomes: list[Any] = outcomes) -> None:
                while True:
                    try:
                        status, _, reply = server.call("/v1/answer", {"questions": ASKED})
                    except (urllib.error.URLError, ConnectionError, http.client.RemoteDisconnected):
                        return  # not accepted
                    except http.client.HTTPException as error:
                        outcomes.append(("incomplete", error))
                        return
                    outcomes.append((status, [record["question"] for record in reply.get("answers", [])]))
                    if status == 503:
                        return

            with ThreadPoolExecutor(6) as pool:
                for _ in range(6):
                    pool.submit(ask)
                wait_for(lambda outcomes=outcomes, least=attempt: len(outcomes) > least, 60, server.process)
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait() in (0, -signal.SIGTERM)
            assert [outcome for outcome in outcomes if outcome not in ((200, ASKED), (503, []))] == []
