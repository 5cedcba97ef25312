"""Addresses that fsspec opens, such as ``s3://bucket/documents``: their version, and their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from realmops import artifacts
from realmops.credentials import WEB, error_line, refuse_credentials, variables_of

SECONDS = 60  # without a byte from a web server
_WEB_MARKS = ("ETag", "Last-Modified", "Content-MD5", "Digest")  # headers that change with the content

Advance = Callable[[int], None]  # callback of a progress bar


class InputError(ValueError):
    """A fault of an input itself, with a complete message."""


def is_address(value: str) -> bool:
    return "://" in value


def name_of(address: str) -> str:
    """Return the name of the file or folder at an address; ValueError if it is refused."""
    refuse_credentials(address, "the input")
    if "::" in address:
        raise ValueError(f"{address} chains filesystems ('::'): changes could be missed; download it, and set its path")
    scheme, _, path = address.partition("://")
    path = unquote(urlsplit(address).path) if scheme in WEB else path
    name = PurePosixPath(path.rstrip("/")).name
    if not name or name == ".." or (scheme in WEB and path.endswith("/")):
        raise ValueError(
            f"{address} names no file; an address ends with the name of a file, or of a folder where the store has "
            "folders (s3, gs, hf)"
        )
    return name


def version_of(address: str) -> str:
    """Return a digest of an address and what its server reports, such as an ETag, else of the file's content."""
    with filesystem(address) as (fs, path):
        fs.invalidate_cache()
        if fs.info(path)["type"] != "directory":
            return artifacts.digest_of([address, _mark(address, fs, path)])
        files = fs.find(path)
        for file in files:
            if ".." in PurePosixPath(file.removeprefix(path)).parts or "\0" in file:
                raise InputError(f"{address} lists the file {file!r} outside of its folder; do not use this address")
        if not files:
            raise InputError(f"{address} holds no file; check the address")
        return artifacts.digest_of([address, sorted([file, _mark(address, fs, file)] for file in files)])


def _mark(address: str, fs: Any, path: str) -> str:
    if address.partition("://")[0] in WEB and not any(fs.info(path).get(mark) for mark in _WEB_MARKS):
        with fs.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return str(fs.checksum(path))


def copy_address(address: str, target: Path, progress: Callable[[str, int, str], Advance]) -> None:
    """Copy the file or folder at an address to ``target``; ValueError if it cannot be read or does not fit."""
    from fsspec.callbacks import Callback

    advance, callback = progress("inputs", 0, "files"), Callback()
    callback.relative_update = lambda files=1: advance(files)
    try:
        with filesystem(address) as (fs, path):
            is_folder = fs.info(path)["type"] == "directory"
            end = "/" if is_folder else ""
            fs.get(f"{path}{end}", f"{target}{end}", recursive=is_folder, callback=callback)
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        raise ValueError(
            f"{address} does not fit on the disk of {target.parent}; free disk space, or put the cache on a larger "
            "disk (REALMOPS_CACHE, in a cluster the claim), and run again"
        ) from None


@contextmanager
def filesystem(address: str) -> Iterator[tuple[Any, str]]:
    """Context manager: yield fsspec's filesystem and path of an address; its errors become a ValueError of one line."""
    try:
        from fsspec.core import url_to_fs

        yield url_to_fs(address, **(_web_options() if address.partition("://")[0] in WEB else {}))
    except InputError:
        raise
    except ImportError as error:
        raise ValueError(f"{address} cannot be read: {error_line(error)}; pip install 'realmops[remote]'") from None
    except Exception as error:  # of any class; the remedy is always the same
        if isinstance(error, OSError) and error.errno == ENOSPC:
            raise  # of the local disk
        raise ValueError(_explain(address, error)) from None


def _explain(address: str, error: Exception) -> str:
    cause = error.__cause__ or error  # fsspec reports any failure of a web server as a missing file
    if isinstance(error, FileNotFoundError) and (cause is error or getattr(cause, "status", None) == 404):
        return f"{address} does not exist; check the address"
    names = variables_of(address.partition("://")[0])
    advice = f", and the credentials in the environment ({names})" if names else ""
    return f"{address} cannot be read: {error_line(cause)}; check the address{advice}"


def _web_options() -> dict[str, Any]:
    """Return options for web servers: a limit on silence instead of one on the whole download; proxies and netrc."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return {}  # fsspec names the missing package
    timeout = ClientTimeout(total=None, sock_connect=SECONDS, sock_read=SECONDS)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}
