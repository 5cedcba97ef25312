"""``realmops init``: create a project from the package's templates, with presets chosen by the user's documents."""

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

from realmops import __version__, artifacts, config, hub
from realmops.answering.own_questions import WHAT_THEY_BRING
from realmops.commands.params import as_yaml
from realmops.config import PACKAGE, Values
from realmops.config_rules import NO_READER, check_rules, option_rules
from realmops.corpus.documents import Document, RawRecord, Rejected
from realmops.corpus.formats import Source, list_sources
from realmops.corpus.public_data import fetch_data_sets
from realmops.corpus.question_sets import read_questions, split_by_hash, to_json_line
from realmops.resources import resource_folder
from realmops.stages import CLOZE, HUB, STAGES, files_in_use, has_file_below, reads_spans, stages_to_run
from realmops.text.languages import AUTO, ENGLISH, detect_language, load_languages

STARTER = PACKAGE / "starter"
BASES = f"realmops-{__version__}"  # folder of the package's manifests in k8s/
CLUSTERS = {"standalone": "kubeflow", "local": "realmops", "production": "realmops"}  # namespaces by overlay
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # retriever.init of the preset minilm
# Readers that init proposes: a small one and a better one.
READERS = "distilbert/distilbert-base-cased-distilled-squad", "deepset/roberta-base-squad2"
MULTILINGUAL_READERS = ("deepset/xlm-roberta-base-squad2",)
READER_EPOCHS = 2  # over the questions of the user
WIDE = 768  # hidden size from which an encoder needs the learning rates of the preset base
SPLITS = "train", "dev", "test"
MIN_QUESTIONS = 60  # fewer are not split into train, dev and test
TAGGED = "data/public"  # the presets' folder of tagged sentences
GPU_SECONDS = 10.0  # timeout of nvidia-smi
LARGE = 20_000_000  # bytes, about 20,000 passages; from scratch, the preset large pays off from here
PARAMS_HEAD = """\
# Options that differ from the defaults. docs/options.md of realmops lists every option; "realmops params --json" prints
# the effective values. A preset is a file of differences: a built-in one, or presets/NAME.yaml in this folder.
"""
DVC_HEAD = """\
# The whole chain. Each stage is one call of the command line; params lists presets, sections and options that it reads.
# With persist, DVC keeps a stage's folder until the stage runs, which itself skips, resumes or replaces it.
"""


@dataclass
class Project:
    """The files of a new project by name, and the lines to print."""

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
        """All sections with the project's presets and options applied."""
        files = [config.preset_path(name, self.folder / "params.yaml") for name in self.presets]
        return config.merge_options(self.own, "params.yaml", config.apply_presets(config.default_options(), files))


