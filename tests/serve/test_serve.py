"""``realmops serve`` over real HTTP: records, limits, protocols by their own clients, and swaps of models."""

import gc
import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
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
from realmops.evaluate.predictions import read_results
from realmops.opening import open_run
from realmops.serve.batching import Busy, Closed, RequestBatcher

SECOND = "Who wrote a novel?"
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


def test_several_questions_are_answered_in_their_order_and_as_alone(server: Served) -> None:
    texts = [question for pairs in QUESTIONS.values() for question, _ in pairs]
    status, _, reply = server.call("/v1/answer", {"questions": texts})
    assert status == 200
    assert [record["question"] for record in reply["answers"]] == texts
    assert [record["answer"] for record in reply["answers"]] == [server.ask(text)["answer"] for text in texts]


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
    sentence = f"  in: {unsure['quote']['quote']}"
    assert sentence not in format_record(shown)
    for record, title, reason in (
        (unsure, "no answer is certain enough: the best passages", "held back below 1)"),
        (never, "no answer is certain enough: the best passages", f"(score {plain['score']:.3g}, held back: too few"),
        (plain, "not calibrated: the best passages", f"(not calibrated: score {plain['score']:.3g})"),
    ):
        lines = format_record(record)
        place = lines.index(sentence) - 1
        assert (lines[0], place > 2, reason in lines[place]) == (title, True, True), lines
    assert [plain[name] for name in ("probability", "calibration", "threshold")] == [None] * 3
    assert (never["probability"], never["calibration"]) == (None, unsure["calibration"])


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


def test_a_stream_gives_the_sources_first(server: Served) -> None:
    status, headers, text = server.call("/v1/answer", {"questions": [QUESTION, SECOND], "stream": True})
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
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
        *((raw, "") for raw in (b"", b"{", b"\xff", b"[" * 100_000, b"null", b'{"question": NaN}')),
    ],
)
def test_an_invalid_request_gets_an_error(server: Served, body: Any, message: str) -> None:
    raw = {"raw": body} if isinstance(body, bytes) else {"body": body}
    status, _, reply = server.call("/v1/answer", **raw)
    assert status in (400, 422), reply
    assert reply["error"]["message"]
    assert message in reply["error"]["message"]
    assert "Traceback" not in "".join(server.log)


def test_json_without_its_content_type_is_refused_as_browsers_send_it_across_sites(server: Served) -> None:
    body = json.dumps({"question": QUESTION, "query": QUESTION}).encode()
    for route in ("/v1/answer", "/v1/search"):
        status, headers, reply = server.call(route, raw=body, Content_Type="text/plain", Origin="http://evil.no")
        assert (status, "send -H 'Content-Type: application/json'" in str(reply)) == (422, True)
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_foreign_host_name_that_resolves_to_loopback_reads_nothing(server: Served) -> None:
    body = {"question": QUESTION}
    status, _, reply = server.call("/v1/answer", body, Host="pages.example:80")
    assert (status, "--token-file" in reply["error"]["message"]) == (403, True)
    for name in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert server.call("/v1/answer", body, Host=name)[0] == 200


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
    assert {"/v1/answer", "/v1/search", "/v2/models/{name}/infer"} <= server.call("/openapi.json")[2]["paths"].keys()


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
    batcher.swap(second)
    pending += batcher.submit([Query(QUESTION)])
    held.released.set()
    batcher.close()
    versions = [opened.version, opened.version, "second"]
    assert [each.record.result(0)["model"]["version"] for each in pending] == versions
    assert [(model.version, len(batch)) for model, batch in held.batches] == [(version, 1) for version in versions]


def test_a_question_of_a_client_that_disconnected_is_not_answered(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, batcher = Held(monkeypatch, OpenedModel, "find"), RequestBatcher(opened)
    batcher.submit([Query("Who is first?")])
    assert held.started.wait(30)
    cancelled, other = batcher.submit([Query("Who hung up?"), Query(QUESTION)])
    cancelled.is_cancelled = True
    held.released.set()
    batcher.close()
    assert [query.question for _, batch in held.batches for query in batch] == ["Who is first?", QUESTION]
    assert other.record.result(0)["question"] == QUESTION
    assert (cancelled.record.done(), batcher.depth) == (False, 0)


def test_one_question_that_fails_costs_no_other_its_answer(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = OpenQa.find

    def fails(model: Any, questions: list[Any], ranked: int = 0) -> Any:
        if SECOND in [question.question for question in questions]:
            raise RuntimeError("out of memory")
        return real(model, questions, ranked)

    monkeypatch.setattr(OpenQa, "find", fails)
    batcher = RequestBatcher(opened)
    good, bad, other = batcher.submit([Query(text) for text in (QUESTION, SECOND, QUESTION)])
    batcher.close()
    assert good.record.result(0)["answer"] == other.record.result(0)["answer"]
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.record.result(0)
    assert "no answer to" in caplog.text


def test_an_idle_server_frees_a_replaced_model_without_the_garbage_collector(answering: Path) -> None:
    opened = open_run(answering / "root")
    batcher = RequestBatcher(opened)
    assert batcher.submit([Query(QUESTION)])[0].record.result(300)["answer"]
    assert batcher.search(PassageQuery(QUESTION)).record.result(300)["passages"]
    batcher.swap(open_run(answering / "root"))
    replaced = [ref(part) for part in (opened, opened.model, opened.model.snapshot, opened.passage_search)]
    gc.disable()  # its pass would stop all requests
    try:
        del opened
        wait_for(lambda: all(part() is None for part in replaced), 3)
    finally:
        gc.enable()
    batcher.close()


# ---- Open Inference


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_the_records(server: Served, binary: bool) -> None:
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
        tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object), binary_data=binary)
        reply, records = client.infer("realmops", [tensor], request_id="7"), [server.ask(text) for text in texts]
        assert reply.get_response()["id"] == "7"
        assert reply.get_response()["model_version"] == records[0]["model"]["version"]
        for name in ("score", "probability", "abstained"):
            assert reply.as_numpy(name).tolist() == pytest.approx([record[name] for record in records], rel=1e-5)
        assert list(map(str, reply.as_numpy("answer"))) == [record["answer"] for record in records]
        quotes = [json.loads(text)["citations"][0]["quote"] for text in reply.as_numpy("record")]
        assert quotes == [record["answer"] for record in records]
        requested = [triton.InferRequestedOutput("answer", binary_data=binary)]
        [output] = client.infer("realmops", [tensor], outputs=requested).get_response()["outputs"]
        assert output["name"] == "answer"
        with pytest.raises(Exception, match="this server serves 'realmops'"):
            client.infer("other", [tensor])
    finally:
        client.close()


