"""A stand-in for the Hugging Face hub, from the source of huggingface_hub 2.4: what an upload calls without Xet.

It refuses what the hub refuses: a wrong token, an owner that the token may not write to, a card with invalid metadata,
large files in a commit, and LFS files that were not uploaded.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

TOKEN = "hf_of_the_test"
OWNERS = ("ann", "lab")  # whose repositories the token may write
LFS = ("*.safetensors", "*.onnx", "*.bin", "*.parquet")  # .gitattributes of a new repository, and more
REGULAR_LIMIT = 10_000_000  # bytes of a file in a commit
LFS_TYPE = "application/vnd.git-lfs+json"


@dataclass
class Repository:
    """Files of the newest commit, and the summaries of all."""

    visibility: str
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits}".encode()).hexdigest()


class Refused(Exception):
    """A response with an error code of the hub."""

    def __init__(self, status: int, message: str, code: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **fields}


@dataclass
class Hub:
    """State of the stand-in: repositories by name, stored LFS objects by sha256, and requests."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [each for each in self.requests if each[0] not in ("GET", "HEAD")]

    def respond(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.requests.append((method, path))
        try:
            content = self.route(method, path.strip("/").split("/"), headers, body)
        except Refused as error:
            names = {"X-Error-Code": error.code} if error.code else {}
            return error.status, names | {"X-Error-Message": str(error)}, json.dumps(error.body).encode()
        if isinstance(content, bytes):
            extra = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": "0" * 40}
            return 200, extra, content
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()

    def route(self, method: str, parts: list[str], headers: Any, body: bytes) -> Any:
        if method == "PUT" and parts[0] == "storage":  # signed address, without a token
            return self.store(parts[1], body)
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid credentials in Authorization header")
        if (method, parts) == ("POST", ["api", "repos", "create"]):
            return self.create(json.loads(body))
        if (method, parts) == ("POST", ["api", "validate-yaml"]):
            return check_card(**json.loads(body))
        if method == "POST" and parts[2:] == ["info", "lfs", "objects", "batch"]:
            assert headers["Content-Type"] == LFS_TYPE
            self.find(f"{parts[0]}/{parts[1].removesuffix('.git')}")
            return self.batch(json.loads(body))
        if method in ("GET", "HEAD") and parts[2:4] == ["resolve", "main"]:
            files = self.find("/".join(parts[:2])).files
            if (name := "/".join(parts[4:])) not in files:
                raise Refused(404, "Entry not found", "EntryNotFound")
            return files[name]
        assert parts[:2] == ["api", "models"], parts
        repository, rest = self.find("/".join(parts[2:4])), parts[4:]
        if method == "GET" and rest == ["tree", "main"]:
            return [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in repository.files.items()]
        if method == "GET" and rest in ([], ["revision", "main"]):
            return describe("/".join(parts[2:4]), repository)
        if method == "POST" and rest == ["preupload", "main"]:
            return {"files": [upload_mode(repository, **file) for file in json.loads(body)["files"]]}
        if method == "POST" and rest == ["commit", "main"]:
            assert headers["Content-Type"] == "application/x-ndjson"
            lines = [json.loads(line) for line in body.splitlines()]
            return self.commit("/".join(parts[2:4]), repository, lines)
        raise AssertionError((method, parts))

    def find(self, name: str) -> Repository:
        if name not in self.repositories:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repositories[name]

    def create(self, asked: dict[str, Any]) -> dict[str, str]:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in OWNERS:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {name}")
        if name in self.repositories:
            raise Refused(409, "You already created this model repo", url=f"{self.url}/{name}")
        self.repositories[name] = Repository(asked.get("visibility", "public"))
        return {"url": f"{self.url}/{name}"}

    def batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert (asked["operation"], asked["hash_algo"]) == ("upload", "sha256")
        assert "basic" in asked["transfers"]
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.url}/storage/{entry['oid']}", "header": {}}}}
            for entry in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def store(self, oid: str, content: bytes) -> dict[str, Any]:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "checksum mismatch")
        self.stored[oid] = content
        return {}

    def commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> dict[str, Any]:
        header, *operations = lines
        assert header["key"] == "header"
        assert header["value"]["summary"]
        if name.partition("/")[0] not in OWNERS:
            raise Refused(403, "you may not write to this repository")
        files = dict(repository.files)
        for operation in operations:
            value, path = operation["value"], operation["value"]["path"]
            assert not path.startswith("/")
            assert ".." not in path.split("/")
            if operation["key"] == "file":
                assert value["encoding"] == "base64"
                content = base64.b64decode(value["content"], validate=True)
                if len(content) > REGULAR_LIMIT or is_lfs(path, content[:512]):
                    raise Refused(400, f"{path}: binary and large files must be uploaded by LFS or Xet")
                files[path] = content
            elif operation["key"] == "lfsFile":
                assert value["algo"] == "sha256"
                if len(self.stored.get(value["oid"], b"")) != value["size"]:
                    raise Refused(400, f"{path}: the LFS object {value['oid']} does not exist")
                files[path] = self.stored[value["oid"]]
            else:
                assert operation["key"] == "deletedFile", operation
                if path not in files:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                del files[path]
        repository.files = files
        repository.commits.append(header["value"]["summary"])
        address = f"{self.url}/{name}/commit/{repository.sha}"
        return {"success": True, "commitUrl": address, "commitOid": repository.sha}


def is_lfs(path: str, sample: bytes) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in LFS) or b"\0" in sample


def upload_mode(repository: Repository, path: str, sample: str, size: int) -> dict[str, Any]:
    mode = "lfs" if size > REGULAR_LIMIT or is_lfs(path, base64.b64decode(sample, validate=True)) else "regular"
    answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
    if (content := repository.files.get(path)) is not None:  # by its hash a client skips an unchanged file
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        answer["oid"] = hashlib.sha256(content).hexdigest() if mode == "lfs" else git
    return answer


def front_matter(card: str) -> dict[str, Any]:
    """Return the metadata of a card; the hub refuses a card without."""
    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0]:
        return {}
    found = yaml.safe_load(parts[1])
    return found if isinstance(found, dict) else {}


def check_card(content: str, repoType: str) -> dict[str, Any]:
    """Check the licence, the tags and the structure of the model-index, as the hub does."""
    assert repoType == "model"
    try:
        front = front_matter(content)
        assert isinstance(front.get("license"), str), '"license" must be a string'
        assert all(isinstance(tag, str) for tag in front.get("tags", [])), '"tags" must be an array of strings'
        if "model-index" in front:
            name, results = model_index_to_eval_results(front["model-index"])
            assert name
            assert all(isinstance(result.metric_value, int | float) for result in results), "a value must be a number"
    except (AssertionError, yaml.YAMLError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise Refused(400, problem, errors=[{"message": problem}], warnings=[]) from None
    return {"errors": [], "warnings": []}


def describe(name: str, repository: Repository) -> dict[str, Any]:
    card = repository.files.get("README.md", b"").decode()
    return {
        "id": name,
        "sha": repository.sha,
        "private": repository.visibility == "private",
        "siblings": [{"rfilename": path} for path in repository.files],
        "cardData": front_matter(card) or None,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        status, headers, content = self.hub.respond(self.command, unquote(urlsplit(self.path).path), self.headers, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """Run a hub on this machine, which huggingface_hub uses with an empty cache in ``folder``."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        values = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        with mock.patch.multiple("huggingface_hub.constants", **values):
            yield hub
        server.shutdown()
