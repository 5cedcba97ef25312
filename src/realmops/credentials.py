"""Credentials in addresses: refused where an address is read, removed from texts that servers return."""

import re
from urllib.parse import unquote, urlsplit

WEB = ("http", "https")  # single files, without folders
VARIABLES = {  # of the environment, or keys of a Secret, by scheme
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server than Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
    "http": "NETRC, the path of a netrc file",
}
_QUERY = re.compile(r"\?[^'\")]+")
_SECRET_NAMES = re.compile(
    r"(?:^|[?&;#])[\w.$-]*(?:token|secret|passw|pwd|signature|credential|auth|api[-_]?key|access[-_]?key)[\w.-]*="
    r"|(?:^|[?&;#])(?:sig|key|code)=",
    re.IGNORECASE,
)


def variables_of(scheme: str) -> str:
    return VARIABLES.get({"s3a": "s3", "gcs": "gs", "https": "http"}.get(scheme, scheme), "")


def refuse_credentials(value: str, place: str) -> None:
    """Raise ValueError for an address with a password, token or signature; ``place`` names its option or file."""
    if "://" not in value:
        return
    for address in value.split("::"):  # of chained filesystems
        if _has_credentials(address):
            scheme = address.partition("://")[0]
            names = variables_of(scheme) or "the variables of its filesystem"
            shown = redact(place.replace(value, f"{scheme}://..."))
            raise ValueError(
                f"{shown} is an address with credentials in it; remove them, and set {names} in the environment, in a "
                "cluster in the Secret realmops-secrets"
            )


def _has_credentials(address: str) -> bool:
    parts = urlsplit(address)
    try:
        has_password = parts.password is not None or (parts.port or 0) < 0
    except ValueError:  # a password with a slash: its first part is read as a port
        has_password = "@" in address.partition("://")[2]
    is_token = parts.scheme in WEB and parts.username is not None
    return has_password or is_token or bool(_SECRET_NAMES.search(unquote(address.partition("://")[2])))


def error_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return redact(f"{type(error).__name__}: {text}")[:300].removesuffix(".")


def redact(text: str) -> str:
    """Remove user names, passwords and query strings from URIs.

    All from // to the last @ is removed, because a password may have characters that are invalid in a URI.
    """
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
    path = word.find("/")
    return word if path < 0 else word[:path] + _QUERY.sub("", word[path:])
