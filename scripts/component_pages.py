"""The pages on components that other pipelines can load: docs/components.md, docs/components/NAME.md.

reference_pages.py writes them. What a component takes and makes is in its file as ``python -m pipelines`` compiles it;
what its pod gets, in the compiled pipelines of this project.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from docstring_parser import parse

from realmops.cluster import IMAGE
from realmops.stages import STAGES

ROOT = Path(__file__).parents[1]
FILES = "build/components"  # of components, as python -m pipelines makes them
SNAKE = {"runAsUser": "run_as_user", "runAsGroup": "run_as_group"}
Row = Callable[..., str]
TYPES = {  # of parameters: in words, and in Python
    "STRING": ("text", "str"),
    "NUMBER_INTEGER": ("whole number", "int"),
    "NUMBER_DOUBLE": ("number", "float"),
    "LIST": ("list", "list"),
}
RIGHTS = {
    "guard": "With profiles: a token for the API of Kubeflow Pipelines, in the file that `KF_PIPELINES_SA_TOKEN_PATH` "
    "names. For pods of that label the PodDefault in `k8s/components/pipelines-token` mounts one.",
    **dict.fromkeys(
        ("pretrain", "scale_builder"),
        "A ServiceAccount that may patch the scale of the Deployment `deployment`, as `k8s/base/scaler.yaml` says it; "
        "nothing is asked of a cluster where `deployment` is empty.",
    ),
}
PLACE = ("folder", "digest", "fingerprint")  # where it lies on the volume, of its manifest, of what made it
HEADLINE = ("em", "f1", "recall_at_5")
OF_THE_STAGE = "every number in the stage's `metrics.json`"
CHIEF_ONES = "the numbers that `realmops run` prints"
# What Kubeflow shows of an output beside its type: keys, and what else.
# tests/cluster/test_pipelines_run.py holds it against runs.
METADATA: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    **{(name, what): (PLACE, OF_THE_STAGE) for name in STAGES for what in ("manifest", "corpus", "model")},
    **{(name, "metrics"): ((), CHIEF_ONES) for name in STAGES},
    ("evaluate", "manifest"): ((*PLACE, *HEADLINE), OF_THE_STAGE),
    ("evaluate", "metrics"): (HEADLINE, CHIEF_ONES),
    ("promote", "champion"): (("name", "message", *HEADLINE, "promoted"), "`em_difference` to the champion of before"),
    ("promote", "metrics"): (("promoted",), "`em_difference` to the champion of before"),
    ("refresh", "metrics"): ((), "every number in the update's `metrics.json`"),
    ("variant", "metrics"): (("variant", *HEADLINE), "every number that `evaluate` gives, as means over seeds"),
    ("table", "metrics"): ((), "of each variant `NAME_em`, `NAME_zero_shot_recall_at_5` and `NAME_em_difference`"),
}


@cache
def components() -> dict[str, dict[str, Any]]:
    """Compile the components; return the document of each, by name."""
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pipelines", folder], check=True, cwd=ROOT)
        return {name: component for name, [component] in compiled(Path(folder, "components")).items()}


def compiled(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each compiled file in a folder, by name."""
    files = sorted(folder.glob("*.yaml"))
    return {file.stem: list(yaml.load_all(file.read_bytes(), yaml.CSafeLoader)) for file in files}


def function_of(component: Mapping[str, Any]) -> ast.FunctionDef:
    """The function that a compiled component carries as text."""
    [executor] = component["deploymentSpec"]["executors"].values()
    source = ast.parse(executor["container"]["command"][-1])
    [function] = [one for one in source.body if isinstance(one, ast.FunctionDef)]
    return function


def pods() -> dict[str, tuple[dict[str, Any], bool]]:
    """What the project's pipelines say of each component's pod, by component; and whether they limit it."""
    found = {}
    for spec, platform in compiled(ROOT / "pipelines").values():
        for label, entry in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].items():
            container = spec["deploymentSpec"]["executors"][label]["container"]
            found[label.removeprefix("exec-").replace("-", "_")] = entry, "resources" in container
    return found


def words(keys: Iterable[str]) -> str:
    """Keys in code, with commas."""
    return ", ".join(f"`{key}`" for key in keys)


