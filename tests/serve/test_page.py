"""The page of ``realmops serve``: over plain HTTP, and in a real browser where chromium and its driver are there."""

import base64
import hashlib
import http.client
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

import lxml.html
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from serving import QUESTION, Served, calibration, client_of, served, watching
from small_project import QUESTIONS, answered, cli, wait_for, write_json_lines
from small_world import DOCUMENTS

from realmops import artifacts
from realmops.answering import opened_model
from realmops.answering.confidence import ALWAYS_ABSTAIN, Confidence
from realmops.answering.feedback import feedback_file, read_feedback
from realmops.answering.record import answer_record
from realmops.evaluate.predictions import read_results, write_predictions
from realmops.serve.guard import COOKIE, Token
from realmops.serve.page import percent, source_link
from realmops.serve.served_model import RunFolder, ServedModel

EVIL = '<script>window.owned=1</script><img src=x onerror="window.owned=1">'
TOKEN = "s3cret"
TUNED = "models/finetune"
ASKED = "/?" + urlencode({"q": QUESTION})
WORDS = "Is there a ship, a play or rain in Bergen, Oslo or Norway?"  # each document has one of them


@pytest.fixture(scope="module")
def project(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was updated once; each document holds a script since."""
    project = Path(shutil.copytree(answering, tmp_path_factory.mktemp("page") / "project"))
    shutil.copytree(project / "root", project / "never_updated")
    documents = [
        {"title": f"{title} <b>", "text": f"{text} {EVIL}", "url": f"https://a.test/{number}?a=1&b"}
        for number, (title, text, _) in enumerate(DOCUMENTS)
    ]
    write_json_lines(project / "documents.jsonl", documents)
    result = cli("update", "--params", project / "params.yaml", "--root", project / "root")
    assert result.exit_code == 0, result.output
    answered(project / "root/results", len(QUESTIONS["test"]))  # as if all were right
    return project


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[Served]:
    with served(project / "root") as one:
        yield one


@pytest.fixture(scope="module")
def guarded(project: Path) -> Iterator[Served]:
    with served(project / "never_updated", REALMOPS_TOKEN=TOKEN) as one:
        yield one


@contextmanager
def held_back(project: Path, confidence: Confidence | None) -> Iterator[Any]:
    """A client of the page of a model with this calibration."""
    from fastapi.testclient import TestClient

    from realmops.serve.app import make_app
    from realmops.serve.batching import RequestBatcher
    from realmops.serve.metrics import Metrics
    from realmops.serve.model_watcher import ModelWatcher

    origin = RunFolder(project / "root")
    batcher = RequestBatcher(ServedModel.of(replace(origin.open(), confidence=confidence)))
    app = make_app(batcher, ModelWatcher(origin, batcher, None, print), Metrics(), None)
    yield TestClient(app)
    batcher.close()


@pytest.fixture(scope="module")
def unsure(project: Path) -> Iterator[Served]:
    """A server that holds every answer back."""
    root = Path(shutil.copytree(project / "root", project / "unsure"))
    replace(Confidence.load(root / TUNED), threshold=ALWAYS_ABSTAIN).save(root / TUNED)
    made = artifacts.read_json(root / TUNED / "manifest.json")
    artifacts.write_manifest(root / TUNED, "finetune", **{k: made[k] for k in ("fingerprint", "sections")})
    with served(root) as one:
        yield one


def visit(server: Served, path: str, form: dict[str, str] | None = None, **headers: str) -> Any:
    """The reply as a browser sees it before it follows a redirection; ``text`` is its body."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    named = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    body = None if form is None else urlencode(form)
    connection.request("GET" if form is None else "POST", path, body, {**named, **headers})
    reply: Any = connection.getresponse()
    reply.text = reply.read().decode()
    connection.close()
    return reply


def page_of(server: Served, path: str, status: int = 200) -> Any:
    reply = visit(server, path)
    assert reply.status == status, reply.text
    return lxml.html.fromstring(reply.text)


def texts(page: Any, path: str) -> list[str]:
    return [" ".join(one.text_content().split()) for one in page.xpath(path)]


def shown(page: Any, heading: str) -> Any:
    """The section with this heading."""
    [section] = page.xpath(f"//section[@aria-labelledby='{heading}']")
    return section


# ---- over HTTP


def test_without_a_question_there_are_the_form_and_questions_of_the_test(server: Served) -> None:
    page = page_of(server, "/")
    links = {one.text_content(): one.get("href") for one in shown(page, "examples").xpath(".//a")}
    assert list(links) == [question for question, _ in QUESTIONS["test"]]
    assert all(parse_qs(urlsplit(place).query)["q"] == [text] for text, place in links.items())
    assert page.get_element_by_id("q").get("value") == ""
    assert "12 documents" in page.get_element_by_id("main").text_content()
    [form] = page.forms
    assert (form.method, urljoin("/", form.action), *form.fields) == ("GET", "/", "q"), "as it is without a script"
    assert not page.xpath("//section[@aria-labelledby='answer']")


def test_the_answer_is_that_of_the_api_with_its_quotation_in_its_passage(server: Served) -> None:
    record = server.ask()
    page = page_of(server, ASKED)
    answer = shown(page, "answer")
    assert texts(answer, ".//p[@class='given']") == [record["answer"]]
    first = record["citations"][0]
    [passage] = [one for one in record["passages"] if one["passage_id"] == first["passage_id"]]
    assert answer.xpath("string(.//blockquote/p)") == passage["text"], "every character of it"
    assert texts(answer, ".//blockquote//mark") == [first["quote"]]
    before = answer.xpath("string(.//mark/preceding-sibling::text())")
    assert len(before) == first["start"] - passage["start"]
    assert f"characters {first['start']} to {first['end']}" in texts(answer, ".//figcaption")[0]
    assert f"It is right with probability {percent(record['probability'])}" in texts(answer, ".//p[@class='sure']")[0]
    assert record["calibration"] in texts(answer, ".//p[@class='sure']")[0]
    assert not record["abstained"]
    assert page.findtext(".//title").startswith(f"{record['answer']}: ")
    assert f"Answer: {record['answer']}, right with probability " in page.get_element_by_id("status").text


@pytest.mark.parametrize(
    ("threshold", "reason"),
    [(ALWAYS_ABSTAIN, "The model was never confident enough"), (0.9995, "Too many answers below above 99% are wrong.")],
)
def test_where_an_answer_is_held_back_the_passages_lead(project: Path, threshold: float, reason: str) -> None:
    """The first three with the words of the question marked; what was held back stands small below them."""
    with held_back(project, calibration(threshold)) as client:
        page = lxml.html.fromstring(client.get("/?" + urlencode({"q": WORDS})).text)
        record = client.post("/v1/answer", json={"question": WORDS}).json()
    assert record["abstained"]
    answer = shown(page, "answer")
    assert texts(answer, ".//h2") == ["Best matches"]
    assert not answer.xpath(".//p[@class='given']"), "nothing in large type"
    sentence, *found = answer.xpath(".//blockquote/p")
    assert sentence.text_content() == record["quote"]["quote"]
    where = f"document {record['quote']['document_id']}, characters {record['quote']['start']} to "
    assert where in texts(answer, ".//figcaption")[0]
    assert [one.text_content() for one in found] == [one["text"] for one in record["passages"][:3]]
    marked = [re.findall(r"Bergen|Oslo|Norway|ships?\b|play|rains", one.text_content()) for one in found]
    assert [one.xpath("./mark/text()") for one in found] == marked
    assert any(marked)
    [small] = texts(answer, ".//p[@class='sure']")
    assert small.startswith(f"Held back: {record['answer']}, right with probability {percent(record['probability'])} (")
    assert reason in small
    assert page.findtext(".//title").startswith("No confident answer: ")
    assert page.get_element_by_id("status").text.startswith("No answer is confident enough.")
    assert EVIL in page.text_content()
    assert len(page.xpath("//script")) == 1


def test_without_a_calibration_no_percentage_is_shown_and_the_passages_lead(project: Path) -> None:
    with held_back(project, None) as client:
        page = lxml.html.fromstring(client.get("/?" + urlencode({"q": WORDS})).text)
        record = client.post("/v1/answer", json={"question": WORDS}).json()
        other = client.get("/?" + urlencode({"q": WORDS, "without": record["citations"][0]["passage_id"]})).text
    answer, certainty = shown(page, "answer"), f"{record['answer']}, not calibrated: score {record['score']:.2f}."
    assert texts(answer, ".//h2") == ["Best matches"]
    assert not answer.xpath(".//p[@class='given']")
    assert texts(answer, ".//p[@class='sure']") == [f"Possible answer: {certainty}"]
    assert page.get_element_by_id("status").text == f"The best passages follow. Possible answer: {certainty}"
    assert page.findtext(".//title").startswith("Best matches: ")
    assert "not calibrated: score" in shown(lxml.html.fromstring(other), "answer").text_content()
    for html in (page, lxml.html.fromstring(other)):
        assert "%" not in shown(html, "answer").text_content()


def test_each_passage_has_its_bars(server: Served) -> None:
    record = server.ask()
    items = shown(page_of(server, ASKED), "read").xpath(".//ol/li")
    assert texts(items[0], ".//h3") == [record["passages"][0]["title"]]
    for item, passage in zip(items, record["passages"], strict=True):
        wide = [float(rect.get("width")) for rect in item.xpath(".//rect")]
        assert wide == pytest.approx([passage["p_z"] * 100, passage["p_z_given_y"] * 100], abs=0.06)
        assert texts(item, ".//dd") == [percent(passage["p_z"]), percent(passage["p_z_given_y"])]
        assert item.xpath("string(.//details/p)") == passage["text"]


def test_a_passage_can_be_taken_away_and_put_back(server: Served) -> None:
    whole = server.ask()
    gone = []
    page = page_of(server, ASKED)
    for _ in range(2):
        place = shown(page, "read").xpath(".//p[@class='without']/a/@href")[0]
        gone = parse_qs(urlsplit(place).query)["without"]
        page = page_of(server, f"/{place}")
        record = server.ask(without=gone)
        assert texts(shown(page, "read"), ".//h3") == [one["title"] for one in record["passages"]]
        assert texts(page, "//section[@aria-labelledby='answer']//p[@class='given']") == [record["answer"]]
        same = record["answer"] == whole["answer"]
        assert ("The answer stays the same" in page.text_content()) is same
        assert ("The answer changes" in page.text_content()) is not same
    assert len(gone) == 2
    back = page.xpath("//ul[@class='excluded']//a/@href")
    assert [parse_qs(urlsplit(one).query)["without"] for one in back] == [gone[1:], gone[:1]]


def test_a_passage_that_is_not_there_can_be_missing(server: Served) -> None:
    page = page_of(server, f"{ASKED}&without=%3Cb%3Enothing")
    assert "The answer stays the same" in page.text_content()
    assert texts(page, "//ul[@class='excluded']/li/span") == ["<b>nothing"]


def test_before_and_after_an_update(project: Path, server: Served) -> None:
    from realmops.answering.opened_model import Query
    from realmops.stages.corpus_states import pipeline_state
    from realmops.stages.open_run import open_run

    [link] = shown(page_of(server, ASKED), "before").xpath(".//a/@href")
    sides = shown(page_of(server, f"/{link}"), "before").xpath(".//div[@class='side']")
    root = project / "root"
    [earlier] = open_run(root, pipeline_state(root)).answer([Query(QUESTION)])
    for side, record, title in zip(
        sides, (earlier, server.ask()), ("Before any update", "After update 1"), strict=True
    ):
        assert texts(side, ".//h3") == [title]
        assert texts(side, ".//p[@class='given']") == [record["answer"]]
        first = record["citations"][0]["passage_id"]
        [passage] = [one["text"] for one in record["passages"] if one["passage_id"] == first]
        assert side.xpath("string(.//blockquote/p)") == passage
        assert ("<script>" in passage) is (title != "Before any update")


def test_what_was_not_updated_has_no_before(project: Path) -> None:
    for name, updated in (("root", True), ("never_updated", False)):
        origin = RunFolder(project / name)
        with watching(origin) as (batcher, watcher):
            before = watcher.before_updates()
            assert (before is not None) is updated
            assert watcher.before_updates() is before, "opened once"
            if before is not None:
                assert (before.number, batcher.served.number) == (0, 1)
                batcher.swap(ServedModel.of(origin.open()))
                assert watcher.before_updates() is not before, "another generation serves: its own is opened"


def test_documents_of_before_that_cannot_be_opened_cost_no_answer(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "root", tmp_path / "root")
    (tmp_path / "root/data/snapshot/corpus/manifest.json").unlink()
    with client_of(tmp_path / "root") as client:
        page = lxml.html.fromstring(client.get(f"{ASKED}&before=1").text)
    assert texts(shown(page, "answer"), ".//p[@class='given']")[0]
    assert texts(shown(page, "before"), ".//p") == [
        "The documents before the update cannot be opened; see the server's log."
    ]


def test_another_site_may_lead_here_and_not_ask(server: Served) -> None:
    other = {"Sec-Fetch-Site": "cross-site"}
    for kind, status in (("document", 200), ("image", 403), ("iframe", 403), ("empty", 403)):
        assert visit(server, ASKED, **other, **{"Sec-Fetch-Dest": kind}).status == status
    assert visit(server, ASKED, **{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}).status == 200


def test_only_questions_that_are_answered_rightly_are_examples(project: Path, tmp_path: Path) -> None:
    """None that is held back now, is wrong, or was made from the corpus, and none without results."""
    assert RunFolder(tmp_path).examples() == ()
    root = Path(shutil.copytree(project / "root", tmp_path / "root"))
    file, (first, second) = root / "results/predictions.parquet", read_results(root)
    changed = {
        (first.question,): [first, replace(second, em=False)],
        (second.question,): [replace(first, em=None, f1=None, failed_at=None), second],
        (): [replace(first, abstained=True), replace(second, em=False)],
    }
    for examples, rows in changed.items():
        write_predictions(file, rows)
        assert RunFolder(root).examples() == list(examples)
    write_predictions(file, [first, second])
    assert len(RunFolder(root).examples()) == 2
    replace(Confidence.load(root / TUNED), threshold=ALWAYS_ABSTAIN).save(root / TUNED)
    assert RunFolder(root).examples() == [], "the model was calibrated again since"


@pytest.mark.parametrize(
    ("question", "status", "told"),
    [
        ("x" * 2001, 422, "The question has 2001 characters; at most 2000 are allowed."),
        ("who " * 90, 422, "has 270 wordpieces, 1 to"),
        ("\u200b", 422, "has 0 wordpieces, 1 to"),
    ],
)
def test_what_cannot_be_asked_is_told(server: Served, question: str, status: int, told: str) -> None:
    page = page_of(server, "/?" + urlencode({"q": question}), status)
    [error] = page.xpath("//p[@role='alert']")
    assert told in error.text
    field = page.get_element_by_id("q")
    assert (field.get("aria-invalid"), field.get("aria-describedby"), error.get("id")) == ("true", "error", "error")
    assert field.get("value") == question.strip()


def test_texts_are_escaped_wherever_they_come_from(server: Served) -> None:
    own = len(page_of(server, "/").xpath("//script"))
    for question in (QUESTION, f'"><script>1</script>{QUESTION}'):
        reply = visit(server, "/?" + urlencode({"q": question, "without": EVIL, "before": "1"}))
        page = lxml.html.fromstring(reply.text)
        assert len(page.xpath("//script")) == own
        assert not page.xpath("//img | //*[@onerror]")
        assert page.get_element_by_id("q").get("value") == question
        assert EVIL in page.text_content()


def test_the_policy_allows_the_pages_own_style_and_script_alone(server: Served, guarded: Served) -> None:
    for one, path in ((server, ASKED), (guarded, "/sign-in")):
        reply = visit(one, path)
        rules = dict(rule.strip().split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split(";"))
        assert (rules["default-src"], rules["base-uri"], rules["frame-ancestors"]) == ("'none'",) * 3
        page = lxml.html.fromstring(reply.text)
        for name, parts in (("style-src", page.xpath("//style")), ("script-src", page.xpath("//script"))):
            for part in parts:
                digest = base64.b64encode(hashlib.sha256(part.text.encode()).digest()).decode()
                assert rules[name] == f"'sha256-{digest}'"
        assert "unsafe" not in reply.headers["Content-Security-Policy"]
        assert (reply.headers["Referrer-Policy"], reply.headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert not page.xpath("//*[@style] | //@src")
        elsewhere = [place for place in page.xpath("//@href") if ":" in place and not place.startswith("data:,")]
        assert all(place.startswith("https://a.test/") for place in elsewhere), "only to documents"


def judged(root: Path) -> list[tuple[str, str, bool, str, str, str]]:
    return [
        (one.question, one.answer, one.right, one.correct_answer, one.passage_id, one.correct_passage_id)
        for one in read_feedback(feedback_file(root))
    ]


@pytest.mark.parametrize("has_answer", [True, False])
def test_the_right_answer_can_be_given_where_the_model_abstains_or_has_none(
    project: Path, monkeypatch: pytest.MonkeyPatch, has_answer: bool
) -> None:
    """As a browser without a script sends the form, with a passage that is marked as the one that contains it."""
    without = {} if has_answer else {"answer": "", "citations": [], "quote": None, "abstained": True}
    monkeypatch.setattr(opened_model, "answer_record", lambda *all_: answer_record(*all_) | without)
    feedback_file(project / "root").unlink(missing_ok=True)
    with held_back(project, calibration(ALWAYS_ABSTAIN)) as client:
        page = lxml.html.fromstring(client.get(ASKED).text)
        record = client.post("/v1/answer", json={"question": QUESTION}).json()
        *thumbs, form = page.xpath("//form[@data-feedback]")
        assert (len(thumbs), form.method, bool(record["answer"])) == (int(has_answer), "POST", has_answer)
        ids = [passage["passage_id"] for passage in record["passages"]]
        assert form.xpath(".//input[@type='radio']/@value") == [*ids, ""]
        texts_of = [" ".join(label.text_content().split()) for label in form.xpath(".//fieldset/label")]
        assert all(text.startswith(one["title"]) for text, one in zip(texts_of, record["passages"], strict=False))
        [field], [button] = form.xpath(".//input[@required]"), form.xpath(".//button")
        assert form.xpath(".//input[@checked]/@value") == [""], "no passage is proposed"
        sent = {field.name: "Bergen", "passage": ids[2], button.get("name"): button.get("value")}
        reply = client.post(urljoin("/", form.action), data=sent, follow_redirects=False)
        assert reply.status_code == 303
        noted = lxml.html.fromstring(client.get(urljoin("/", reply.headers["location"])).text)
        assert "Thank you for your feedback." in noted.text_content()
        blank = client.post(urljoin("/", form.action), data={**sent, field.name: " "}, follow_redirects=False)
        assert blank.status_code == 422
    quoted = record["citations"][0]["passage_id"] if has_answer else ""
    assert judged(project / "root") == [(QUESTION, record["answer"], False, "Bergen", quoted, ids[2])]
    feedback_file(project / "root").unlink()


def test_a_documents_address_leads_to_the_quotation(server: Served) -> None:
    first = server.ask()["citations"][0]
    [link] = shown(page_of(server, ASKED), "answer").xpath(".//figcaption/a")
    assert (link.text, link.get("rel")) == (first["uri"], "noopener noreferrer")
    assert link.get("href").startswith(f"{first['uri']}#:~:text=")
    assert source_link({"uri": "https://a.test/x"}, "a-b, c&d") == "https://a.test/x#:~:text=a%2Db%2C%20c%26d"
    assert source_link({"uri": "https://a.test/x#y"}, "a") == "https://a.test/x#y"
    assert [source_link({"uri": uri}, "a") for uri in ("javascript:alert(1)", "corpus.jsonl", "file:///etc")] == [
        ""
    ] * 3


def test_no_probability_is_said_to_be_certain_that_is_not() -> None:
    told = [percent(share) for share in (0.0, 1e-9, 0.004, 0.006, 0.494, 0.994, 0.996, 1.0)]
    assert told == ["0%", "below 1%", "below 1%", "1%", "49%", "99%", "above 99%", "100%"]


# ---- the token


def test_a_token_is_asked_for_once_and_never_in_an_address(guarded: Served) -> None:
    sent = visit(guarded, ASKED)
    assert (sent.status, sent.text) == (303, "")
    place = urljoin("/", sent.headers["Location"])
    assert place == ASKED.replace("/?", "/sign-in?")
    form = page_of(guarded, place)
    assert form.forms[0].method == "POST"
    action = urljoin(place, form.forms[0].action)
    assert action == place, "the question goes on with it"
    wrong = visit(guarded, action, {"token": "wrong"})
    assert (wrong.status, wrong.headers["Set-Cookie"]) == (401, None)
    assert "Wrong token." in wrong.text
    right = visit(guarded, action, {"token": TOKEN})
    assert (right.status, urljoin(place, right.headers["Location"])) == (303, ASKED)
    cookie, *flags = right.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Max-Age=43200"} == set(flags)
    assert TOKEN not in cookie
    page = visit(guarded, ASKED, Cookie=f"other=1; {cookie}")
    assert page.status == 200
    assert TOKEN not in page.text
    assert [visit(guarded, path, Cookie=cookie).status for path in ("/docs", "/openapi.json")] == [200, 200]
    end = visit(guarded, "/sign-in/end", {}, Cookie=cookie)
    assert (urljoin("/sign-in/end", end.headers["Location"]), "Max-Age=0" in end.headers["Set-Cookie"]) == (
        "/sign-in",
        True,
    )
    assert visit(guarded, "/", Authorization=f"Bearer {TOKEN}").status == 200


def test_the_cookie_opens_pages_and_nothing_that_programs_call(guarded: Served) -> None:
    cookie = f"{COOKIE}={Token(TOKEN).cookie()}"
    assert visit(guarded, "/", Cookie=cookie).status == 200
    for path in ("/metrics", "/v1/search", "/v2"):
        assert visit(guarded, path, Cookie=cookie).status == 401
    assert guarded.call("/v1/answer", {"question": QUESTION}, Cookie=cookie)[0] == 401
    assert visit(guarded, "/docs", {}, Cookie=cookie).status == 401


@pytest.mark.parametrize("value", ["", "x", ".", "9999999999.", f"9999999999.{'0' * 64}", TOKEN, "é.é", "9" * 5000])
def test_a_cookie_that_is_made_up_opens_nothing(guarded: Served, value: str) -> None:
    assert visit(guarded, "/", Cookie=f"{COOKIE}={value}").status == 303


def test_a_cookie_ends_and_is_good_for_one_token() -> None:
    assert Token(TOKEN).is_valid(Token(TOKEN).cookie())
    assert not Token(TOKEN).is_valid(Token(TOKEN).cookie(-1))
    assert not Token(TOKEN).is_valid(Token("other").cookie())
    ends, _, signature = Token(TOKEN).cookie().partition(".")
    assert not Token(TOKEN).is_valid(f"{int(ends) + 1}.{signature}")


def test_after_signing_in_nobody_is_sent_elsewhere(guarded: Served) -> None:
    for query in ("//evil.test", "q=1&next=https://evil.test", "https://evil.test"):
        reply = visit(guarded, f"/sign-in?{query}", {"token": TOKEN})
        place = urljoin(f"{guarded.url}/sign-in", reply.headers["Location"])
        assert place == f"{guarded.url}/?{query}"


def test_behind_tls_the_cookie_stays_there(guarded: Served) -> None:
    reply = visit(guarded, "/sign-in", {"token": TOKEN}, **{"X-Forwarded-Proto": "https"})
    assert "; Secure" in reply.headers["Set-Cookie"]


def test_without_a_token_nobody_signs_in(server: Served) -> None:
    for reply in (visit(server, "/sign-in?q=a"), visit(server, "/sign-in?q=a", {"token": "x"})):
        assert (reply.status, reply.headers["Location"], reply.headers["Set-Cookie"]) == (303, ".?q=a", None)
    assert "Sign out" not in visit(server, "/").text


# ---- in a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# WCAG 2.2, relative luminance and contrast ratio; what has less than 4.5 is listed.
LOW_CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (text) => {
  const [r, g, b] = rgb(text).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const [, , , alpha = 1] = rgb(getComputedStyle(one).backgroundColor);
    if (alpha) return getComputedStyle(one).backgroundColor;
  }
};
document.querySelectorAll("details").forEach((one) => (one.open = true));
const found = [], seen = [];
for (const one of document.body.querySelectorAll("*")) {
  const own = one.matches("input") || [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || one.matches("script, .hidden") || !one.getClientRects().length) continue;
  const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  seen.push(ratio);
  if (ratio < 4.5) found.push([one.outerHTML.slice(0, 80), ratio]);
}
return [seen.length, found];
"""
FAULTS = """
const faults = [];
const named = (one) => one.textContent.trim() || one.getAttribute("aria-label");
for (const one of document.querySelectorAll("input")) if (!one.labels.length) faults.push("no label: " + one.outerHTML);
for (const one of document.querySelectorAll("a, button, summary, nav")) if (!named(one)) faults.push(one.outerHTML);
for (const one of document.querySelectorAll("[aria-labelledby], [aria-describedby]"))
  for (const id of (one.getAttribute("aria-labelledby") || one.getAttribute("aria-describedby")).split(" "))
    if (!document.getElementById(id)) faults.push("no " + id);
const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
if (new Set(ids).size !== ids.length) faults.push("an id twice");
if (document.querySelectorAll("main").length !== 1 || document.querySelectorAll("h1").length !== 1)
  faults.push("main, h1");
let level = 0;
for (const one of document.querySelectorAll("h1, h2, h3")) {
  if (one.tagName[1] - level > 1) faults.push("a level is left out: " + one.textContent);
  level = +one.tagName[1];
}
if (!document.documentElement.lang || !document.title) faults.push("lang, title");
const links = new Map();
for (const one of document.querySelectorAll("main a[data-in-place]")) {
  const name = one.textContent.trim();
  if (links.has(name) && links.get(name) !== one.href) faults.push("two links of one name: " + name);
  links.set(name, one.href);
}
return faults;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    program, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if program is None or driver is None:
        missing = "browser (chromium)" if program is None else "chromedriver"
        pytest.skip(f"not run: there is no {missing}: 'make podman' installs it on Debian")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A root in a container may have no sandbox, and little shared memory. The browser calls nobody.
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{option}")
    with webdriver.Chrome(options, Service(driver)) as found:
        yield found


@pytest.fixture
def at(browser: webdriver.Chrome, server: Served) -> Iterator[webdriver.Chrome]:
    """The browser at the empty page; what it complains about fails the test."""
    browser.get(f"{server.url}/")
    browser.get_log("browser")  # what was said before
    yield browser
    assert browser.get_log("browser") == []


def said(browser: webdriver.Chrome) -> str:
    return str(browser.find_element(By.ID, "status").get_attribute("textContent"))


def wait_for_answer(browser: webdriver.Chrome) -> None:
    wait_for(lambda: said(browser).startswith("Answer: "), 60)


def test_asked_by_keyboard_it_answers_in_place(at: webdriver.Chrome, server: Served) -> None:
    at.execute_script("window.stays = 1")
    field = at.switch_to.active_element
    assert field.get_attribute("id") == "q", "one may type at once"
    field.send_keys(QUESTION, Keys.ENTER)
    wait_for_answer(at)
    record = server.ask()
    assert said(at).startswith(f"Answer: {record['answer']}, right with probability ")
    assert at.title.startswith(f"{record['answer']}: ")
    assert at.current_url == f"{server.url}{ASKED}"
    assert at.execute_script("return window.stays") == 1, "the page was not loaded anew"
    assert at.switch_to.active_element == field
    assert at.find_element(By.CSS_SELECTOR, ".given").text == record["answer"]


def test_a_script_in_a_document_is_text(at: webdriver.Chrome, server: Served) -> None:
    at.find_element(By.ID, "q").send_keys(QUESTION, Keys.ENTER)  # put into the page by our script
    wait_for_answer(at)
    for _ in range(2):
        assert EVIL in at.find_element(By.CSS_SELECTOR, "blockquote").text
        assert at.execute_script("return [window.owned, document.images.length]") == [None, 0]
        at.get(f"{server.url}{ASKED}&before=1")  # put there by the server


def test_a_passage_is_taken_away_and_the_way_back_leads_back(at: webdriver.Chrome, server: Served) -> None:
    at.get(f"{server.url}{ASKED}")
    first = said(at)
    link = at.find_element(By.CSS_SELECTOR, ".without a")
    link.send_keys(Keys.ENTER)
    wait_for(lambda: "without=" in at.current_url, 60)
    wait_for(lambda: at.find_elements(By.CSS_SELECTOR, ".excluded"), 60)
    assert at.switch_to.active_element.get_attribute("id") == "result", "reading goes on where the answer is"
    at.back()
    wait_for(lambda: said(at) == first and not at.find_elements(By.CSS_SELECTOR, ".excluded"), 60)
    assert at.find_element(By.ID, "q").get_attribute("value") == QUESTION


def test_what_is_held_back_is_small_and_comes_last(browser: webdriver.Chrome, unsure: Served) -> None:
    browser.get(f"{unsure.url}/")
    assert not browser.find_elements(By.CSS_SELECTOR, ".examples"), "nothing is answered"
    browser.find_element(By.ID, "q").send_keys(WORDS, Keys.ENTER)
    wait_for(lambda: said(browser).startswith("No answer is confident enough."), 60)
    record = unsure.ask(WORDS)
    answer = browser.find_element(By.CSS_SELECTOR, "section[aria-labelledby='answer']")
    guess, marks = (answer.find_element(By.CSS_SELECTOR, name) for name in (".guess", "blockquote mark"))
    assert (guess.text.strip('"“”'), marks.text.lower()[:4] in WORDS.lower()) == (record["answer"], True)
    size = "return parseFloat(getComputedStyle(arguments[0]).fontSize)"
    passage = answer.find_elements(By.CSS_SELECTOR, "blockquote")[-1]
    assert browser.execute_script(size, guess) < browser.execute_script(size, passage)
    assert guess.location["y"] > passage.location["y"]
    assert browser.title.startswith("No confident answer: ")


def test_a_thumb_and_a_correction_are_kept_without_leaving_the_page(
    at: webdriver.Chrome, server: Served, project: Path
) -> None:
    """The correction by keys alone: its field, one of the passages, and the key that sends it."""
    at.get(f"{server.url}{ASKED}")
    at.execute_script("window.stays = 1")
    at.find_element(By.CSS_SELECTOR, ".thumb[value='no']").click()
    thanks = "Thank you for your feedback."
    wait_for(lambda: said(at) == thanks, 60)
    focused = "return [window.stays, document.activeElement.textContent]"
    assert at.execute_script(focused) == [1, thanks]
    [form] = at.find_elements(By.CSS_SELECTOR, "form[data-feedback]")
    at.execute_script("document.getElementById('status').textContent = ''")
    at.find_element(By.CSS_SELECTOR, ".feedback summary").send_keys(Keys.ENTER)
    form.find_element(By.ID, "correct").send_keys("Bergen", Keys.TAB)
    at.switch_to.active_element.send_keys(Keys.ARROW_DOWN)  # from the last choice to the first passage
    form.find_element(By.ID, "correct").send_keys(Keys.ENTER)
    wait_for(lambda: said(at) == thanks, 60)
    assert at.execute_script(focused) == [1, thanks]
    assert not at.find_elements(By.CSS_SELECTOR, "form[data-feedback]")
    record = server.ask()
    shown = QUESTION, record["answer"], False
    quoted, first = record["citations"][0]["passage_id"], record["passages"][0]["passage_id"]
    assert judged(project / "root") == [(*shown, "", quoted, ""), (*shown, "Bergen", quoted, first)]
    at.get(f"{server.url}{ASKED}&noted=1")
    assert thanks in at.find_element(By.ID, "result").text, "as without a script"


def pages(server: Served, guarded: Served, unsure: Served) -> Iterator[str]:
    gone = server.ask()["passages"][0]["passage_id"]
    queries = ("", f"{ASKED[1:]}&before=1&without={gone}", "?" + urlencode({"q": "x" * 2001}))
    yield from (f"{server.url}/{query}" for query in queries)
    yield f"{guarded.url}/sign-in?q=a"
    yield f"{unsure.url}{ASKED}"


OPEN_ALL = "document.querySelectorAll('details').forEach((one) => one.open = true)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(
    browser: webdriver.Chrome, server: Served, guarded: Served, unsure: Served, scheme: str
) -> None:
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        grounds = set()
        for place in pages(server, guarded, unsure):
            browser.get(place)
            browser.execute_script(OPEN_ALL)
            assert browser.execute_script(FAULTS) == [], place
            seen, low = browser.execute_script(LOW_CONTRAST)
            assert (seen > 3, low) == (True, []), place
            wide, room = browser.execute_script(
                "const all = document.documentElement; return [all.scrollWidth, all.clientWidth]"
            )
            assert (wide, room <= 360) == (room, True), f"{place} scrolls sideways"
            grounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        assert grounds == {"rgb(244, 246, 248)" if scheme == "light" else "rgb(18, 22, 27)"}
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_tab_key_goes_through_it_from_top_to_bottom(at: webdriver.Chrome, server: Served) -> None:
    at.get(f"{server.url}{ASKED}")
    wanted = at.execute_script(
        "return [...document.querySelectorAll('a, button, input, summary')].filter((one) => one.checkVisibility())"
        ".filter((one) => !one.closest('details:not([open])') || one.matches('summary')).map((one) => one.outerHTML)"
    )
    reached = []
    for _ in wanted:
        at.switch_to.active_element.send_keys(Keys.TAB)
        html, style, width = at.execute_script(
            "const one = document.activeElement, how = getComputedStyle(one);"
            "return [one.outerHTML, how.outlineStyle, parseFloat(how.outlineWidth)]"
        )
        assert (style, width >= 2) == ("solid", True), f"no ring around {html}"
        reached.append(html)
    assert reached == wanted
    assert re.search(r"Skip to the question", reached[0])
