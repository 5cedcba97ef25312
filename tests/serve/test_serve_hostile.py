"""Hostile values in every text field of every route: refused by name, or answered; never a 500."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from serving import QUESTION, Served, served

from realmops.answering.opened_model import Query
from realmops.answering.openqa import OpenQa
from realmops.baselines.rankers import build_ranker
from realmops.corpus.snapshot_reader import Snapshot
from realmops.opening import open_run
from realmops.serve.app import _events
from realmops.serve.batching import RequestBatcher

TOKEN = "s3cret"
BODIES: list[tuple[str, Any]] = [
    ("/v1/answer", {"question": QUESTION, "without": ["x"], "stream": True}),
    ("/v1/answer", {"questions": [QUESTION]}),
    ("/v1/search", {"query": QUESTION, "k": 2, "filters": {"document_id": ["x"]}, "by": "run"}),
    (
        "/v2/models/realmops/infer",
        {
            "id": "7",
            "inputs": [
                {"name": "question", "datatype": "BYTES", "shape": [1], "data": [QUESTION], "parameters": {"x": 1}}
            ],
            "outputs": [{"name": "answer"}],
        },
    ),
]
HOSTILE: dict[str, Any] = {
    "lone high": "\ud800", "lone low": "who \udfff wrote?", "NUL": "\0", "megabyte": "a" * 1_040_000,
    "deep": "@deep", "number": 7, "true": True, "null": None, "list": ["a"], "object": {"a": "b"},
}  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in a body, and to an unknown field next to them."""
    if at:
        yield at
    if isinstance(value, dict):
        yield (*at, "\ud800")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*at, name))


@pytest.fixture(scope="module")
def server(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("hostile") / "token"
    file.write_text(f"{TOKEN}\n")
    with served(answering / "root", "--token-file", str(file)) as process:
        yield process
        assert "Traceback" not in "".join(process.log)


def call(server: Served, path: str, raw: bytes | None = None, **headers: str) -> tuple[int, Any]:
    status, _, reply = server.call(path, raw=raw, Authorization=f"Bearer {TOKEN}", **headers)
    return status, reply


def test_a_token_is_required_everywhere_but_by_probes(server: Served) -> None:
    for path in ("/v1/search", "/metrics", "/docs", "/openapi.json", "/v2", "/nothing"):
        status, headers, reply = server.call(path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
        assert "missing or invalid bearer token" in str(reply)
    assert [server.call(path)[0] for path in ("/health/live", "/health/ready", "/v2/health/ready")] == [200] * 3
    for given, status in (("Bearer wrong", 401), (f"Basic {TOKEN}", 401), (f"Bearer {TOKEN}", 200)):
        assert server.call("/v1/answer", {"question": QUESTION}, Authorization=given)[0] == status


@pytest.mark.parametrize(("route", "body", "place"), [(*pair, place) for pair in BODIES for place in places(pair[1])])
def test_no_field_of_a_body_causes_a_500(server: Served, route: str, body: Any, place: tuple[Any, ...]) -> None:
    for kind, value in HOSTILE.items():
        changed = at = copy.deepcopy(body)
        for name in place[:-1]:
            at = at[name]
        at[place[-1]] = value
        raw = json.dumps(changed).replace('"@deep"', "[" * 5000 + "]" * 5000).encode()
        status, reply = call(server, route, raw)
        assert status in (200, 400, 404, 413, 422), (kind, status, reply)
        if status == 200:
            assert "event: error" not in str(reply), (kind, reply)
            continue
        message = reply["error"] if route.startswith("/v2") else reply["error"]["message"]
        known = [re.escape(name) for name in place if isinstance(name, str) and name.isascii()]
        known += ["question", "query", "field", "filter", "range", "surrogates", "body"]
        assert message, (kind, reply)
        assert status != 422 or re.search("|".join(known), message), (kind, message)


@pytest.mark.parametrize("text", ["\ud800", "\0", "a" * 60_000, "../" * 50, "é 😀"], ids=range(5))
def test_no_name_in_an_address_and_no_header_causes_a_500(server: Served, text: str) -> None:
    name, (path, body) = quote(text.encode(errors="surrogatepass"), safe=""), BODIES[-1]
    paths = (f"/v1/{name}", f"/v2/models/{name}/ready", f"/v2/models/realmops/versions/{name}", f"/{name}")
    for address in (*paths, f"/?q={name}", f"/?q=who&without={name}&before={name}", f"/sign-in?q={name}"):
        assert call(server, address)[0] in (200, 303, 400, 404, 422), address[:60]
    raw = json.dumps(body).encode()
    assert call(server, f"/v2/models/{name}/infer", raw)[0] in (400, 404, 422)
    for field in ("Inference_Header_Content_Length", "Cookie", "Content_Type", "Host", "Origin", "Sec_Fetch_Site"):
        value = text.encode(errors="replace").replace(b"\0", b"?")[:5000].decode("latin-1")
        assert call(server, path, raw, **{field: value})[0] in (200, 400, 403, 404, 422), field


@pytest.mark.parametrize(
    ("form", "status"),
    [(b"&" * 1000, 422), (b"token=%ED%A0%80", 401), (b"token=" + b"a" * 1_000_000, 401), (b"\xff\xfe", 401)],
    ids=range(4),
)
def test_no_form_to_sign_in_causes_a_500(server: Served, form: bytes, status: int) -> None:
    actual, reply = call(server, "/sign-in", form, Content_Type="application/x-www-form-urlencoded")
    assert (actual, "token" in reply) == (status, True), reply


def test_a_stream_reports_a_failed_question_and_continues(
    answering: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = OpenQa.read

    def fails(model: Any, retrieved: Any, target_answers: Any) -> Any:
        if any(item.question.question == "Who fails?" for item in retrieved):
            raise RuntimeError("out of memory")
        return real(model, retrieved, target_answers)

    monkeypatch.setattr(OpenQa, "read", fails)
    batcher = RequestBatcher(open_run(answering / "root"))
    pending = batcher.submit([Query("Who fails?"), Query(QUESTION)])

    async def stream() -> list[str]:
        return [event.decode() async for event in _events(pending)]

    events = asyncio.run(stream())
    batcher.close()
    kinds = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert kinds == ["sources", "error", "sources", "answer"]
    assert "no answer to" in caplog.text
    error = json.loads(events[1].split("data: ")[1])
    assert (error["index"], "could not be answered" in error["error"]["message"]) == (0, True)


@pytest.mark.parametrize("retriever", ["bm25", "tfidf"])
def test_the_cache_of_a_ranker_is_bounded(answering: Path, retriever: str) -> None:
    ranker: Any = build_ranker(retriever, Snapshot.open(answering / "root/data/snapshot/corpus"), remembered=3)
    for number in range(10):
        ranker(f"Who was born in {number}?", 2)
    assert ranker._rank.cache_info().currsize == 3
