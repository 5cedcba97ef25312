"""``realmops serve`` over real HTTP: records, limits, protocols by their own clients, and swaps of models."""

import gc
import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlencode, urlsplit
from weakref import ref

import numpy as np
import pytest
import torch
from serving import QUESTION, Served, calibration, client_of, every_call, listening, served
from small_project import QUESTIONS, cli, wait_for
from small_world import DOCUMENTS

from realmops.answering.answer import InvalidRequest
from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.passage_search import PassageQuery, PassageSearch
from realmops.answering.record import _context, format_record
from realmops.artifacts import read_json
from realmops.evaluate.predictions import read_results
from realmops.opening import open_run
from realmops.serve.batching import Busy, Closed, RequestBatcher
from realmops.serve.page import ICON

SECOND, GONE = "Who wrote a novel?", "Who hung up?"
GOOD = {"name": "question", "datatype": "BYTES", "shape": [1], "data": [QUESTION]}
INFER = "/v2/models/realmops/infer"


@pytest.fixture(scope="module")
def server(answering: Path) -> Iterator[Served]:
    with served(answering / "root", starts=True) as process:
        yield process


@pytest.fixture
def opened(answering: Path) -> OpenedModel:
    return open_run(answering / "root")


def test_an_answer_is_that_of_the_evaluation_with_its_sources(answering: Path, server: Served) -> None:
    [stored] = [p for p in read_results(answering / "root") if p.question == QUESTION]
    record = server.ask()
    assert record["question"] == QUESTION
    assert record["answer"] == stored.prediction == record["citations"][0]["quote"]
    assert [p["passage_id"] for p in record["passages"]] == list(stored.passage_ids)
    assert [p["p_z"] for p in record["passages"]] == pytest.approx(stored.p_z, rel=1e-4)
    assert [p["span"] for p in record["passages"]] == list(stored.passage_spans)
    assert record["probability"] == pytest.approx(stored.confidence, abs=1e-4)
    fitted = read_json(answering / "root/models/finetune/confidence.json")
    assert (record["abstained"], record["threshold"]) == (stored.abstained, fitted["threshold"])
    texts = {title: text for title, text, _ in DOCUMENTS}  # one passage each
    for citation in (*record["citations"], record["quote"]):
        assert citation["quote"] == texts[citation["title"]][citation["start"] : citation["end"]]
        assert citation["uri"] == "documents.jsonl"
    assert record["answer"] in record["quote"]["quote"]
    manifest = read_json(answering / "root/data/snapshot/corpus/manifest.json")
    assert record["model"]["snapshot"] == manifest["corpus_hash"]
    assert record["model"]["weights_step"] == 6, "two epochs of six questions, two at a time"
    assert record["model"]["index_generation"] == 0


def test_an_excluded_passage_is_not_read_and_without_passages_there_is_no_answer(opened: OpenedModel) -> None:
    [whole] = opened.answer([Query(QUESTION)])
    excluded = whole["citations"][0]["passage_id"]
    [record] = opened.answer([Query(QUESTION, [excluded])])
    ids = [p["passage_id"] for p in record["passages"]]
    assert (excluded in ids, len(ids)) == (False, len(whole["passages"])), "the next one is read instead"
    assert sum(p["p_z"] for p in record["passages"]) == pytest.approx(1)
    names = [opened.model.snapshot.passage_id(p) for p in range(len(DOCUMENTS))]
    [unread] = opened.answer([Query(QUESTION, names)])
    assert [unread[name] for name in ("answer", "abstained", "citations", "passages")] == ["", True, [], []]
    assert [unread[name] for name in ("probability", "score", "quote")] == [0, 0, None]


def test_an_answer_below_the_threshold_is_held_back(opened: OpenedModel) -> None:
    [retrieved] = opened.find([Query(QUESTION)])
    shown, unsure, never, plain = (
        replace(opened, confidence=confidence).read([retrieved])[0]
        for confidence in (*map(calibration, (0.0, 1.0, ALWAYS_ABSTAIN)), None)
    )
    assert [record["abstained"] for record in (shown, unsure, never, plain)] == [False, True, True, True]
    assert len({record["answer"] for record in (shown, unsure, never, plain)}) == 1
    for record, reason in (
        (unsure, "held back below 1)"),
        (never, f"(score {plain['score']:.3g}, held back: too few"),
        (plain, f"(not calibrated: score {plain['score']:.3g})"),
    ):
        assert [reason in line for line in format_record(record)[-4:]].count(True) == 1
    assert [plain[name] for name in ("probability", "calibration", "threshold")] == [None] * 3
    assert (never["probability"], never["calibration"]) == (None, unsure["calibration"])


