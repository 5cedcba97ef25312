"""``realmops serve`` over real HTTP: records, limits, protocols by their own clients, and swaps of generations."""

import gc
import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit
from weakref import ref

import numpy as np
import pytest
import torch
from serving import QUESTION, Served, calibration, client_of, every_call, served, update
from small_project import QUESTIONS, cli, wait_for
from small_world import DOCUMENTS

from realmops.answering.answer import InvalidRequest
from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.openqa import OpenQa
from realmops.answering.passage_search import PassageQuery, PassageSearch
from realmops.answering.record import format_record
from realmops.artifacts import read_json, write_manifest
from realmops.commands.open_model import open_run
from realmops.evaluate.predictions import read_results
from realmops.serve.batching import Busy, Closed, RequestBatcher
from realmops.serve.served_model import ServedModel
from realmops.serve.server import CONNECTIONS

SECOND = "Who wrote a novel?"


@pytest.fixture(scope="module")
def server(answering: Path) -> Iterator[Served]:
    with served(answering / "root", starts=True) as one:
        yield one


def source_of(citation: dict[str, Any]) -> str:
    """What stands in the documents where a citation says; these documents are one passage each."""
    [text] = [text for title, text, _ in DOCUMENTS if title == citation["title"]]
    return text[citation["start"] : citation["end"]]


# ---- the record


def test_an_answer_is_that_of_the_evaluation_with_its_sources(answering: Path, server: Served) -> None:
    [stored] = [p for p in read_results(answering / "root") if p.question == QUESTION]
    record = server.ask()
    assert record["question"] == QUESTION
    assert record["answer"] == stored.prediction == record["citations"][0]["quote"]
    assert [p["passage_id"] for p in record["passages"]] == list(stored.passage_ids)
    assert [p["p_z"] for p in record["passages"]] == pytest.approx(stored.p_z, rel=1e-4)
    assert [p["span"] for p in record["passages"]] == list(stored.passage_spans)
    assert sum(p["p_z_given_y"] for p in record["passages"]) == pytest.approx(1)
    assert record["probability"] == pytest.approx(stored.confidence, abs=1e-4)
    assert 0 < record["score"] <= 1
    assert record["calibration"] == "fitted on 20 questions: questions.dev"
    fitted = read_json(answering / "root/models/finetune/confidence.json")
    assert (record["abstained"], record["threshold"]) == (stored.abstained, fitted["threshold"])
    for citation in record["citations"]:
        assert citation["quote"] == source_of(citation)
        assert (citation["uri"], citation["p_z_given_y"] > 0) == ("documents.jsonl", True)
    assert record["quote"]["quote"] == source_of(record["quote"])
    assert record["answer"] in record["quote"]["quote"]
    manifest = read_json(answering / "root/data/snapshot/corpus/manifest.json")
    assert record["model"]["snapshot"] == manifest["corpus_hash"]
    assert record["model"]["weights_step"] == 6, "two epochs of six questions, two at a time"
    assert record["model"]["index_generation"] == 0


def test_several_questions_are_answered_in_their_order_and_as_alone(server: Served) -> None:
    texts = [question for pairs in QUESTIONS.values() for question, _ in pairs]
    status, _, reply = server.call("/v1/answer", {"questions": texts})
    assert status == 200
    assert [one["question"] for one in reply["answers"]] == texts
    assert [one["answer"] for one in reply["answers"]] == [server.ask(text)["answer"] for text in texts]


def test_callers_at_the_same_time_get_their_own_answers(server: Served) -> None:
    texts = [question for pairs in QUESTIONS.values() for question, _ in pairs] * 5
    alone = {text: server.ask(text)["answer"] for text in set(texts)}
    with ThreadPoolExecutor(16) as pool:
        records = list(pool.map(server.ask, texts))
    assert [(one["question"], one["answer"]) for one in records] == [(text, alone[text]) for text in texts]
    _, _, figures = server.call("/metrics")
    several = [line for line in figures.splitlines() if line.startswith("realmops_batch_questions_bucket")]
    assert float(several[-1].split()[-1]) > float(several[0].split()[-1]), "some were answered together"


