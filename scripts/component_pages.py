"""Generate the pages on reusable components: docs/components.md and docs/components/NAME.md.

reference_pages.py writes them. Inputs and outputs come from the component files that ``python -m pipelines`` compiles,
the configuration of the pods from the compiled pipelines of this project.
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
FILES = "build/components"  # output folder of python -m pipelines
SNAKE = {"runAsUser": "run_as_user", "runAsGroup": "run_as_group"}
Row = Callable[..., str]
TYPES = {  # parameter types: in prose, and in Python
    "STRING": ("text", "str"),
    "NUMBER_INTEGER": ("whole number", "int"),
    "NUMBER_DOUBLE": ("number", "float"),
    "LIST": ("list", "list"),
}
RIGHTS = {
    "guard": "With profiles: a token for the API of Kubeflow Pipelines, in the file that `KF_PIPELINES_SA_TOKEN_PATH` "
    "names. The PodDefault in `k8s/components/pipelines-token` mounts one into pods with that label.",
    **dict.fromkeys(
        ("pretrain", "scale_builder"),
        "A ServiceAccount that may patch the scale of the Deployment `deployment`, as in `k8s/base/scaler.yaml`; not "
        "needed if `deployment` is empty.",
    ),
}
PLACE = ("folder", "digest", "fingerprint")  # folder on the volume, digest of its manifest, fingerprint of the stage
HEADLINE = ("em", "f1", "recall_at_5")
OF_THE_STAGE = "every number in the stage's `metrics.json`"
CHIEF_ONES = "the numbers that `realmops run` prints"
# Metadata of each output in Kubeflow: fixed keys, and a description of the others.
# tests/cluster/test_pipelines_run.py compares it with runs.
METADATA: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    **{(name, output): (PLACE, OF_THE_STAGE) for name in STAGES for output in ("manifest", "corpus", "model")},
    **{(name, "metrics"): ((), CHIEF_ONES) for name in STAGES},
    ("cloze", "questions"): (("folder", "digest"), ""),
    ("cloze", "metrics"): ((), "the number of questions by split"),
    ("evaluate", "manifest"): ((*PLACE, *HEADLINE), OF_THE_STAGE),
    ("evaluate", "metrics"): (HEADLINE, CHIEF_ONES),
    ("promote", "champion"): (("name", "message", *HEADLINE, "promoted"), "`em_difference` to the previous champion"),
    ("promote", "metrics"): (("promoted",), "`em_difference` to the previous champion"),
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
    """Parse the Python function that a compiled component contains as text."""
    [executor] = component["deploymentSpec"]["executors"].values()
    source = ast.parse(executor["container"]["command"][-1])
    [function] = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    return function


def pods() -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the pod configuration of each component in the project's pipelines, and whether it has resource limits."""
    configurations = {}
    for spec, platform in compiled(ROOT / "pipelines").values():
        for label, entry in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].items():
            container = spec["deploymentSpec"]["executors"][label]["container"]
            configurations[label.removeprefix("exec-").replace("-", "_")] = entry, "resources" in container
    return configurations


def words(keys: Iterable[str]) -> str:
    """Format keys as code, separated by commas."""
    return ", ".join(f"`{key}`" for key in keys)


