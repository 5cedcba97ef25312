"""Credentials in addresses: refused in options, removed from texts of servers."""

from pathlib import Path

import pytest

from realmops.config import load_params
from realmops.credentials import redact, refuse_credentials


@pytest.mark.parametrize(
    ("address", "variable"),
    [
        ("s3://me:s3/cret@bucket/documents", "AWS_SECRET_ACCESS_KEY"),
        ("https://s3cret@host/documents.jsonl", "NETRC"),
        ("https://host/a.jsonl?X%2DAmz%2DSignature=s3cret", "NETRC"),
        ("https://host/a.jsonl?sv=2026&sig=s3cret", "NETRC"),
        ("https://host/a.jsonl?access_token=s3cret", "NETRC"),
        ("gs://bucket/a.jsonl#key=s3cret", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("hf://datasets/o/n/a.jsonl?token=s3cret", "HF_TOKEN"),
        ("simplecache::https://me:s3cret@host/a.jsonl", "NETRC"),
    ],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(
    address: str, variable: str, tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text("{}")
    for option in ("snapshot.documents", "questions.test", "retriever.init"):
        with pytest.raises(ValueError, match=f"{option}.*with credentials in it.*{variable}") as refused:
            load_params(tmp_path / "params.yaml", settings=[f"{option}={address}"])
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "hf://datasets/owner/name@main/a.jsonl",
        "abfss://container@account.dfs.core.windows.net/a.jsonl",
        "http://host:8080/a@2.jsonl?version=2&page=3",
        "s3://bucket/tokens/key.jsonl",
        "sftp://me@host/a.jsonl",
    ],
)
def test_an_address_without_credentials_is_accepted(address: str) -> None:
    refuse_credentials(address, "here")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/api?token=s3cret", "http://host:5000/api"),
        ("https://me:p@s/5#?x@host/a", "https://host/a"),
        ("got 'me:s3cret@host:5000'", "got 'host:5000'"),
        ("postgresql://me:s3@cret@db/mlflow?password=s3cret", "postgresql://db/mlflow"),
        ("retries exceeded with url: /api/2.0?token=s3cret (for", "retries exceeded with url: /api/2.0 (for"),
        ("Who wrote to a@b? I did.", "Who wrote to a@b? I did."),
        ("models:/first@champion, sqlite:////mlflow.db; is it there?",) * 2,
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("text", ["/" * (1 << 21), "a:'" * (1 << 20), "x//y?" * (1 << 19), "@" * (1 << 21)])
def test_redacting_takes_linear_time(text: str) -> None:
    assert len(redact(text)) <= len(text)