def test_a_passage_that_is_left_out_is_not_read(server: Served) -> None:
    whole = server.ask()
    gone = whole["citations"][0]["passage_id"]
    record = server.ask(without=[gone])
    ids = [p["passage_id"] for p in record["passages"]]
    assert gone not in ids
    assert len(ids) == len(whole["passages"]), "the next one is read instead"
    assert sum(p["p_z"] for p in record["passages"]) == pytest.approx(1)


def test_without_any_passage_there_is_no_answer(answering: Path) -> None:
    generation = open_run(answering / "root")
    names = [generation.model.snapshot.passage_id(p) for p in range(len(DOCUMENTS))]
    some, none = generation.find([Query(QUESTION), Query(QUESTION, names)])
    both = generation.read([some, none])
    assert both[0]["answer"]
    assert (both[1]["answer"], both[1]["abstained"], both[1]["citations"], both[1]["passages"]) == ("", True, [], [])
    assert (both[1]["probability"], both[1]["score"], both[1]["quote"]) == (0, 0, None)
    assert generation.read([none])[0] == both[1]


def test_an_unsure_answer_is_marked(answering: Path) -> None:
    generation = open_run(answering / "root")
    [found] = generation.find([Query(QUESTION)])
    records = {}
    for threshold in (0.0, 1.0, ALWAYS_ABSTAIN):
        [records[threshold]] = replace(generation, confidence=calibration(threshold)).read([found])
    assert [record["abstained"] for record in records.values()] == [False, True, True]
    assert len({record["answer"] for record in records.values()}) == 1
    assert "held back" not in format_record(records[0.0])[0]
    sentence = f"  in: {records[1.0]['quote']['quote']}"
    assert [sentence in format_record(record) for record in records.values()] == [False, True, True]
    unsure, never = (format_record(records[threshold]) for threshold in (1.0, ALWAYS_ABSTAIN))
    assert unsure[0] == never[0] == "no answer is certain enough: the best passages"
    first = records[1.0]["passages"][0]
    assert unsure[1].startswith(f"  {first['title'] or first['document_id']}: ")
    place = unsure.index(sentence) - 1
    assert place > 2, "the answer is below the passages"
    assert "held back below 1)" in unsure[place]
    assert "held back as every answer is" in never[place]
    [plain] = replace(generation, confidence=None).read([found])
    assert [plain[name] for name in ("probability", "calibration", "threshold")] == [None] * 3
    assert (plain["abstained"], plain["score"]) == (True, records[0.0]["score"])
    lines = format_record(plain)
    assert lines[0] == "not calibrated: the best passages"
    assert lines[place : place + 2] == [
        f"possible answer: {plain['answer']}  (not calibrated: score {plain['score']:.3g})", sentence
    ]  # fmt: skip


def test_a_stream_gives_the_sources_first(server: Served) -> None:
    status, headers, text = server.call("/v1/answer", {"questions": [QUESTION, SECOND], "stream": True})
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    events = [block.split("\n", 1) for block in text.strip().split("\n\n")]
    assert [name for name, _ in events] == ["event: sources", "event: answer"] * 2
    first, second, third, _ = (json.loads(data.removeprefix("data: ")) for _, data in events)
    record = server.ask()
    assert second.keys() == record.keys() | {"index"}
    assert (second["index"], second["answer"]) == (0, record["answer"])
    assert [p["text"] for p in first["passages"]] == [p["text"] for p in record["passages"]]
    assert "answer" not in first
    assert (third["index"], third["question"]) == (1, SECOND)


