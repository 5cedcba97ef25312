"""Which options name inputs, what an address means, and the version of what is there.

An address is whatever fsspec opens (``s3://bucket/documents``). A stored object has the layout of a DVC remote, and its
digest is in its address: ``STORE/files/md5/ab/cdef...#NAME``, with ``.dir`` before ``#`` for a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from itertools import pairwise
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from realmops import artifacts
from realmops.inputs.redaction import redact

if TYPE_CHECKING:  # the command line imports this module, and pydantic takes 0.2 s
    from realmops.config import Values

FILES = (
    *("snapshot.documents", "snapshot.warmup", "tag.train", "tag.dev"),
    *("questions.train", "questions.dev", "questions.test"),
)
MODELS = ("retriever.init", "reader.init", "closed_book.init")
NO_MODEL = {  # values that name no model
    "retriever.init": ("small",),
    "reader.init": ("encoder", "none"),
    "closed_book.init": ("small",),
}
PUBLISHED = "data/published"  # passages imported with a checkpoint
CLOZE = "data/cloze"  # questions generated from the corpus
STAGE_FOLDERS = {  # outputs, relative to the root of the run
    "sample": "data/sample",
    "snapshot": "data/snapshot",
    "tag": "data/spans",
    "ict": "models/ict",
    "pretrain": "models/pretrain",
    "finetune": "models/finetune",
    "evaluate": "results",
}
WEB = ("http", "https")  # single files, without folders
THREADS = 16  # concurrent requests: small files take a round trip each
CHUNK = 1 << 20  # bytes
SECONDS = 60  # without a byte from a web server
GOOGLE = "storage.googleapis.com"
OBJECTS = "files/md5"  # folder of a store
# What filesystems report of a file that changes with its content, the most exact first, and at its changes
CONTENT_MARKS = "md5Hash", "xet_hash", "blob_id", "ETag", "etag", "Content-MD5", "Digest", "content_md5", "checksum"
_MARKS = *CONTENT_MARKS, "LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created"
_STORED = re.compile(
    rf"(?P<store>.+)/{OBJECTS}/(?P<two>[0-9a-f]{{2}})/(?P<rest>[0-9a-f]{{30}}(?:\.dir)?)(?:#(?P<name>.*))?"
)
_ADVICE = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server than Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}


def is_address(value: str) -> bool:
    """Return whether the value of an option is an address."""
    return "://" in value


def is_stage_output(value: str) -> bool:
    """Return whether a file is in the folder of a stage, or in that of imported or generated data."""
    return any(Path(folder) in Path(value).parents for folder in (PUBLISHED, CLOZE, *STAGE_FOLDERS.values()))


def unused_inputs(values: Values) -> set[str]:
    """Return the keys of the inputs that no stage reads with these options."""
    from realmops.options import CLOSED_BOOK

    unused = set() if values["snapshot"]["use_warmup"] else {"snapshot.warmup"}
    unused |= set() if values["tag"]["method"] == "tagger" else {"tag.train", "tag.dev"}
    return unused | (set() if values["finetune"]["reader"] in CLOSED_BOOK else {"closed_book.init"})


def listed_inputs(values: Values) -> dict[str, str]:
    """Return the inputs in use by section.key: paths, addresses, names on the hub and datasets (``hf:...``)."""
    listed = {key: values[section][name] for key in (*FILES, *MODELS) for section, name in [key.split(".")]}
    unused = unused_inputs(values)
    return {
        key: value
        for key, value in listed.items()
        if value and key not in unused and value not in NO_MODEL.get(key, ()) and not is_stage_output(value)
    }


def replace_inputs(values: Values, inputs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the options with other inputs, given by section.key."""
    replaced = {section: dict(keys) for section, keys in values.items()}
    for key, value in inputs.items():
        section, _, name = key.partition(".")
        replaced[section][name] = value
    return replaced


@dataclass(frozen=True)
class Address:
    """A parsed address."""

    text: str  # the address as in the option
    location: str  # the address without the name of a stored object
    name: str  # name of the file or folder; its suffix determines the format
    digest: str = ""  # DVC's md5 of a stored object, with ``.dir`` for a folder; empty for any other address
    store: str = ""  # address of the store that has a stored object; else empty

    def __str__(self) -> str:
        return redact(self.text)


