"""``realmops init``: a project of the user's own, made of what the package has and of what the documents are."""

import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from realmops import __version__, artifacts, config
from realmops.commands.params import as_yaml
from realmops.commands.public_data import bring
from realmops.config import PACKAGE, Values
from realmops.config_rules import check, option_rules
from realmops.corpus.documents import Document, Raw, Rejected
from realmops.corpus.formats import Source, sources
from realmops.corpus.question_sets import json_line, parts_of, read_questions
from realmops.hub import CONFIG, is_sentence_encoder, read_optional
from realmops.resources import resource
from realmops.stages import CLOZE, HUB, STAGES, chain, in_use, named_below
from realmops.text.languages import AUTO, ENGLISH, detect, languages

STARTER = PACKAGE / "starter"
BASES = f"realmops-{__version__}"  # the folder of the manifests below k8s
CLUSTERS = {"standalone": "kubeflow", "local": "realmops", "production": "realmops"}  # each with its namespace
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # what the preset minilm starts from
WIDE = 768  # numbers of a wordpiece, from which on an encoder learns at the rates of the preset base
SPLITS = "train", "dev", "test"
LEAST = 60  # questions, below which all are test questions
TAGGED = "data/public"  # where the presets look for tagged sentences
HUB_SECONDS = 5.0
GPU_SECONDS = 10.0  # for the driver's answer
LARGE = 20_000_000  # bytes of documents, some 20,000 passages, from which on the preset large finds more from scratch
PARAMS_HEAD = """\
# What differs from the defaults. docs/options.md of realmops has every option; "realmops params --json" prints all that
# hold here. A preset is a file of differences, realmops' own or presets/NAME.yaml here.
"""
DVC_HEAD = """\
# The whole chain. Each stage is one call of the command line; params lists the presets and the sections that it reads.
# With persist DVC leaves a stage's folder to the stage, which goes on with what realmops run has made, and replaces the
# folder whole.
"""


@dataclass
class Project:
    """What will be written: text by file, and what a person is told."""

    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    own: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        """Set an option of params.yaml."""
        section, _, name = key.partition(".")
        self.own.setdefault(section, {})[name] = value

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """All sections."""
        files = [config.preset_path(name, self.folder / "params.yaml") for name in self.presets]
        return config.checked(self.own, "params.yaml", config.laid(config.defaults(), files))


def init(
    folder: Path,
    documents: Path | None,
    questions: Sequence[Path],
    encoder: str | None,
    cluster: str,
    image: str,
    reader: Path | None = None,
) -> Iterator[str]:
    """Write a project into a folder; what was found and what comes next, in words.

    Args:
        documents: a file or a folder; None for the invented encyclopedia.
        questions: files; they are split where there are enough of them.
        encoder: a folder, a name on the hub, or "small" for one from scratch; None for what is at hand.
        image: of the pods.
        reader: a folder of ``realmops export --format reader``.

    Raises ValueError, before anything is written, for documents or questions that no stage could read, and for a
    folder that has one of the files already.
    """
    project = Project(folder)
    if documents is not None:
        size = _look_at_documents(project, documents)
        project.presets += _model(project, encoder, size)
        if encoder is None and "language" in project.own["snapshot"]:
            project.lines[-1] += "; name one of the documents' language, or a multilingual one, by --encoder"
        if questions:
            _look_at_questions(project, questions)
        else:
            project.presets.append("documents")
            project.lines.append("questions: none; realmops makes some from the documents (preset documents)")
        if reader is not None:
            if project.values["bert"]["init"] == "small":
                raise ValueError(
                    f"--reader {reader} began with a pre-trained encoder, and reads its wordpieces alone: name it "
                    f"by --encoder ({reader / 'README.md'} says which it was)"
                )
            project.presets.append("reader")
            project.put("reader.init", _named(project, reader))
            project.lines.append(f"reader: {reader}, which answers already and is not trained (preset reader)")
    elif questions or encoder or reader:
        raise ValueError("--questions, --encoder and --reader want --documents: the sample has its own")
    project.put("tracking.experiment", folder.resolve().name or "realmops")
    check(option_rules(project.values))
    places = dict(PLACES)
    if (folder / "README.md").exists():
        del places["README.md"]
        project.lines.append(f"{folder / 'README.md'} is yours, and stays as it is")
    there = [name for name in (*ALWAYS, *places.values(), *project.files) if (folder / name).exists()]
    if there:
        raise ValueError(f"{folder / there[0]} exists, and would be overwritten; name another folder, or move it away")
    _bring_tagged(project)
    values = project.values
    project.files |= {
        "params.yaml": params_text(project.presets, project.own),
        "dvc.yaml": dvc_text(values, project.own),
        ".gitignore": _ignored(folder / ".gitignore"),
        "kustomization.yaml": kustomization_text(cluster, image),
        **{place: _filled(name, project, cluster) for name, place in places.items()},
    }
    for name, text in project.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_bytes(folder / name, text.encode())
    kept = shutil.ignore_patterns("README.md", "overlays", "__pycache__")
    shutil.copytree(resource("k8s"), folder / "k8s" / BASES, ignore=kept)
    yield from project.lines
    yield f"written: {', '.join(str(folder / name) for name in project.files)}, {folder / 'k8s' / BASES}"
    place = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    dvc = "DVC" if find_spec("dvc") is not None else "DVC (pip install 'realmops[dvc]')"
    yield f"next: {place}realmops run all; or with {dvc}: {place}{_dvc_words(folder.resolve())}dvc repro"