def init(
    folder: Path,
    documents: Path | None,
    questions: Sequence[Path],
    encoder: str | None,
    cluster: str,
    image: str,
    reader: str | None = None,
) -> Iterator[str]:
    """Write a project into a folder; yield a description of the input, and the next commands.

    Args:
        folder: the project's folder.
        documents: a file or a folder; None for the synthetic encyclopedia.
        questions: question files; split if there are at least ``MIN_QUESTIONS``.
        encoder: a folder, a name on the hub, or "small" for one from scratch; None to choose by availability.
        cluster: a key of ``CLUSTERS``.
        image: the container image of the pods.
        reader: a reader of spans, a folder or a name on the hub; NO_READER for search alone; None to choose by
            availability.

    Raises:
        ValueError: documents or questions cannot be read, or a file already exists; nothing is written then.
    """
    project = Project(folder)
    if documents is not None:
        size = _add_documents(project, documents)
        project.presets += _choose_model(project, encoder, size)
        if encoder is None and "language" in project.own["snapshot"]:
            project.lines[-1] += "; name an encoder of the documents' language, or a multilingual one, with --encoder"
        if questions:
            _add_questions(project, questions)
        else:
            project.presets.append("documents")
            project.lines.append("questions: none; they will be generated from the documents (preset documents)")
            project.lines.append("label your own after 'realmops run snapshot', with 'realmops questions --label':")
            project.lines += [f"  {line}" for line in WHAT_THEY_BRING]
        _choose_reader(project, reader, has_questions=bool(questions))
    elif questions or encoder or reader:
        raise ValueError("--questions, --encoder and --reader need --documents; the sample corpus has its own")
    project.put("tracking.experiment", folder.resolve().name or "realmops")
    check_rules(option_rules(project.values))
    places = dict(PLACES)
    if (folder / "README.md").exists():
        del places["README.md"]
        project.lines.append(f"{folder / 'README.md'} exists and is kept")
    existing = [name for name in (*ALWAYS, *places.values(), *project.files) if (folder / name).exists()]
    if existing:
        raise ValueError(f"{folder / existing[0]} exists and would be overwritten; choose another folder, or move it")
    _fetch_tagged(project)
    values = project.values
    project.files |= {
        "params.yaml": params_text(project.presets, project.own),
        "dvc.yaml": dvc_text(values, project.own),
        ".gitignore": _gitignore_text(folder / ".gitignore"),
        "kustomization.yaml": kustomization_text(cluster, image),
        **{place: _fill_template(name, project, cluster) for name, place in places.items()},
    }
    for name, text in project.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_bytes(folder / name, text.encode())
    ignored = shutil.ignore_patterns("README.md", "overlays", "__pycache__")
    shutil.copytree(resource_folder("k8s"), folder / "k8s" / BASES, ignore=ignored)
    yield from project.lines
    yield f"written: {', '.join(str(folder / name) for name in project.files)}, {folder / 'k8s' / BASES}"
    place = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    dvc = "DVC" if find_spec("dvc") is not None else "DVC (pip install 'realmops[dvc]')"
    yield f"next: {place}realmops run all; or with {dvc}: {place}{_dvc_init_command(folder.resolve())}dvc repro"


def _dvc_init_command(folder: Path) -> str:
    """Return the shell prefix that initialises git and DVC, as far as ``dvc repro`` still needs them."""
    if (folder / ".dvc").is_dir():
        return ""
    if any((above / ".git").exists() for above in folder.parents) and not (folder / ".git").exists():
        return "dvc init --subdir && "
    return "dvc init && " if (folder / ".git").exists() else "git init && dvc init && "


ALWAYS = "params.yaml", "dvc.yaml", "kustomization.yaml", f"k8s/{BASES}"
PLACES = {  # destinations by template
    "README.md": "README.md",
    "argo-cd.yaml": "k8s/argo-cd.yaml",
    "flux.yaml": "k8s/flux.yaml",
    "retrain.yml": ".github/workflows/retrain.yml",
}


def _gitignore_text(file: Path) -> str:
    """Return a .gitignore with the outputs of runs added to its lines, if any."""
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = (STARTER / "gitignore").read_text(encoding="utf-8").splitlines(keepends=True)
    end = "" if own.endswith("\n") or not own else "\n"
    return own + end + "".join(line for line in lines if line.rstrip() not in own.splitlines())


def _fill_template(name: str, project: Project, cluster: str) -> str:
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


def _add_documents(project: Project, documents: Path) -> int:
    """Set snapshot.documents and its language, describe the documents, and return their size in bytes."""
    files = list_sources(documents, "auto")
    counts = Counter(_kind(source) for source in files)
    size = sum(source.size for source in files)
    kinds = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    project.lines.append(f"documents: {kinds}, {size / 1e6:,.1f} MB")
    project.lines += _inspect_records(project, files)
    project.put("snapshot.documents", _path_in_params(project, documents))
    return size


def _kind(source: Source) -> str:
    """Return the file type to print: the suffix if the format, text, covers several types."""
    ending = Path(source.path.name.removesuffix(".gz")).suffix.lstrip(".")
    return ending if ending and source.format.name == "text" else source.format.name


