"""The page of ``realmops serve``: over plain HTTP, and in a browser if chromium and its driver are installed."""

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

import lxml.html
import pytest
from fastapi.testclient import TestClient
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from serving import QUESTION, Served, calibration, client_of, served, watching
from small_project import QUESTIONS, answered, cli, wait_for, write_json_lines
from small_world import DOCUMENTS

from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.feedback import feedback_file, read_feedback
from realmops.answering.opened_model import Query
from realmops.evaluate.predictions import read_results, write_predictions
from realmops.serve.guard import COOKIE, Token
from realmops.serve.model_sources import RunFolder
from realmops.serve.page import percent, source_link

EVIL = '<script>window.owned=1</script><img src=x onerror="window.owned=1">'
TOKEN = "s3cret"
TUNED = "models/finetune"
ASKED = "/?" + urlencode({"q": QUESTION})
WORDS = "/?" + urlencode({"q": "Is there a ship, a play or rain in Bergen, Oslo or Norway?"})  # one in each document


@pytest.fixture(scope="module")
def project(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was updated once, since when each document contains a script."""
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
def client(project: Path) -> Iterator[TestClient]:
    with client_of(project / "root", follow_redirects=False) as found:
        yield found


@pytest.fixture
def guarded(project: Path) -> Iterator[TestClient]:
    with client_of(project / "never_updated", token=TOKEN, follow_redirects=False) as found:
        yield found


def page_of(client: TestClient, path: str, status: int = 200) -> Any:
    reply = client.get(path)
    assert reply.status_code == status, reply.text
    return lxml.html.fromstring(reply.text)


def ask(client: TestClient, question: str = ASKED, **more: Any) -> Any:
    [text] = parse_qs(urlsplit(question).query)["q"]
    return client.post("/v1/answer", json={"question": text, **more}).json()


def texts(page: Any, path: str) -> list[str]:
    return [" ".join(element.text_content().split()) for element in page.xpath(path)]


def section(page: Any, heading: str) -> Any:
    [found] = page.xpath(f"//section[@aria-labelledby='{heading}']")
    return found


def judged(root: Path) -> list[tuple[str, str, bool, str, str, str]]:
    entries = read_feedback(feedback_file(root))
    return [(e.question, e.answer, e.right, e.correct_answer, e.passage_id, e.correct_passage_id) for e in entries]


def test_without_a_question_the_page_has_a_form_and_examples(client: TestClient) -> None:
    page = page_of(client, "/")
    links = {link.text_content(): link.get("href") for link in section(page, "examples").xpath(".//a")}
    assert list(links) == [question for question, _ in QUESTIONS["test"]]
    assert all(parse_qs(urlsplit(place).query)["q"] == [text] for text, place in links.items())
    assert "12 documents" in page.get_element_by_id("main").text_content()
    [form] = page.forms
    assert (form.method, urljoin("/", form.action), *form.fields) == ("GET", "/", "q"), "it works without a script"


def test_the_page_shows_the_answer_of_the_api_with_its_quotation_and_passages(client: TestClient) -> None:
    record, page = ask(client), page_of(client, ASKED)
    answer, certainty = section(page, "answer"), f"right with probability {percent(ask(client)['probability'])}"
    assert texts(answer, ".//p[@class='given']") == [record["answer"]]
    first = record["citations"][0]
    [passage] = [found for found in record["passages"] if found["passage_id"] == first["passage_id"]]
    assert answer.xpath("string(.//blockquote/p)") == passage["text"], "every character of it"
    assert len(answer.xpath("string(.//mark/preceding-sibling::text())")) == first["start"] - passage["start"]
    assert f"characters {first['start']} to {first['end']}" in texts(answer, ".//figcaption")[0]
    assert f"It is {certainty} ({record['calibration']})." in texts(page, "//p[@class='sure']")
    assert page.findtext(".//title").startswith(f"{record['answer']}: ")
    assert page.get_element_by_id("status").text == f"Answer: {record['answer']}, {certainty}."
    [link] = answer.xpath(".//figcaption/a")
    assert (link.text, link.get("rel")) == (first["uri"], "noopener noreferrer")
    for item, passage in zip(section(page, "read").xpath(".//ol/li"), record["passages"], strict=True):
        assert texts(item, ".//h3") == [passage["title"]]
        widths = [float(rect.get("width")) for rect in item.xpath(".//rect")]
        assert widths == pytest.approx([passage["p_z"] * 100, passage["p_z_given_y"] * 100], abs=0.06)
        assert item.xpath("string(.//details/p)") == passage["text"]


@pytest.mark.parametrize(
    ("threshold", "title", "reason"),
    [
        (ALWAYS_ABSTAIN, "No confident answer", "was too rarely right on these questions"),
        (0.9995, "No confident answer", "Too many answers below above 99% are wrong."),
        (None, "Best matches", "Possible answer: "),
    ],
)
def test_the_passages_come_before_an_answer_that_is_held_back(
    project: Path, threshold: float | None, title: str, reason: str
) -> None:
    """The first three have the words of the question marked. Without a promise there is no percentage."""
    confidence = None if threshold is None else calibration(threshold)
    with client_of(project / "root", changes={"confidence": confidence}) as client:
        page, record = page_of(client, WORDS), ask(client, WORDS)
    answer = section(page, "answer")
    assert (texts(answer, ".//h2"), answer.xpath(".//p[@class='given']")) == (["Best matches"], [])
    sentence, *passages = answer.xpath(".//blockquote/p")
    assert sentence.text_content() == record["quote"]["quote"]
    assert [passage.text_content() for passage in passages] == [found["text"] for found in record["passages"][:3]]
    marked = [re.findall(r"Bergen|Oslo|Norway|ships?\b|play|rains", passage.text_content()) for passage in passages]
    assert [passage.xpath("./mark/text()") for passage in passages] == marked
    [small] = texts(answer, ".//p[@class='sure']")
    assert (record["answer"] in small, reason in small, "%" in small) == (True, True, threshold == 0.9995)
    assert page.findtext(".//title").startswith(f"{title}: ")
    assert record["answer"] in page.get_element_by_id("status").text


def test_a_passage_can_be_excluded_and_included_again(client: TestClient) -> None:
    complete, gone, page = ask(client), list[str](), page_of(client, ASKED)
    for _ in range(2):
        place = section(page, "read").xpath(".//p[@class='without']/a/@href")[0]
        gone, page = parse_qs(urlsplit(place).query)["without"], page_of(client, f"/{place}")
        record = ask(client, without=gone)
        assert texts(section(page, "read"), ".//h3") == [passage["title"] for passage in record["passages"]]
        change = "stays the same" if record["answer"] == complete["answer"] else "changes"
        assert f"The answer {change}" in page.text_content()
    back = page.xpath("//ul[@class='excluded']//a/@href")
    assert [parse_qs(urlsplit(link).query)["without"] for link in back] == [gone[1:], gone[:1]]


def test_the_answer_before_the_update_is_next_to_the_current_one(
    client: TestClient, project: Path, tmp_path: Path
) -> None:
    [link] = section(page_of(client, ASKED), "before").xpath(".//a/@href")
    sides = section(page_of(client, f"/{link}"), "before").xpath(".//div[@class='side']")
    with watching(RunFolder(project / "never_updated")) as (batcher, watcher):
        assert watcher.before_updates() is None
        earlier = batcher.submit([Query(QUESTION)])[0].record.result(60)
    titles = ("Before any update", "After update 1")
    for side, record, title in zip(sides, (earlier, ask(client)), titles, strict=True):
        assert (texts(side, ".//h3"), texts(side, ".//p[@class='given']")) == ([title], [record["answer"]])
        assert (" <b>" in side.text_content()) is (title != "Before any update")
    shutil.copytree(project / "root", tmp_path / "root")
    (tmp_path / "root/data/snapshot/corpus/manifest.json").unlink()
    with client_of(tmp_path / "root") as broken:
        page = page_of(broken, f"{ASKED}&before=1")
    assert texts(section(page, "answer"), ".//p[@class='given']")[0], "its error costs no answer"
    assert "cannot be opened; see the server's log" in section(page, "before").text_content()


def test_examples_are_correct_answers_of_people_that_are_not_held_back(project: Path, tmp_path: Path) -> None:
    assert RunFolder(tmp_path).examples() == ()
    root = Path(shutil.copytree(project / "root", tmp_path / "root"))
    file, (first, second) = root / "results/predictions.parquet", read_results(root)
    for examples, rows in (
        ([first.question], [first, replace(second, em=False)]),
        ([second.question], [replace(first, em=None, f1=None, failed_at=None), second]),
        ([], [replace(first, abstained=True), replace(second, em=False)]),
        ([first.question, second.question], [first, second]),
    ):
        write_predictions(file, rows)
        assert RunFolder(root).examples() == examples
    replace(calibration(0.0), threshold=ALWAYS_ABSTAIN).save(root / TUNED)
    assert RunFolder(root).examples() == [], "the model was calibrated again"


def test_an_invalid_question_is_explained_at_its_field(client: TestClient) -> None:
    page = page_of(client, "/?" + urlencode({"q": "x" * 2001}), 422)
    [error], field = page.xpath("//p[@role='alert']"), page.get_element_by_id("q")
    assert error.text == "The question has 2001 characters; at most 2000 are allowed."
    assert (field.get("aria-invalid"), field.get("aria-describedby"), error.get("id")) == ("true", "error", "error")
    assert field.get("value") == "x" * 2001


def test_feedback_without_a_script_corrects_an_answer(project: Path) -> None:
    feedback_file(project / "root").unlink(missing_ok=True)
    held = {"confidence": calibration(ALWAYS_ABSTAIN)}
    with client_of(project / "root", changes=held, follow_redirects=False) as client:
        record = ask(client)
        *thumbs, form = page_of(client, ASKED).xpath("//form[@data-feedback]")
        ids = [passage["passage_id"] for passage in record["passages"]]
        assert (len(thumbs), form.method) == (1, "POST")
        assert form.xpath(".//input[@type='radio']/@value") == [*ids, ""]
        assert form.xpath(".//input[@checked]/@value") == [""], "no passage is proposed"
        [field], [button] = form.xpath(".//input[@required]"), form.xpath(".//button")
        sent = {field.name: "Bergen", "passage": ids[2], button.get("name"): button.get("value")}
        reply = client.post(urljoin("/", form.action), data=sent)
        assert reply.status_code == 303
        noted = page_of(client, urljoin("/", reply.headers["location"]))
        assert "Thank you for your feedback." in noted.text_content()
        assert client.post(urljoin("/", form.action), data={**sent, field.name: " "}).status_code == 422
    quoted = record["citations"][0]["passage_id"]
    assert judged(project / "root") == [(QUESTION, record["answer"], False, "Bergen", quoted, ids[2])]
    feedback_file(project / "root").unlink()


def test_links_name_the_quotation_and_never_run_a_script() -> None:
    assert source_link({"uri": "https://a.test/x"}, "a-b, c&d") == "https://a.test/x#:~:text=a%2Db%2C%20c%26d"
    assert source_link({"uri": "https://a.test/x#y"}, "a") == "https://a.test/x#y"
    for uri in ("javascript:alert(1)", "corpus.jsonl", "file:///etc"):
        assert source_link({"uri": uri}, "a") == ""


# ---- other sites, scripts and the token


def test_another_site_may_link_to_an_answer_but_not_embed_it(client: TestClient) -> None:
    for kind, status in (("document", 200), ("image", 403), ("iframe", 403), ("empty", 403)):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": kind}
        assert client.get(ASKED, headers=headers).status_code == status


def test_texts_are_escaped_wherever_they_come_from(client: TestClient) -> None:
    question = f'"><script>1</script>{QUESTION}'
    page = page_of(client, "/?" + urlencode({"q": question, "without": EVIL, "before": "1"}))
    assert len(page.xpath("//script")) == len(page_of(client, "/").xpath("//script"))
    assert not page.xpath("//img | //*[@onerror]")
    assert page.get_element_by_id("q").get("value") == question
    assert EVIL in page.text_content()


def test_the_policy_allows_only_the_pages_own_style_and_script(client: TestClient, guarded: TestClient) -> None:
    for reply in (client.get(ASKED), guarded.get("/sign-in")):
        rules = dict(rule.strip().split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split(";"))
        assert (rules["default-src"], rules["base-uri"], rules["frame-ancestors"]) == ("'none'",) * 3
        page = lxml.html.fromstring(reply.text)
        for name, parts in (("style-src", page.xpath("//style")), ("script-src", page.xpath("//script"))):
            for part in parts:
                digest = base64.b64encode(hashlib.sha256(part.text.encode()).digest()).decode()
                assert rules[name] == f"'sha256-{digest}'"
        assert (reply.headers["Referrer-Policy"], reply.headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert not page.xpath("//*[@style] | //@src")


def test_signing_in_gives_a_cookie_and_leads_to_the_question(guarded: TestClient) -> None:
    sent = guarded.get(ASKED)
    place = urljoin("/", sent.headers["location"])
    assert (sent.status_code, place) == (303, ASKED.replace("/?", "/sign-in?"))
    action = urljoin(place, page_of(guarded, place).forms[0].action)
    wrong = guarded.post(action, data={"token": "wrong"})
    assert (wrong.status_code, "set-cookie" in wrong.headers, "Wrong token." in wrong.text) == (401, False, True)
    right = guarded.post(action, data={"token": TOKEN})
    assert (right.status_code, urljoin(place, right.headers["location"])) == (303, ASKED)
    cookie, *flags = right.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Max-Age=43200"} == {*flags}
    assert TOKEN not in cookie
    assert [guarded.get(path).status_code for path in (ASKED, "/docs", "/openapi.json")] == [200] * 3
    assert [guarded.get(path).status_code for path in ("/metrics", "/v1/search", "/v2")] == [401] * 3
    assert [guarded.post(path).status_code for path in ("/v1/answer", "/docs")] == [401] * 2
    assert "Max-Age=0" in guarded.post("/sign-in/end").headers["set-cookie"]
    reply = guarded.post("/sign-in?https://evil.test", data={"token": TOKEN})
    assert urljoin("http://testserver/sign-in", reply.headers["location"]) == "http://testserver/?https://evil.test"
    secure = guarded.post("https://testserver/sign-in", data={"token": TOKEN})
    assert "; Secure" in secure.headers["set-cookie"]


def test_a_forged_or_expired_cookie_is_refused(guarded: TestClient) -> None:
    assert Token(TOKEN).is_valid(Token(TOKEN).cookie())
    expires, _, signature = Token(TOKEN).cookie().partition(".")
    forged = ("", ".", "9999999999.", f"9999999999.{'0' * 64}", TOKEN, "9" * 5000, f"{int(expires) + 1}.{signature}")
    for value in (*forged, Token(TOKEN).cookie(-1), Token("other").cookie()):
        assert guarded.get("/", headers={"Cookie": f"{COOKIE}={value}"}).status_code == 303


# ---- in a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FAULTS = """
document.querySelectorAll("details").forEach((one) => (one.open = true));
const faults = [];
const named = (one) => one.textContent.trim() || one.getAttribute("aria-label");
for (const one of document.querySelectorAll("input")) if (!one.labels.length) faults.push("no label: " + one.outerHTML);
for (const one of document.querySelectorAll("a, button, summary, nav")) if (!named(one)) faults.push(one.outerHTML);
for (const one of document.querySelectorAll("[aria-labelledby], [aria-describedby]"))
  for (const id of (one.getAttribute("aria-labelledby") || one.getAttribute("aria-describedby")).split(" "))
    if (!document.getElementById(id)) faults.push("no " + id);
if (document.querySelectorAll("main").length !== 1 || document.querySelectorAll("h1").length !== 1)
  faults.push("main, h1");
const all = document.documentElement;
if (all.scrollWidth > all.clientWidth) faults.push("scrolls sideways");
const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((value) => value / 255)
  .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
const ground = (one) => { const colour = getComputedStyle(one).backgroundColor;
  return one.parentElement && /rgba\\(.*, 0\\)/.test(colour) ? ground(one.parentElement) : colour; };
for (const one of document.querySelectorAll("body *:not(script)")) {
  if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
  const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
  if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) faults.push("contrast: " + one.outerHTML.slice(0, 200));
}
return faults;
"""


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[Served]:
    with served(project / "root") as found:
        yield found


@pytest.fixture(scope="module")
def chrome() -> Iterator[webdriver.Chrome]:
    program, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if program is None or driver is None:
        missing = "browser (chromium)" if program is None else "chromedriver"
        pytest.skip(f"not run: there is no {missing}: 'make podman' installs it on Debian")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A root in a container may have no sandbox, and little shared memory. The browser calls no other host.
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{option}")
    with webdriver.Chrome(options, Service(driver)) as found:
        yield found


@pytest.fixture
def browser(chrome: webdriver.Chrome, server: Served) -> Iterator[webdriver.Chrome]:
    """The browser at the empty page; its error log fails the test."""
    chrome.get(f"{server.url}/")
    chrome.get_log("browser")  # of earlier pages
    chrome.execute_script("window.stays = 1")
    yield chrome
    assert chrome.get_log("browser") == []


def announced(browser: webdriver.Chrome) -> str:
    return str(browser.find_element(By.ID, "status").get_attribute("textContent"))


def test_the_answer_appears_in_place_and_a_script_in_a_document_is_text(
    browser: webdriver.Chrome, server: Served
) -> None:
    field = browser.switch_to.active_element
    field.send_keys(QUESTION, Keys.ENTER)
    wait_for(lambda: announced(browser).startswith("Answer: "), 60)
    record = server.ask()
    assert announced(browser).startswith(f"Answer: {record['answer']}, right with probability ")
    assert browser.title.startswith(f"{record['answer']}: ")
    assert (browser.current_url, browser.switch_to.active_element) == (f"{server.url}{ASKED}", field)
    assert browser.execute_script("return window.stays") == 1, "the page was not reloaded"
    assert EVIL in browser.execute_script("return document.body.textContent")
    assert browser.execute_script("return [window.owned, document.images.length]") == [None, 0]


def test_feedback_is_given_by_keys_in_the_order_of_the_page(
    browser: webdriver.Chrome, server: Served, project: Path
) -> None:
    """Tab leads from the question over the answer's verdicts to the correction: its field, a passage, and Enter."""
    browser.get(f"{server.url}{ASKED}")
    thanks, record = "Thank you for your feedback.", server.ask()
    browser.find_element(By.ID, "q").send_keys(Keys.TAB)
    order = []
    while not order or order[-1] != "I know the right answer":
        order.append(browser.switch_to.active_element.text)
        assert len(order) < 9, order
        browser.switch_to.active_element.send_keys(Keys.TAB)
    assert [text.split()[-1] for text in order if text in ("Ask", *order[-3:])] == ["Ask", "Right", "Wrong", "answer"]
    browser.find_element(By.CSS_SELECTOR, ".feedback summary").send_keys(Keys.ENTER)
    browser.find_element(By.ID, "correct").send_keys("Bergen", Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)  # from the last choice to the first passage
    browser.find_element(By.ID, "correct").send_keys(Keys.ENTER)
    wait_for(lambda: announced(browser) == thanks, 60)
    quoted, first = record["citations"][0]["passage_id"], record["passages"][0]["passage_id"]
    assert judged(project / "root") == [(QUESTION, record["answer"], False, "Bergen", quoted, first)]


@pytest.mark.parametrize("query", ["/", f"{ASKED}&before=1", "/?" + urlencode({"q": "x" * 2001})])
def test_a_narrow_page_is_labelled_has_contrast_and_does_not_scroll_sideways(
    browser: webdriver.Chrome, server: Served, query: str
) -> None:
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        for scheme in ("light", "dark"):
            scheme_of = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_of]})
            browser.get(f"{server.url}{query}")
            assert browser.execute_script(FAULTS) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.get_log("browser")  # an invalid question's status 422