def _dvc_words(folder: Path) -> str:
    """What comes before ``dvc repro``, which wants its own folder, beside git's or below it."""
    if (folder / ".dvc").is_dir():
        return ""
    if any((above / ".git").exists() for above in folder.parents) and not (folder / ".git").exists():
        return "dvc init --subdir && "
    return "dvc init && " if (folder / ".git").exists() else "git init && dvc init && "


ALWAYS = "params.yaml", "dvc.yaml", "kustomization.yaml", f"k8s/{BASES}"
PLACES = {  # of the templates
    "README.md": "README.md",
    "argo-cd.yaml": "k8s/argo-cd.yaml",
    "flux.yaml": "k8s/flux.yaml",
    "retrain.yml": ".github/workflows/retrain.yml",
}


def _ignored(file: Path) -> str:
    """A .gitignore with what runs write; lines that it has stay."""
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = (STARTER / "gitignore").read_text(encoding="utf-8").splitlines(keepends=True)
    end = "" if own.endswith("\n") or not own else "\n"
    return own + end + "".join(line for line in lines if line.rstrip() not in own.splitlines())


def _filled(name: str, project: Project, cluster: str) -> str:
    text = (STARTER / name).read_text(encoding="utf-8")
    for mark, value in {
        "@NAME@": project.folder.resolve().name,
        "@VERSION@": __version__,
        "@BASES@": BASES,
        "@NAMESPACE@": CLUSTERS[cluster],
        "@INSTALL@": f"'realmops[cluster]=={__version__}'",
    }.items():
        text = text.replace(mark, value)
    return text


def _look_at_documents(project: Project, documents: Path) -> int:
    """Tell of the documents; their bytes."""
    found = sources(documents, "auto")
    counts = Counter(_kind(one) for one in found)
    size = sum(one.size for one in found)
    files = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    project.lines.append(f"documents: {files}, {size / 1e6:,.1f} MB")
    project.lines += _looked_into(project, found)
    project.put("snapshot.documents", _named(project, documents))
    return size


def _kind(source: Source) -> str:
    """What a person calls a file: by its ending where one format reads several kinds of texts."""
    ending = Path(source.path.name.removesuffix(".gz")).suffix.lstrip(".")
    return ending if ending and source.format.name == "text" else source.format.name


def _named(project: Project, path: Path) -> str:
    """A file's name in params.yaml: from the project's folder on where it lies there."""
    if str(path).startswith(HUB):
        return str(path)
    place, home = path.resolve(), project.folder.resolve()
    return place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)


SHORT = 100  # characters, below which a document says little of its language
SEVERAL = 0.05  # share of the documents in another language than most, from which on each document has its own


def _looked_into(project: Project, found: Sequence[Source]) -> list[str]:
    """A line where one of the first records is broken, and one where the first documents are not in English."""
    spoken: Counter[str] = Counter()
    broken: list[Rejected] = []
    for one in found[:20]:
        for raw in islice(one.format.records(one.path), 50):
            document = one.format.convert(raw) if isinstance(raw, Raw) else raw
            if isinstance(document, Document):
                likely = detect(document.text)
                spoken.update(likely if len(likely) == 1 and len(document.text) >= SHORT else ())
            elif isinstance(document, Rejected):
                broken.append(document)
    lines = [f"documents: {broken[0].place}: {broken[0].problem}"] if broken else []
    shares = {code: count / spoken.total() for code, count in spoken.most_common() if count >= SEVERAL * spoken.total()}
    if not shares or [*shares] == [ENGLISH]:
        return lines
    project.put("snapshot.language", AUTO if len(shares) > 1 else next(iter(shares)))
    names = ", ".join(f"{languages()[code].name} {share:.0%}" for code, share in shares.items())
    lines.append(f"language: {names} (snapshot.language: {project.own['snapshot']['language']})")
    return lines


