"""What is shown of an address."""

import pytest

from realmops.inputs.redaction import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/api?token=s3cret", "http://host:5000/api"),
        ("https://me:p@s/5#?x@host/a", "https://host/a"),
        ("got 'me:s3cret@host:5000'", "got 'host:5000'"),
        ("me:s3cret@host", "host"),
        ("postgresql://me:s3@cret@db/mlflow?password=s3cret", "postgresql://db/mlflow"),
        ("request to https://token@host/a?key=s3cret failed", "request to https://host/a failed"),
        ("retries exceeded with url: /api/2.0?token=s3cret (for", "retries exceeded with url: /api/2.0 (for"),
        ("Who wrote to a@b? I did.", "Who wrote to a@b? I did."),
        ("models:/first@champion, sqlite:////mlflow.db; is it there?",) * 2,
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text", ["/" * (1 << 21), "a:'" * (1 << 20), "x//y?" * (1 << 19), "@" * (1 << 21), "?" * (1 << 21)]
)
def test_a_long_run_costs_no_more_than_its_length(text: str) -> None:
    """What looks at each mark again for each other one would take hours."""
    assert len(redact(text)) <= len(text)