def parse(text: str) -> Address:
    """Parse an address.

    Raises:
        ValueError: the address has no usable name.
    """
    if stored := _STORED.fullmatch(text):
        name = stored["name"] or ""
        if not name or len(PurePosixPath(name).parts) != 1 or name == ".." or not _is_inside(name):
            raise ValueError(
                f"{redact(text)} is a stored object without a usable name: found {name!r}; add #NAME, the name of the "
                "file or folder with its suffix, for example #documents.jsonl"
            )
        return Address(text, text.partition("#")[0], name, stored["two"] + stored["rest"], stored["store"])
    is_web = _scheme(text) in WEB
    path = unquote(urlsplit(text).path) if is_web else text.partition("://")[2]
    name = PurePosixPath(path.rstrip("/")).name
    if not name or name == ".." or (is_web and path.endswith("/")):
        raise ValueError(
            f"{redact(text)} names no file; an address ends with the name of a file, or of a folder where the store "
            "has folders (s3, gs, hf)"
        )
    return Address(text, text.rstrip("/"), name)


def version_of(address: str) -> str:
    """Return the version of what an address names: equal if the content is.

    For a stored object it is DVC's md5, without a request. For any other address it is a digest of the names and sizes
    of its files, and of what the store reports of their content, such as an ETag; where a web server reports nothing,
    the file is read.

    Raises:
        ValueError: the address cannot be read.
    """
    parsed = parse(address)
    return parsed.digest or listing_version(parsed, list_files(parsed))


@dataclass(frozen=True)
class RemoteFile:
    """A file of an address."""

    name: str  # path below the folder of the input; empty if the address is a file
    path: str  # what its filesystem opens
    size: int | None  # bytes; None if unknown
    mark: str  # what changes with the content; ``md5:`` or ``sha256:`` and a digest, or what the store reports


def listing_version(address: Address, files: Sequence[RemoteFile]) -> str:
    """Return the version of an address with these files."""
    listing = [[file.name or address.name, file.size, file.mark] for file in files]
    return address.digest or artifacts.digest_of([redact(address.location), listing])


def list_files(address: Address) -> list[RemoteFile]:
    """Return the files of an address, sorted by name; hidden ones are left out, as when a folder is read.

    Raises:
        ValueError: the address cannot be read, or names no file, or a file outside its folder.
    """
    with filesystem(address) as fs:
        if address.store:
            files = _stored_files(address, fs)
        else:
            fs.invalidate_cache()
            files = _listed_files(address, fs)
    return sorted(files, key=lambda file: file.name)


class InputError(ValueError):
    """What is wrong with an input, rather than with reaching it; the message is complete."""


def shared_progress(advance: Callable[[int], None], stopped: Event) -> Callable[[int], None]:
    """Return the callback of a progress bar for several threads; once ``stopped`` is set it ends them by an error."""
    lock = Lock()

    def update(units: int) -> None:
        if stopped.is_set():
            raise InputError("stopped")
        with lock:
            advance(units)

    return update


@contextmanager
def filesystem(address: Address, access: str = "read") -> Iterator[Any]:
    """Context manager: yield fsspec's filesystem of an address; its errors become a ValueError of one line.

    ``access`` is the past participle for the error: "read" or "written".
    """
    try:
        from fsspec import filesystem as open_filesystem

        scheme = _scheme(address.text)
        options = _web_options() if scheme in WEB else {}
        if scheme in ("gs", "gcs"):
            _check_google()
        yield open_filesystem(scheme, **options)
    except InputError:
        raise
    except ImportError as error:
        raise ValueError(f"{address} cannot be {access}: {_one_line(error)}; pip install 'realmops[remote]'") from None
    except Exception as error:  # of any class; the remedy is always the same
        if isinstance(error, OSError) and error.errno == ENOSPC:
            raise  # of the local disk
        raise ValueError(_explain(address, error, access)) from None


def _explain(address: Address, error: Exception, access: str) -> str:
    cause = error.__cause__ or error  # fsspec reports any failure of a web server as a missing file
    status = getattr(cause, "status", None)
    if access == "read" and isinstance(error, FileNotFoundError) and (cause is error or status == 404):
        return f"{address} does not exist; check the address"
    names = _ADVICE.get(_scheme(address.text).replace("s3a", "s3").replace("gcs", "gs"))
    advice = f", and the credentials in the environment ({names})" if names else ""
    return f"{address} cannot be {access}: {type(cause).__name__}: {_one_line(cause)}; check the address{advice}"


