"""Feedback on answers: the file that keeps it, who may send it, the questions it gives, and MLflow's assessments."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient
from power import Disk
from small_project import cli, wait_for

from realmops.answering import feedback as module
from realmops.answering.feedback import (
    Feedback,
    FeedbackFileFull,
    append_feedback,
    confirmed_labels,
    feedback_file,
    read_feedback,
)
from realmops.answering.own_questions import Label, save_labels
from realmops.questions.question_sets import read_questions
from realmops.serve.app import make_app
from realmops.serve.guard import COOKIE, Token
from realmops.serve.metrics import Metrics
from realmops.tracking import feedback_log

RIGHT = {"question": "Where was Anna Berg born?", "answer": "Oslo", "right": True, "passage_id": "p1"}
WRONG = {"question": "Who built The Star?", "answer": "Karl Lund", "right": False, "correct_answer": "Jon Vik"}
MISSING = {"question": "When did Maria Holm die?", "answer": "", "right": False, "correct_answer": "1972"}
MISSING["correct_passage_id"] = "p7"
TOKEN = "s3cret"
FORM = {**RIGHT, "right": "yes"}


def client(root: Path, token: str | None = None) -> TestClient:
    """A client of the routes over no model: none of these asks it."""
    watcher: Any = SimpleNamespace(source=SimpleNamespace(root=root, name="realmops"))
    batcher: Any = SimpleNamespace()
    return TestClient(make_app(batcher, watcher, Metrics(), token), follow_redirects=False)


def stored(root: Path) -> list[tuple[str, str, bool, str, str]]:
    entries = read_feedback(feedback_file(root))
    return [(e.question, e.answer, e.right, e.correct_answer, e.passage_id) for e in entries]


def test_feedback_survives_a_power_cut_and_a_killed_process(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        append_feedback(tmp_path, Feedback(**RIGHT))
        with open(feedback_file(tmp_path), "ab") as file:
            file.write(b'{"question": "Wh')
        append_feedback(tmp_path, Feedback(**WRONG))
        assert disk.lost(feedback_file(tmp_path)) == []
    assert stored(tmp_path) == [(*tuple(RIGHT.values())[:3], "", "p1"), (*tuple(WRONG.values()), "")]


def test_concurrent_writers_write_whole_lines(tmp_path: Path) -> None:
    names = [f"{name} {n}?" for name in range(8) for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: append_feedback(tmp_path, Feedback(name, "x" * 500, True)), names))
    assert {question for question, *_ in stored(tmp_path)} == {*names}


def test_line_and_file_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "\U0001f600" * 2000
    append_feedback(tmp_path, Feedback(longest, longest, False, longest, "p" * 80))
    with pytest.raises(ValueError, match="unicode"):
        Feedback("\ud800", "Oslo", True)
    before = feedback_file(tmp_path).read_bytes()
    monkeypatch.setattr(module, "FILE_LIMIT", len(before) + 10)
    with pytest.raises(FeedbackFileFull, match="is full"):
        append_feedback(tmp_path, Feedback(**RIGHT))
    assert feedback_file(tmp_path).read_bytes() == before
    assert client(tmp_path).post("/v1/feedback", json=RIGHT).status_code == 507
    for line in ('{"question": "a"}', '{"question": "a", "answer": 1, "right": true}', "{"):
        feedback_file(tmp_path).write_bytes(before + line.encode() + b"\n")
        with pytest.raises(ValueError, match=r"feedback\.jsonl:2"):
            stored(tmp_path)


def test_the_last_entry_of_a_question_counts() -> None:
    entries = [
        Feedback("Where?", "Oslo", True, "", "p"),
        Feedback("Who?", "", False, "Anna", "p", "p2"),
        Feedback(" Where? ", "Oslo", False, "Bergen", "p"),
        Feedback("When?", "1950", True, "", "p"),
        Feedback("When?", "1950", False),
        Feedback("How?", "by ship", False),
    ]
    labels = [(label.question, label.answer, label.passage_id) for label in confirmed_labels(entries)]
    assert labels == [("Where?", "Bergen", ""), ("Who?", "Anna", "p2")]


def test_questions_are_the_same_by_their_text() -> None:
    """Not by the normal form of exact match, which has no marks, no articles and no case."""
    texts = ["Who created C?", "Who created C++?", "Who created C#?", "who created C?", "Who created the C?"]
    labels = confirmed_labels([Feedback(text, answer, True) for text, answer in zip(texts, "A!的Bc", strict=True)])
    assert [(label.question, label.answer) for label in labels] == list(zip(texts, "A!的Bc", strict=True))
    assert len({label.record()["id"] for label in labels}) == 5
    composed = [Feedback("Wo ist Köln?", "x", True), Feedback("Wo  ist Ko\u0308ln?\n", "am Rhein", True)]
    [label] = confirmed_labels(composed)
    assert (label.question, label.answer) == ("Wo ist Köln?", "am Rhein")
    assert label.record()["id"] == confirmed_labels(composed[:1])[0].record()["id"]


def test_the_command_adds_dev_questions_to_the_file_of_labels(tmp_path: Path) -> None:
    """Confirmed and corrected ones, whose answer there is not newer; a line without a time, or with more, is kept."""
    out = tmp_path / "questions/own.jsonl"
    command = ("questions", "--from-feedback", "--root", tmp_path, "--out", out)
    missing = cli(*command)
    assert (missing.exit_code, "no feedback was given yet" in missing.output) == (2, True)
    for entry in (RIGHT, WRONG, {**WRONG, "question": "Why?", "correct_answer": ""}, MISSING):
        append_feedback(tmp_path, Feedback(**entry))
    result = cli(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("4 judgements read, 3 questions added or replaced\n")
    assert f"next: realmops run all --set questions.dev={out} --root {tmp_path}" in result.stdout
    questions = read_questions([out], format="jsonl")
    assert [(q.answers[0], q.passage_id) for q in questions] == [("Oslo", "p1"), ("Jon Vik", None), ("1972", "p7")]
    save_labels(out, [Label(WRONG["question"], "labelled later")])
    with open(out, "a") as file:
        file.write('{"question": "By hand?", "answer": "yes", "note": "mine"}\n')
    append_feedback(tmp_path, Feedback("By hand?", "no", True))
    append_feedback(tmp_path, Feedback(MISSING["question"], "1973", True))
    assert "6 judgements read, 1 questions added or replaced; 3 are in the file already" in cli(*command).stdout
    answers = [q.answers[0] for q in read_questions([out], format="jsonl")]
    assert answers == ["Oslo", "labelled later", "1973", "yes"]
    assert '"note": "mine"' in out.read_text()
    refused = cli("questions", "--root", tmp_path, "--from-feedback", "--label")
    assert (refused.exit_code, "either FILES, --label or --from-feedback" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": "yes"}, "right"),
        ({"question": " "}, "question is empty"),
        ({"answer": "", "right": False}, "answer is empty"),
        ({"right": False, "correct_passage_id": "p2"}, "correct_passage_id is set without correct_answer"),
        ({"correct_passage_id": "x" * 81}, "correct_passage_id"),
        ({"question": "x" * 2001}, "question"),
        ({"correct_answer": "Bergen"}, "correct_answer is set although right is true"),
        ({"right": False, "correct_answer": " \n"}, "which is blank"),
        ({"more": 1}, "more"),
    ],
)
def test_contradictory_feedback_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    reply = client(tmp_path).post("/v1/feedback", json={**RIGHT, **change})
    assert (reply.status_code, message in reply.json()["error"]["message"]) == (422, True), reply.text
    assert not feedback_file(tmp_path).exists()


def test_programs_send_feedback_and_learn_if_it_cannot_be_saved(tmp_path: Path) -> None:
    for entry in (RIGHT, WRONG, MISSING):
        reply = client(tmp_path).post("/v1/feedback", json=entry)
        assert (reply.status_code, reply.json()) == (200, {"kept": True})
    assert [question for question, *_ in stored(tmp_path)] == [e["question"] for e in (RIGHT, WRONG, MISSING)]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/.realmops").write_text("no folder")
    reply = client(tmp_path / "full").post("/v1/feedback", json=RIGHT)
    assert (reply.status_code, "cannot be saved" in reply.text) == (503, True)


def test_the_pages_forms_redirect_to_the_question(tmp_path: Path) -> None:
    reply = client(tmp_path).post("/feedback", data=FORM)
    assert reply.status_code == 303
    assert parse_qs(urlsplit(reply.headers["location"]).query) == {"q": [RIGHT["question"]], "noted": ["1"]}
    correction = {**FORM, "right": "no", "correct_answer": " Bergen ", "correct_passage_id": "p2"}
    assert client(tmp_path).post("/feedback", data=correction).status_code == 303
    question = RIGHT["question"], "Oslo"
    assert stored(tmp_path) == [(*question, True, "", "p1"), (*question, False, "Bergen", "p1")]
    assert [entry.correct_passage_id for entry in read_feedback(feedback_file(tmp_path))] == ["", "p2"]
    many = {f"f{n}": "1" for n in range(20)}
    for change in ({"right": "maybe"}, {"f": "1"}, many, {"right": "no", "correct_answer": "x" * 3000}):
        assert client(tmp_path).post("/feedback", data={**FORM, **change}).status_code == 422
    assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize(
    ("headers", "api", "form"),
    [
        ({}, 401, 401),
        ({"Authorization": "Bearer wrong"}, 401, 401),
        ({"Cookie": f"{COOKIE}={Token(TOKEN).cookie()}"}, 401, 303),
        ({"Authorization": f"Bearer {TOKEN}"}, 200, 303),
        *(
            ({"Authorization": f"Bearer {TOKEN}", **site}, *statuses)
            for site, statuses in (
                ({"Sec-Fetch-Site": "same-origin", "Origin": "null"}, (200, 303)),
                ({"Origin": "http://testserver"}, (200, 303)),
                ({"Sec-Fetch-Site": "cross-site"}, (403, 403)),
                ({"Sec-Fetch-Site": "none"}, (403, 403)),
                ({"Origin": "http://evil.test"}, (403, 403)),
                ({"Origin": "null"}, (403, 403)),
            )
        ),
    ],
)
def test_feedback_needs_the_token_and_comes_from_no_other_site(
    tmp_path: Path, headers: dict[str, str], api: int, form: int
) -> None:
    """The token for programs; on the page its cookie, too."""
    guarded = client(tmp_path, TOKEN)
    assert guarded.post("/v1/feedback", json=RIGHT, headers=headers).status_code == api
    assert guarded.post("/feedback", data=FORM, headers=headers).status_code == form
    assert feedback_file(tmp_path).exists() is (form == 303)


def test_feedback_becomes_assessments_of_traces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question and answer in a trace; whether it is right, and the correct answer if it is known."""
    import mlflow

    from realmops.tracking.client import local_tracking_uri

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = local_tracking_uri(tmp_path / ".realmops/mlflow")
    for entry in (RIGHT, WRONG, MISSING):
        append_feedback(tmp_path, Feedback(**entry))
    with open(feedback_file(tmp_path), "ab") as file:
        file.write(b'{"damaged": 1}\n{"question": "half a li')
    try:
        assert [feedback_log.send_feedback(tmp_path) for _ in range(2)] == [3, 0]
        assert feedback_log.is_tracked(tmp_path)
        append_feedback(tmp_path, Feedback("Why?", "so", False))
        assert feedback_log.send_feedback(tmp_path) == 1
        mlflow.set_tracking_uri(uri)
        [experiment] = mlflow.search_experiments(filter_string="name = 'realmops'")
        traces = mlflow.search_traces(locations=[experiment.experiment_id], return_type="list")
    finally:
        mlflow.set_tracking_uri(None)  # the default would outlive the test in its variable
    sent = [
        (
            json.loads(trace.data.request)["question"],
            json.loads(trace.data.response)["answer"],
            {assessment.name: assessment.value for assessment in trace.info.assessments},
        )
        for trace in traces
    ]
    expected = [
        (RIGHT["question"], "Oslo", {"right": True, "expected_response": "Oslo"}),
        (WRONG["question"], "Karl Lund", {"right": False, "expected_response": "Jon Vik"}),
        (MISSING["question"], "", {"right": False, "expected_response": "1972"}),
        ("Why?", "so", {"right": False}),
    ]
    assert sorted(sent, key=str) == sorted(expected, key=str), "MLflow's times are too coarse for an order"
    assert {each.source.source_type for trace in traces for each in trace.info.assessments} == {"HUMAN"}


def test_an_unreachable_mlflow_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sender = feedback_log.FeedbackSender(tmp_path)
    sender.notify()
    assert not sender._new.is_set()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert client(tmp_path).post("/v1/feedback", json=RIGHT).status_code == 200
        wait_for(lambda: "feedback waits to be sent to MLflow" in caplog.text, 60)
    assert len(stored(tmp_path)) == 1