# ---- limits and errors


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 422, "give either 'question' or 'questions'"),
        ({"question": "a", "questions": ["b"]}, 422, "give either 'question' or 'questions'"),
        ({"question": "x" * 2001}, 422, "question: String should have at most 2000 characters"),
        ({"question": "who " * 90}, 422, "has 270 wordpieces, 1 to"),
        ({"question": "  "}, 422, "has 0 wordpieces, 1 to"),
        ({"questions": []}, 422, "questions: List should have at least 1 item"),
        ({"questions": ["a"] * 65}, 422, "questions: List should have at most 64 items"),
        ({"question": 7}, 422, "question: Input should be a valid string"),
        ({"question": "a", "k": 1}, 422, "k: Extra inputs are not permitted"),
        ({"question": "\ud800"}, 422, "unable to parse raw data as a unicode string"),
        ({"question": "a", "x\ud800": 1}, 422, "unable to parse raw data as a unicode string"),
    ],
)
def test_what_cannot_be_asked_is_told(server: Served, body: Any, status: int, told: str) -> None:
    found, _, reply = server.call("/v1/answer", body)
    assert found == status, reply
    assert told in reply["error"]["message"]
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"[1]", b'"a"', b'{"question": NaN}'])
def test_garbage_is_refused(server: Served, raw: bytes) -> None:
    status, _, reply = server.call("/v1/answer", raw=raw)
    assert status in (400, 422), reply
    assert reply["error"]["message"]
    assert server.ask()["answer"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_json_that_is_not_sent_as_json_is_told_how(server: Served, kind: str) -> None:
    """As by ``curl -d`` without a header."""
    body = json.dumps({"question": QUESTION}).encode()
    for route in ("/v1/answer", "/v1/search"):
        status, _, reply = server.call(route, raw=body, Content_Type=kind)
        told = json.dumps(reply)
        assert (status, "send -H 'Content-Type: application/json'" in told) == (422, True), told


def test_a_form_of_another_page_is_no_question(server: Served) -> None:
    """What a browser may send across origins without asking first is refused, and nothing allows more."""
    body = json.dumps({"question": QUESTION}).encode()
    status, headers, _ = server.call("/v1/answer", raw=body, Content_Type="text/plain", Origin="http://evil.no")
    assert status == 422
    assert not [name for name in headers if name.lower().startswith("access-control")]


def exchange(server: Served, head: str, *parts: bytes) -> bytes:
    """The reply to raw bytes; the parts are sent while the server may have answered already."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode())
        try:
            for part in parts:
                connection.sendall(part)
            found = b""
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionError:
            pass
    return found


@pytest.mark.parametrize("path", ["/v1/answer", "/v2/models/realmops/infer", "/feedback"])
def test_the_server_reads_at_most_a_megabyte_of_a_body(server: Served, path: str) -> None:
    """A body without a length is refused once it exceeds the limit; the rest is not read."""
    head = f"POST {path} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nTransfer-Encoding: chunked\n\n"
    chunk = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
    reply = exchange(server, head, *[chunk] * 5)
    assert reply.startswith(b"HTTP/1.1 413 "), reply[:200]
    assert b"more than 1048576 bytes" in reply
    assert server.ask()["answer"]


def test_requests_beyond_the_limit_of_connections_get_503(answering: Path) -> None:
    with served(answering / "root") as server:
        address = urlsplit(server.url)
        with ExitStack() as idle:
            for _ in range(CONNECTIONS):
                idle.enter_context(socket.create_connection((address.hostname, address.port), 30))
            wait_for(lambda: server.call("/health/live")[0] == 503, 30, server.process)
        wait_for(lambda: server.call("/health/live")[0] == 200, 30, server.process)
        assert server.ask()["answer"]


def test_no_route_but_the_known_ones(server: Served) -> None:
    for path in ("/v1/../../etc/passwd", "/docs/../../params.yaml", "/static/x", "/v2/models/..%2f..%2fetc"):
        assert server.call(path)[0] == 404


def test_too_many_waiting_requests_are_refused_all_or_none(answering: Path) -> None:
    generation = open_run(answering / "root")
    batcher = RequestBatcher(ServedModel.of(generation), waiting=3)
    with pytest.raises(Busy, match="at most 3 are allowed"):
        batcher.submit([Query(QUESTION)] * 4)
    assert batcher.depth == 0
    tickets = batcher.submit([Query(QUESTION)] * 3)
    batcher.close()
    assert {ticket.record.result(0)["question"] for ticket in tickets} == {QUESTION}
    with pytest.raises(Closed):
        batcher.submit([Query(QUESTION)])
    with pytest.raises(Closed):
        batcher.search(PassageQuery(QUESTION))
    batcher = RequestBatcher(ServedModel.of(generation), waiting=0)
    with pytest.raises(Busy, match="too many pending searches: 0"):
        batcher.search(PassageQuery(QUESTION))
    batcher.close()


def test_searches_that_wait_together_share_a_batch_and_an_invalid_one_fails_alone(
    answering: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel.of(open_run(answering / "root"))
    everything, search_batch = len(DOCUMENTS), PassageSearch.search_batch
    titles = [{"document_id": [served.model.snapshot.document_id(row) for row in (0, 3)]}]
    queries = [PassageQuery(text, everything) for pairs in QUESTIONS.values() for text, _ in pairs]
    queries += [PassageQuery(SECOND, 2, by="words"), PassageQuery(SECOND, everything, by="embeddings")]
    queries += [PassageQuery(QUESTION, everything, titles), PassageQuery(QUESTION, 3)]
    alone = [search_batch(served.shared_search, [query])[0] for query in queries]
    batches: list[int] = []
    started, released = Event(), Event()

    def slow(self: PassageSearch, together: list[PassageQuery]) -> Any:
        batches.append(len(together))
        started.set()
        assert released.wait(300)
        return search_batch(self, together)

    monkeypatch.setattr(PassageSearch, "search_batch", slow)
    batcher = RequestBatcher(served)
    batcher.search(queries[0])
    assert started.wait(300)
    pending = [batcher.search(query) for query in queries]
    invalid = batcher.search(PassageQuery(QUESTION, filters=[{"nowhere": 1}]))
    released.set()
    batcher.close()
    with pytest.raises(InvalidRequest, match="nowhere"):
        invalid.record.result(0)
    assert batches == [1, len(queries)]
    for query, ticket, record in zip(queries, pending, alone, strict=True):
        found = ticket.record.result(0)
        assert found["query"] == query.query
        assert len(found["passages"]) == len(record["passages"])
        if query.k == everything:  # in a batch, bf16 has other last digits
            scores, expected = ({p["passage_id"]: p["score"] for p in one["passages"]} for one in (found, record))
            assert scores == pytest.approx(expected, rel=0.02, abs=0.02)
        elif query.by == "words":
            assert found == record


def test_an_idle_server_frees_a_replaced_model_without_the_garbage_collector(answering: Path) -> None:
    served = ServedModel.of(open_run(answering / "root"))
    batcher = RequestBatcher(served)
    assert batcher.submit([Query(QUESTION)])[0].record.result(300)["answer"]
    assert batcher.search(PassageQuery(QUESTION)).record.result(300)["passages"]
    batcher.swap(ServedModel.of(open_run(answering / "root")))
    replaced = [ref(part) for part in (served, served.model, served.model.snapshot, served.shared_search)]
    gc.disable()  # its pass would stop all requests
    try:
        del served
        wait_for(lambda: all(part() is None for part in replaced), 3)
    finally:
        gc.enable()
    batcher.close()


@pytest.mark.parametrize(("wordpieces", "together"), [(128, 10), (320, 4), (512 * 1024, 1)])
def test_a_batch_is_as_large_as_the_spans_of_its_passages_allow(
    answering: Path, wordpieces: int, together: int
) -> None:
    """The laptop profile's 5 passages of 128 wordpieces with 10 spans each of width 256 are 6.25 MiB, of 64."""
    generation = open_run(answering / "root")
    sizes = {"reader_candidates": 5, "reader_wordpieces": wordpieces, "answer_wordpieces": 10}
    options = generation.model.options.model_copy(update=sizes)
    assert ServedModel.of(replace(generation, model=replace(generation.model, options=options))).batch_size == together


def test_questions_that_wait_together_are_answered_each_by_the_generation_that_accepted_it(
    answering: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ServedModel.of(open_run(answering / "root"))
    second = replace(first, version="second")
    batches: list[tuple[str, int]] = []
    started, released, find = Event(), Event(), OpenedModel.find

    def slow(self: OpenedModel, asked: list[Query]) -> Any:
        batches.append((self.version, len(asked)))
        started.set()
        assert released.wait(300)
        return find(self, asked)

    monkeypatch.setattr(OpenedModel, "find", slow)
    batcher = RequestBatcher(first)
    tickets = batcher.submit([Query(QUESTION)])
    assert started.wait(300)
    tickets += batcher.submit([Query(QUESTION)])
    batcher.swap(second)
    tickets += batcher.submit([Query(QUESTION)])
    released.set()
    batcher.close()
    versions = [first.version, first.version, "second"]
    assert [ticket.record.result(0)["model"]["version"] for ticket in tickets] == versions
    assert batches == [(version, 1) for version in versions]


def test_one_question_that_fails_costs_no_other_its_answer(
    answering: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generation = open_run(answering / "root")
    real = OpenQa.find

    def fails(model: Any, questions: list[Any], ranked: int = 0) -> Any:
        if SECOND in [one.question for one in questions]:
            raise RuntimeError("out of memory")
        return real(model, questions, ranked)

    monkeypatch.setattr(OpenQa, "find", fails)
    batcher = RequestBatcher(ServedModel.of(generation))
    good, bad, other = batcher.submit([Query(text) for text in (QUESTION, SECOND, QUESTION)])
    batcher.close()
    assert good.record.result(0)["answer"] == other.record.result(0)["answer"]
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.record.result(0)
    assert "no answer to" in caplog.text


def test_a_name_of_elsewhere_that_leads_here_reads_nothing(server: Served) -> None:
    """DNS rebinding: a web page's own name is made to mean the loopback address."""
    body = {"question": QUESTION}
    status, _, told = server.call("/v1/answer", body, Host="pages.example:80")
    assert status == 403
    assert "--token-file" in told["error"]["message"]
    for name in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert server.call("/v1/answer", body, Host=name)[0] == 200


# ---- what describes it


def test_health_metrics_and_pages(server: Served) -> None:
    server.ask()
    assert server.call("/health/live")[2] == {"live": True}
    for path in ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method="HEAD")) as reply:
            assert (reply.status, reply.read()) == (200, b"")
    ready = server.call("/health/ready")[2]
    assert ready["ready"] is True
    assert ready["refused"] is None
    assert ready["model"] == server.ask()["model"]
    _, headers, figures = server.call("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'realmops_requests_total{code="200",route="/v1/answer"}' in figures
    assert ready["model"]["snapshot"] in figures
    openapi = server.call("/openapi.json")[2]
    assert {"/v1/answer", "/v1/search", "/v2/models/{name}/infer"} <= openapi["paths"].keys()
    assert "/openapi.json" in server.call("/docs")[2]


# ---- others' clients, unmodified


@pytest.mark.parametrize("binary", [True, False])
def test_the_triton_client_asks(server: Served, binary: bool) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(urlsplit(server.url).netloc)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("realmops")
        assert client.get_server_metadata()["name"] == "realmops"
        assert client.get_model_metadata("realmops")["inputs"] == [
            {"name": "question", "datatype": "BYTES", "shape": [-1]}
        ]
        texts = [QUESTION, SECOND, "Hvor er Åse 😀?"]
        tensor = triton.InferInput("question", [3], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object), binary_data=binary)
        reply = client.infer("realmops", [tensor], request_id="7")
        records = [server.ask(text) for text in texts]
        assert reply.get_response()["id"] == "7"
        assert reply.get_response()["model_version"] == records[0]["model"]["version"]
        assert [str(one) for one in reply.as_numpy("answer")] == [one["answer"] for one in records]
        assert reply.as_numpy("score") == pytest.approx([one["score"] for one in records], rel=1e-5)
        assert reply.as_numpy("probability") == pytest.approx([one["probability"] for one in records], rel=1e-5)
        assert reply.as_numpy("abstained").tolist() == [one["abstained"] for one in records]
        assert [json.loads(one)["citations"][0]["quote"] for one in reply.as_numpy("record")] == [
            one["answer"] for one in records
        ]
        wanted = [triton.InferRequestedOutput("answer", binary_data=binary)]
        [output] = client.infer("realmops", [tensor], outputs=wanted).get_response()["outputs"]
        assert output["name"] == "answer"
        with pytest.raises(Exception, match="this server serves 'realmops'"):
            client.infer("other", [tensor])
    finally:
        client.close()


GOOD = {"name": "question", "datatype": "BYTES", "shape": [1], "data": [QUESTION]}


def test_a_model_without_a_calibration_has_no_probability_in_any_protocol(copy: Path) -> None:
    tuned = copy / "root/models/finetune"
    made = read_json(tuned / "manifest.json")
    (tuned / "confidence.json").unlink()
    write_manifest(tuned, "finetune", **{key: made[key] for key in ("fingerprint", "sections")})
    with client_of(copy / "root") as client:
        record = client.post("/v1/answer", json={"question": QUESTION}).json()
        assert (record["probability"], record["abstained"]) == (None, True)
        path = "/v2/models/realmops"
        names = ["answer", "score", "abstained", "record"]
        assert [output["name"] for output in client.get(path).json()["outputs"]] == names
        outputs = client.post(f"{path}/infer", json={"inputs": [GOOD]}).json()["outputs"]
        assert [output["name"] for output in outputs] == names
        assert outputs[1]["data"] == [pytest.approx(record["score"], rel=1e-5)]
        refused = client.post(f"{path}/infer", json={"inputs": [GOOD], "outputs": [{"name": "probability"}]})
        assert (refused.status_code, "is not calibrated" in refused.text) == (422, True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"inputs": []}, "expected one tensor"),
        ({"inputs": [{**GOOD, "datatype": "FP32"}]}, "the datatype BYTES"),
        ({"inputs": [{**GOOD, "shape": [2]}]}, "has 1 elements but the shape [2]"),
        ({"inputs": [{**GOOD, "shape": [-1]}]}, "'shape'"),
        ({"inputs": [{**GOOD, "shape": [True]}]}, "'shape'"),
        ({"inputs": [{**GOOD, "data": [1]}]}, "not a list of strings"),
        ({"inputs": [{**GOOD, "data": [], "shape": [0]}]}, "0 questions; 1 to 64"),
        ({"inputs": [{**GOOD, "data": ["a"] * 65, "shape": [65]}]}, "65 questions; 1 to 64"),
        ({"inputs": [{**GOOD, "data": ["x" * 2001]}]}, "has 2001 characters; at most 2000"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 9}}]}, "0 bytes follow"),
        ({"inputs": [GOOD], "outputs": [{"name": "logits"}]}, "expected one or more of answer"),
        ({"inputs": [GOOD], "outputs": [{"name": ["answer"]}]}, "expected one or more of answer"),
        ({"inputs": [GOOD], "outputs": [{"name": "answer"}, {"name": "logits"}]}, "expected one or more of answer"),
        ({"inputs": [GOOD], "outputs": [{"name": "answer"}, {"name": "answer"}]}, "each once"),
    ],
)
def test_an_open_inference_call_that_is_none(server: Served, call: Any, told: str) -> None:
    status, _, reply = server.call("/v2/models/realmops/infer", call)
    assert status == 422
    assert told in reply["error"]