def _path_in_params(project: Project, path: Path) -> str:
    """Return a path for params.yaml: relative if it is inside the project's folder, otherwise absolute."""
    if str(path).startswith(HUB):
        return str(path)
    place, home = path.resolve(), project.folder.resolve()
    return place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)


SHORT = 100  # characters; language detection is unreliable below
SEVERAL = 0.05  # share of documents in a second language from which each document is detected on its own (auto)


def _inspect_records(project: Project, files: Sequence[Source]) -> list[str]:
    """Return a line about the first broken record, if any, and one about languages, if not only English."""
    detected: Counter[str] = Counter()
    broken: list[Rejected] = []
    for source in files[:20]:
        for raw in islice(source.format.records(source.path), 50):
            document = source.format.convert(raw) if isinstance(raw, RawRecord) else raw
            if isinstance(document, Document):
                likely = detect_language(document.text)
                detected.update(likely if len(likely) == 1 and len(document.text) >= SHORT else ())
            elif isinstance(document, Rejected):
                broken.append(document)
    lines = [f"documents: {broken[0].place}: {broken[0].problem}"] if broken else []
    shares = {code: n / detected.total() for code, n in detected.most_common() if n >= SEVERAL * detected.total()}
    if not shares or [*shares] == [ENGLISH]:
        return lines
    project.put("snapshot.language", AUTO if len(shares) > 1 else next(iter(shares)))
    names = ", ".join(f"{load_languages()[code].name} {share:.0%}" for code, share in shares.items())
    lines.append(f"language: {names} (snapshot.language: {project.own['snapshot']['language']})")
    return lines


def _choose_model(project: Project, encoder: str | None, size: int) -> list[str]:
    """Return the presets of the model, by encoder, size of the documents in bytes, and GPU."""
    chosen, gpu = encoder or _available_encoder(), _gpu_name()
    if gpu:
        project.lines.append(f"GPU: {gpu}")
    if chosen == "small":
        reason = "" if encoder else f"; {ENCODER} is not in the hub's cache, and the hub is unreachable"
        presets = ["squad", "large"] if size >= LARGE else ["squad"]
        project.lines.append(f"encoder: from scratch (presets: {', '.join(presets)}){reason}")
        return presets
    if chosen != ENCODER:
        path = Path(chosen)
        project.put("retriever.init", _path_in_params(project, path) if path.is_dir() else chosen)
    presets = ["squad", "minilm", *(["base"] if is_wide(chosen) else [])]
    if gpu and _is_plain_bert(chosen):
        presets = ["squad", "bert-base"]
    note = "; bert-base is for a plain BERT on a GPU, and untested" if "bert-base" in presets else ""
    if _is_plain_bert(chosen) and "bert-base" not in presets:  # [CLS] of a BERT without such training retrieves little
        project.put("retriever.pooling", "mean")
        note += "; retriever.pooling: mean, because it is not a sentence encoder"
    project.lines.append(f"encoder: {chosen} (presets: {', '.join(presets)}){note}")
    if not gpu and find_spec("openvino") is not None:
        project.put("run.precision", "int8")
        project.lines.append("precision: passages are embedded in int8, as OpenVINO is installed (run.precision)")
    return presets


