"""One pipeline: the stages as data, dvc.yaml, params.yaml, the presets and the command line say the same.

Each check is a function that returns what is wrong; the tests below it plant the drift that it is there for.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from small_project import Quiet, cli, stage, toy_values, write_project

from realmops import cli as command_line
from realmops import config
from realmops.stages import STAGES, Stage, parse_sections
from realmops.stages.runner import run_stage

ROOT = Path(__file__).parents[1]
PARAMS = ROOT / "params.yaml"
PRESETS = sorted((ROOT / "pipelines" / "presets").rglob("*.yaml"))
PIPELINE: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())
ALL_STAGES = ("tracking",)  # sections that the runner reads for every stage and that change no output


# dvc.yaml


def dvc_drift(pipeline: Mapping[str, Any], stages: Mapping[str, Stage]) -> list[str]:
    """What the stages of a dvc.yaml have other than ``stages``; their order counts."""
    found = []
    if list(pipeline["stages"]) != list(stages):
        found.append(f"stages: {list(pipeline['stages'])} instead of {list(stages)}")
    for name in set(pipeline["stages"]) & set(stages):
        one = stages[name]
        wanted = {
            "cmd": f"realmops run {name}",
            "deps": [*(stages[need].folder for need in one.needs), *(f"${{{key}}}" for key in one.files)],
            "params": list(one.sections),
            "outs": [{one.folder: {"persist": True}}],  # or DVC removes what realmops run has made
        }
        entry = {"deps": [], **pipeline["stages"][name]}
        found += [f"{name}.{key}: {entry.get(key)}" for key in {*entry, *wanted} if entry.get(key) != wanted.get(key)]
    return found


def test_dvc_yaml_has_the_stages_and_nothing_else() -> None:
    assert dvc_drift(PIPELINE, STAGES) == []


def drifted(**changes: Any) -> dict[str, Any]:
    pipeline = copy.deepcopy(PIPELINE)
    pipeline["stages"]["ict"].update(changes)
    return pipeline


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        (drifted(cmd="python -m realmops run ict"), "ict.cmd"),
        (drifted(deps=["data/snapshot"]), "ict.deps"),
        (drifted(deps=["data/spans", "data/snapshot", "src"]), "ict.deps"),
        (drifted(params=["run", "bert", "retriever", "ict"]), "ict.params"),
        (drifted(params=["run", "bert", "retriever", "ict", "optimiser", "pretrain"]), "ict.params"),
        (drifted(params=["run", "bert", "retriever", "ict.steps", "optimiser"]), "ict.params"),
        (drifted(outs=["models/ict"]), "ict.outs"),
        (drifted(always_changed=True), "ict.always_changed"),
        ({"stages": {k: v for k, v in PIPELINE["stages"].items() if k != "tag"}}, "stages"),
        ({"stages": dict(reversed(PIPELINE["stages"].items()))}, "stages"),
    ],
)
def test_drift_of_dvc_yaml_is_seen(pipeline: dict[str, Any], told: str) -> None:
    assert any(line.startswith(told) for line in dvc_drift(pipeline, STAGES))


def test_a_stage_that_dvc_yaml_lacks_is_seen() -> None:
    longer = {**STAGES, "publish": Stage("publish", ("run",), ("evaluate",), "published", "")}
    assert any(line.startswith("stages") for line in dvc_drift(PIPELINE, longer))


def test_dvc_goes_on_with_what_realmops_run_has_made(tmp_path: Path) -> None:
    """And a stage whose options changed replaces its folder."""
    write_project(tmp_path)
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def shell(*words: str) -> str:
        told = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=250
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout + told.stderr

    manifest = tmp_path / "data/snapshot/corpus/manifest.json"
    shell("dvc", "init", "--no-scm")
    for name in ("sample", "snapshot"):
        shell("realmops", "run", name)
    made = manifest.stat().st_ino, manifest.read_bytes()
    shell("dvc", "repro", "snapshot")
    assert (manifest.stat().st_ino, manifest.read_bytes()) == made
    shell("realmops", "params", "--set", "snapshot.block_wordpieces=60", "--write")
    shell("dvc", "repro", "snapshot")
    assert manifest.read_bytes() != made[1]


def shown_files(pipeline: Mapping[str, Any]) -> list[str]:
    plots = [path for plot in pipeline["plots"] for entry in plot.values() for path in entry["y"]]
    return [*pipeline["metrics"], *plots]


def test_metrics_and_plots_of_dvc_yaml_lie_in_outputs_of_stages() -> None:
    folders = {Path(one.folder) for one in STAGES.values()}
    assert shown_files(PIPELINE)
    for path in shown_files(PIPELINE):
        assert folders & set(Path(path).parents), path


# The stages among themselves and the command line


def stage_drift(stages: Mapping[str, Stage]) -> list[str]:
    """Stages out of order, options that name files without being declared, folders inside one another."""
    found = []
    for place, (name, one) in enumerate(stages.items()):
        earlier = list(stages)[:place]
        found += [f"{name} is called {one.name}"] if name != one.name else []
        found += [f"{name} needs {need}, which does not come before it" for need in one.needs if need not in earlier]
        found += [f"{name} has no section {s}" for s in one.sections if s not in config.SECTIONS]
        for key in one.files:
            section, _, option = key.partition(".")
            if section not in one.sections or option not in config.SECTIONS[section].__annotations__:
                found.append(f"{name} takes the file {key}, but its sections are {one.sections}")
    folders = [Path(one.folder) for one in stages.values()]
    found += [f"{a} holds {b}" for a in folders for b in folders if a in b.parents]
    found += [f"{a} twice" for a in set(folders) if folders.count(a) > 1]
    return found


def test_the_stages_fit_together() -> None:
    assert stage_drift(STAGES) == []


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("ict", {"needs": ("snapshot", "pretrain")}, "ict needs pretrain"),
        ("ict", {"sections": ("run", "berd")}, "ict has no section berd"),
        ("tag", {"sections": ("run", "bert", "optimiser")}, "tag takes the file tag.train"),
        ("tag", {"files": ("tag.training",)}, "tag takes the file tag.training"),
        ("tag", {"folder": "data/snapshot/spans"}, "data/snapshot holds data/snapshot/spans"),
        ("tag", {"folder": "data/snapshot"}, "data/snapshot twice"),
        ("tag", {"name": "tags"}, "tag is called tags"),
    ],
)
def test_drift_among_the_stages_is_seen(name: str, change: dict[str, Any], told: str) -> None:
    changed = {**STAGES, name: dataclasses.replace(STAGES[name], **change)}
    assert any(line.startswith(told) for line in stage_drift(changed))


def test_every_stage_has_its_module() -> None:
    for name in STAGES:
        assert (ROOT / "src/realmops/stages" / f"{name}.py").is_file()


def test_the_command_line_offers_the_stages_in_their_order() -> None:
    assert tuple(STAGES) == tuple(command_line.STAGES)
    assert ", ".join(STAGES) in " ".join(cli("--help").output.split())
    first_words = [line.split()[0] for line in cli("run", "--help").output.splitlines() if line.strip()]
    assert [word for word in first_words if word in STAGES] == list(STAGES)
    refused = cli("run", "train")
    assert refused.exit_code == 2
    assert all(name in refused.output for name in STAGES)


# params.yaml and the presets


def params_drift(text: str, stages: Mapping[str, Stage]) -> list[str]:
    """Sections that nobody reads or that are missing, and keys without a comment."""
    values = yaml.safe_load(text)
    used = {section for one in stages.values() for section in one.sections} | set(ALL_STAGES)
    found = [f"{name} is read by no stage" for name in values if name not in used]
    found += [f"{name} is missing" for name in used if name not in values]
    section = ""
    for line in text.splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        if (match := re.match(r"  (\w+):", line)) and "  # " not in line:
            found.append(f"{section}.{match[1]} has no comment")
    return found


def test_params_yaml_has_the_sections_of_the_stages_each_key_with_a_comment() -> None:
    assert params_drift(PARAMS.read_text(), STAGES) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tracking:\n", "extra:\n  key: 1  # a\ntracking:\n", "extra is read by no stage"),
        ("\nevaluate:\n", "\nevaluation:\n", "evaluate is missing"),
        ("tracking:\n", "tracking:\n  server: none\n", "tracking.server has no comment"),
    ],
)
def test_drift_of_params_yaml_is_seen(old: str, new: str, told: str) -> None:
    text = PARAMS.read_text()
    assert text.count(old) == 1
    assert told in params_drift(text.replace(old, new), STAGES)


def test_params_yaml_has_every_key_once_and_none_besides() -> None:
    values = config.load(PARAMS)
    assert list(values) == list(config.SECTIONS)
    for name, section in config.SECTIONS.items():
        assert list(values[name]) == [field.name for field in dataclasses.fields(section)], name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_difference_from_params_yaml(preset: Path) -> None:
    base, changed = config.load(PARAMS), config.load(PARAMS, presets=[preset])
    difference = config.read_yaml(preset)
    assert difference
    for name, keys in changed.items():
        config.parse_section(name, keys)
        for key, value in keys.items():
            assert value == difference.get(name, {}).get(key, base[name][key]), f"{name}.{key}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pretrain: {step: 1}", "no key pretrain.step"),
        ("pretraining: {steps: 1}", "no section 'pretraining'"),
        ("pretrain: {steps: many}", "pretrain.steps"),
        ("pretrain: {marginal: both}", "pretrain.marginal"),
    ],
)
def test_a_preset_with_an_unknown_key_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "preset.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        config.load(PARAMS, presets=[tmp_path / "preset.yaml"])


def read_names() -> set[str]:
    """Every attribute that the code outside config.py reads, and every ``section.key`` in its texts."""
    names: set[str] = {key for one in STAGES.values() for key in one.files}
    for path in (ROOT / "src/realmops").rglob("*.py"):
        if path.name != "config.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
    return names


def unread_options(sections: Mapping[str, type], names: set[str]) -> Iterator[str]:
    for name, section in sections.items():
        for field in dataclasses.fields(section):
            key = f"{name}.{field.name}"
            if field.name not in names and key not in names and name not in ALL_STAGES:
                yield key


def test_every_option_is_read_somewhere() -> None:
    assert list(unread_options(config.SECTIONS, read_names())) == []


def test_an_option_without_effect_is_seen() -> None:
    @dataclasses.dataclass
    class Section:
        steps: int
        knob_that_nobody_turns: int

    unread = list(unread_options({"ict": Section}, read_names()))
    assert unread == ["ict.knob_that_nobody_turns"]


# A stage reads the sections that it declares, all of them and no other


class Recording(dict[str, Any]):
    """A mapping that remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_a_stage_is_given_its_sections_and_no_other() -> None:
    for one in STAGES.values():
        assert tuple(parse_sections(one, toy_values())) == one.sections