@pytest.mark.parametrize(
    ("size", "tail", "told"),
    [
        (b"2", b"\x01\x00", "ends within a string's length"),
        (b"3", b"\x01\x00\x00", "ends within a string's length"),
        (b"6", b"\xff\xff\xff\xff\x00\x00", "more than remain"),
        (b"5", b"\x01\x00\x00\x00\xff", "not valid UTF-8"),
    ],
)
def test_tensors_as_bytes_that_are_damaged(server: Served, size: bytes, tail: bytes, told: str) -> None:
    tensor = b'{"name":"question","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%s}}' % size
    head = b'{"inputs":[%s]}' % tensor
    raw, length = head + tail, {"Inference_Header_Content_Length": str(len(head))}
    status, _, reply = server.call("/v2/models/realmops/infer", raw=raw, **length)
    assert (status, told in reply["error"]) == (422, True), reply
    for wrong in ("-1", "x", str(len(raw) + 1), "9" * 5000):
        status, _, reply = server.call("/v2/models/realmops/infer", raw=raw, Inference_Header_Content_Length=wrong)
        assert (status, "expected a number of bytes" in reply["error"]) == (422, True)


# ---- generations


def test_an_update_takes_over_and_a_damaged_one_does_not(copy: Path) -> None:
    with served(copy / "root") as server:
        before = server.ask()
        update(copy, "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931.")
        wait_for(lambda: server.ask()["model"]["index_generation"] == 1, 30, server.process)
        after = server.ask()
        assert after["model"]["snapshot"] != before["model"]["snapshot"]
        assert after["model"]["version"] == before["model"]["version"], "the weights are the same"
        [made] = (copy / "root/updates").iterdir()
        bad = copy / "root/updates/bad"
        shutil.copytree(made, copy / "root/.bad")
        manifest = read_json(copy / "root/.bad/manifest.json")
        write_manifest(copy / "root/.bad", "update", **{k: manifest[k] for k in ("model", "corpus_hash")}, number=2)
        index = copy / "root/.bad/finetune/index.safetensors"
        index.write_bytes(bytes(len(index.read_bytes())))  # not that of the manifest any more
        (copy / "root/.bad").rename(bad)
        ready = wait_for(lambda: (r := server.call("/health/ready")[2])["refused"] and r, 30, server.process)
        assert "index.safetensors has sha256" in ready["refused"]["reason"]
        assert 'realmops_generations_total{result="refused"} 1.0' in server.call("/metrics")[2]
        assert server.ask() == after, "the old one serves on"
        shutil.rmtree(bad)
        wait_for(lambda: server.call("/health/ready")[2]["refused"] is None, 30, server.process)


