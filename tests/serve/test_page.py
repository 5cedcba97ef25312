"""The page of ``realmops serve``: over plain HTTP, and in a browser if chromium and its driver are installed."""

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
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
from serving import QUESTION, Served, calibration, client_of, served
from small_project import QUESTIONS, answered, cli, wait_for, write_json_lines
from small_world import DOCUMENTS

from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.feedback import feedback_file, read_feedback
from realmops.serve.guard import COOKIE, Token
from realmops.serve.page import ICON, percent, source_link

EVIL = '<script>window.owned=1</script><img src=x onerror="window.owned=1">'
TOKEN = "s3cret"
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


def judged(root: Path) -> tuple[object, ...]:
    *_, last = read_feedback(feedback_file(root))
    return last.question, last.answer, last.right, last.correct_answer, last.passage_id, last.correct_passage_id


def test_without_a_question_the_page_has_a_form_and_examples(client: TestClient) -> None:
    page = page_of(client, "/")
    links = {link.text_content(): link.get("href") for link in section(page, "examples").xpath(".//a")}
    assert list(links) == [question for question, _ in QUESTIONS["test"]]
    assert all(parse_qs(urlsplit(place).query)["q"] == [text] for text, place in links.items())
    [form] = page.forms
    assert (form.method, urljoin("/", form.action), *form.fields) == ("GET", "/", "q"), "it works without a script"


def test_the_page_shows_the_answer_of_the_api_with_its_quotation_and_passages(client: TestClient) -> None:
    record, page = ask(client), page_of(client, ASKED)
    answer, certainty = section(page, "answer"), f"right with probability {percent(record['probability'])}"
    first = record["citations"][0]
    [quoted] = [found for found in record["passages"] if found["passage_id"] == first["passage_id"]]
    assert texts(answer, ".//p[@class='given']") == [record["answer"]]
    assert answer.xpath("string(.//blockquote/p)") == quoted["text"], "every character of it"
    assert len(answer.xpath("string(.//mark/preceding-sibling::text())")) == first["start"] - quoted["start"]
    assert f"characters {first['start']} to {first['end']}" in texts(answer, ".//figcaption")[0]
    assert f"It is {certainty} ({record['calibration']})." in texts(page, "//p[@class='sure']")
    assert page.get_element_by_id("status").text == f"Answer: {record['answer']}, {certainty}."
    [link] = answer.xpath(".//figcaption/a")
    assert (link.text, link.get("rel")) == (first["uri"], "noopener noreferrer")
    for item, passage in zip(section(page, "read").xpath(".//ol/li"), record["passages"], strict=True):
        widths = [float(rect.get("width")) for rect in item.xpath(".//rect")]
        assert widths == pytest.approx([passage["p_z"] * 100, passage["p_z_given_y"] * 100], abs=0.06)
        assert (texts(item, ".//h3"), item.xpath("string(.//details/p)")) == ([passage["title"]], passage["text"])


@pytest.mark.parametrize(
    ("threshold", "reason"),
    [
        (ALWAYS_ABSTAIN, "was too rarely right on these questions"),
        (0.9995, "Too many answers below above 99% are wrong."),
        (None, "Possible answer: "),
    ],
)
def test_the_passages_come_before_an_answer_that_is_held_back(
    project: Path, threshold: float | None, reason: str
) -> None:
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


def test_the_answer_before_the_update_is_next_to_the_current_one(client: TestClient, project: Path, copy: Path) -> None:
    [link] = section(page_of(client, ASKED), "before").xpath(".//a/@href")
    sides = section(page_of(client, f"/{link}"), "before").xpath(".//div[@class='side']")
    with client_of(project / "never_updated") as earlier:
        answers = [ask(earlier)["answer"], ask(client)["answer"]]
    assert [texts(side, ".//p[@class='given']") for side in sides] == [[answer] for answer in answers]
    assert [" <b>" in side.text_content() for side in sides] == [False, True], "the titles of the update"
    shutil.copytree(project / "root", copy / "broken")
    (copy / "broken/data/snapshot/corpus/manifest.json").unlink()
    with client_of(copy / "broken") as broken:
        page = page_of(broken, f"{ASKED}&before=1")
    assert texts(section(page, "answer"), ".//p[@class='given']")[0], "its error costs no answer"
    assert "cannot be opened; see the server's log" in section(page, "before").text_content()