@pytest.mark.parametrize("threshold", [None, ALWAYS_ABSTAIN])
def test_a_model_that_promises_nothing_has_no_probability_in_any_protocol(copy: Path, threshold: float | None) -> None:
    tuned = copy / "root/models/finetune"
    manifest = read_json(tuned / "manifest.json")
    (tuned / "confidence.json").unlink()
    if threshold is not None:
        calibration(threshold).save(tuned)
    write_manifest(tuned, "finetune", **{key: manifest[key] for key in ("fingerprint", "sections")})
    with client_of(copy / "root") as client:
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
        ({"inputs": []}, "expected one tensor"),
        ({"inputs": [{**GOOD, "datatype": "FP32"}]}, "the datatype BYTES"),
        ({"inputs": [{**GOOD, "shape": [2]}]}, "has 1 elements but the shape [2]"),
        ({"inputs": [{**GOOD, "shape": [True]}]}, "'shape'"),
        ({"inputs": [{**GOOD, "data": [1]}]}, "not a list of strings"),
        ({"inputs": [{**GOOD, "data": ["a"] * 65, "shape": [65]}]}, "65 questions; 1 to 64"),
        ({"inputs": [{**GOOD, "data": ["x" * 2001]}]}, "has 2001 characters; at most 2000"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 9}}]}, "0 bytes follow"),
        ({"inputs": [GOOD], "outputs": [{"name": ["answer"]}]}, "expected one or more of answer"),
        ({"inputs": [GOOD], "outputs": [{"name": "answer"}, {"name": "answer"}]}, "each once"),
    ],
)
def test_an_invalid_inference_request_is_refused(server: Served, call: Any, message: str) -> None:
    status, _, reply = server.call(INFER, call)
    assert (status, message in reply["error"]) == (422, True), reply


@pytest.mark.parametrize(
    ("size", "tail", "message"),
    [
        (b"2", b"\x01\x00", "ends within a string's length"),
        (b"6", b"\xff\xff\xff\xff\x00\x00", "more than remain"),
        (b"5", b"\x01\x00\x00\x00\xff", "not valid UTF-8"),
    ],
)
def test_a_damaged_binary_tensor_is_refused(server: Served, size: bytes, tail: bytes, message: str) -> None:
    tensor = b'{"name":"question","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%s}}' % size
    head = b'{"inputs":[%s]}' % tensor
    for length, problem in ((str(len(head)), message), *((n, "a number of bytes") for n in ("-1", "x", "9" * 5000))):
        status, _, reply = server.call(INFER, raw=head + tail, Inference_Header_Content_Length=length)
        assert (status, problem in reply["error"]) == (422, True), reply


# ---- the served model


def test_an_update_is_served_and_a_damaged_one_is_not(copy: Path) -> None:
    with served(copy / "root") as server:
        before = server.ask()
        update(copy, "Anna Berg was born in Bergen. She wrote The Cold Sea in 1931.")
        wait_for(lambda: server.ask()["model"]["index_generation"] == 1, 30, server.process)
        after = server.ask()
        assert after["model"]["snapshot"] != before["model"]["snapshot"]
        assert after["model"]["version"] == before["model"]["version"], "the weights are the same"
        [folder] = (copy / "root/updates").iterdir()
        bad = copy / "root/updates/bad"
        shutil.copytree(folder, copy / "root/.bad")
        manifest = read_json(copy / "root/.bad/manifest.json")
        write_manifest(copy / "root/.bad", "update", **{k: manifest[k] for k in ("model", "corpus_hash")}, number=2)
        index = copy / "root/.bad/finetune/index.safetensors"
        index.write_bytes(bytes(len(index.read_bytes())))  # not that of the manifest any more
        (copy / "root/.bad").rename(bad)
        ready = wait_for(lambda: (r := server.call("/health/ready")[2])["refused"] and r, 30, server.process)
        assert "index.safetensors has sha256" in ready["refused"]["reason"]
        assert 'realmops_generations_total{result="refused"} 1.0' in server.call("/metrics")[2]
        assert server.ask() == after, "the old one is still served"
        shutil.rmtree(bad)
        wait_for(lambda: server.call("/health/ready")[2]["refused"] is None, 30, server.process)


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
            (copy / "root", "--port", taken.getsockname()[1], "in use; use another one"),
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
    (tmp_path / "answers.jsonl").write_text(result.stdout)
    checked = cli("verify", tmp_path / "answers.jsonl", answering / "documents.jsonl")
    assert (checked.exit_code, checked.stdout.startswith("3 answers, ")) == (0, True), checked.output
    assert f"[{answer}]" in cli("ask", QUESTION, "--root", answering / "root").stdout