def _model(project: Project, encoder: str | None, size: int) -> list[str]:
    """The presets of the model: by the encoder, the bytes of the documents, and whether there is a GPU."""
    chosen, gpu = encoder or _at_hand(), _gpu()
    if gpu:
        project.lines.append(f"GPU: {gpu}")
    if chosen == "small":
        why = "" if encoder else f"; {ENCODER} is not in the hub's cache, and the hub cannot be reached"
        presets = ["squad", "large"] if size >= LARGE else ["squad"]
        project.lines.append(f"encoder: from scratch ({_presets(presets)}){why}")
        return presets
    if chosen != ENCODER:
        path = Path(chosen)
        project.put("bert.init", _named(project, path) if path.is_dir() else chosen)
    presets = ["squad", "minilm", *(["base"] if _is_wide(chosen) else [])]
    if gpu and _is_plain_bert(chosen):
        presets = ["squad", "bert-base"]
    why = "; bert-base is for a plain BERT on a GPU, and was not run by us" if "bert-base" in presets else ""
    project.lines.append(f"encoder: {chosen} ({_presets(presets)}){why}")
    if not gpu and find_spec("openvino") is not None:
        project.put("run.precision", "int8")
        project.lines.append("passages are embedded in int8 by OpenVINO, which is installed here (run.precision)")
    return presets


def _presets(names: Sequence[str]) -> str:
    return f"{'presets' if len(names) > 1 else 'preset'} {', '.join(names)}"


def _is_plain_bert(encoder: str) -> bool:
    """Whether an encoder is no sentence encoder, as far as its folder or its name on the hub says."""
    folder = Path(encoder)
    return not is_sentence_encoder(folder) if folder.is_dir() else encoder.startswith(("google-bert/", "bert-"))


def _is_wide(encoder: str) -> bool:
    """Whether an encoder is a base one or larger, as far as its folder or its name on the hub says."""
    folder = Path(encoder)
    if not folder.is_dir():
        return any(size in encoder.lower() for size in ("base", "large"))
    shape = read_optional(folder / CONFIG, "model configuration")
    widths = (shape.get(name) for name in ("hidden_size", "dim"))
    return any(isinstance(width, int) and width >= WIDE for width in widths)


