"""Bad input through the command line: one message with file, line or key and what to do, code 2, nothing left."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from faults import may_mount, small_disk
from safetensors.numpy import load as load_tensors
from small_project import cli, litter, run_all_here, toy_values, write_project

from realmops.commands.run import option_warnings
from realmops.config import parse_options, preset_layers
from realmops.stages import STAGES


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of which nothing was run."""
    write_project(tmp_path)
    return tmp_path


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def run(project: Path, name: str, *more: str | Path) -> Result:
    return cli("run", name, "--params", project / "params.yaml", "--root", project / "root", *more)


ONE_STEP = ("--set", "pretrain.steps=1", "--set", "pretrain.builder=child")


def refused(result: Result, *parts: str) -> None:
    """Check for one message on standard error with all these parts, and exit code 2."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    [message] = [line for line in result.stderr.splitlines() if line.startswith("realmops: ")]
    for part in parts:
        assert part in message, message


def nothing_of(project: Path, name: str) -> None:
    """Check that there is no output folder of the stage, no half-written folder and no work folder."""
    root = project / "root"
    assert not (root / STAGES[name].folder).exists()
    assert litter(root) == []
    assert list((root / ".realmops" / "work").glob("*")) == []


def test_a_bad_corpus_and_a_bad_option_are_refused_with_one_message(project: Path) -> None:
    refused(run(project, "snapshot", "--set", "pretrain.step=5"), "unknown key pretrain.step", "closest match: steps")
    assert not (project / "root").exists()
    good = b'{"title": "Oslo", "text": "Oslo is a city."}\n'
    (project / "documents.jsonl").write_bytes(good + b"Oslo is a city.\n")
    refused(run(project, "snapshot"), "documents.jsonl:2", "not valid JSON", "each line must be one JSON object")
    nothing_of(project, "snapshot")


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("questions.test", "check the path"),
        ("tag.train", "or set tag.method to dates, or to given if the documents contain spans"),
    ],
)
def test_a_missing_file_of_a_later_stage_is_named_before_the_first_runs(project: Path, key: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is 'nowhere'") as error:
        run_all_here(project / "params.yaml", project / "root", "tag.method=tagger", f"{key}=nowhere")
    for words in (f"{project / 'nowhere'} does not exist", advice):
        assert words in str(error.value)
    assert not (project / "root" / "data").exists()


def test_inputs_of_other_stages_need_not_exist(project: Path) -> None:
    more = ("--set", "tag.train=nowhere", "--set", "questions.test=nowhere")
    assert run(project, "snapshot", *more).exit_code == 0
    assert run(project, "tag", *more).exit_code == 0


def test_a_run_warns_of_options_that_are_rarely_intended(monkeypatch: pytest.MonkeyPatch) -> None:
    long = toy_values(snapshot={"block_wordpieces": 288})
    first, second = option_warnings(STAGES, long)
    assert "pretrain.reader_wordpieces=128: raise it to 288" in first
    assert "finetune.reader_wordpieces=128: raise it to 352" in second
    tracked = toy_values(tracking={"enabled": True})
    assert list(option_warnings(STAGES, tracked)) == []
    monkeypatch.setattr("realmops.commands.run.has_mlflow", lambda: False)
    [warning] = option_warnings(STAGES, tracked)
    assert "MLflow is not installed: metrics are only in metrics.jsonl" in warning
    assert list(option_warnings(("sample", "snapshot", "tag"), tracked)) == []


def rate_warnings(init: str, *presets: str) -> list[str]:
    layers = preset_layers(presets, Path("params.yaml"))
    values = parse_options(*layers, ("test", {"retriever": {"init": init}} if init else {}))
    return [warning for warning in option_warnings(STAGES, values) if "retriever.init" in warning]


def test_learning_rates_for_another_kind_of_encoder_are_named() -> None:
    for presets in ("", "ablation", "squad", "squad large", "squad minilm", "squad bert-base nq", "paper"):
        assert rate_warnings("", *presets.split()) == []
    [warning] = rate_warnings("small", "squad", "minilm")
    for rate in ("tag.learning_rate=0.0002", "ict.reader_learning_rate=0.0001", "finetune.reader_learning_rate=0.0001"):
        assert rate in warning
    [warning] = rate_warnings("some/encoder", "squad")
    assert "retriever.init is some/encoder" in warning
    assert "finetune.reader_learning_rate=0.001" in warning


def test_a_refused_corpus_or_folder_leaves_the_snapshot_of_before(project: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (project / "root/data").rglob("*") if path.is_file()}

    assert run(project, "snapshot").exit_code == 0
    before = files()
    (project / "documents.jsonl").write_bytes(b"")
    refused(run(project, "snapshot"), "no passage is left")
    assert (files(), litter(project / "root")) == (before, [])
    (mine := project / "root/data/snapshot/mine.txt").write_text("mine")
    refused(run(project, "snapshot", "--force"), "mine.txt was not written by this command")
    assert files() == before | {mine: b"mine"}


# Outputs of other stages: missing, damaged, of another corpus or vocabulary


def test_a_missing_or_damaged_input_names_the_stage_that_replaces_it(copy: Path) -> None:
    folder, spans = copy / "root/data/snapshot", copy / "root/data/spans"
    before = json.loads((folder / "manifest.json").read_bytes())["files"]
    shutil.rmtree(spans)
    tokens = folder / "corpus/tokens.npy"
    content = tokens.read_bytes()
    for damage, parts in (
        (lambda: tokens.write_bytes(content[:-1] + b"?"), ("corpus/tokens.npy", "run the stage that makes it again")),
        (lambda: (folder / "manifest.json").write_bytes(b""), ("manifest.json is not valid JSON", "run its stage")),
        (lambda: shutil.rmtree(folder), ("data/snapshot", "no finished snapshot", "'realmops run all' makes it")),
    ):
        damage()
        refused(run(copy, "tag"), *parts)
        nothing_of(copy, "tag")
    assert run(copy, "snapshot").exit_code == 0
    after = json.loads((folder / "manifest.json").read_bytes())["files"]
    del before["metrics.json"], after["metrics.json"]
    assert after == before


def test_spans_and_models_of_another_vocabulary_are_refused(copy: Path) -> None:
    smaller = ("--set", "bert.vocabulary=120")
    assert run(copy, "snapshot", *smaller).exit_code == 0
    shutil.rmtree(copy / "root/models/pretrain")
    refused(run(copy, "pretrain", *smaller, *ONE_STEP), "data/spans/corpus", "run the tag stage again")
    assert run(copy, "tag", *smaller).exit_code == 0
    refused(run(copy, "pretrain", *smaller, *ONE_STEP), "models/ict", "vocabulary", "run the stages since ict again")
    nothing_of(copy, "pretrain")


# A full disk


@pytest.mark.skipif(not may_mount(), reason="file systems can be mounted by root only")
@pytest.mark.faults
@pytest.mark.parametrize("name", ["snapshot", "ict"])
def test_a_full_disk_ends_a_stage_until_there_is_room(trained: Path, name: str) -> None:
    """With more and more room, until there is enough, a stage is complete or leaves nothing."""
    refusals = 0
    for kilobytes in (4, 12, 24, 80, 256, 4096):
        with small_disk(kilobytes << 10) as disk:
            for stage in (STAGES[need] for need in STAGES[name].needs if need != "sample"):
                (disk / "root" / stage.folder).parent.mkdir(parents=True, exist_ok=True)
                (disk / "root" / stage.folder).symlink_to(trained / "root" / stage.folder)
            result = cli("run", name, "--params", trained / "params.yaml", "--root", disk / "root")
            if result.exit_code == 0:
                break
            refusals += 1
            refused(result, "Free disk space and run the same command again")
            assert not (disk / "root" / STAGES[name].folder).exists()
            assert litter(disk / "root") == []
    assert result.exit_code == 0
    assert refusals >= 2


def test_what_is_written_is_readable_by_others(trained: Path) -> None:
    """Some writers of tensors make private files, which another user's builder or server could not read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (trained / "root/models").rglob("*.safetensors"):
        assert path.stat().st_mode & 0o044 == 0o044 & ~mask, path
        assert load_tensors(path.read_bytes())
