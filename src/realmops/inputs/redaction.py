"""URIs without credentials, for display."""

import re

_QUERY = re.compile(r"\?[^'\")]+")


def redact(text: str) -> str:
    """Remove user names, passwords and query strings from the URIs in a text, for example an error message.

    Every URI that is displayed or stored passes through here: messages, logs, tags. Everything from // to the last @
    before a blank is removed, so that no part of a password with characters that are invalid in a URI is left.
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