def test_words_around_a_quotation_are_whole() -> None:
    context = _context("zebra " * 20 + "the answer" + " quagga" * 20, 120, 130)
    assert context == ("… " + "zebra " * 10, " quagga" * 8 + " …")


def test_a_stream_gives_the_sources_first(server: Served) -> None:
    status, headers, text = server.call("/v1/answer", {"questions": [QUESTION, SECOND], "stream": True})
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert headers["x-accel-buffering"] == "no", "nginx passes on each event"
    events = [block.split("\n", 1) for block in text.strip().split("\n\n")]
    assert [name for name, _ in events] == ["event: sources", "event: answer"] * 2
    first, second, third, _ = (json.loads(data.removeprefix("data: ")) for _, data in events)
    record = server.ask()
    assert (second["index"], second["answer"]) == (0, record["answer"])
    assert [p["text"] for p in first["passages"]] == [p["text"] for p in record["passages"]]
    assert ("answer" in first, third["index"], third["question"]) == (False, 1, SECOND)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either 'question' or 'questions'"),
        ({"question": "x" * 2001}, "question: String should have at most 2000 characters"),
        ({"question": "who " * 90}, "has 270 wordpieces, 1 to"),
        ({"question": "  "}, "has 0 wordpieces, 1 to"),
        ({"questions": ["a"] * 65}, "questions: List should have at most 64 items"),
        ({"question": "a", "k": 1}, "k: Extra inputs are not permitted"),
        ({"question": "\ud800"}, "unable to parse raw data as a unicode string"),
        (b'{"question": "\xe9"}', "the body is not valid UTF-8"),
        *((raw, "") for raw in (b"", b"{", b"[" * 100_000, b"null", b'{"question": NaN}')),
    ],
)
def test_an_invalid_request_gets_an_error(server: Served, body: Any, message: str) -> None:
    raw = {"raw": body} if isinstance(body, bytes) else {"body": body}
    status, _, reply = server.call("/v1/answer", **raw)
    assert status in (400, 422), reply
    assert reply["error"]["message"]
    assert message in reply["error"]["message"]
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("route", ["/v1/answer", "/v1/search", INFER])
def test_a_request_that_the_server_does_not_read_is_refused(server: Served, route: str) -> None:
    """A browser sends JSON as text across sites, and a foreign host name may resolve to loopback."""
    body: dict[str, Any] = {"query": QUESTION} if "search" in route else {"question": QUESTION}
    raw = json.dumps({"inputs": [GOOD]} if route == INFER else body).encode()
    for path, headers, expected, message in (
        (
            route,
            {"Content_Type": "text/plain", "Origin": "http://evil.no"},
            422,
            "send -H 'Content-Type: application/json'",
        ),
        (route, {"Host": "pages.example:80"}, 403, "--token-file"),
        (route, {"Content_Encoding": "gzip"}, 415, "without gzip"),
        (f"{route}/", {}, 404, "Not Found"),
        *((route, {"Host": name}, 200, "") for name in ("localhost:1", "127.0.0.1", "[::1]:80")),
    ):
        status, given, reply = server.call(path, raw=raw, **headers)
        assert (status, message in str(reply), "location" in given) == (expected, True, False), (path, headers)
        assert not [name for name in given if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", ["/v1/answer", INFER, "/feedback"])
def test_a_body_of_more_than_a_megabyte_is_not_read(server: Served, path: str) -> None:
    kind = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    address, reply = urlsplit(server.url), b""
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}".encode())
        with suppress(ConnectionError):  # the server has answered
            for _ in range(5):
                connection.sendall(b"40000\r\n" + b" " * 0x40000 + b"\r\n")
        with suppress(ConnectionError):
            while received := connection.recv(1 << 16):
                reply += received
    assert reply.startswith(b"HTTP/1.1 413 "), reply[:200]
    assert b"more than 1048576 bytes" in reply


