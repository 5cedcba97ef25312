"""Credentials in addresses: refused where an address is read, removed from texts of servers and libraries."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

WEB = ("http", "https")  # single files, without folders
VARIABLES = {  # of the environment, or keys of a Secret, by scheme
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server than Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
    "http": "NETRC, the path of a netrc file",
    "postgresql": "PGUSER and PGPASSWORD",
}
_SCHEME = re.compile(r"[\w+.-]*\Z")
_PARAMETER = re.compile(r"(?:^|[?&;#])([^=&?;#\s]{1,100})\s*=")  # name=value in a query or fragment
_SECRET_NAME = re.compile(
    r"token(?!i)|secret|passw|passphrase|pwd|signature|credential|auth(?!or(?!i))"
    r"|(?:api|app|access|account|private|shared|subscription)[-_.]?key"
    r"|^(?:key|code)$|(?:^|[^a-z])(?:sig|pass|pw|jwt|bearer|ticket)(?:[^a-z]|$)",
    re.IGNORECASE,
)
_CLOSING = "'\")]}>,;.:"  # characters after an address in a text


def variables_of(scheme: str) -> str:
    return VARIABLES.get({"s3a": "s3", "gcs": "gs", "https": "http"}.get(scheme, scheme), "")


def refuse_credentials(value: object, place: str, variables: str = "") -> None:
    """Raise ValueError for an address with a password, token or signature in a text, or in a text of a collection.

    ``place`` names its option or file, ``variables`` where credentials belong, by default those of the scheme.
    """
    for text in _texts(value):
        for scheme, rest in _addresses(text):
            if _has_credentials(scheme, rest):
                shown = redact(place.replace(text, f"{scheme}://..."))
                names = variables or variables_of(scheme) or "the variables of its client"
                raise ValueError(
                    f"{shown} has an address ({scheme}://...) with credentials in it; remove them, and set {names} in "
                    "the environment, in a cluster in the Secret realmops-secrets"
                )


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value and its collections that may have addresses."""
    if isinstance(value, str):
        yield from [value] if "://" in value else []
    elif isinstance(value, Mapping | list | tuple):
        for part in (*value, *(value.values() if isinstance(value, Mapping) else ())):
            yield from _texts(part)


def _addresses(text: str) -> Iterator[tuple[str, str]]:
    """Yield scheme and rest of each address, also in a sentence, in another address or of chained filesystems."""
    before, *pieces = text.split("://")
    for piece in pieces:
        scheme = _SCHEME.findall(before[-40:])[0]
        is_whole = before.rpartition("::")[2] == scheme  # then a password may have blanks
        yield scheme.lower(), piece if is_whole else piece.partition(" ")[0]
        before = piece


def _has_credentials(scheme: str, rest: str) -> bool:
    authority = unquote(re.split("[/?#]", rest, maxsplit=1)[0])  # as encoded: a password may have %2F
    user, at, host = authority.rpartition("@")
    _, colon, port = host.rpartition(":")
    is_cut = colon and "@" in rest and not (port.isdigit() or port.endswith("]"))  # a password with a slash, no port
    return bool((at and (":" in user or scheme in WEB)) or is_cut or _find_secret(unquote(rest)) >= 0)


def _find_secret(text: str) -> int:
    """Return where the first parameter with the name of a secret starts; -1 without one."""
    return next((match.start() for match in _PARAMETER.finditer(text) if _SECRET_NAME.search(match[1])), -1)


def error_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return redact(f"{type(error).__name__}: {text}")[:300].removesuffix(".")


def redact(text: str) -> str:
    """Remove user names, passwords and queries from URIs: from // to the last @, and from ? to the next blank."""
    return re.sub(r"\S+", lambda word: _redact_word(word[0]), text)


def _redact_word(word: str) -> str:
    """Redact a word without blanks in linear time, as an error may hold whole pages of a server."""
    before, at, host = word.rpartition("@")
    scheme = re.search("//|[a-z]:/(?=[^/].*:)", before)
    if at and scheme:
        word = before[: scheme.end()] + host
    elif at:  # a URI without //: name:password@host, perhaps after a bracket or a quotation mark
        name, colon, password = before.partition(":")
        first = max(map(name.rfind, "'\"(=")) + 1
        if name[first:] and "/" not in name[first:] and colon and password[:1] not in ("", "/"):
            word = name[:first] + host
    path, end = word.find("/"), len(word.rstrip(_CLOSING))
    query = word.find("?", path) if path >= 0 else -1
    starts = [start for start in (query, _find_secret(word)) if 0 < start < end - 1]
    return word[: min(starts)] + word[end:] if starts else word
