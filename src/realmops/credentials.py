"""Credentials in addresses: refused where an address is read, removed from texts of servers and libraries."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

WEB = ("http", "https")  # single files, without folders
VARIABLES = {  # of the environment, or keys of a Secret, by scheme
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server than Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
    "http": "NETRC, the path of a netrc file",
    "postgresql": "PGUSER and PGPASSWORD",
}
_ADDRESS = re.compile(r"[a-z][\w+.-]*://\S*", re.IGNORECASE)
_PARAMETER = re.compile(r"(?:^|[?&;#])([\w.$-]{1,100})=")  # name=value in a query or fragment
_SECRET_NAME = re.compile(
    r"token(?!i)|secret|passw|passphrase|pwd|signature|credential|auth(?!or)|(?:api|access|account|private|shared)[-_]?key"
    r"|^(?:sig|key|code|pass|jwt)$",
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
        for address in (*_ADDRESS.findall(text), *text.split("::")):  # in a sentence; of chained filesystems
            if _has_credentials(address):
                scheme = address.partition("://")[0].lower()
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


def _has_credentials(address: str) -> bool:
    rest = unquote(address.partition("://")[2])
    try:
        parts = urlsplit(unquote(address))
        has_password = parts.password is not None or (parts.port or 0) < 0
        is_token = parts.scheme in WEB and parts.username is not None
    except ValueError:  # a password with a slash or bracket: its first part is read as a port or host
        has_password, is_token = "@" in rest, False
    return has_password or is_token or _find_secret(rest) >= 0


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
    start = before.find("//")
    if at and start >= 0:
        word = before[: start + 2] + host
    elif at:  # a URI without //: name:password@host, perhaps after a bracket or a quotation mark
        name, colon, password = before.partition(":")
        first = max(map(name.rfind, "'\"(=")) + 1
        if name[first:] and "/" not in name[first:] and colon and password[:1] not in ("", "/"):
            word = name[:first] + host
    path, end = word.find("/"), len(word.rstrip(_CLOSING))
    starts = [start for start in (word.find("?", path), _find_secret(word)) if 0 <= path < start < end - 1]
    return word[: min(starts)] + word[end:] if starts else word