def run_recorded(name: str, project: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Run a stage; the sections that its work has read, those for the names of its files included."""
    jobs: list[Recording] = []

    def parse(one: Stage, values: Mapping[str, Mapping[str, Any]]) -> Recording:
        jobs.append(Recording(parse_sections(one, values)))
        return jobs[-1]

    monkeypatch.setattr("realmops.stages.runner.parse_sections", parse)
    run_stage(name, toy_values(tag={"method": "tagger"}), project=project, root=root, report=Quiet())
    return jobs[-1].read | {key.partition(".")[0] for key in STAGES[name].files}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    return folder


def test_a_stage_reads_every_section_that_it_declares(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the section of a reader that reads no passages, where that is not the reader."""
    for name, one in STAGES.items():
        read = run_recorded(name, project, tmp_path, monkeypatch)
        assert read == set(one.sections) - {"closed_book"}, name


def test_a_section_that_is_not_declared_cannot_be_read(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = dataclasses.replace(STAGES["snapshot"], sections=("snapshot",))
    monkeypatch.setitem(STAGES, "snapshot", fewer)
    with pytest.raises(KeyError, match="bert"):
        stage("snapshot", toy_values(), project, tmp_path)


def test_every_file_that_a_stage_reads_counts_for_what_is_made_from_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change one byte of each external file: the stages that name it run again, no other."""

    class Runs(Exception):
        pass

    def refuse(*_: Any) -> Any:
        raise Runs

    values = toy_values(tag={"method": "tagger"}, pretrain={"steps": 0, "builder": "external"})
    for name in STAGES:
        stage(name, values, project, tmp_path)
    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    keys = {key for one in STAGES.values() for key in one.files if (project / path_of(values, key)).is_file()}
    assert keys == {"snapshot.documents", "questions.train", "questions.dev", "questions.test", "tag.train", "tag.dev"}
    for key in sorted(keys):
        path = project / path_of(values, key)
        content = path.read_bytes()
        same = {k for k in keys if path_of(values, k) == path_of(values, key)}
        path.write_bytes(content + b"\n")
        started = {name for name in STAGES if not finishes(lambda n=name: stage(n, values, project, tmp_path), Runs)}
        path.write_bytes(content)
        assert started == {name for name, one in STAGES.items() if same & set(one.files)}, key


def path_of(values: small_project.Values, key: str) -> str:
    section, _, option = key.partition(".")
    return str(values[section][option])


def finishes(work: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        work()
    except error:
        return False
    return True
