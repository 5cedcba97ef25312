"""Texts of the files of a new project."""

from collections.abc import Sequence
from pathlib import Path

from realmops import __version__
from realmops.config import PACKAGE, Values
from realmops.inputs.addresses import CLOZE
from realmops.options import SECTIONS
from realmops.stages import CLOZE_STEP, HUB, STAGES, files_in_use, planned_steps
from realmops.starter.cluster_files import BASES, fill_cluster_template
from realmops.starter.git_origin import GitOrigin
from realmops.starter.yaml_text import as_yaml

STARTER = PACKAGE / "starter"
INPUTS_TEXT = """\
# Files and folders that "realmops submit" has uploaded, with their addresses; it writes this file. Commit it.
{}
"""
PARAMS_HEAD = """\
# Options that differ from the defaults, and those that are varied most, with their values. docs/options.md of realmops
# lists every option; "realmops params --json" prints the effective values. A preset is a file of differences: one of
# realmops, or presets/NAME.yaml in this folder. The options below take precedence over presets; to change presets and
# the values that came from them: realmops params --preset NAME --write
"""
VARIED = (  # listed in params.yaml, because "dvc exp run -S section.key=value" requires it
    *("run.seed", "snapshot.block_wordpieces", "retriever.init", "retriever.hybrid", "reader.init"),
    *("ict.steps", "ict.learning_rate", "pretrain.steps", "pretrain.masking"),
    *("finetune.epochs", "finetune.retriever_epochs", "finetune.reader_candidates"),
)
DVC_HEAD = """\
# The whole chain. Each stage is one call of the command line; params lists presets, sections and options that it reads.
# With persist, DVC keeps a stage's folder until the stage runs, which itself skips, resumes or replaces it.
"""


def gitignore_text(file: Path) -> str:
    """Return a .gitignore with the outputs of runs added to its lines, if any."""
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = (STARTER / "gitignore").read_text(encoding="utf-8").splitlines(keepends=True)
    end = "" if own.endswith("\n") or not own else "\n"
    return own + end + "".join(line for line in lines if line.rstrip() not in own.splitlines())


def fill_template(name: str, folder: Path, origin: GitOrigin, cluster: str) -> str:
    """Return a template with the project's name, repository, namespace and version filled in."""
    text = fill_cluster_template((STARTER / name).read_text(encoding="utf-8"), origin, cluster)
    for mark, value in {
        "@NAME@": folder.resolve().name,
        "@VERSION@": __version__,
        "@BASES@": BASES,
        "@INSTALL@": f"'realmops[cluster]=={__version__}'",
    }.items():
        text = text.replace(mark, value)
    return text


def params_text(presets: Sequence[str], own: Values) -> str:
    """Return a params.yaml of differences; sections without any are written empty, as DVC needs all of them."""
    lines = [PARAMS_HEAD, f"presets: [{', '.join(presets)}]", ""]
    sections = {name: own.get(name, {}) for name in SECTIONS}
    for name, keys in sorted(sections.items(), key=lambda section: not section[1]):
        lines.append(as_yaml({name: dict(keys)}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def dvc_text(values: Values, own: Values) -> str:
    """Return the dvc.yaml of a project: the stages of its chain, with the files in their options as dependencies.

    ``values`` has defaults and presets applied; the options of ``own`` are in params.yaml, and DVC interpolates them
    into paths.
    """
    names = planned_steps(values)
    lines = [DVC_HEAD + "stages:"]

    def stage(name: str, command: str, deps: Sequence[str], params: Sequence[str], folder: str) -> None:
        lines.extend((f"  {name}:", f"    cmd: {command}", *([f"    deps: [{', '.join(deps)}]"] if deps else [])))
        lines.append(f"    params: [{', '.join(('presets', *params))}]")
        lines.append(f"    outs: [{{{folder}: {{persist: true}}}}]")

    for name in names:
        if name == CLOZE_STEP:
            stage(name, "realmops cloze", [STAGES[need].folder for need in ("snapshot", "tag")], ["run"], CLOZE)
            continue
        definition = STAGES[name]
        deps = [STAGES[need].folder for need in definition.needs if need in names]
        for key in files_in_use(definition, values):
            section, _, option = key.partition(".")
            file = values[section][option]
            if Path(CLOZE) in Path(file).parents:
                deps += [CLOZE] if CLOZE not in deps else []
            elif not file.startswith(HUB):
                deps.append(f'"${{{key}}}"' if option in own.get(section, {}) else file)
        stage(name, f"realmops run {name}", deps, definition.tracked_params(own), definition.folder)
    return "\n".join(lines) + "\n\n" + (STARTER / "plots.yaml").read_text(encoding="utf-8")