def _choose_reader(project: Project, reader: str | None, *, has_questions: bool) -> None:
    """Set reader.init to the given reader, or to one that the hub offers; without one, the project only searches."""
    language = project.values["snapshot"]["language"]
    proposed = READERS if language == ENGLISH else MULTILINGUAL_READERS
    is_folder = reader is not None and Path(reader).is_dir()
    names = proposed if reader is None else () if is_folder or reader == NO_READER else (reader,)
    models = [model for model in map(hub.describe_model, names) if model is not None]
    chosen = reader or (models[0].name if models else proposed[0] if hub.is_cached(proposed[0]) else None)
    note = f"{models[0]}, loaded by the first run" if models else str(chosen)
    if reader is None:
        note += "".join(f"; better and larger: --reader {model}" for model in models[1:])
        note += "; --no-reader for search alone"
    if chosen is None and has_questions:
        project.lines.append("reader: trained on your questions from the encoder, as no published one can be loaded")
        return
    if chosen is None or chosen == NO_READER:
        if has_questions:
            project.presets.append("reader")
            project.put("reader.init", NO_READER)
        reason = "no reader, by --no-reader" if chosen else "no reader can be loaded: give one with --reader"
        project.lines.insert(0, f"search, not answers: {reason}")
        return
    if is_folder:
        hub.encoder_folder(chosen, hub.READER)
    project.put("reader.init", _path_in_params(project, Path(chosen)) if is_folder else chosen)
    project.presets.append("reader")
    if has_questions:
        project.put("finetune.epochs", READER_EPOCHS)
        note += f", trained {READER_EPOCHS} epochs further on your questions"
    project.lines.append(f"reader: {note}")


def _is_plain_bert(encoder: str) -> bool:
    """Return whether an encoder is not a sentence encoder, judged by its folder or its name on the hub."""
    folder = Path(encoder)
    return not hub.is_sentence_encoder(folder) if folder.is_dir() else encoder.startswith(("google-bert/", "bert-"))


def is_wide(encoder: str) -> bool:
    """Return whether an encoder has base size or more, judged by its configuration or its name on the hub."""
    folder = Path(encoder)
    if not folder.is_dir():
        return any(size in encoder.lower() for size in ("base", "large"))
    shape = hub.read_optional_json(folder / hub.CONFIG, "model configuration")
    widths = (shape.get(name) for name in ("hidden_size", "dim"))
    return any(isinstance(width, int) and width >= WIDE for width in widths)