def _one_line(error: BaseException) -> str:
    return redact(" ".join(str(error).split()))[:200].removesuffix(".")


def _check_google() -> None:
    """Raise ConnectionError without a network, in which gcsfs would try for a minute; silence its tracebacks."""
    for logger in ("gcsfs", "google.auth"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # they also raise what they log
    if "STORAGE_EMULATOR_HOST" not in os.environ:
        try:
            socket.getaddrinfo(GOOGLE, 443)
        except OSError as error:
            raise ConnectionError(f"{GOOGLE}: {error.strerror}") from None


def _web_options() -> dict[str, Any]:
    """Return options for web servers: a limit on silence instead of one on the whole download, and proxies."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return {}  # fsspec names the missing package
    timeout = ClientTimeout(total=None, sock_connect=SECONDS, sock_read=SECONDS)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _scheme(text: str) -> str:
    return text.partition("://")[0]


def _listed_files(address: Address, fs: Any) -> list[RemoteFile]:
    path = fs._strip_protocol(address.location)
    info = fs.info(path)
    if info["type"] != "directory":
        return [_remote_file("", path, info, fs)]
    base = path.rstrip("/") + "/"
    listed = {name: entry for name, entry in fs.find(path, detail=True).items() if entry["type"] != "directory"}
    names = {name: name.removeprefix(base) for name in listed if name.startswith(base) and not name.endswith("/")}
    _check_names(address, names.values())
    names = {name: below for name, below in names.items() if not any(p.startswith(".") for p in below.split("/"))}
    if not names:
        raise InputError(f"{address} holds no file; check the address")
    return [_remote_file(below, name, listed[name], fs) for name, below in names.items()]


def _remote_file(name: str, path: str, info: Mapping[str, Any], fs: Any) -> RemoteFile:
    mark = next((f"{key}:{info[key]}" for key in _MARKS if info.get(key) is not None), "")
    return RemoteFile(name, path, info.get("size"), mark or f"sha256:{content_digest(fs, path, 'sha256')}")


def content_digest(fs: Any, path: str, algorithm: str) -> str:
    """Read a file and return its digest."""
    digest = hashlib.new(algorithm)
    with fs.open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _stored_files(address: Address, fs: Any) -> list[RemoteFile]:
    if not address.digest.endswith(".dir"):
        path = fs._strip_protocol(address.location)
        return [RemoteFile("", path, fs.info(path).get("size"), f"md5:{address.digest}")]
    content = fs.cat_file(fs._strip_protocol(address.location))
    try:
        entries = sorted(
            ({key: str(entry[key]) for key in ("md5", "relpath")} for entry in json.loads(content)),
            key=lambda entry: entry["relpath"],
        )
        digest = hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    except (ValueError, KeyError, TypeError):
        digest = ""
    if f"{digest}.dir" != address.digest:
        raise InputError(
            f"{address} is damaged: its list of files has another md5 than its address; delete this object, and upload "
            "it again"
        )
    _check_names(address, [entry["relpath"] for entry in entries])
    paths = [fs._strip_protocol(object_address(address.store, entry["md5"])) for entry in entries]
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(pool.map(lambda path: fs.info(path).get("size"), paths))
    return [
        RemoteFile(entry["relpath"], path, size, f"md5:{entry['md5']}")
        for entry, path, size in zip(entries, paths, sizes, strict=True)
    ]


def object_address(store: str, digest: str) -> str:
    """Return the address of an object in a store, without a name."""
    return f"{store}/{OBJECTS}/{digest[:2]}/{digest[2:]}"


def _is_inside(name: str) -> bool:
    """Return whether a relative path stays in its folder, and is a path at all."""
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def _check_names(address: Address, names: Collection[str]) -> None:
    for name in names:
        if not _is_inside(name):
            raise InputError(
                f"{address} lists the file {name!r}, which is no path below its folder; do not use this address"
            )
    for one, other in pairwise(sorted(name.split("/") for name in names)):
        if other[: len(one)] == one:
            raise InputError(
                f"{address} lists {'/'.join(one)!r} twice, or as a file and as a folder; rename one of them"
            )
