"""Feedback on answers: the file that keeps it, who may send it, what is made of it, and MLflow's assessments."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient
from power import Disk
from small_project import cli, wait_for

from realmops.answering import feedback as kept
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
from realmops.serve.page import feedback_address
from realmops.tracking import feedback_log as sending

RIGHT = {"question": "Where was Anna Berg born?", "answer": "Oslo", "right": True, "passage_id": "p1"}
WRONG = {"question": "Who built The Star?", "answer": "Karl Lund", "right": False, "correct_answer": "Jon Vik"}
MISSING = {
    "question": "When did Maria Holm die?",
    "answer": "",
    "right": False,
    "correct_answer": "1972",
    "correct_passage_id": "p7",
}
TOKEN = "s3cret"


def client(root: Path, token: str | None = None) -> TestClient:
    """The routes over no model: none of these asks it."""
    watcher: Any = SimpleNamespace(source=SimpleNamespace(root=root, name="realmops"))
    batcher: Any = SimpleNamespace()
    return TestClient(make_app(batcher, watcher, Metrics(), token), follow_redirects=False)


def said(root: Path) -> list[tuple[str, str, bool, str, str]]:
    return [
        (one.question, one.answer, one.right, one.correct_answer, one.passage_id)
        for one in read_feedback(feedback_file(root))
    ]


# ---- the file


def test_what_is_kept_survives_a_power_cut_and_comes_back_in_order(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        for one in (RIGHT, WRONG):
            append_feedback(tmp_path, Feedback(**one))
            assert disk.lost(feedback_file(tmp_path)) == []
    assert said(tmp_path) == [(*tuple(RIGHT.values())[:3], "", "p1"), (*tuple(WRONG.values()), "")]


def test_many_callers_write_whole_lines(tmp_path: Path) -> None:
    def tell(name: int) -> None:
        for n in range(20):
            append_feedback(tmp_path, Feedback(f"{name} {n}?", "x" * 500, True))

    threads = [threading.Thread(target=tell, args=(name,)) for name in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert {question for question, *_ in said(tmp_path)} == {f"{name} {n}?" for name in range(8) for n in range(20)}


def test_half_a_line_of_a_killed_process_goes(tmp_path: Path) -> None:
    append_feedback(tmp_path, Feedback(**RIGHT))
    with open(feedback_file(tmp_path), "ab") as file:
        file.write(b'{"question": "Wh')
    append_feedback(tmp_path, Feedback(**WRONG))
    assert [question for question, *_ in said(tmp_path)] == [RIGHT["question"], WRONG["question"]]


def test_line_and_file_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="allowed: 32768"):
        append_feedback(tmp_path, Feedback("x" * kept.LINE_LIMIT, "Oslo", True))
    with pytest.raises(ValueError, match="surrogate"):
        append_feedback(tmp_path, Feedback("\ud800", "Oslo", True))
    append_feedback(tmp_path, Feedback(**RIGHT))
    before = feedback_file(tmp_path).read_bytes()
    monkeypatch.setattr(kept, "FILE_LIMIT", len(before) + 10)
    with pytest.raises(FeedbackFileFull, match="is full"):
        append_feedback(tmp_path, Feedback(**RIGHT))
    assert feedback_file(tmp_path).read_bytes() == before
    assert client(tmp_path).post("/v1/feedback", json=RIGHT).status_code == 507


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    append_feedback(tmp_path, Feedback(**RIGHT))
    for line in ('{"question": "a"}', '{"question": "a", "answer": 1, "right": true}', "{"):
        with open(feedback_file(tmp_path), "a") as file:
            file.write(f"{line}\n")
        with pytest.raises(ValueError, match=r"feedback\.jsonl:2"):
            said(tmp_path)
        feedback_file(tmp_path).write_bytes(feedback_file(tmp_path).read_bytes().split(b"\n")[0] + b"\n")


# ---- the questions


def test_what_was_said_last_of_a_question_counts() -> None:
    def one(question: str, answer: str, right: bool, correct: str = "", holding: str = "") -> Feedback:
        return Feedback(question, answer, right, correct, "p", holding)

    found = confirmed_labels(
        [
            one("Where?", "Oslo", True),
            one("Who?", "", False, "Anna", "p2"),
            one(" Where? ", "Oslo", False, "Bergen"),
            one("When?", "1950", True),
            one("When?", "1950", False),
            one("How?", "by ship", False),
        ]
    )
    assert [(label.question, label.answer, label.passage_id) for label in found] == [
        ("Where?", "Bergen", ""),
        ("Who?", "Anna", "p2"),
    ]


def test_questions_are_the_same_by_their_text() -> None:
    """Not by the normal form of exact match, which has no marks, no articles and no case."""
    texts = ["Who created C?", "Who created C++?", "Who created C#?", "who created C?", "Who created the C?"]
    found = confirmed_labels([Feedback(text, f"Answer {n}", True) for n, text in enumerate(texts)])
    assert [(one.question, one.answer) for one in found] == [(text, f"Answer {n}") for n, text in enumerate(texts)]
    assert len({one.record()["id"] for one in found}) == 5
    composed = [Feedback("Wo ist Köln?", "x", True), Feedback("Wo  ist Ko\u0308ln?\n", "am Rhein", True)]
    [one] = confirmed_labels(composed)
    assert (one.question, one.answer) == ("Wo ist Köln?", "am Rhein")
    assert one.record()["id"] == confirmed_labels(composed[:1])[0].record()["id"]


@pytest.mark.parametrize("answer", ["A", "The", "!", "C#", "的"])
def test_an_answer_is_one_that_is_not_blank(answer: str, tmp_path: Path) -> None:
    for one in (Feedback("Which?", answer, True), Feedback("Which?", "B", False, answer)):
        [label] = confirmed_labels([one])
        assert label.answer == answer
    wrong = {**RIGHT, "right": False, "correct_answer": answer}
    assert client(tmp_path).post("/v1/feedback", json=wrong).status_code == 200
    assert said(tmp_path)[0][3] == answer


def test_the_command_adds_dev_questions_to_the_file_of_labels(tmp_path: Path) -> None:
    """Confirmed and corrected ones, whose answer there is not newer; a line without a time, or with more, stays."""
    out = tmp_path / "questions/own.jsonl"
    command = ("questions", "--from-feedback", "--root", tmp_path, "--out", out)
    missing = cli(*command)
    assert (missing.exit_code, "no feedback was given yet" in missing.output) == (2, True)
    for one in (RIGHT, WRONG, {**WRONG, "question": "Why?", "correct_answer": ""}, MISSING):
        append_feedback(tmp_path, Feedback(**one))
    done = cli(*command)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:2] == [
        "4 judgements read, 3 questions added or replaced",
        f"{out}: 3 of 20 questions, 17 left",
    ]
    assert f"next: realmops run all --set questions.dev={out} --root {tmp_path}" in done.stdout
    first = [("Oslo", "p1"), ("Jon Vik", None), ("1972", "p7")]
    found = read_questions([out], format="jsonl")
    assert [(q.answers[0], q.passage_id) for q in found] == first
    assert [q.question for q in found] == [RIGHT["question"], WRONG["question"], MISSING["question"]]
    save_labels(out, [Label(WRONG["question"], "labelled later")])
    with open(out, "a") as file:
        file.write('{"question": "By hand?", "answer": "yes", "note": "mine"}\n')
    append_feedback(tmp_path, Feedback("By hand?", "no", True))
    append_feedback(tmp_path, Feedback(MISSING["question"], "1973", True))
    assert "6 judgements read, 1 questions added or replaced; 3 are in the file already" in cli(*command).stdout
    found = read_questions([out], format="jsonl")
    assert [q.answers[0] for q in found] == ["Oslo", "labelled later", "1973", "yes"]
    assert '"note": "mine"' in out.read_text()
    for wrong in (("--from-feedback", out), ("--from-feedback", "--label"), ("--out", out)):
        refused = cli("questions", "--root", tmp_path, *wrong)
        assert (refused.exit_code, "either FILES, --label or --from-feedback" in refused.output) == (2, True)
    assert "give --out with the folder" in cli("questions", out, "--root", tmp_path).output
    refused = cli(*command[:-1], tmp_path)
    assert (refused.exit_code, f"{tmp_path} is a folder; expected a file" in refused.output) == (2, True)


# ---- over HTTP


def test_programs_send_feedback(tmp_path: Path) -> None:
    for one in (RIGHT, WRONG, MISSING):
        reply = client(tmp_path).post("/v1/feedback", json=one)
        assert (reply.status_code, reply.json()) == (200, {"kept": True})
    assert [question for question, *_ in said(tmp_path)] == [one["question"] for one in (RIGHT, WRONG, MISSING)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"right": "yes"}, "right"),
        ({"question": " "}, "question is empty"),
        ({"answer": ""}, "answer is empty"),
        ({"answer": "", "right": False}, "answer is empty"),
        ({"answer": " ", "right": True, "correct_answer": "Oslo"}, "answer is empty"),
        ({"right": False, "correct_passage_id": "p2"}, "correct_passage_id is set without correct_answer"),
        ({"correct_passage_id": "x" * 81}, "correct_passage_id"),
        ({"question": "x" * 2001}, "question"),
        ({"passage_id": "x" * 81}, "passage_id"),
        ({"correct_answer": "Bergen"}, "correct_answer is set although right is true"),
        ({"right": False, "correct_answer": " \n"}, "which is blank"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_feedback_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    reply = client(tmp_path).post("/v1/feedback", json={**RIGHT, **change})
    assert (reply.status_code, told in reply.json()["error"]["message"]) == (422, True), reply.text
    assert not feedback_file(tmp_path).exists()


def test_where_nothing_can_be_written_it_is_told(tmp_path: Path) -> None:
    (tmp_path / ".realmops").write_text("no folder")
    reply = client(tmp_path).post("/v1/feedback", json=RIGHT)
    assert (reply.status_code, "cannot be saved" in reply.text) == (503, True)


def test_the_pages_buttons_lead_back_to_the_question(tmp_path: Path) -> None:
    record = {**RIGHT, "citations": [{"passage_id": "p1"}]}
    place = f"/{feedback_address(record)}"
    reply = client(tmp_path).post(place, data={"right": "yes", "correct": "ignored", "passage": "p2"})
    assert reply.status_code == 303
    assert parse_qs(urlsplit(reply.headers["location"]).query) == {"q": [RIGHT["question"]], "noted": ["1"]}
    correction = {"right": "no", "correct": " Bergen ", "passage": "p2"}
    assert client(tmp_path).post(place, data=correction).status_code == 303
    assert said(tmp_path) == [
        (RIGHT["question"], "Oslo", True, "", "p1"),
        (RIGHT["question"], "Oslo", False, "Bergen", "p1"),
    ]
    assert [one.correct_passage_id for one in read_feedback(feedback_file(tmp_path))] == ["", "p2"]
    for form in ({}, {"right": "maybe"}, {f"f{n}": "1" for n in range(20)}, {"right": "no", "correct": "x" * 3000}):
        assert client(tmp_path).post(place, data=form).status_code == 422
    assert len(said(tmp_path)) == 2


def test_only_those_with_the_token_send_feedback(tmp_path: Path) -> None:
    """The token itself for programs; on the page its cookie, too."""
    guarded = client(tmp_path, TOKEN)
    cookie = {"Cookie": f"{COOKIE}={Token(TOKEN).cookie()}"}
    bearer, wrong = ({"Authorization": f"Bearer {one}"} for one in (TOKEN, "wrong"))
    page = f"/{feedback_address({**RIGHT, 'citations': []})}"
    for headers, api, form in (({}, 401, 401), (wrong, 401, 401), (cookie, 401, 303), (bearer, 200, 303)):
        assert guarded.post("/v1/feedback", json=RIGHT, headers=headers).status_code == api
        assert guarded.post(page, data={"right": "yes"}, headers=headers).status_code == form
    assert len(said(tmp_path)) == 3


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "null"}, False),
        ({"Origin": "http://testserver"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "http://evil.test"}, True),
        ({"Origin": "null"}, True),
    ],
)
def test_another_site_sends_none(tmp_path: Path, headers: dict[str, str], refused: bool) -> None:
    page = f"/{feedback_address({**RIGHT, 'citations': []})}"
    replies = [
        client(tmp_path).post("/v1/feedback", json=RIGHT, headers=headers),
        client(tmp_path).post(page, data={"right": "yes"}, headers=headers),
    ]
    assert [reply.status_code for reply in replies] == ([403, 403] if refused else [200, 303])
    assert feedback_file(tmp_path).exists() is not refused


# ---- MLflow


def test_it_becomes_assessments_of_traces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question and answer in a trace; whether it is right, and the right answer where it is known."""
    import mlflow

    from realmops.tracking.client import local_tracking_uri

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = local_tracking_uri(tmp_path / ".realmops/mlflow")
    for one in (RIGHT, WRONG, {**WRONG, "correct_answer": ""}, MISSING):
        append_feedback(tmp_path, Feedback(**one))
    with open(feedback_file(tmp_path), "ab") as file:
        file.write(b'{"damaged": 1}\n{"question": "half a li')
    try:
        assert [sending.send_feedback(tmp_path) for _ in range(2)] == [4, 0]
        assert sending.is_tracked(tmp_path)
        append_feedback(tmp_path, Feedback("Why?", "so", True))
        assert sending.send_feedback(tmp_path) == 1
        mlflow.set_tracking_uri(uri)
        [experiment] = mlflow.search_experiments(filter_string="name = 'realmops'")
        traces = mlflow.search_traces(locations=[experiment.experiment_id], return_type="list")
    finally:
        mlflow.set_tracking_uri(None)  # what was there by default would outlive the test in its variable
    found = [
        (
            json.loads(trace.data.request)["question"],
            json.loads(trace.data.response)["answer"],
            {one.name: one.value for one in trace.info.assessments},
        )
        for trace in traces
    ]
    wanted = [
        (RIGHT["question"], "Oslo", {"right": True, "expected_response": "Oslo"}),
        (WRONG["question"], "Karl Lund", {"right": False, "expected_response": "Jon Vik"}),
        (WRONG["question"], "Karl Lund", {"right": False}),
        (MISSING["question"], "", {"right": False, "expected_response": "1972"}),
        ("Why?", "so", {"right": True, "expected_response": "so"}),
    ]
    assert sorted(found, key=str) == sorted(wanted, key=str), "MLflow's times are too coarse for an order"
    assert {one.source.source_type for trace in traces for one in trace.info.assessments} == {"HUMAN"}


def test_a_server_of_mlflow_that_is_away_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply does not wait; the log says that it waits to be sent; without MLflow nothing is started."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sender = sending.FeedbackSender(tmp_path)
    sender.notify()
    assert sender._thread is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://name:secret@127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert client(tmp_path).post("/v1/feedback", json=RIGHT).status_code == 200
        wait_for(lambda: "feedback waits to be sent to MLflow" in caplog.text, 60)
    assert "secret" not in caplog.text
    assert len(said(tmp_path)) == 1