def _gpu_name() -> str:
    """Return the name of an NVIDIA GPU that torch can use, or "", without the seconds of importing torch."""
    if version("torch").endswith("+cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(process.stdout.splitlines()), "").strip()


def _available_encoder() -> str:
    """Return ``ENCODER`` if it is in the hub's cache or the hub is reachable, else "small"."""
    return ENCODER if hub.is_cached(ENCODER) or hub.describe_model(ENCODER) else "small"


def _add_questions(project: Project, files: Sequence[Path]) -> None:
    """Set questions.train, dev and test to files with these names, else to a random split in questions/."""
    if file_of_split := _by_name(files):
        for split, path in file_of_split.items():
            count = len(read_questions([path], format="auto"))
            project.lines.append(f"questions.{split}: {count} of {path}")
            project.put(f"questions.{split}", _path_in_params(project, path))
        return
    questions = read_questions(files, format="auto")
    if len(questions) < MIN_QUESTIONS:
        raise ValueError(
            f"{', '.join(map(str, files))}: {len(questions)} questions; at least {MIN_QUESTIONS} are needed for train, "
            "dev and test. Leave --questions out to train on questions generated from the documents, and measure the "
            "model on yours with 'realmops ask --from FILE'"
        )
    for split, part in split_by_hash(questions).items():
        name = f"questions/{split}.jsonl"
        project.files[name] = b"".join(map(to_json_line, part)).decode()
        project.put(f"questions.{split}", name)
        project.lines.append(f"questions.{split}: {len(part)} of {len(questions)}, in {name}")


def _by_name(files: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each split if every split has one, else an empty dictionary.

    The split of a file is a whole word in its name: ``latest_dev.jsonl`` is dev, not test.
    """
    candidates: dict[str, list[Path]] = {split: [] for split in SPLITS}
    unmatched: list[Path] = []
    for path in files:
        splits = [split for split in SPLITS if split in re.split(r"[\W_]+", path.name.lower())]
        (candidates[splits[0]] if len(splits) == 1 else unmatched).append(path)
    if not all(candidates.values()):
        return {}
    advice = f"give one file for each of {', '.join(SPLITS)}, with exactly one of these words in its name"
    for split, paths in candidates.items():
        if len(paths) > 1:
            raise ValueError(f"--questions: {' and '.join(map(str, paths))} both match questions.{split}; {advice}")
    if unmatched:
        raise ValueError(f"--questions: {' and '.join(map(str, unmatched))}: no split in the name; {advice}")
    return {split: path for split, (path,) in candidates.items()}


def _fetch_tagged(project: Project) -> None:
    """Download the tagged sentences of the presets; if that fails, find names without a tagger.

    They are English: in other languages names are found without a tagger, too.
    """
    values = project.values
    if not reads_spans(values) or values["tag"]["method"] != "tagger" or not values["tag"]["train"].startswith(TAGGED):
        return
    if values["snapshot"]["language"] != ENGLISH:
        project.put("tag.method", "phrases")
        project.lines.append(
            "names: capitalised words or recurring phrases (tag.method: phrases), as the public tagged sentences are "
            "English; to use your own CoNLL files as tag.train and tag.dev, delete that line"
        )
        return
    to = project.folder / TAGGED
    try:
        for _ in fetch_data_sets(["ner"], to, None, 0):
            pass
        project.lines.append(f"tagged sentences for the name tagger: downloaded to {to / 'ner'}")
    except ValueError as error:
        project.put("tag.method", "phrases")
        project.lines.append(
            f"tagged sentences for the name tagger: {str(error).partition(';')[0]}. Names are found by capitals and "
            "recurrence instead (tag.method: phrases); run 'realmops public-data ner', then delete that line"
        )


def params_text(presets: Sequence[str], own: Values) -> str:
    """Return a params.yaml of differences; sections without any are written empty, as DVC needs all of them."""
    lines = [PARAMS_HEAD, f"presets: [{', '.join(presets)}]", ""]
    sections = {name: own.get(name, {}) for name in config.SECTIONS}
    for name, keys in sorted(sections.items(), key=lambda section: not section[1]):
        lines.append(as_yaml({name: dict(keys)}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def dvc_text(values: Values, own: Values) -> str:
    """Return the dvc.yaml of a project: the stages of its chain, with the files in their options as dependencies.

    Args:
        values: all sections, defaults and presets applied.
        own: the options in params.yaml, which DVC interpolates into paths.
    """
    names = stages_to_run(values)
    lines = [DVC_HEAD + "stages:"]
    cloze = has_file_below(CLOZE, names, values)

    def stage(name: str, command: str, deps: Sequence[str], params: Sequence[str], folder: str) -> None:
        lines.extend((f"  {name}:", f"    cmd: {command}", *([f"    deps: [{', '.join(deps)}]"] if deps else [])))
        lines.append(f"    params: [{', '.join(('presets', *params))}]")
        lines.append(f"    outs: [{{{folder}: {{persist: true}}}}]")

    for name in names:
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
        if name == "tag" and cloze:
            stage("cloze", "realmops cloze", [STAGES[need].folder for need in ("snapshot", "tag")], ["run"], CLOZE)
    return "\n".join(lines) + "\n\n" + (STARTER / "plots.yaml").read_text(encoding="utf-8")


def kustomization_text(cluster: str, image: str) -> str:
    """Return an overlay of the package adapted to a project's folder, with its params.yaml as a ConfigMap."""
    text = (resource_folder("k8s") / "overlays" / cluster / "kustomization.yaml").read_text(encoding="utf-8")
    text = text.replace("../../", f"k8s/{BASES}/").replace(" ../", " --cluster ")
    name, _, tag = image.rpartition(":")
    text = text.replace("    newTag: local\n", f"    newName: {name}\n    newTag: {tag}\n")
    return text + (
        "# For the Job that submits the pipeline: a changed option needs a commit, but no new image.\n"
        "configMapGenerator:\n  - name: realmops-params\n    files: [params.yaml]\n"
    )