def _gpu() -> str:
    """The name of an NVIDIA GPU that torch can use, empty where there is none; torch would take seconds to import."""
    if version("torch").endswith("+cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(asked.stdout.splitlines()), "").strip()


def _at_hand() -> str:
    """``ENCODER`` where the hub's cache has it or the hub answers, else "small"."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(ENCODER, "config.json"), str):
        return ENCODER
    if constants.HF_HUB_OFFLINE:
        return "small"
    try:
        with urlopen(f"{constants.ENDPOINT}/api/models/{ENCODER}", timeout=HUB_SECONDS):
            return ENCODER
    except OSError:
        return "small"


def _look_at_questions(project: Project, files: Sequence[Path]) -> None:
    """Questions in three parts below questions/: those of files named train, dev and test, else drawn."""
    if named := _by_name(files):
        for split, path in named.items():
            count = len(read_questions([path], format="auto"))
            project.lines.append(f"questions.{split}: {count} of {path}")
            project.put(f"questions.{split}", _named(project, path))
        return
    found = read_questions(files, format="auto")
    if len(found) < LEAST:
        raise ValueError(
            f"{', '.join(map(str, files))}: {len(found)} questions; from {LEAST} on they are split into train, dev and "
            "test. With fewer, leave --questions out: realmops makes questions of the documents, and these measure the "
            "model with 'realmops ask --from FILE'"
        )
    for split, part in parts_of(found).items():
        name = f"questions/{split}.jsonl"
        project.files[name] = b"".join(map(json_line, part)).decode()
        project.put(f"questions.{split}", name)
        project.lines.append(f"questions.{split}: {len(part)} of {len(found)}, in {name}")


def _by_name(files: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each split where every split has one, else nothing.

    A file is of the split that is one of the words of its name: ``latest_dev.jsonl`` is of dev, and not of test.
    """
    found: dict[str, list[Path]] = {split: [] for split in SPLITS}
    others: list[Path] = []
    for path in files:
        splits = [split for split in SPLITS if split in re.split(r"[\W_]+", path.name.lower())]
        (found[splits[0]] if len(splits) == 1 else others).append(path)
    if not all(found.values()):
        return {}
    advice = f"give one file for each of {', '.join(SPLITS)}, with that word in its name and no other of them"
    for split, paths in found.items():
        if len(paths) > 1:
            raise ValueError(f"--questions: {' and '.join(map(str, paths))} could each be questions.{split}; {advice}")
    if others:
        raise ValueError(f"--questions: {' and '.join(map(str, others))}: no split by the name; {advice}")
    return {split: path for split, (path,) in found.items()}


def _bring_tagged(project: Project) -> None:
    """Bring the tagged sentences that the presets name; where they are not to be had, dates alone are masked.

    In another language than English they are of no use, and phrases are masked.
    """
    values = project.values
    if values["tag"]["method"] != "tagger" or not values["tag"]["train"].startswith(TAGGED):
        return
    if values["snapshot"]["language"] != ENGLISH:
        project.put("tag.method", "phrases")
        project.lines.append(
            "names: by capitals, or phrases that recur (tag.method: phrases), as the tagged sentences at hand are "
            "English; with CoNLL files of your own as tag.train and tag.dev, delete that line"
        )
        return
    to = project.folder / TAGGED
    try:
        for _ in bring(["ner"], to, None, 0):
            pass
        project.lines.append(f"tagged sentences, from which names are learned: downloaded to {to / 'ner'}")
    except ValueError as error:
        project.put("tag.method", "dates")
        project.lines.append(
            f"tagged sentences, from which names are learned: {str(error).partition(';')[0]}. So dates alone are "
            "masked (tag.method: dates). 'realmops public-data ner' gets the files; then delete that line"
        )


def params_text(presets: Sequence[str], own: Values) -> str:
    """A params.yaml of differences; DVC wants every section, so that those without one stand there empty."""
    lines = [PARAMS_HEAD, f"presets: [{', '.join(presets)}]", ""]
    whole = {name: own.get(name, {}) for name in config.SECTIONS}
    for name, keys in sorted(whole.items(), key=lambda one: not one[1]):
        lines.append(as_yaml({name: dict(keys)}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def dvc_text(values: Values, own: Values) -> str:
    """The dvc.yaml of a project: the stages of its chain, each with the files that its options name.

    Args:
        own: what params.yaml has: DVC takes file names from there.
    """
    names = chain(values)
    lines = [DVC_HEAD + "stages:"]
    cloze = named_below(CLOZE, names, values)

    def stage(name: str, command: str, deps: Sequence[str], params: Sequence[str], folder: str) -> None:
        lines.extend((f"  {name}:", f"    cmd: {command}", *([f"    deps: [{', '.join(deps)}]"] if deps else [])))
        lines.append(f"    params: [{', '.join(('presets', *params))}]")
        lines.append(f"    outs: [{{{folder}: {{persist: true}}}}]")

    for name in names:
        one = STAGES[name]
        deps = [STAGES[need].folder for need in one.needs if need in names]
        for key in in_use(one, values):
            section, _, option = key.partition(".")
            file = values[section][option]
            if Path(CLOZE) in Path(file).parents:
                deps += [CLOZE] if CLOZE not in deps else []
            elif not file.startswith(HUB):
                deps.append(f'"${{{key}}}"' if option in own.get(section, {}) else file)
        stage(name, f"realmops run {name}", deps, one.sections, one.folder)
        if name == "tag" and cloze:
            stage("cloze", "realmops cloze", [STAGES[need].folder for need in ("snapshot", "tag")], ["run"], CLOZE)
    return "\n".join(lines) + "\n\n" + (STARTER / "plots.yaml").read_text(encoding="utf-8")


def kustomization_text(cluster: str, image: str) -> str:
    """An overlay of the package for a project's folder, with its params.yaml as a ConfigMap."""
    text = (resource("k8s") / "overlays" / cluster / "kustomization.yaml").read_text(encoding="utf-8")
    text = text.replace("../../", f"k8s/{BASES}/").replace(" ../", " --cluster ")
    name, _, tag = image.rpartition(":")
    text = text.replace("    newTag: local\n", f"    newName: {name}\n    newTag: {tag}\n")
    return text + (
        "# For the Job that submits the pipeline: another option is another commit, and no other image.\n"
        "configMapGenerator:\n  - name: realmops-params\n    files: [params.yaml]\n"
    )