def test_feedback_without_a_script_corrects_an_answer(project: Path) -> None:
    held = {"confidence": calibration(ALWAYS_ABSTAIN)}
    with client_of(project / "root", changes=held, follow_redirects=False) as client:
        record = ask(client)
        _, form = page_of(client, ASKED).xpath("//form[@data-feedback]")
        ids = [passage["passage_id"] for passage in record["passages"]]
        assert form.xpath(".//input[@type='radio']/@value") == [*ids, ""]
        [field], [button], fields = form.xpath(".//input[@required]"), form.xpath(".//button"), dict(form.fields)
        assert fields["correct_passage_id"] == "", "no passage is proposed"
        sent = {**fields, field.name: "Bergen", "correct_passage_id": ids[2], button.get("name"): button.get("value")}
        reply = client.post(urljoin("/", form.action), data=sent)
        noted = page_of(client, urljoin("/", reply.headers["location"]))
        assert (reply.status_code, "Thank you for your feedback." in noted.text_content()) == (303, True)
        assert client.post(urljoin("/", form.action), data={**sent, field.name: " "}).status_code == 422
    quoted = record["citations"][0]["passage_id"]
    assert judged(project / "root") == (QUESTION, record["answer"], False, "Bergen", quoted, ids[2])


def test_links_name_the_quotation_and_never_run_a_script() -> None:
    assert source_link({"uri": "https://a.test/x"}, "a-b, c&d") == "https://a.test/x#:~:text=a%2Db%2C%20c%26d"
    assert source_link({"uri": "https://a.test/x#y"}, "a") == "https://a.test/x#y"
    for uri in ("javascript:alert(1)", "corpus.jsonl", "file:///etc"):
        assert source_link({"uri": uri}, "a") == ""


