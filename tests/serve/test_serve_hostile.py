"""What no client of good will sends, in every text field of every route: refused by name, or answered; never a 500."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from serving import QUESTION, Served, served

from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.openqa import OpenQa
from realmops.baselines.rankers import build_ranker
from realmops.commands.open_model import open_run
from realmops.corpus.snapshot_reader import Snapshot
from realmops.serve.app import _events
from realmops.serve.batching import RequestBatcher
from realmops.serve.served_model import ServedModel

TOKEN = "s3cret"
BODIES: dict[str, Any] = {
    "/v1/answer": {"question": QUESTION, "questions": [QUESTION], "without": ["x"], "stream": True},
    "/v1/search": {"query": QUESTION, "k": 2, "filters": {"document_id": ["x"]}, "by": "run"},
    "/v2/models/realmops/infer": {
        "id": "7",
        "inputs": [{"name": "question", "datatype": "BYTES", "shape": [1], "data": [QUESTION], "parameters": {"x": 1}}],
        "outputs": [{"name": "answer"}],
    },
}
HOSTILE: dict[str, Any] = {
    "lone high": "\ud800", "lone low": "who \udfff wrote?", "NUL": "\0", "megabyte": "a" * 1_040_000,
    "deep": "@deep", "number": 7, "true": True, "null": None, "list": ["a"], "object": {"a": "b"},
}  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a body, and to a field that nobody knows beside them."""
    if at:
        yield at
    if isinstance(value, dict):
        yield (*at, "\ud800")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in items:
        yield from places(one, (*at, name))


def cases() -> Iterator[Any]:
    for route, body in BODIES.items():
        bodies = [body] if route != "/v1/answer" else [{**body} for _ in range(2)]
        if len(bodies) == 2:
            del bodies[0]["questions"], bodies[1]["question"]
        for number, one in enumerate(bodies):
            for place in places(one):
                yield pytest.param(route, one, place, id=f"{route}-{number}-{'.'.join(map(ascii, place))}")


