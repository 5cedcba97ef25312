"""Bad input through the command line: one message with file, line or key and what to do, code 2, nothing left."""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small_project
from click.testing import Result
from faults import may_mount, small_disk
from safetensors.numpy import load as load_tensors
from small_project import cli, litter, run_all_here, run_command, toy_values, write_params, write_project

from realmops import artifacts
from realmops.commands.run import option_warnings
from realmops.config import parse_options, preset_layers, preset_path
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


def refused(result: Result, *told: str) -> None:
    """One message on standard error that holds every text of ``told``, and exit code 2."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    [message] = [line for line in result.stderr.splitlines() if line.startswith("realmops: ")]
    for text in told:
        assert text in message, message


def nothing_of(project: Path, name: str) -> None:
    """No output folder of the stage, no half-written folder beside it, no work folder."""
    root = project / "root"
    assert not (root / STAGES[name].folder).exists()
    assert litter(root) == []
    assert list((root / ".realmops" / "work").glob("*")) == []


# The corpus

GOOD = b'{"title": "Oslo", "text": "Oslo is a city."}\n'


def test_a_bad_corpus_is_refused(project: Path) -> None:
    """Other ways to be bad are in test_refused_inputs.py."""
    (project / "documents.jsonl").write_bytes(GOOD + b"Oslo is a city.\n")
    refused(run(project, "snapshot"), "documents.jsonl:2", "not valid JSON", "each line must be one JSON object")
    nothing_of(project, "snapshot")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("questions.test", "check the path"),
        ("questions.train", "check the path"),
        ("tag.dev", "check the path"),
        ("tag.train", "or set tag.method to dates, or to given if the documents contain spans"),
    ],
)
def test_a_missing_file_of_a_later_stage_is_named_before_the_first_runs(project: Path, key: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is 'nowhere'") as error:
        run_all_here(project / "params.yaml", project / "root", "tag.method=tagger", f"{key}=nowhere")
    for words in (f"{project / 'nowhere'} does not exist", told):
        assert words in str(error.value)
    assert not (project / "root" / "data").exists()


def test_all_stages_end_with_the_one_message_of_the_first_that_cannot_run(project: Path) -> None:
    """Each is a process of its own."""
    options = ("--params", project / "params.yaml", "--root", project / "root", "--set", "tag.method=dates")
    done = run_command("run", "all", *options, "--set", "snapshot.block_wordpieces=100000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("realmops: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    nothing_of(project, "snapshot")


def test_what_is_not_used_need_not_be_there(project: Path) -> None:
    more = ("--set", "snapshot.warmup=nowhere", "--set", "tag.train=nowhere", "--set", "questions.test=nowhere")
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
    layers = preset_layers(preset_path(name, Path("params.yaml")) for name in presets)
    values = parse_options(*layers, ("test", {"retriever": {"init": init}} if init else {})).model_dump()
    return [warning for warning in option_warnings(STAGES, values) if "retriever.init" in warning]


@pytest.mark.parametrize(
    "presets",
    ["", "ablation", "squad", "squad large", "squad documents", "squad minilm", "squad bert-base nq", "paper"],
)
def test_learning_rates_of_presets_fit_their_encoder(presets: str) -> None:
    assert rate_warnings("", *presets.split()) == []


def test_learning_rates_for_another_kind_of_encoder_are_named() -> None:
    [warning] = rate_warnings("small", "squad", "minilm")
    for rate in ("tag.learning_rate=0.0002", "ict.reader_learning_rate=0.0001", "finetune.reader_learning_rate=0.0001"):
        assert rate in warning
    [warning] = rate_warnings("some/encoder", "squad")
    assert "retriever.init is some/encoder" in warning
    assert "finetune.reader_learning_rate=0.001" in warning


def test_ctrl_c_ends_with_the_command_that_resumes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*names: Any, **given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("realmops.commands.run.run_stages", stopped)
    result = run(project, "snapshot")
    assert (result.exit_code, "stopped; run the same command again" in result.stderr) == (130, True), result.output


def test_a_refused_corpus_leaves_the_snapshot_of_before(project: Path) -> None:
    assert run(project, "snapshot").exit_code == 0
    before = {p: p.read_bytes() for p in (project / "root/data").rglob("*") if p.is_file()}
    (project / "documents.jsonl").write_bytes(b"")
    refused(run(project, "snapshot"), "no passage is left")
    assert {p: p.read_bytes() for p in (project / "root/data").rglob("*") if p.is_file()} == before
    assert litter(project / "root") == []


# Questions and tagged sentences


def test_bad_questions_are_refused(copy: Path) -> None:
    """What else may be wrong with them is in test_refused_inputs.py."""
    name, split = "finetune", "train"
    good = '{"id": "one", "question": "Who?", "answers": ["Oslo"]}\n'
    (copy / f"questions.{split}.jsonl").write_text(good + '{"id": "q", "question": "Who?", "answers": [" "]}\n')
    shutil.rmtree(copy / "root" / STAGES[name].folder, ignore_errors=True)
    refused(run(copy, name), f"questions.{split}.jsonl:2", "'q' has no answer", "add one or remove it")
    nothing_of(copy, name)


# params.yaml, presets and --set


def test_bad_options_are_refused(project: Path) -> None:
    """On the command line and in the file; what else may be wrong with them is in test_config.py."""
    refused(run(project, "snapshot", "--set", "pretrain.step=5"), "unknown key pretrain.step", "closest match: steps")
    write_params(project / "params.yaml", {**toy_values(), "ict": {"steps": "5 steps"}})
    refused(run(project, "snapshot"), "params.yaml", "ict.steps", "'5 steps'", "it must be a valid integer")
    assert not (project / "root").exists()


# Outputs of other stages: missing, damaged, of another corpus or vocabulary


def test_a_stage_without_its_input_names_the_stage_to_run(project: Path) -> None:
    refused(run(project, "tag"), "data/snapshot", "no finished snapshot", "run the stage that makes it")
    nothing_of(project, "tag")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (b"", ["manifest.json is not valid JSON", "run its stage again"]),
        (b'{"kind": "tag", "schema": 1}', ["manifest.json", "('tag', 1)", "run the stage that makes it again"]),
    ],
)
def test_a_damaged_manifest_is_refused_and_its_stage_replaces_it(copy: Path, damage: bytes, told: list[str]) -> None:
    path = copy / "root/data/snapshot/manifest.json"
    before = json.loads(path.read_bytes())["files"]
    path.write_bytes(damage)
    shutil.rmtree(copy / "root/data/spans")
    refused(run(copy, "tag"), *told)
    nothing_of(copy, "tag")
    assert run(copy, "snapshot").exit_code == 0
    after = json.loads(path.read_bytes())["files"]
    assert {n: e for n, e in after.items() if n != "metrics.json"} == {
        n: e for n, e in before.items() if n != "metrics.json"
    }


def test_a_damaged_file_is_refused(copy: Path) -> None:
    path = copy / "root/models/ict/reader/model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(copy / "root/models/pretrain")
    refused(run(copy, "pretrain"), "models/ict/reader/model.safetensors", "run the stage that makes it again")
    nothing_of(copy, "pretrain")


def test_spans_and_models_of_another_vocabulary_are_refused(copy: Path) -> None:
    smaller = ("--set", "bert.vocabulary=120")
    assert run(copy, "snapshot", *smaller).exit_code == 0
    shutil.rmtree(copy / "root/models/pretrain")
    refused(run(copy, "pretrain", *smaller, *ONE_STEP), "data/spans/corpus", "run the tag stage again")
    assert run(copy, "tag", *smaller).exit_code == 0
    refused(run(copy, "pretrain", *smaller, *ONE_STEP), "models/ict", "vocabulary", "run the stages since ict again")
    nothing_of(copy, "pretrain")


def test_the_exchange_of_another_run_is_refused(copy: Path) -> None:
    """The same folder for two runs, of which the second has another width."""
    shared = ("--set", f"pretrain.exchange={copy / 'exchange'}", *ONE_STEP)
    shutil.rmtree(copy / "root/models/pretrain")
    assert run(copy, "pretrain", *shared).exit_code == 0
    shutil.rmtree(copy / "root/models/pretrain")
    other = ("--set", "retriever.embedding_width=4")
    assert run(copy, "ict", *other).exit_code == 0
    result = run(copy, "pretrain", *shared, *other)
    refused(result, str(copy / "exchange"), "belongs to another run", "give this run another exchange folder")
    card = next((copy / "exchange/run").glob("v-*/manifest.json"))
    assert {"corpus_hash", "embedding_width"} <= json.loads(card.read_bytes())["run"].keys()
    nothing_of(copy, "pretrain")


def test_a_builder_on_the_exchange_of_another_corpus_is_refused(
    copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = copy / "exchange"
    shutil.rmtree(copy / "root/models/pretrain")
    assert run(copy, "pretrain", "--set", f"pretrain.exchange={shared}", *ONE_STEP).exit_code == 0
    (tmp_path / "other").mkdir()
    write_project(tmp_path / "other")
    (tmp_path / "other/documents.jsonl").write_bytes(GOOD)
    assert run(tmp_path / "other", "snapshot").exit_code == 0
    builder = cli("index-builder", "--exchange", shared, "--snapshot", tmp_path / "other/root/data/snapshot/corpus")
    assert builder.exit_code == 2
    for text in ("corpus_hash", str(shared), "belongs to another run"):
        assert text in caplog.text


# A full disk


def link_inputs(trained: Path, name: str, root: Path) -> None:
    """Let the outputs that a stage reads lie under a new root."""
    for need in STAGES[name].needs:
        if (source := trained / "root" / STAGES[need].folder).exists():
            (root / STAGES[need].folder).parent.mkdir(parents=True, exist_ok=True)
            (root / STAGES[need].folder).symlink_to(source)


def on_a_small_disk(trained: Path, name: str, disk: Path) -> Result:
    """Run a stage whose root lies on the disk."""
    root = disk / "root"
    link_inputs(trained, name, root)
    return cli("run", name, "--params", trained / "params.yaml", "--root", root)


@pytest.mark.skipif(not may_mount(), reason="file systems can be mounted by root only")
@pytest.mark.faults
@pytest.mark.parametrize("name", ["sample", "snapshot", "tag", "ict", "finetune"])
def test_a_full_disk_ends_a_stage_until_there_is_room(trained: Path, name: str) -> None:
    """More and more room, until there is enough: either the stage is whole or it was never there."""
    refusals = 0
    for kilobytes in (4, 12, 24, 80, 256, 4096):
        with small_disk(kilobytes << 10) as disk:
            result = on_a_small_disk(trained, name, disk)
            if result.exit_code == 0:
                break
            refusals += 1
            refused(result, "Free disk space and run the same command again")
            assert not (disk / "root" / STAGES[name].folder).exists()
            assert litter(disk / "root") == []
    assert result.exit_code == 0
    assert refusals >= 2


@pytest.mark.skipif(not may_mount(), reason="file systems can be mounted by root only")
@pytest.mark.faults
def test_pre_training_on_a_full_disk_goes_on_when_there_is_room(trained: Path) -> None:
    """The index builder is a child process; the disk fills while it works."""
    words = ["--params", trained / "params.yaml", "--set", "pretrain.steps=5", "--set", "pretrain.builder=child"]
    with small_disk(400 << 10) as disk:
        on_a_small_disk(trained, "pretrain", disk)  # links the inputs; 0 steps fit
        shutil.rmtree(disk / "root/models/pretrain")
        filler = disk / "filler"
        filler.write_bytes(bytes(330 << 10))
        refused(
            cli("run", "pretrain", *words, "--root", disk / "root"), "Free disk space and run the same command again"
        )
        assert not (disk / "root/models/pretrain").exists()
        assert litter(disk / "root") == []
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        result = cli("run", "pretrain", *words, "--root", disk / "root")
        assert result.exit_code == 0, result.output
        assert len(small_project.journal(disk / "root/models/pretrain")) == 5


def test_a_file_that_may_not_grow_is_refused(trained: Path, tmp_path: Path) -> None:
    """The same for people who may not mount: a limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, before[1]))
    try:
        result = on_a_small_disk(trained, "ict", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    refused(result, "File too large")
    assert not (tmp_path / "root/models/ict").exists()
    assert litter(tmp_path / "root") == []


def test_models_of_an_earlier_version_are_refused_with_what_to_run(copy: Path) -> None:
    folder = copy / "root/models/pretrain"
    shutil.rmtree(folder / "retriever")
    (folder / "model.json").write_text("{}")
    manifest = artifacts.read_json(folder / artifacts.MANIFEST)
    artifacts.write_manifest(folder, "pretrain", **{key: manifest[key] for key in ("fingerprint", "sections")})
    refused(run(copy, "finetune"), "models/pretrain/retriever/realmops.json is missing", "'realmops run ict --force'")
    nothing_of(copy, "finetune")


def test_what_is_written_is_readable_by_others(trained: Path) -> None:
    """Another user's builder or server reads what a stage wrote; some writers of tensors make private files."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (trained / "root/models").rglob("*.safetensors"):
        assert path.stat().st_mode & 0o044 == 0o044 & ~mask, path
        assert load_tensors(path.read_bytes())