def test_health_metrics_and_api_reference_are_served(server: Served) -> None:
    record = server.ask()
    for path in ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method="HEAD")) as reply:
            assert (reply.status, reply.read()) == (200, b"")
    ready = server.call("/health/ready")[2]
    assert (ready["ready"], ready["refused"], ready["model"]) == (True, None, record["model"])
    _, headers, text = server.call("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'realmops_requests_total{code="200",route="/v1/answer"}' in text
    assert ready["model"]["snapshot"] in text
    described, page = server.call("/openapi.json")[2], server.call("/docs")[2]
    assert {"/v1/answer", "/v1/search", "/v2/models/{name}/infer"} <= described["paths"].keys()
    assert ("`" in json.dumps(described), "url: 'openapi.json'" in page, ICON in page) == (False, True, True)


# ---- batches


def test_requests_beyond_the_limit_are_refused_all_or_none(opened: OpenedModel) -> None:
    batcher = RequestBatcher(opened, waiting=3)
    with pytest.raises(Busy, match="at most 3 are allowed"):
        batcher.submit([Query(QUESTION)] * 4)
    assert batcher.depth == 0
    pending = batcher.submit([Query(QUESTION)] * 3)
    batcher.close()
    assert {each.record.result(0)["question"] for each in pending} == {QUESTION}
    with pytest.raises(Closed):
        batcher.submit([Query(QUESTION)])
    with pytest.raises(Closed):
        batcher.search(PassageQuery(QUESTION))


class Held:
    """A method of a class that waits at its first call, until it is released; ``batches`` are its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        self.batches: list[tuple[Any, Any]] = []
        self.started, self.released, real = Event(), Event(), getattr(kind, name)

        def held(this: Any, batch: Any) -> Any:
            self.batches.append((this, batch))
            self.started.set()
            assert self.released.wait(300)
            return real(this, batch)

        monkeypatch.setattr(kind, name, held)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.released.set()


def test_waiting_searches_share_a_batch_and_an_invalid_one_fails_alone(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = len(DOCUMENTS)
    titles = [{"document_id": [opened.model.snapshot.document_id(row) for row in (0, 3)]}]
    queries = [PassageQuery(text, everything) for pairs in QUESTIONS.values() for text, _ in pairs]
    queries += [PassageQuery(SECOND, 2, by="words"), PassageQuery(SECOND, everything, by="embeddings")]
    queries += [PassageQuery(QUESTION, everything, titles), PassageQuery(QUESTION, 3)]
    alone = [opened.passage_search.search_batch([query])[0] for query in queries]
    held, batcher = Held(monkeypatch, PassageSearch, "search_batch"), RequestBatcher(opened)
    batcher.search(queries[0])
    assert held.started.wait(300)
    pending = [batcher.search(query) for query in queries]
    invalid = batcher.search(PassageQuery(QUESTION, filters=[{"nowhere": 1}]))
    held.released.set()
    batcher.close()
    with pytest.raises(InvalidRequest, match="nowhere"):
        invalid.record.result(0)
    assert [len(batch) for _, batch in held.batches] == [1, len(queries)]
    for query, each, expected in zip(queries, pending, alone, strict=True):
        record = each.record.result(0)
        assert (record["query"], len(record["passages"])) == (query.query, len(expected["passages"]))
        if query.k == everything:  # in a batch, bf16 has other last digits
            scores, others = ({p["passage_id"]: p["score"] for p in r["passages"]} for r in (record, expected))
            assert scores == pytest.approx(others, rel=0.02, abs=0.02)


def test_waiting_questions_are_answered_by_the_model_that_accepted_them(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = replace(opened, version="second")
    held, batcher = Held(monkeypatch, OpenedModel, "find"), RequestBatcher(opened)
    pending = batcher.submit([Query(QUESTION)])
    assert held.started.wait(300)
    pending += batcher.submit([Query(QUESTION)])
    batcher.served = second
    pending += batcher.submit([Query(QUESTION)])
    batcher.submit([Query(GONE)])[0].record.cancel()
    held.released.set()
    batcher.close()
    versions = [opened.version, opened.version, "second"]
    assert [each.record.result(0)["model"]["version"] for each in pending] == versions
    assert [(model.version, len(batch)) for model, batch in held.batches] == [(version, 1) for version in versions]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/answer", {"question": GONE}),
        ("/v1/answer", {"questions": [GONE] * 3}),
        ("/v1/answer", {"question": GONE, "stream": True}),
        ("/v1/search", {"query": GONE}),
        (INFER, {"inputs": [{**GOOD, "data": [GONE]}]}),
        (f"/?{urlencode({'q': GONE})}", None),
    ],
)
def test_a_request_whose_client_disconnects_leaves_the_queue(
    copy: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    searches, depths = "search" in path, [1]
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'POST' if content else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    held = Held(monkeypatch, *((PassageSearch, "search_batch") if searches else (OpenedModel, "find")))
    with client_of(copy / "root") as client, listening(client.app) as address, held:
        batcher = client.app.state.service.batcher  # type: ignore[attr-defined]
        queue = batcher._searches if searches else batcher._answers

        def ask(text: str) -> Any:
            return batcher.search(PassageQuery(text)) if searches else batcher.submit([Query(text)])[0]

        first = ask(QUESTION)
        assert held.started.wait(300)
        with ExitStack() as connections:
            for _ in range(20):
                connection = connections.enter_context(socket.create_connection(address))
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
                depths.append(wait_for(lambda: (depth := queue.depth) > depths[-1] and depth, 60))
        wait_for(lambda: queue.depth == 1, 60)
        last = ask(SECOND)
        held.released.set()
        assert (first.record.result(60)["model"], bool(last.record.result(60))) == (batcher.served.about, True)
        wait_for(lambda: queue.depth == 0, 60)
        assert 'code="499"' in client.get("/metrics").text
    texts = [getattr(query, "query" if searches else "question") for _, batch in held.batches for query in batch]
    assert texts == [QUESTION, SECOND]


def test_an_idle_server_frees_a_replaced_model_without_the_garbage_collector(answering: Path) -> None:
    opened = open_run(answering / "root")
    batcher = RequestBatcher(opened)
    assert batcher.submit([Query(QUESTION)])[0].record.result(300)["answer"]
    assert batcher.search(PassageQuery(QUESTION)).record.result(300)["passages"]
    batcher.served = open_run(answering / "root")
    replaced = [ref(part) for part in (opened, opened.model, opened.model.snapshot, opened.passage_search)]
    gc.disable()  # its pass would stop all requests
    try:
        del opened
        wait_for(lambda: all(part() is None for part in replaced), 3)
    finally:
        gc.enable()
    batcher.close()


# ---- Open Inference


def test_tritons_client_gets_the_records(server: Served) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(urlsplit(server.url).netloc)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("realmops")
        assert client.get_server_metadata()["name"] == "realmops"
        inputs = [{"name": "question", "datatype": "BYTES", "shape": [-1]}]
        assert client.get_model_metadata("realmops")["inputs"] == inputs
        texts = [QUESTION, SECOND, "Hvor er Åse 😀?"]
        tensor = triton.InferInput("question", [3], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object), binary_data=False)
        reply, records = client.infer("realmops", [tensor], request_id="7"), [server.ask(text) for text in texts]
        assert reply.get_response()["id"] == "7"
        assert reply.get_response()["model_version"] == records[0]["model"]["version"]
        for name in ("score", "probability", "abstained"):
            assert reply.as_numpy(name).tolist() == pytest.approx([record[name] for record in records], rel=1e-5)
        assert list(map(str, reply.as_numpy("answer"))) == [record["answer"] for record in records]
        quotes = [json.loads(text)["citations"][0]["quote"] for text in reply.as_numpy("record")]
        assert quotes == [record["answer"] for record in records]
        requested = [triton.InferRequestedOutput("answer", binary_data=False)]
        [output] = client.infer("realmops", [tensor], outputs=requested).get_response()["outputs"]
        assert output["name"] == "answer"
        with pytest.raises(Exception, match="this server serves 'realmops'"):
            client.infer("other", [tensor])
    finally:
        client.close()


@pytest.mark.parametrize("threshold", [None, ALWAYS_ABSTAIN])
def test_a_model_that_promises_nothing_has_no_probability_in_any_protocol(
    answering: Path, threshold: float | None
) -> None:
    confidence = None if threshold is None else calibration(threshold)
    with client_of(answering / "root", changes={"confidence": confidence}) as client:
        record = client.post("/v1/answer", json={"question": QUESTION}).json()
        assert (record["probability"], record["abstained"]) == (None, True)
        names = ["answer", "score", "abstained", "record"]
        assert [output["name"] for output in client.get("/v2/models/realmops").json()["outputs"]] == names
        outputs = client.post(INFER, json={"inputs": [GOOD]}).json()["outputs"]
        assert [output["name"] for output in outputs] == names
        refused = client.post(INFER, json={"inputs": [GOOD], "outputs": [{"name": "probability"}]})
        assert (refused.status_code, "is not calibrated" in refused.text) == (422, True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"inputs": []}, "inputs: List should have at least 1 item"),
        ({"inputs": [{**GOOD, "datatype": "FP32"}]}, "inputs.0.datatype: Input should be 'BYTES'"),
        ({"inputs": [{**GOOD, "shape": [2]}]}, "inputs.0: the tensor has 1 elements but the shape [2]"),
        ({"inputs": [{**GOOD, "shape": [True]}]}, "inputs.0.shape.0: "),
        ({"inputs": [{**GOOD, "data": [1]}]}, "inputs.0.data.0: "),
        ({"inputs": [{**GOOD, "data": ["a"] * 65, "shape": [65]}]}, "inputs.0.data: List should have at most 64 items"),
        ({"inputs": [{**GOOD, "data": ["x" * 2001]}]}, "inputs.0.data.0: String should have at most 2000 characters"),
        ({"inputs": [{**GOOD, "data": None, "parameters": {"binary_data_size": 9}}]}, "inputs.0.data: "),
        ({"inputs": [GOOD], "outputs": [{"name": ["answer"]}]}, "outputs.0.name: Input should be 'answer', "),
    ],
)
def test_an_invalid_inference_request_is_refused(server: Served, call: Any, message: str) -> None:
    status, _, reply = server.call(INFER, call)
    assert (status, message in reply["error"]) == (422, True), reply


# ---- the served model


@pytest.mark.parametrize("removed", ["lexical", "corpus/sources.jsonl"])
def test_no_reply_names_a_folder_of_the_server(copy: Path, removed: str, caplog: pytest.LogCaptureFixture) -> None:
    """If files disappear, what needs them fails with 500, and the log alone has the path."""
    path = copy / "root/data/snapshot" / removed
    with client_of(copy / "root", raise_server_exceptions=False) as client:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(copy / "root/models/finetune")
        watcher = client.app.state.watcher  # type: ignore[attr-defined]
        assert watcher.poll() is False
        watcher.poll_error = "the model registry failed: unable to open 'sqlite:////srv/runs/mlflow.db'"
        replies = dict(every_call(client))
    assert {reply.status_code for reply in replies.values()} == {200, 500}, "nothing is the client's mistake"
    for call, reply in replies.items():
        assert (str(copy) in reply.text, "/srv" in reply.text) == (False, False), (call, reply.text)
        assert reply.status_code == 200 or "could not be answered" in reply.text, call  # pages escape the rest
    [(_, ready)] = [(call, reply) for call, reply in replies.items() if "/health/ready" in call and "/v2" not in call]
    assert ready.json()["refused"]["reason"].startswith("finetune holds no manifest.json")
    assert ready.json()["registry_away"] == "the model registry failed: unable to open 'mlflow.db'"
    assert str(copy / "root/models/finetune") in caplog.text


def test_weights_that_are_not_numbers_are_not_served(opened: OpenedModel) -> None:
    """Calibrated, such an answer has the probability 0, which is a number; its score is none."""
    with torch.no_grad():
        opened.model.reader.spans.start.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="a first answer is nan: the weights are damaged"):
        opened.probe()


def test_what_cannot_be_served_is_an_error_at_the_start(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "token").write_text(" \n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for root, option, value, message in (
            (tmp_path / "empty", "--port", 0, "it is no finished finetune"),
            (copy / "root", "--port", taken.getsockname()[1], "already in use"),
            (copy / "root", "--token-file", tmp_path / "token", "holds no valid bearer token"),
            (copy / "root", "--model", "realmops", "expected models:/NAME@champion"),
        ):
            result = cli("serve", "--root", root, option, value)
            assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    gc.collect()  # a socket left open is a ResourceWarning, which ends the test


def test_a_question_of_a_file_that_is_too_long_gets_an_error_and_the_rest_is_scored(
    answering: Path, server: Served, tmp_path: Path
) -> None:
    answer = server.ask()["answer"]
    texts = ((QUESTION, answer), ("who " * 90, "x"), (QUESTION + "?", "no such answer"), (QUESTION, answer))
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answers": [answer]}) + "\n" for text, answer in texts))
    result = cli("ask", "--from", file, "--root", answering / "root", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["question"] for record in records] == [text.strip() for text, _ in texts]
    assert ["error" in record for record in records] == [False, True, False, False]
    assert f"exact match 0.500: 2 of 4 questions of {file} are correct" in result.stderr
    assert (result.exit_code, f"1 of the questions in {file} have no answer" in result.stderr) == (1, True)
