"""Callers behind a filter: what JSON Web Tokens let them see, and that answers tell of nothing else."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import numpy as np
import pytest
import small_project
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from faults import times
from serving import served
from small_project import cli

from realmops.commands.answers import Asked, Generation, generation_of_run
from realmops.serve.claims import Claims

OWN = {"team": ["a"]}
HIDDEN = ("zebra", "quagga")  # words that stand in documents of others alone
SECRET = bytes(range(32))
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


def documents(path: Path, teams: str = "ab") -> None:
    """Twenty of each team, which tell of the same things."""
    records = []
    for n in range(40):
        team, name = "ab"[n % 2], f"{('Anna Berg', 'Karl Lund', 'Maria Holm', 'Jon Vik')[n % 4]} {n // 2}"
        built = f"Item{n // 2} was built by {name} in {'Oslo' if team == 'a' else HIDDEN[n // 2 % 2].title()}."
        text = f"{name} wrote a book about the river in 19{50 + n}. {built}"
        records.append({"id": f"{team}{n}", "title": name, "text": text, "team": team})
    small_project.write_json_lines(path, [one for one in records if one["team"] in teams])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behind")
    small_project.write_project(folder, retriever={"hybrid": True})
    documents(folder / "documents.jsonl")
    params = folder / "params.yaml"
    small_project.run_all_here(params, folder, "tag.method=dates")
    return folder


@pytest.fixture(scope="module")
def generation(root: Path) -> Generation:
    return generation_of_run(root)


def questions(count: int) -> Iterator[str]:
    random = np.random.default_rng(0)
    words = ["Item1", "Item3", "river", "Oslo", "Jon", "Vik", "book", "1951", "built", "Maria", *HIDDEN]
    for _ in range(count):
        yield " ".join(random.choice(words, 3)) + "?"


@pytest.mark.faults
def test_answers_tell_of_no_other_document(generation: Generation) -> None:
    """Among questions of others who may see all, in the same batches; ten thousand times under make faults."""
    wanted = times(1_000, 10_000)
    asked = [Asked(one, own=OWN if n % 8 else None) for n, one in enumerate(questions(wanted * 8 // 7 + 1))]
    others = behind = 0
    for first in range(0, len(asked), 32):
        some = asked[first : first + 32]
        found = generation.find(some)
        for one, of_one, record in zip(some, found, generation.read(found), strict=True):
            told = json.dumps([generation.sources(of_one), {**record, "question": ""}]).lower()
            told = told.replace(json.dumps(one.question).lower(), "")
            documents = {each["document_id"][0] for each in record["passages"] + record["citations"]}
            if one.own is None:
                others += "b" in documents
                continue
            behind += 1
            assert documents == {"a"}
            assert of_one.ranked == ()
            assert not any(word in told for word in HIDDEN)
    assert behind == wanted
    assert others > wanted // 10, "without a filter they are read"


def test_the_answer_is_that_of_a_corpus_without_the_others(root: Path, generation: Generation, tmp_path: Path) -> None:
    """Passages, p(z|x), answers and scores: nothing moves with what others have."""
    asked = [*questions(40)]
    behind = [generation.answer([Asked(one, own=OWN)])[0] for one in asked]
    copy = shutil.copytree(root, tmp_path / "copy")
    documents(copy / "documents.jsonl", "a")
    params = copy / "params.yaml"
    params.write_text(params.read_text().replace(str(root), str(copy)))
    assert cli("update", "--params", params, "--root", copy).exit_code == 0
    alone = generation_of_run(copy)
    assert len(alone.model.snapshot) < len(generation.model.snapshot)
    for question, mine in zip(asked, behind, strict=True):
        [wanted] = alone.answer([Asked(question)])
        for one in (mine, wanted):
            assert one.pop("model")
        assert [one["document_id"] for one in mine["passages"]] == [one["document_id"] for one in wanted["passages"]]
        for key in ("answer", "abstained"):
            assert mine[key] == wanted[key]
        for key in ("p_z", "score", "p_z_given_y"):
            numbers = [[one[key] for one in each["passages"]] for each in (mine, wanted)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


def test_who_may_see_nothing_gets_no_answer(generation: Generation) -> None:
    [record] = generation.answer([Asked("Who built Item3?", own={"team": ["nobody's"]})])
    assert (record["answer"], record["passages"], record["abstained"]) == ("", [], True)


def test_passages_can_be_left_out_behind_a_filter(generation: Generation) -> None:
    [whole] = generation.answer([Asked("Who built Item3?", own=OWN)])
    first, *rest = [one["passage_id"] for one in whole["passages"]]
    [without] = generation.answer([Asked("Who built Item3?", frozenset([first]), own=OWN)])
    left = [one["passage_id"] for one in without["passages"]]
    assert first not in left
    assert left[: len(rest)] == rest


# ---- tokens


def key_set(path: Path, **more: Any) -> Path:
    """A set with a key of each kind, and the file beside it that names it."""
    algorithms = jwt.algorithms.get_default_algorithms()
    public = {"RS256": RSA.public_key(), "ES256": EC.public_key(), "EdDSA": ED.public_key()}
    keys = [
        {**algorithms[name].to_jwk(key, as_dict=True), "kid": name, "alg": name}  # type: ignore[call-overload]
        for name, key in public.items()
    ]
    keys.append({"kty": "oct", "kid": "HS256", "k": base64.urlsafe_b64encode(SECRET).decode().rstrip("=")})
    (path / "keys.json").write_text(json.dumps({"keys": more.pop("keys", keys)}))
    given = {"keys": "keys.json", "audience": "realmops", "issuer": "https://id", "filters": {"team": "groups"}, **more}
    (path / "jwt.json").write_text(json.dumps({name: value for name, value in given.items() if value is not None}))
    return path / "jwt.json"


def token(kind: str = "RS256", key: Any = None, kid: str | None = "", **changes: Any) -> bytes:
    """One that holds, but for the changes; None takes a claim away."""
    claims = {"aud": "realmops", "iss": "https://id", "exp": time.time() + 60, "groups": ["a"], **changes}
    claims = {name: value for name, value in claims.items() if value is not None}
    keys: dict[str, Any] = {"RS256": RSA, "ES256": EC, "EdDSA": ED, "HS256": SECRET, "none": None}
    headers = {} if kid is None else {"kid": kid or kind}
    return jwt.encode(claims, key or keys[kind], kind, headers).encode()


@pytest.mark.parametrize("kind", ["RS256", "ES256", "EdDSA", "HS256"])
def test_the_claims_of_a_token_become_a_filter(kind: str, tmp_path: Path) -> None:
    claims = Claims(key_set(tmp_path))
    assert claims.filter_of(token(kind)) == {"team": ["a"]}
    assert claims.filter_of(token(kind, groups="b")) == {"team": "b"}
    assert claims.filter_of(token(kind, groups=[])) == {"team": []}
    two = Claims(key_set(tmp_path, filters={"team": "groups", "level": "clearance"}))
    assert two.filter_of(token(kind, clearance=[1, 2])) == {"team": ["a"], "level": [1, 2]}
    assert two.filter_of(token(kind)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1}, {"exp": None}, {"aud": "other"}, {"aud": None}, {"iss": "https://other"}, {"iss": None},
        {"groups": None}, {"groups": {"gte": ""}}, {"groups": [["a"]]}, {"groups": [None]}, {"nbf": time.time() + 999},
        {"kid": None}, {"kid": "unknown"}, {"key": rsa.generate_private_key(65537, 2048)}, {"kind": "none"},
        {"kind": "HS256", "kid": "RS256"}, {"kind": "ES256", "kid": "RS256"}, {"kind": "none", "kid": "RS256"},
    ],
)  # fmt: skip
def test_a_token_that_does_not_hold_lets_nobody_in(changes: dict[str, Any], tmp_path: Path) -> None:
    claims = Claims(key_set(tmp_path))
    assert claims.filter_of(token()) == {"team": ["a"]}
    assert claims.filter_of(token(**changes)) is None


def test_a_public_key_is_no_secret(tmp_path: Path) -> None:
    """The oldest forgery: HS256 under the words of an RSA key that everybody has."""
    claims = Claims(key_set(tmp_path))
    public = (tmp_path / "keys.json").read_bytes()
    head, body = (
        base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=")
        for one in ({"alg": "HS256", "kid": "RS256"}, {"aud": "realmops", "iss": "https://id", "exp": 1 << 40})
    )
    signed = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(head + b"." + body, public)
    forged = b".".join([head, body, base64.urlsafe_b64encode(signed).rstrip(b"=")])
    for strange in (forged, b"", b"a.b.c", b"\xff.\xff.\xff", b"[" * 9000 + b".e.e", token()[:-4] + b"AAAA"):
        assert claims.filter_of(strange) is None


def test_one_key_needs_no_name(tmp_path: Path) -> None:
    secret = [{"kty": "oct", "k": base64.urlsafe_b64encode(SECRET).decode()}]
    claims = Claims(key_set(tmp_path, keys=secret, issuer=None))
    assert claims.filter_of(token("HS256", kid=None, iss=None)) == {"team": ["a"]}
    assert claims.filter_of(token("HS256", kid="other")) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"keys": []}, "is no JSON Web Key Set"),
        ({"keys": [{"kty": "oct", "k": "AAAA"}]}, "has a secret of 3 bytes; HS256 wants 32 at least"),
        ({"keys": [{"kty": "new"}]}, "has a key that cannot be read"),
        ({"keys": ["x"]}, "has a key that cannot be read"),
        ({"audience": None}, "an object is wanted as"),
        ({"filters": {}}, "an object is wanted as"),
        ({"filters": {"team": 1}}, "an object is wanted as"),
        ({"issuers": "x"}, "an object is wanted as"),
    ],
)
def test_a_file_that_would_let_somebody_in_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    file = key_set(tmp_path, **changes)
    with pytest.raises(ValueError, match=told):
        Claims(file)


def test_the_file_is_told_of_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, whole, told in (
        ("{}", "", "wants --token-file"),
        ("{", "whole", "cannot be read"),
        ("[]", "whole", "no obj"),
    ):
        (tmp_path / "jwt.json").write_text(text)
        monkeypatch.setenv("REALMOPS_TOKEN", whole)
        if not whole:
            monkeypatch.delenv("REALMOPS_TOKEN")
        result = cli("serve", "--root", tmp_path, "--jwt", tmp_path / "jwt.json")
        assert (result.exit_code, told in result.stderr) == (2, True), result.stderr


def test_bearers_search_and_ask_behind_their_claims_and_do_nothing_else(root: Path, tmp_path: Path) -> None:
    (tmp_path / "access.json").write_text(json.dumps({"of-a": OWN}))
    words = ("--jwt", str(key_set(tmp_path)), "--access", str(tmp_path / "access.json"))
    asked = {"question": "Who built Item3?"}
    with served(root, *words, REALMOPS_TOKEN="whole") as running:
        for bearer in (token().decode(), "of-a"):
            head = {"Authorization": f"Bearer {bearer}"}
            status, _, record = running.call("/v1/answer", asked, **head)
            assert (status, {one["document_id"][0] for one in record["passages"]}) == (200, {"a"})
            status, _, several = running.call("/v1/answer", {"questions": ["Who built Item3?"] * 3}, **head)
            assert [one["answer"] for one in several["answers"]] == [record["answer"]] * 3
            status, _, stream = running.call("/v1/answer", {**asked, "stream": True}, **head)
            assert (status, "zebra" in str(stream).lower()) == (200, False)
            status, _, found = running.call("/v1/search", {"query": "Item3", "k": 40}, **head)
            assert {one["extra"]["team"] for one in found["passages"]} == {"a"}
            for path, body in (
                ("/metrics", None), ("/docs", None), ("/v2", None),
                ("/v1/answer/", asked),
                ("/v1/feedback", {"question": "Who?", "answer": "Jon", "right": True}),
            ):  # fmt: skip
                assert running.call(path, body, **head)[0] == 403
        head = {"Authorization": f"Bearer {token(exp=1).decode()}"}
        assert running.call("/v1/answer", asked, **head)[0] == 401
        assert running.call("/v1/answer", asked, Authorization="Bearer whole")[0] == 200