@pytest.fixture(scope="module")
def server(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("hostile") / "token"
    file.write_text(f"{TOKEN}\n")
    with served(answering / "root", "--token-file", str(file)) as one:
        yield one
        assert "Traceback" not in "".join(one.log)


def call(server: Served, path: str, raw: bytes | None = None, **headers: str) -> tuple[int, Any]:
    status, _, reply = server.call(path, raw=raw, Authorization=f"Bearer {TOKEN}", **headers)
    return status, reply


def test_a_token_is_asked_for_everywhere_but_by_probes(server: Served) -> None:
    for path in ("/v1/search", "/metrics", "/docs", "/openapi.json", "/v2", "/nothing"):
        status, headers, reply = server.call(path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
        assert "missing or invalid bearer token" in str(reply)
    assert [server.call(path)[0] for path in ("/health/live", "/health/ready", "/v2/health/ready")] == [200] * 3
    body = {"question": QUESTION}
    assert server.call("/v1/answer", body)[0] == 401
    for given, status in (("Bearer wrong", 401), (f"Basic {TOKEN}", 401), (f"Bearer {TOKEN}", 200)):
        assert server.call("/v1/answer", body, Authorization=given)[0] == status


def raw_body(body: Any, place: tuple[Any, ...], value: Any) -> bytes:
    body = copy.deepcopy(body)
    at = body
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return json.dumps(body).replace('"@deep"', "[" * 5000 + "]" * 5000).encode()


@pytest.mark.parametrize(("route", "body", "place"), list(cases()))
def test_no_field_of_a_body_brings_a_500(server: Served, route: str, body: Any, place: tuple[Any, ...]) -> None:
    for kind, value in HOSTILE.items():
        status, reply = call(server, route, raw_body(body, place, value))
        assert status in (200, 400, 404, 413, 422), (kind, status, reply)
        if status == 200:
            assert "event: error" not in str(reply), (kind, reply)
            continue
        told = reply["error"] if route.startswith("/v2") else reply["error"]["message"]
        assert told, (kind, reply)
        if status == 422:
            known = [re.escape(name) for name in place if isinstance(name, str) and name.isascii()]
            known += ["question", "query", "field", "filter", "range", "surrogates", "body"]
            assert re.search("|".join(known), told), (kind, told)


@pytest.mark.parametrize("text", ["\ud800", "\0", "a" * 60_000, "../" * 50, "é 😀"], ids=range(5))
def test_no_name_in_an_address_and_no_header_brings_a_500(server: Served, text: str) -> None:
    name = quote(text.encode(errors="surrogatepass"), safe="")
    body = json.dumps(BODIES["/v2/models/realmops/infer"]).encode()
    for path in (
        f"/v1/{name}",
        f"/v2/models/{name}",
        f"/v2/models/{name}/ready",
        f"/v2/models/realmops/versions/{name}",
        f"/v2/models/realmops/versions/{name}/ready",
        f"/?q={name}",
        f"/?q=who&without={name}&before={name}",
        f"/sign-in?q={name}",
        f"/{name}",
    ):
        assert call(server, path)[0] in (200, 303, 400, 404, 422), path[:60]
    for path in (f"/v2/models/{name}/infer", f"/v2/models/realmops/versions/{name}/infer"):
        assert call(server, path, body)[0] in (200, 400, 404, 422), path[:60]
    for field in ("Inference_Header_Content_Length", "Cookie", "Content_Type", "Host", "Origin", "Sec_Fetch_Site"):
        value = text.encode(errors="replace").replace(b"\0", b"?")[:5000].decode("latin-1")
        status, _ = call(server, "/v2/models/realmops/infer", body, **{field: value})
        assert status in (200, 400, 403, 404, 422), (field, status)


@pytest.mark.parametrize(
    ("form", "status"),
    [
        (b"&".join(b"f%d=x" % n for n in range(17)), 422), (b"token=%ED%A0%80", 401), (b"token=%00", 401),
        (b"token=" + b"a" * 1_000_000, 401), (b"\xff\xfe", 401), (b"", 401), (b"&" * 1000, 422),
    ],
)  # fmt: skip
def test_no_form_to_sign_in_with_brings_a_500(server: Served, form: bytes, status: int) -> None:
    found, reply = call(server, "/sign-in", form, Content_Type="application/x-www-form-urlencoded")
    assert found == status, reply
    assert "token" in reply


def test_a_stream_says_when_reading_fails_and_goes_on(answering: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenQa.read

    def fails(model: Any, found: Any, target_answers: Any) -> Any:
        if any(one.question.question == "Who fails?" for one in found):
            raise RuntimeError("out of memory")
        return real(model, found, target_answers)

    monkeypatch.setattr(OpenQa, "read", fails)
    batcher = RequestBatcher(ServedModel.of(open_run(answering / "root")))
    tickets = batcher.submit([Query("Who fails?"), Query(QUESTION)])

    async def told() -> list[str]:
        return [one.decode() async for one in _events(tickets)]

    events = asyncio.run(told())
    batcher.close()
    assert [one.split("\n")[0] for one in events] == [
        "event: sources", "event: error", "event: sources", "event: answer",
    ]  # fmt: skip
    error = json.loads(events[1].split("data: ")[1])
    assert (error["index"], "could not be answered" in error["error"]["message"]) == (0, True)


def test_who_hung_up_is_not_answered(answering: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is neither looked for nor read; that of a caller who waits, in the same batch, is."""
    asked: list[str] = []
    begun, let = threading.Event(), threading.Event()
    real = OpenedModel.find

    def find(self: OpenedModel, questions: Any) -> Any:
        asked.extend(one.question for one in questions)
        begun.set()
        let.wait(30)
        return real(self, questions)

    monkeypatch.setattr(OpenedModel, "find", find)
    batcher = RequestBatcher(ServedModel.of(open_run(answering / "root")))
    batcher.submit([Query("Who is first?")])
    assert begun.wait(30)
    gone, stays = batcher.submit([Query("Who hung up?"), Query(QUESTION)])
    gone.is_cancelled = True
    let.set()
    batcher.close()
    assert asked == ["Who is first?", QUESTION]
    assert stays.record.result(0)["question"] == QUESTION
    assert not gone.record.done()
    assert batcher.depth == 0


@pytest.mark.parametrize("retriever", ["bm25", "tfidf"])
def test_what_a_server_remembers_is_bounded(answering: Path, retriever: str) -> None:
    ranker: Any = build_ranker(retriever, Snapshot.open(answering / "root/data/snapshot/corpus"), remembered=3)
    for number in range(10):
        ranker(f"Who was born in {number}?", 2)
    assert ranker._rank.cache_info().currsize == 3
