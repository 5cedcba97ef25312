"""Texts of the files of a new project: the Jinja templates of the folder ``project``, filled in."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from realmops import __version__
from realmops.config import PACKAGE, Values
from realmops.hub import HUB
from realmops.options import SECTIONS, Options
from realmops.resources import render_template
from realmops.stages import CLOZE_STEP, STAGES, files_in_use, planned_steps
from realmops.stages.option_inputs import CLOZE
from realmops.starter.cluster_files import BASES, CLUSTERS, REPOSITORY_TO_SET
from realmops.starter.git_origin import GitOrigin
from realmops.starter.yaml_text import as_yaml, yaml_scalar

STARTER = PACKAGE / "starter" / "project"
TEMPLATES = {  # by the file of the project
    "README.md": "README.md.j2",
    "k8s/argo-cd.yaml": "k8s/argo-cd.yaml.j2",
    "k8s/flux.yaml": "k8s/flux.yaml.j2",
    ".github/workflows/retrain.yml": "github/workflows/retrain.yml.j2",
}
VARIED = (  # listed in params.yaml, because "dvc exp run -S section.key=value" requires it
    *("run.seed", "snapshot.block_wordpieces", "retriever.init", "retriever.hybrid", "reader.init"),
    *("ict.steps", "ict.learning_rate", "pretrain.steps", "pretrain.masking"),
    *("finetune.epochs", "finetune.retriever_epochs", "finetune.reader_candidates"),
)


def gitignore_text(file: Path) -> str:
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = (STARTER / "gitignore").read_text(encoding="utf-8").splitlines(keepends=True)
    end = "" if own.endswith("\n") or not own else "\n"
    return own + end + "".join(line for line in lines if line.rstrip() not in own.splitlines())


def project_text(place: str, folder: Path, origin: GitOrigin, cluster: str) -> str:
    values = {
        "repository": origin.address or REPOSITORY_TO_SET,
        "branch": origin.branch,
        "path": origin.path,
        "flux_path": "./" if origin.path == "." else f"./{origin.path}",
        "namespace": CLUSTERS[cluster],
    }
    return render_template(
        STARTER / TEMPLATES[place],
        name=folder.resolve().name,
        version=__version__,
        bases=BASES,
        is_ssh=origin.address.startswith("ssh://"),
        **{name: yaml_scalar(value) for name, value in values.items()},
    )


def params_text(presets: Sequence[str], own: Values) -> str:
    """Return a params.yaml of differences; sections without any are written empty, as DVC needs all of them."""
    sections = {name: dict(own.get(name, {})) for name in SECTIONS}
    options = as_yaml(dict(sorted(sections.items(), key=lambda section: not section[1])))
    return render_template(STARTER / "params.yaml.j2", presets=presets, options=options)


def dvc_text(options: Options, own: Collection[str]) -> str:
    """Return the dvc.yaml of a project; DVC interpolates the keys in ``own``, those of params.yaml, into paths."""
    names = planned_steps(options)
    return render_template(STARTER / "dvc.yaml.j2", stages=[_dvc_stage(name, names, options, own) for name in names])


def _dvc_stage(name: str, names: Sequence[str], options: Options, own: Collection[str]) -> dict[str, Any]:
    if name == CLOZE_STEP:
        deps, params = [STAGES[need].folder for need in ("snapshot", "tag")], ["presets", "run"]
        return {"name": name, "deps": deps, "params": params, "folder": CLOZE}
    stage = STAGES[name]
    deps = [STAGES[need].folder for need in stage.needs if need in names]
    for key in files_in_use(stage, options):
        if key == "snapshot.warmup":  # may become empty, and DVC refuses an empty path
            continue
        file = options.get(key)
        if Path(CLOZE) in Path(file).parents:
            deps += [CLOZE] if CLOZE not in deps else []
        elif not file.startswith(HUB):
            deps.append(f'"${{{key}}}"' if key in own else file)
    # DVC fails for a key that params.yaml lacks: the section of such an option is tracked instead
    single = (key if key in own else key.partition(".")[0] for key in stage.options)
    params = [*dict.fromkeys(["presets", *stage.sections, *single])]
    return {"name": name, "deps": deps, "params": params, "folder": stage.folder}
