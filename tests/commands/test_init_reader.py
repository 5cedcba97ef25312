"""``realmops init`` proposes a published reader, or says that it only searches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import small_project
import yaml
from small_project import cli

from realmops.config import load_params
from realmops.starter.choose_models import MULTILINGUAL_READERS, READERS

SIZES = {READERS[0]: 260_783_000, READERS[1]: 496_254_442, MULTILINGUAL_READERS[0]: 1_109_800_000}
LICENCES = {READERS[0]: "apache-2.0", READERS[1]: "cc-by-4.0"}


class Hub(BaseHTTPRequestHandler):
    """The hub's ``/api/models/NAME``, with the fields that huggingface_hub 2.4 reads (``HfApi.model_info``)."""

    known: dict[str, int]
    requests: list[str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = url.path.removeprefix("/api/models/")
        type(self).requests.append(name)
        if name not in self.known:
            self.send_error(404)
            return
        blobs = parse_qs(url.query).get("blobs") in (["true"], ["True"])
        files = {"config.json": 500, "model.safetensors": self.known[name], "pytorch_model.bin": 3 * self.known[name]}
        body = {
            "id": name,
            "siblings": [{"rfilename": file} | ({"size": size} if blobs else {}) for file, size in files.items()],
            "cardData": {"license": LICENCES[name]} if name in LICENCES else {},
        }
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine, with an empty cache; it has the readers and no encoder."""
    handler = type("OneHub", (Hub,), {"known": dict(SIZES), "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield handler
        server.shutdown()


def created(folder: Path, *words: str | Path, language: str = "") -> tuple[list[str], dict[str, Any]]:
    """The lines of ``init``, and the options of the project."""
    text = "Die Stadt wurde von ihren Bewohnern am Fluss erbaut, und viele Menschen leben heute dort. " * 30
    documents = folder.parent / "documents.jsonl"
    if language:
        small_project.write_json_lines(documents, [{"title": "", "text": text}])
    else:
        small_project.write_documents(documents)
    result = cli("init", folder, "--documents", documents, "--encoder", "some/encoder", *words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines(), load_params(folder / "params.yaml")


def line(lines: list[str], start: str) -> str:
    [found] = [text for text in lines if text.startswith(start)]
    return found


def test_a_small_reader_is_proposed_with_its_licence_and_size_and_a_better_one_is_named(
    tmp_path: Path, hub: type[Hub]
) -> None:
    lines, values = created(tmp_path / "mine")
    proposal = line(lines, "reader: ")
    assert f"{READERS[0]} (apache-2.0, 261 MB), loaded by the first run" in proposal
    assert f"--reader {READERS[1]} (cc-by-4.0, 496 MB)" in proposal
    assert "--no-reader" in proposal
    assert values["reader"]["init"] == READERS[0]
    assert not values["finetune"]["epochs"]
    assert not values["pretrain"]["steps"]
    assert not (tmp_path / "cache").exists(), "nothing is loaded"
    assert {*READERS} <= {*hub.requests}


def test_a_named_reader_has_its_licence_and_size_too_and_the_hub_may_lack_the_first(
    tmp_path: Path, hub: type[Hub]
) -> None:
    lines, values = created(tmp_path / "mine", "--reader", READERS[1])
    assert line(lines, "reader: ") == f"reader: {READERS[1]} (cc-by-4.0, 496 MB), loaded by the first run"
    assert values["reader"]["init"] == READERS[1]
    del hub.known[READERS[0]]
    lines, values = created(tmp_path / "other")
    assert f"reader: {READERS[1]} (cc-by-4.0, 496 MB)" in line(lines, "reader: ")
    assert values["reader"]["init"] == READERS[1]


def test_other_languages_get_a_multilingual_reader_whose_licence_may_be_unknown(tmp_path: Path, hub: type[Hub]) -> None:
    lines, values = created(tmp_path / "mine", language="de")
    assert f"{MULTILINGUAL_READERS[0]} (unknown, 1,110 MB)" in line(lines, "reader: ")
    assert values["reader"]["init"] == MULTILINGUAL_READERS[0]


def test_without_a_reader_the_first_line_is_search_not_answers(tmp_path: Path, hub: type[Hub]) -> None:
    lines, values = created(tmp_path / "asked", "--no-reader")
    assert lines[0] == "search, not answers: no reader, by --no-reader"
    assert values["reader"]["init"] == "none"
    assert not hub.requests
    hub.known.clear()
    lines, values = created(tmp_path / "alone")
    assert lines[0].startswith("search, not answers: no reader can be loaded")
    assert values["reader"]["init"] == "none"


def test_a_reader_is_trained_further_on_questions_of_people(tmp_path: Path, hub: type[Hub]) -> None:
    records = [{"question": f"Who wrote book {n}?", "answers": ["Anna Berg"]} for n in range(60)]
    questions = small_project.write_json_lines(tmp_path / "questions.jsonl", records)
    lines, values = created(tmp_path / "mine", "--questions", questions)
    assert "trained 2 epochs further on your questions" in line(lines, "reader: ")
    assert values["finetune"]["epochs"] == 2
    stages = yaml.safe_load((tmp_path / "mine" / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert "tag" not in stages, "nothing reads spans"
    _, values = created(tmp_path / "search", "--questions", questions, "--no-reader")
    assert values["reader"]["init"] == "none"
    hub.known.clear()
    lines, values = created(tmp_path / "own", "--questions", questions)
    assert "trained on your questions from the encoder" in line(lines, "reader: ")
    assert values["reader"]["init"] == "encoder"