def variables(pod: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return the environment variables of a pod by key of its ConfigMap (``configMap``) or Secret (``secret``)."""
    pairs = [pair for source in pod.get(f"{kind}AsEnv", ()) for pair in source["keyToEnv"]]
    return {pair[f"{kind}Key"]: pair["envVar"] for pair in pairs}


def example(name: str, parameters: Mapping[str, str], pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an example pipeline with this component; ``parameters`` maps names to Python types."""
    yield "from kfp import components, dsl, kubernetes"
    yield ""
    yield f'{name} = components.load_component_from_file("{FILES}/{name}.yaml")'
    yield ""
    yield ""
    yield f'@dsl.pipeline(name="{name.replace("_", "-")}-alone")'
    yield "def pipeline("
    yield from (f"    {parameter}: {kind}," for parameter, kind in parameters.items())
    yield "):"
    yield f"    task = {name}("
    yield from (f"        {parameter}={parameter}," for parameter in parameters)
    yield "    )"
    yield "    task.set_caching_options(False)  # the stage checks itself whether it is up to date"
    for mount in pod["pvcMount"]:
        yield f'    kubernetes.mount_pvc(task, pvc_name="realmops-data", mount_path="{mount["mountPath"]}")'
    for mount in pod["emptyDirMounts"]:
        yield f'    kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="{mount["mountPath"]}")'
    user = {key: pod["securityContext"][key] for key in ("runAsUser", "runAsGroup")}
    security = ", ".join(f"{SNAKE[key]}={value}" for key, value in user.items())
    yield f"    kubernetes.set_security_context(task, {security})"
    for kind, function, resource in (
        ("configMap", "use_config_map_as_env", "realmops-tracking"),
        ("secret", "use_secret_as_env", "realmops-secrets"),
    ):
        yield f"    kubernetes.{function}("
        yield "        task,"
        yield f'        "{resource}",'
        yield "        {"
        yield from (f'            "{key}": "{variable}",' for key, variable in variables(pod, kind).items())
        yield "        },"
        yield "        optional=True,"
        yield "    )"
    for key, value in pod.get("podMetadata", {}).get("labels", {}).items():
        yield f'    kubernetes.add_pod_label(task, "{key}", "{value}")'


def component_page(name: str, component: Mapping[str, Any], notice: str, row: Row) -> str:
    """Return the text of docs/components/NAME.md; ``notice`` is the comment on generated files."""
    [entry] = component["components"].values()
    [executor] = component["deploymentSpec"]["executors"].values()
    function = function_of(component)
    docstring = parse(ast.get_docstring(function) or "")
    about = {param.arg_name: " ".join((param.description or "").split()) for param in docstring.params}
    order = [argument.arg for argument in function.args.args]
    inputs, outputs = entry["inputDefinitions"], entry.get("outputDefinitions", {}).get("artifacts", {})
    parameters = {key: inputs["parameters"][key]["parameterType"] for key in order if key in inputs["parameters"]}
    pod, has_limits = pods()[name]
    lines = [f"# `{name}`", "", notice, "", str(docstring.short_description), ""]
    lines += [f"`{name}.yaml`, with the image `{executor['container']['image']}`.", ""]
    lines += ["## Inputs", "", row("input", "type", "what it is"), "|---|---|---|"]
    lines += [row(f"`{key}`", TYPES[kind][0], about[key]) for key, kind in parameters.items()]
    for key, kind in inputs.get("artifacts", {}).items():
        optional = ", optional" if kind.get("isOptional") else ""
        lines += [row(f"`{key}`", f"`{kind['artifactType']['schemaTitle']}`{optional}", about[key])]
    if outputs:
        lines += ["", "## Outputs", "", row("output", "type", "what it is", "metadata"), "|---|---|---|---|"]
    for key in [key for key in order if key in outputs]:
        keys, more = METADATA.get((name, key), ((), ""))
        metadata = "; ".join(filter(None, [words(keys), more])) or "none"
        lines += [row(f"`{key}`", f"`{outputs[key]['artifactType']['schemaTitle']}`", about[key], metadata)]
    security = pod["securityContext"]
    lines += ["", "## Environment", "", "Its pod in the pipelines of this project has:", "", row("setting", "value")]
    lines += ["|---|---|", row("claim with the run's folder", words(mount["mountPath"] for mount in pod["pvcMount"]))]
    lines += [row("emptyDir", words(mount["mountPath"] for mount in pod["emptyDirMounts"]))]
    lines += [row("user, group", f"{security['runAsUser']}, {security['runAsGroup']}")]
    lines += [row("variables from a ConfigMap, all optional", words(variables(pod, "configMap").values()))]
    lines += [row("variables from a Secret, all optional", words(variables(pod, "secret").values()))]
    labels = pod.get("podMetadata", {}).get("labels", {})
    lines += [row("labels", words(f"{key}: {value}" for key, value in sorted(labels.items())))]
    lines += [row("limits and accelerator", "parameters of the pipeline" if has_limits else "none")]
    lines += [row("timeout", f"{int(pod['activeDeadlineSeconds']) / 3600:g} hours")]
    if name in RIGHTS:
        lines += ["", RIGHTS[name]]
    python = {key: TYPES[kind][1] for key, kind in parameters.items()}
    return "\n".join([*lines, "", "## Example", "", "```python", *example(name, python, pod), "```"]) + "\n"


def components_page(documents: Mapping[str, Mapping[str, Any]], notice: str, row: Row) -> str:
    """Return the text of docs/components.md."""
    rows = []
    for name, component in documents.items():
        summary = parse(ast.get_docstring(function_of(component)) or "").short_description
        rows.append(row(f"[`{name}`](components/{name}.md)", str(summary)))
    return f"""\
# Components

{notice}

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
`task.after(...)`. A step that the options do not need (`sample`, `tag`, `cloze`) does nothing, and its artifact has a
`message` alone. Each page below shows a pipeline with that component alone. The claim and the image must exist.

{row("component", "what it does")}
|---|---|
{chr(10).join(rows)}
"""


def pages(notice: Callable[[str], str], row: Row) -> dict[Path, str]:
    """Return the text of each page by its path; ``notice`` builds the comment for a source."""
    documents = components()
    texts = {ROOT / "docs/components.md": components_page(documents, notice("components/"), row)}
    for name, component in documents.items():
        page = component_page(name, component, notice(f"components/{name}.py or pipelines/"), row)
        texts[ROOT / f"docs/components/{name}.md"] = page
    return texts
