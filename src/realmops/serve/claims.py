"""Callers with a token of an identity provider (JWT, RFC 7519): its claims become the filter that they ask behind."""

import json
from pathlib import Path
from typing import Any

from realmops.answering.search import Where, check_filter

ALGORITHMS = ("EdDSA", "ES256", "HS256", "RS256")
SECRET = 32  # bytes of an HS256 key at least
WANTED = (
    'an object is wanted as {"keys": "JWKS", "audience": "NAME", "filters": {"FIELD": "CLAIM"}}; "issuer" may be in it'
)


class Claims:
    """Knows the tokens that one of some keys has signed for us, and what they let their bearer see.

    The file names a JSON Web Key Set beside it (``keys``), the ``audience`` that a token must be for, its ``issuer`` if
    that counts, and by field of the documents (``filters``) the claim that has the values which the bearer may see.

    Raises ValueError for what is no such file, a key that is too weak or unknown, and where PyJWT is not installed.
    """

    def __init__(self, file: Path) -> None:
        try:
            import jwt
        except ImportError:
            raise ValueError(f"--jwt {file} needs PyJWT: pip install 'realmops[jwt]'") from None

        self._jwt = jwt
        given = _read(file, file)
        filters, self._audience, self._issuer = given.get("filters"), given.get("audience"), given.get("issuer")
        texts = [given.get("keys"), self._audience, *([] if self._issuer is None else [self._issuer])]
        texts += list(filters.values()) if isinstance(filters, dict) else []
        known = set(given) <= {"keys", "audience", "issuer", "filters"}
        if (
            not known
            or not filters
            or not isinstance(filters, dict)
            or not all(isinstance(t, str) and t for t in texts)
        ):
            raise ValueError(f"--jwt {file}: {WANTED}")
        self._filters: dict[str, str] = filters
        keys = _read(file, file.parent / given["keys"]).get("keys")
        if not isinstance(keys, list) or not keys:
            raise ValueError(
                f"--jwt {file}: {given['keys']} is no JSON Web Key Set: an object with a list 'keys' is wanted"
            )
        self._keys: dict[str | None, Any] = {}
        for one in keys:
            self._add(one, f"--jwt {file}: {given['keys']}")
        if len(keys) == 1:
            self._keys[None] = next(iter(self._keys.values()))  # for a token that names no key

    def _add(self, given: Any, place: str) -> None:
        try:
            key = self._jwt.PyJWK(given)
        except (self._jwt.PyJWTError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(f"{place} has a key that cannot be read: {error}") from None
        if key.algorithm_name not in ALGORITHMS:
            raise ValueError(f"{place} has a key for {key.algorithm_name}; known are {', '.join(ALGORITHMS)}")
        if key.algorithm_name == "HS256" and len(key.key) < SECRET:
            raise ValueError(f"{place} has a secret of {len(key.key)} bytes; HS256 wants {SECRET} at least")
        if key.key_id in self._keys:
            raise ValueError(f"{place} has two keys with the 'kid' {key.key_id!r}: each wants its own")
        self._keys[key.key_id] = key

    def filter_of(self, token: bytes) -> Where | None:
        """What the bearer may see; None for a token that does not hold, or without a claim that is wanted."""
        jwt = self._jwt
        try:
            key = self._keys.get(jwt.get_unverified_header(token).get("kid"))
            if key is None:
                return None
            said = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],  # the key's own: a token cannot choose another
                audience=self._audience,
                issuer=self._issuer,
                options={"require": ["exp", "aud", *([] if self._issuer is None else ["iss"])]},
            )
            where = {field: said[claim] for field, claim in self._filters.items()}
            if any(isinstance(value, dict) for value in where.values()):  # which a filter takes for a range
                return None
            check_filter(where)
        except (jwt.PyJWTError, KeyError, RecursionError, TypeError, ValueError):
            return None
        return where


def _read(file: Path, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--jwt {file}: {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--jwt {file}: {path} has no object; {WANTED}")
    return found