def variables(pod: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Keys of the ConfigMap (``configMap``) or Secret (``secret``) of a pod, each with the variable that it becomes."""
    pairs = [pair for one in pod.get(f"{kind}AsEnv", ()) for pair in one["keyToEnv"]]
    return {pair[f"{kind}Key"]: pair["envVar"] for pair in pairs}


def example(name: str, parameters: Mapping[str, str], pod: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a pipeline with this component alone; ``parameters`` has Python's types."""
    yield "from kfp import components, dsl, kubernetes"
    yield ""
    yield f'{name} = components.load_component_from_file("{FILES}/{name}.yaml")'
    yield ""
    yield ""
    yield f'@dsl.pipeline(name="{name.replace("_", "-")}-alone")'
    yield "def pipeline("
    yield from (f"    {one}: {kind}," for one, kind in parameters.items())
    yield "):"
    yield f"    task = {name}("
    yield from (f"        {one}={one}," for one in parameters)
    yield "    )"
    yield "    task.set_caching_options(False)  # it knows itself whether there is anything to do"
    for mount in pod["pvcMount"]:
        yield f'    kubernetes.mount_pvc(task, pvc_name="realmops-data", mount_path="{mount["mountPath"]}")'
    for mount in pod["emptyDirMounts"]:
        yield f'    kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="{mount["mountPath"]}")'
    user = {key: pod["securityContext"][key] for key in ("runAsUser", "runAsGroup")}
    yield f"    kubernetes.set_security_context(task, {', '.join(f'{SNAKE[key]}={one}' for key, one in user.items())})"
    for kind, function, given in (
        ("configMap", "use_config_map_as_env", "realmops-tracking"),
        ("secret", "use_secret_as_env", "realmops-secrets"),
    ):
        yield f"    kubernetes.{function}("
        yield "        task,"
        yield f'        "{given}",'
        yield "        {"
        yield from (f'            "{key}": "{variable}",' for key, variable in variables(pod, kind).items())
        yield "        },"
        yield "        optional=True,"
        yield "    )"
    for key, value in pod.get("podMetadata", {}).get("labels", {}).items():
        yield f'    kubernetes.add_pod_label(task, "{key}", "{value}")'


def component_page(name: str, component: Mapping[str, Any], made: str, row: Row) -> str:
    """The text of docs/components/NAME.md; ``made`` says by what."""
    [entry] = component["components"].values()
    [executor] = component["deploymentSpec"]["executors"].values()
    [function] = [
        one for one in ast.parse(executor["container"]["command"][-1]).body if isinstance(one, ast.FunctionDef)
    ]
    told = parse(ast.get_docstring(function) or "")
    about = {one.arg_name: " ".join((one.description or "").split()) for one in told.params}
    order = [argument.arg for argument in function.args.args]
    taken, given = entry["inputDefinitions"], entry.get("outputDefinitions", {}).get("artifacts", {})
    parameters = {one: taken["parameters"][one]["parameterType"] for one in order if one in taken["parameters"]}
    pod, limited = pods()[name]
    lines = [f"# `{name}`", "", made, "", str(told.short_description), ""]
    lines += [f"`{name}.yaml`, with the image `{executor['container']['image']}`.", ""]
    lines += ["## Inputs", "", row("input", "type", "what it is"), "|---|---|---|"]
    lines += [row(f"`{one}`", TYPES[kind][0], about[one]) for one, kind in parameters.items()]
    for one, kind in taken.get("artifacts", {}).items():
        optional = ", may be left out" if kind.get("isOptional") else ""
        lines += [row(f"`{one}`", f"`{kind['artifactType']['schemaTitle']}`{optional}", about[one])]
    if given:
        lines += ["", "## Outputs", "", row("output", "type", "what it is", "metadata"), "|---|---|---|---|"]
    for one in [one for one in order if one in given]:
        keys, more = METADATA.get((name, one), ((), ""))
        shown = "; ".join(filter(None, [words(keys), more])) or "none"
        lines += [row(f"`{one}`", f"`{given[one]['artifactType']['schemaTitle']}`", about[one], shown)]
    security = pod["securityContext"]
    lines += ["", "## Environment", "", "What the pipelines of this project give its pod:", "", row("what", "value")]
    lines += ["|---|---|", row("claim with the run's folder", words(mount["mountPath"] for mount in pod["pvcMount"]))]
    lines += [row("empty folder", words(mount["mountPath"] for mount in pod["emptyDirMounts"]))]
    lines += [row("user, group", f"{security['runAsUser']}, {security['runAsGroup']}")]
    lines += [row("variables from a ConfigMap, all optional", words(variables(pod, "configMap").values()))]
    lines += [row("variables from a Secret, all optional", words(variables(pod, "secret").values()))]
    labels = pod.get("podMetadata", {}).get("labels", {})
    lines += [row("labels", words(f"{key}: {value}" for key, value in sorted(labels.items())))]
    lines += [row("limits and accelerator", "parameters of the pipeline" if limited else "none")]
    lines += [row("time", f"{int(pod['activeDeadlineSeconds']) / 3600:g} hours")]
    if name in RIGHTS:
        lines += ["", RIGHTS[name]]
    python = {one: TYPES[kind][1] for one, kind in parameters.items()}
    return "\n".join([*lines, "", "## Example", "", "```python", *example(name, python, pod), "```"]) + "\n"


def components_page(known: Mapping[str, Mapping[str, Any]], made: str, row: Row) -> str:
    """The text of docs/components.md."""
    rows = []
    for name, component in known.items():
        what = parse(ast.get_docstring(function_of(component)) or "").short_description
        rows.append(row(f"[`{name}`](components/{name}.md)", str(what)))
    return f"""\
# Components

{made}

With this page your own pipelines load the stages. In a clone, `python -m pipelines` compiles a file for each into
`{FILES}`:

```python
from kfp import components

evaluate = components.load_component_from_file("{FILES}/evaluate.yaml")
```

The image is `{IMAGE}`. `python -m pipelines FOLDER --image IMAGE` compiles with another one, and
`task.set_container_image(IMAGE)` sets it for one task.

A component reads and writes files on a claim; its artifacts name them. Give all stages of a run the same `options`
(from `realmops params --json`) and `root`, and put each after the one before it, by its input `after` or by
`task.after(...)`. Each page below shows a pipeline with that component alone. The claim and the image must exist.

{row("component", "what it does")}
|---|---|
{chr(10).join(rows)}
"""


def pages(made: Callable[[str], str], row: Row) -> dict[Path, str]:
    """What stands in each page, by its file."""
    known = components()
    found = {ROOT / "docs/components.md": components_page(known, made("components/"), row)}
    for name, component in known.items():
        page = component_page(name, component, made(f"components/{name}.py or pipelines/"), row)
        found[ROOT / f"docs/components/{name}.md"] = page
    return found