@pytest.mark.parametrize("gone", ["lexical", "corpus/sources.jsonl"])
def test_no_reply_names_a_folder_of_the_servers_disk(copy: Path, gone: str, caplog: pytest.LogCaptureFixture) -> None:
    """Files that go while it serves: what needs them fails with 500, and the log alone has the path."""
    path = copy / "root/data/snapshot" / gone
    with client_of(copy / "root", raise_server_exceptions=False) as client:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(copy / "root/models/finetune")
        watcher = client.app.state.watcher  # type: ignore[attr-defined]
        assert watcher.poll() is False
        watcher.poll_error = "the model registry failed: unable to open 'sqlite:////srv/runs/mlflow.db'"
        replies = dict(every_call(client))
    states = {reply.status_code for reply in replies.values()}
    assert states == {200, 500}, "nothing is a caller's mistake"
    for call, reply in replies.items():
        assert str(copy) not in reply.text, (call, reply.text)
        assert "/srv" not in reply.text, (call, reply.text)
        if reply.status_code == 500:
            assert "could not be answered" in reply.text, call  # pages escape the rest
    [(_, ready)] = [(call, reply) for call, reply in replies.items() if "/health/ready" in call and "/v2" not in call]
    assert ready.json()["refused"]["reason"].startswith("finetune holds no manifest.json")
    assert ready.json()["registry_away"] == "the model registry failed: unable to open 'mlflow.db'"
    assert str(copy / "root/models/finetune") in caplog.text


