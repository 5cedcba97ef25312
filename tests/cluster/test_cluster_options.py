"""Options as the text that a pipeline takes: what differs from the defaults."""

import json
from pathlib import Path

import pytest

from realmops.cluster.packed_options import pack_options, packed_pins, unpack_options
from realmops.config import PACKAGE, default_options, load_params
from realmops.inputs.resolve import PinnedInput


def test_options_are_what_differs_from_the_defaults(tmp_path: Path) -> None:
    """All 6 kB of them, in forty places of Argo's state, hid the last tasks of a run on a real server."""
    (tmp_path / "params.yaml").write_text("pretrain: {steps: 40}\n")
    values = load_params(tmp_path / "params.yaml", presets=[PACKAGE / "presets/minilm.yaml"])
    text = pack_options(values)
    assert unpack_options(text) == values
    assert len(text) < 2000
    assert json.loads(pack_options(load_params(tmp_path / "params.yaml"))).keys() == {"defaults", "pretrain"}
    assert unpack_options('{"pretrain": {"steps": 40}}')["pretrain"]["steps"] == 40, (
        "a person need not know the defaults"
    )


def test_inputs_that_pods_fetch_are_no_options() -> None:
    pins = {
        "snapshot.documents": PinnedInput("md5:1a.dir", "documents", "", {"url": "s3://bucket/store"}),
        "questions.test": PinnedInput("s3://bucket/test.jsonl 2b"),
    }
    text = pack_options(default_options(), pins)
    assert (unpack_options(text), packed_pins(text)) == (default_options(), pins)
    assert packed_pins(pack_options(default_options())) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"defaults": "0", "pretrain": {"steps": 40}}',
            r"refer to the defaults 0, and this image has",
        ),
        ("[]", "expected sections with keys"),
        ("{", "options is not valid JSON"),
    ],
)
def test_options_of_another_version_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_options(text)