def test_another_site_may_link_to_an_answer_but_not_embed_it(client: TestClient) -> None:
    for kind, status in (("document", 200), ("image", 403), ("iframe", 403), ("empty", 403)):
        reply = client.get(ASKED, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": kind})
        assert reply.status_code == status


def test_texts_are_escaped_and_only_the_pages_own_style_and_script_run(client: TestClient, guarded: TestClient) -> None:
    question = f'"><script>1</script>{QUESTION}'
    evil = client.get("/?" + urlencode({"q": question, "without": EVIL, "before": "1"}))
    for reply, scripts in ((evil, 1), (guarded.get("/sign-in"), 0)):
        rules = dict(rule.strip().split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split(";"))
        assert (rules["default-src"], rules["base-uri"], rules["frame-ancestors"]) == ("'none'",) * 3
        page = lxml.html.fromstring(reply.text)
        for name, parts in (("style-src", page.xpath("//style")), ("script-src", page.xpath("//script"))):
            assert len(parts) == (1 if name == "style-src" else scripts)
            for part in parts:
                digest = base64.b64encode(hashlib.sha256(part.text.encode()).digest()).decode()
                assert rules[name] == f"'sha256-{digest}'"
        assert (reply.headers["Referrer-Policy"], reply.headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert not page.xpath("//img | //*[@onerror] | //*[@style] | //@src")
        assert page.xpath("//link[@rel='icon']/@href") == [ICON]
    page = lxml.html.fromstring(evil.text)
    assert (page.get_element_by_id("q").get("value"), EVIL in page.text_content()) == (question, True)


def test_signing_in_gives_a_cookie_and_leads_to_the_question(guarded: TestClient) -> None:
    sent = guarded.get(ASKED)
    place = urljoin("/", sent.headers["location"])
    assert (sent.status_code, place) == (303, ASKED.replace("/?", "/sign-in?"))
    action = urljoin(place, page_of(guarded, place).forms[0].action)
    assert guarded.post(action, data={"token": "wrong"}).status_code == 401
    right = guarded.post(action, data={"token": TOKEN})
    assert (right.status_code, urljoin(place, right.headers["location"])) == (303, ASKED)
    cookie, *flags = right.headers["set-cookie"].split("; ")
    assert ({"HttpOnly", "Path=/", "SameSite=strict", "Max-Age=43200"}, TOKEN in cookie) == ({*flags}, False)
    assert [guarded.get(path).status_code for path in (ASKED, "/docs", "/openapi.json")] == [200] * 3
    assert [guarded.get(path).status_code for path in ("/metrics", "/v1/search", "/v2")] == [401] * 3
    assert [guarded.post(path).status_code for path in ("/v1/answer", "/docs")] == [401] * 2
    assert "Max-Age=0" in guarded.post("/sign-in/end").headers["set-cookie"]
    reply = guarded.post("https://testserver/sign-in?https://evil.test", data={"token": TOKEN})
    assert (reply.headers["location"], "; Secure" in reply.headers["set-cookie"]) == (".?https://evil.test", True)


def test_a_forged_or_expired_cookie_is_refused(guarded: TestClient) -> None:
    assert Token(TOKEN).is_valid(Token(TOKEN).cookie())
    expires, _, signature = Token(TOKEN).cookie().partition(".")
    forged = ("", ".", "9999999999.", f"9999999999.{'0' * 64}", TOKEN, "9" * 5000, f"{int(expires) + 1}.{signature}")
    for value in (*forged, Token(TOKEN).cookie(-1), Token("other").cookie()):
        assert guarded.get("/", headers={"Cookie": f"{COOKIE}={value}"}).status_code == 303


# ---- in a browser


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[Served]:
    with served(project / "root") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    driver = shutil.which("chromedriver")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None or driver is None:
        pytest.skip("not run: needs chromium and chromedriver, which 'make podman' installs on Debian")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A root in a container may have no sandbox, and little shared memory. The browser calls no other host.
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{option}")
    with webdriver.Chrome(options, Service(driver)) as found:
        yield found


def test_the_answer_and_feedback_appear_in_place_and_a_script_in_a_document_is_text(
    browser: webdriver.Chrome, server: Served, project: Path
) -> None:
    browser.get(f"{server.url}/")
    browser.execute_script("window.stays = 1")
    status, field, record = browser.find_element(By.ID, "status"), browser.switch_to.active_element, server.ask()
    field.send_keys(QUESTION, Keys.ENTER)
    wait_for(lambda: status.get_attribute("textContent").startswith(f"Answer: {record['answer']}, right with "), 60)
    assert (browser.current_url, browser.switch_to.active_element) == (f"{server.url}{ASKED}", field)
    assert EVIL in browser.execute_script("return document.body.textContent")
    browser.find_element(By.CSS_SELECTOR, ".thumb[value=yes]").send_keys(Keys.ENTER)
    wait_for(lambda: status.get_attribute("textContent") == "Thank you for your feedback.", 60)
    quoted = record["citations"][0]["passage_id"]
    assert judged(project / "root") == (QUESTION, record["answer"], True, "", quoted, "")
    assert browser.execute_script("return [window.stays, window.owned, document.images.length]") == [1, None, 0]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("query", ["/", f"{ASKED}&before=1", "/?" + urlencode({"q": "x" * 2001})])
def test_a_narrow_page_is_labelled_and_does_not_scroll_sideways(
    browser: webdriver.Chrome, server: Served, query: str
) -> None:
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    browser.get(f"{server.url}{query}")
    browser.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    unlabelled = "return [...document.querySelectorAll('input:not([type=hidden])')].filter((one) => !one.labels.length)"
    sideways = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert [browser.execute_script(script) for script in (unlabelled, sideways)] == [[], 0]