def test_weights_that_are_not_numbers_do_not_serve(answering: Path) -> None:
    """Calibrated, such an answer has the probability 0, which is a number; its score is none."""
    generation = open_run(answering / "root")
    assert generation.confidence is not None
    assert generation.model.reader.spans is not None
    with torch.no_grad():
        generation.model.reader.spans.start.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="a first answer is nan: the weights are damaged"):
        generation.probe()


def test_what_cannot_be_served_is_told_at_the_start(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = cli("serve", "--root", tmp_path / "empty", "--port", "0")
    assert (result.exit_code, "it is no finished finetune" in result.stderr) == (2, True), result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = cli("serve", "--root", copy / "root", "--port", str(taken.getsockname()[1]))
    assert (result.exit_code, "in use; use another one" in result.stderr) == (2, True), result.stderr
    del result
    gc.collect()  # a socket left open is a ResourceWarning, which ends the test
    (tmp_path / "token").write_text(" \n")
    result = cli("serve", "--root", copy / "root", "--token-file", tmp_path / "token")
    assert (result.exit_code, "holds no valid bearer token" in result.stderr) == (2, True)
    result = cli("serve", "--root", copy / "root", "--model", "realmops")
    assert (result.exit_code, "expected models:/NAME@champion" in result.stderr) == (2, True)


# ---- at the terminal


def test_ask_gives_the_same_record_and_verify_agrees(answering: Path, server: Served, tmp_path: Path) -> None:
    result = cli("ask", QUESTION, "--root", answering / "root", "--json")
    record, served_record = json.loads(result.stdout), server.ask()
    assert record.keys() == served_record.keys()
    assert (record["answer"], record["model"]) == (served_record["answer"], served_record["model"])
    shown = cli("ask", QUESTION, "--root", answering / "root").stdout
    first = record["citations"][0]
    assert f"{record['answer']}  (p = " in shown
    assert "ask: p is the probability that an answer is right, fitted on 20 questions: questions.dev" in result.stderr
    assert f"[{record['answer']}]" in shown
    assert f"documents.jsonl, characters {first['start']} to {first['end']}" in shown
    every = cli("ask", "--from", answering / "questions.test.jsonl", "--root", answering / "root", "--json")
    (tmp_path / "answers.jsonl").write_text(every.stdout)
    checked = cli("verify", tmp_path / "answers.jsonl", answering / "documents.jsonl")
    assert (checked.exit_code, checked.stdout.startswith("2 answers, ")) == (0, True), checked.output
    nothing = cli("ask", "--root", answering / "root")
    assert (nothing.exit_code, "no questions: give QUESTION, or --from" in nothing.stderr) == (2, True)


def test_a_question_of_a_file_that_is_too_long_gets_an_error_and_the_rest_is_scored(
    answering: Path, tmp_path: Path
) -> None:
    said = json.loads(cli("ask", QUESTION, "--root", answering / "root", "--json").stdout)["answer"]
    texts = ((QUESTION, said), ("who " * 90, "x"), (QUESTION + "?", "no such answer"), (QUESTION, said))
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answers": [answer]}) + "\n" for text, answer in texts))
    found = cli("ask", "--from", file, "--root", answering / "root", "--json")
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [record["question"] for record in records] == [text.strip() for text, _ in texts]
    assert ["error" in record for record in records] == [False, True, False, False]
    assert "has 270 wordpieces, 1 to" in records[1]["error"]
    assert f"exact match 0.500: 2 of 4 questions of {file} are correct" in found.stderr
    assert (found.exit_code, f"1 of the questions in {file} have no answer" in found.stderr) == (1, True)
    assert "error: the question" in cli("ask", "--from", file, "--root", answering / "root").stdout
    made = tmp_path / "made.jsonl"
    made.write_text(json.dumps({"question": QUESTION, "answers": [said], "not_in": ["0"]}) + "\n")
    assert "exact match" not in cli("ask", "--from", made, "--root", answering / "root").stderr
    (tmp_path / "answers.jsonl").write_text(found.stdout)
    checked = cli("verify", tmp_path / "answers.jsonl", answering / "documents.jsonl")
    assert (checked.exit_code, checked.stdout.startswith("3 answers, ")) == (0, True), checked.output


def test_words_around_a_quotation_are_whole() -> None:
    text = "zebra " * 20 + "the answer" + " quagga" * 20
    start = text.index("the answer")
    passage = {"passage_id": "d#0", "text": text, "start": 100}
    cited = {"passage_id": "d#0", "document_id": "d", "title": "T", "uri": "f.txt", "quote": "the answer", "p_z": 0.5}
    cited |= {"start": 100 + start, "end": 110 + start}
    record = {"answer": "the answer", "probability": 0.9, "abstained": False, "passages": [passage]}
    record["model"] = {"reader": "spans"}
    _, quoted, where = format_record({**record, "citations": [cited]})
    assert quoted == "  T: … " + "zebra " * 10 + "[the answer]" + " quagga" * 8 + " …"
    assert where == f"    document d, f.txt, characters {100 + start} to {110 + start}, p(z|x) 0.50"
    passage["text"], cited["start"], cited["end"] = "It is the answer.", 106, 116
    assert format_record({**record, "citations": [cited]})[1] == "  T: It is [the answer]."
