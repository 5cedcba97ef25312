"""``realmops init``: a project for documents, questions and readers of the user, and the installed package."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from huggingface_hub.hf_api import ModelInfo
from manifest_rules import faults
from manifests import find, instructions, read_all, render
from paged_files import pdf
from small_project import cli
from small_world import DOCUMENTS

from realmops import __version__, config
from realmops.config import load_params
from realmops.config_yaml import read_params
from realmops.questions.question_sets import read_questions
from realmops.stages import STAGES, stages_to_run
from realmops.starter.choose_models import MULTILINGUAL_READERS, READERS
from realmops.starter.choose_questions import match_splits
from realmops.starter.cluster_files import BASES, CLUSTERS, PLACEHOLDER
from realmops.starter.project_files import dvc_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:

    def none(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", none)


def made(folder: Path, *words: str | Path) -> str:
    result = cli("init", folder, *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def with_documents(folder: Path) -> Path:
    folder.mkdir()
    small_project.write_documents(folder / "documents.jsonl")
    return folder


def questions(path: Path, count: int) -> Path:
    records = [{"question": f"Who wrote book {n}?", "answers": ["Anna Berg"]} for n in range(count)]
    return small_project.write_json_lines(path, records)


def test_without_documents_the_project_has_the_sample_and_the_stages_of_the_package(tmp_path: Path) -> None:
    made(tmp_path / "mine")
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    assert values == config.load_params(ROOT / "params.yaml").replace({"tracking.experiment": "mine"})
    assert stages_to_run(values) == tuple(STAGES)
    _, sections = read_params(ROOT / "params.yaml")
    own = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    assert (ROOT / "dvc.yaml").read_text(encoding="utf-8") == dvc_text(config.load_params(ROOT / "params.yaml"), own)


def test_documents_alone_are_not_trained_on_and_have_no_questions(tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    printed = made(folder, "--documents", folder / "documents.jsonl")
    for line in ("documents: 1 jsonl", "encoder: from scratch (presets: squad)", "questions: none"):
        assert line in printed
    presets, own = read_params(folder / "params.yaml")
    assert presets == ["squad", "documents", "untrained"]
    assert own["snapshot"] == {"documents": "documents.jsonl", "block_wordpieces": 288}
    assert config.load_params(folder / "params.yaml").reader.init == "none"
    stages = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert [*stages] == ["snapshot", "ict", "pretrain", "finetune"]
    assert "sample" not in str(stages)


@pytest.mark.parametrize(
    ("encoder", "size", "presets"),
    [
        ("pooled", 0, ["squad", "minilm"]),
        ("some/name", 0, ["squad", "minilm"]),
        ("wide", 0, ["squad", "minilm", "base"]),
        ("small", 20_000_000, ["squad", "large"]),
    ],
)
def test_encoder_and_size_choose_the_presets(
    encoder: str, size: int, presets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pooled" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "pooled" / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "wide").mkdir()
    for folder in ("pooled", "wide"):
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / folder / name).write_text('{"hidden_size": 768}' if folder == "wide" else "{}")
    monkeypatch.setattr("realmops.hub.is_cached", "some/name".__eq__)
    monkeypatch.chdir(tmp_path)
    documents = with_documents(tmp_path / "docs")
    with (documents / "large.txt").open("wb") as file:
        file.write(b"Words.\n")
        file.truncate(max(7, size))
    printed = made(tmp_path / "mine", "--documents", documents, "--encoder", encoder)
    assert f"(presets: {', '.join(presets)})" in printed
    values = yaml.safe_load((tmp_path / "mine" / "params.yaml").read_text())
    assert values["presets"] == [*presets, "documents", "untrained"]
    assert (values["retriever"] or {}).get("pooling") == ("mean" if encoder == "wide" else None)


def test_questions_are_split_once_and_for_all(tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    printed = made(folder, "--documents", folder, "--questions", questions(tmp_path / "asked.jsonl", 100))
    parts = {name: (folder / f"questions/{name}.jsonl").read_text().splitlines() for name in ("train", "dev", "test")}
    assert sum(map(len, parts.values())) == 100
    assert min(map(len, parts.values())) > 3
    assert f"questions.test: {len(parts['test'])} of 100" in printed
    assert config.load_params(folder / "params.yaml").questions.train == "questions/train.jsonl"
    again = with_documents(tmp_path / "again")
    made(again, "--documents", again, "--questions", questions(tmp_path / "asked.jsonl", 140))
    for name, lines in parts.items():
        assert lines == (again / f"questions/{name}.jsonl").read_text().splitlines()[: len(lines)]


def test_a_split_is_a_whole_word_of_a_file_name() -> None:
    names = {"dev": "latest_dev.jsonl", "train": "my-TRAIN.jsonl", "test": "final.test.jsonl"}
    files = {split: Path(name) for split, name in names.items()}
    assert match_splits([*files.values()]) == files
    for no_splits in (["latest_dev.jsonl", "constraints.jsonl", "test.jsonl"], ["train/a.jsonl", "dev/a.jsonl"]):
        assert match_splits([*map(Path, no_splits)]) == {}
    assert match_splits([Path("train_dev_test.jsonl")]) == {}, "one file for all is split"
    for name in ("test_2.jsonl", "train_test.jsonl"):
        with pytest.raises(ValueError, match=rf"final\.test\.jsonl, {name}: expected one file for each of train, dev"):
            match_splits([*files.values(), Path(name)])


def test_languages_of_documents_are_detected(tmp_path: Path) -> None:
    german = "Die Stadt wurde von ihren Bewohnern am Fluss erbaut, und viele Menschen leben heute noch dort. " * 30
    english = "The town was built by the people of the valley, and many of them live in it to this day. " * 30
    documents = [{"title": "", "text": text} for text in (english, german, english)]
    small_project.write_json_lines(tmp_path / "documents.jsonl", documents)
    asked = questions(tmp_path / "questions.jsonl", 60)
    printed = made(tmp_path / "mine", "--documents", tmp_path / "documents.jsonl", "--questions", asked)
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    assert "language: English 67%, German 33% (snapshot.language: auto)" in printed
    assert (values.snapshot.language, values.tag.method) == ("auto", "phrases")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--questions", "asked.jsonl"], "need --documents"),
        (["--documents", "documents.jsonl", "--questions", "asked.jsonl"], "5 questions; at least 60 are needed"),
        (["--documents", "documents.jsonl", "--questions", "documents.jsonl"], "documents.jsonl"),
        (["--documents", "documents.jsonl", "--encoder", "nowhere"], "nowhere is a folder that "),
        (["--documents", "documents.jsonl", "--encoder", "no/where"], "--encoder is 'no/where': no such folder"),
        (["--documents", "documents.jsonl", "--encoder", "."], ". lacks config.json"),
        (["--documents", "documents.jsonl", "--reader", "no/where"], "--reader is 'no/where': no such folder"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_documents(tmp_path / "mine")
    questions(folder / "asked.jsonl", 5)
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    result = cli("init", ".", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(folder.rglob("*")) == before


def test_documents_are_read_file_by_file_and_refused_if_none_can_be(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    unreadable = {
        "empty.txt": (b" ", "it has no text"),
        "locked.pdf": (pdf("x", password="secret"), "the PDF needs a password"),
        "long.txt": (b"words " * (3 << 20), "the file is larger than 16 MiB"),
        "more.rar": (b"Rar!\x1a\7" + bytes(30), "unknown format"),
    }
    for name, (content, problem) in unreadable.items():
        (folder / name).write_bytes(content)
        for documents in (folder, folder / name):
            result = cli("init", tmp_path / "mine", "--documents", documents)
            assert (result.exit_code, f"{name}: {problem}" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "mine").exists()
    for n in range(7):
        (folder / f"note{n}.txt").write_text("Anna Berg was born in Oslo.\n")
    printed = made(tmp_path / "mine", "--documents", folder)
    listed = "documents: 7 of a sample of 11 files read: note0.txt, note1.txt, note2.txt, note3.txt, note4.txt\n"
    assert listed in printed
    for name, (_, problem) in unreadable.items():
        assert f"{name}: {problem}" in printed


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine\n")
    (tmp_path / ".gitignore").write_text("*.log\n/data/")
    assert "README.md exists and is kept" in made(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine\n"
    lines = (tmp_path / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["*.log", "/data/"]
    assert lines.count("/data/") == 1
    assert "/models/ict/" in lines
    assert "/models/" not in lines, "an encoder of the user's may lie beside ours"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = cli("init", tmp_path)
    assert (result.exit_code, "params.yaml exists and would be overwritten" in result.stderr) == (2, True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("params.yaml", "k8s"):
        mine = tmp_path / f"with {name}" / name
        mine.parent.mkdir()
        mine.symlink_to("elsewhere")
        result = cli("init", mine.parent)
        assert (result.exit_code, f"{mine} exists and would be overwritten" in result.stderr) == (2, True)
        assert [*mine.parent.iterdir()] == [mine]


@pytest.mark.parametrize("name", ["1e5", "it's: [x]"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    printed = made(tmp_path / name)
    assert config.load_params(tmp_path / name / "params.yaml").tracking.experiment == name
    assert f"next: cd {shlex.quote(str(tmp_path / name))} && realmops run all" in printed


@pytest.mark.parametrize(("cluster", "namespace"), CLUSTERS.items())
def test_a_cluster_accepts_the_folder_and_resubmits_its_params(cluster: str, namespace: str, tmp_path: Path) -> None:
    made(tmp_path, "--cluster", cluster, "--image", "realmops:local")
    file = tmp_path / "kustomization.yaml"
    file.write_text(file.read_text().replace(PLACEHOLDER, "set"))
    assert faults(render(tmp_path)) == []
    argo = read_all(tmp_path / "k8s" / "argo-cd.yaml")[0]["spec"]
    flux = read_all(tmp_path / "k8s" / "flux.yaml")[1]["spec"]
    assert (
        argo["source"]["kustomize"]["components"] == flux["components"] == [f"k8s/{BASES}/components/retrain-on-sync"]
    )
    assert (argo["source"]["path"], flux["path"]) == (".", "./")
    assert argo["destination"]["namespace"] == namespace
    own = yaml.safe_load(file.read_text())
    own["components"] = [*own.get("components", []), *flux["components"]]
    file.write_text(yaml.safe_dump(own))
    job = find(render(tmp_path), "Job/realmops-retrain")
    assert cli("params", "--params", tmp_path / "params.yaml", "--set", "pretrain.steps=7", "--write").exit_code == 0
    objects = render(tmp_path)
    assert faults(objects) == []
    assert find(objects, "Job/realmops-retrain")["spec"] != job["spec"], "a changed option is another Job"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of the sdist of the files that the image is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    copied = [rest for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    for path in {ROOT / name for rest in copied for name in rest.split()[:-1]}:
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(path, source)

    def build(kind: str, place: Path) -> None:
        code = f"from setuptools import build_meta; import sys; print(build_meta.build_{kind}(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", code, folder], cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    build("sdist", source)
    name = f"realmops-{__version__}"
    with tarfile.open(folder / f"{name}.tar.gz") as file:
        file.extractall(folder, filter="data")
    build("wheel", folder / name)
    [wheel] = folder.glob("*.whl")
    assert wheel.name == f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_has_every_file_of_the_package(installed: Path) -> None:
    package = ROOT / "src" / "realmops"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {path.relative_to(package) for path in files}
    expected |= {
        path.relative_to(ROOT) for path in (*(ROOT / "k8s").rglob("*.*"), *(ROOT / "pipelines").glob("*.yaml"))
    }
    assert {path.relative_to(installed / "realmops") for path in (installed / "realmops").rglob("*.*")} == {
        path for path in expected if "." in path.name
    }


def test_an_installed_package_makes_a_project_and_runs_it_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """The sample chain, made small, then a pipeline, presets and manifests of the package."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "realmops", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("init", "--image", "realmops:local")
    small = {name: keys for name, keys in small_project.SMALL.items() if name not in ("questions", "snapshot")}
    small |= {"tag": {"steps": 4}}
    settings = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in small.items() for key, value in keys.items()
    ]
    run("params", "--write", *(word for one in settings for word in ("--set", one)))
    run("run", "all")
    assert "realmops ask" in run("report")
    assert json.loads(run("params", "--preset", "ablations/t5", "--json"))["finetune"]["reader"] == "t5"
    assert faults(render(tmp_path)) == []
    message = f"not a parameter of {installed}/realmops/pipelines/ablations.yaml; allowed are "
    assert message in run("submit", "--pipeline", "ablations", "--argument", "none=1", code=2)


def beir_folder(folder: Path, splits: dict[str, int]) -> Path:
    """The documents of ``small_world`` with judged questions, of the splits with their numbers."""
    documents = [{"_id": f"d{n}", "title": t, "text": x} for n, (t, x, _) in enumerate(DOCUMENTS)]
    (folder / "qrels").mkdir(parents=True)
    small_project.write_json_lines(folder / "corpus.jsonl", documents)
    small_project.write_json_lines(folder / "queries.jsonl", [{"_id": f"{n}", "text": f"Who? {n}"} for n in range(40)])
    for split, count in splits.items():
        lines = [f"{n}\td{n % 12}\t1\n" for n in range(count)]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


@pytest.mark.parametrize(
    ("splits", "counts"),
    [
        ({"train": 40, "test": 5}, {"train": 36, "dev": 4, "test": 5}),
        ({"train": 3, "dev": 5}, {"train": 2, "dev": 1, "test": 5}),
        ({"test": 5}, {"test": 5}),
    ],
)
def test_a_beir_folder_has_documents_and_judged_questions(
    tmp_path: Path, splits: dict[str, int], counts: dict[str, int]
) -> None:
    printed = made(tmp_path / "mine", "--documents", beir_folder(tmp_path / "beir", splits), "--encoder", "small")
    assert printed.startswith("search, not answers: the questions have relevance judgements; --reader adds a reader\n")
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    files = {split: tmp_path / "mine" / "questions" / f"{split}.jsonl" for split in counts}
    parts = {split: read_questions([file], format="auto") for split, file in files.items()}
    assert {split: len(part) for split, part in parts.items()} == counts
    assert parts["test"][1].relevant == (("d1", 1),)
    if "train" in counts:
        assert {values.get(f"questions.{split}") for split in counts} == {
            f"questions/{split}.jsonl" for split in counts
        }
        assert stages_to_run(values) == ("snapshot", "ict", "pretrain", "finetune", "evaluate")
        assert (values.ict.steps, values.finetune.retriever_training) == (0, "queries")
        assert values.finetune.retriever_epochs == 0, "before adapt"
    else:
        assert values.questions.test == "questions/test.jsonl"
        assert (values.questions.train, values.questions.dev) == ("", "")
    assert (values.reader.init, values.finetune.epochs) == ("none", 0)


SIZES = {READERS[0]: 260_783_000, READERS[1]: 496_254_442, MULTILINGUAL_READERS[0]: 1_109_800_000}
LICENCES = {READERS[0]: "apache-2.0", READERS[1]: "cc-by-4.0"}
GERMAN = "Die Stadt wurde von ihren Bewohnern am Fluss erbaut, und viele Menschen leben heute dort. " * 30


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Readers on a hub without encoders, by name with their bytes; the cache is empty."""
    known = dict(SIZES)

    def model_info(api: object, name: str, **options: object) -> ModelInfo:
        files = [{"rfilename": "model.safetensors", "size": known[name]}, {"rfilename": "model.bin", "size": 1 << 40}]
        return ModelInfo(id=name, siblings=files, cardData={"license": LICENCES.get(name)})

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("realmops.hub.is_cached", "some/encoder".__eq__)
    return known


def created(folder: Path, *words: str | Path, text: str = "") -> tuple[list[str], str, dict[str, Any]]:
    """The lines of ``init``, its line about the reader, and the options of the project."""
    documents = folder.parent / "documents.jsonl"
    if text:
        small_project.write_json_lines(documents, [{"title": "", "text": text}])
    else:
        small_project.write_documents(documents)
    result = cli("init", folder, "--documents", documents, "--encoder", "some/encoder", *words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    return lines, next((line for line in lines if line.startswith("reader: ")), ""), load_params(folder / "params.yaml")


@pytest.mark.usefixtures("sizes")
def test_a_small_reader_is_proposed_with_licence_and_size_and_a_better_one_is_named(tmp_path: Path) -> None:
    _, proposal, values = created(tmp_path / "mine")
    assert f"{READERS[0]} (apache-2.0, 261 MB), loaded by the first run" in proposal
    assert f"--reader {READERS[1]} (cc-by-4.0, 496 MB); --no-reader" in proposal
    assert (values.reader.init, values.finetune.epochs) == (READERS[0], 0)
    _, proposal, values = created(tmp_path / "named", "--reader", READERS[1])
    assert proposal == f"reader: {READERS[1]} (cc-by-4.0, 496 MB), loaded by the first run"
    assert values.reader.init == READERS[1]
    _, proposal, values = created(tmp_path / "german", text=GERMAN)
    assert f"{MULTILINGUAL_READERS[0]} (unknown, 1,110 MB)" in proposal
    assert values.reader.init == MULTILINGUAL_READERS[0]


def test_without_a_reader_the_first_line_is_search_not_answers(tmp_path: Path, sizes: dict[str, int]) -> None:
    lines, _, values = created(tmp_path / "asked", "--no-reader")
    assert (lines[0], values.reader.init) == ("search, not answers: no reader, by --no-reader", "none")
    sizes.clear()
    lines, _, values = created(tmp_path / "alone")
    assert lines[0].startswith("search, not answers: no reader can be loaded")
    assert values.reader.init == "none"


def test_a_reader_is_trained_further_on_questions_of_people(tmp_path: Path, sizes: dict[str, int]) -> None:
    records = [{"question": f"Who wrote book {n}?", "answers": ["Anna Berg"]} for n in range(60)]
    questions = small_project.write_json_lines(tmp_path / "questions.jsonl", records)
    _, proposal, values = created(tmp_path / "mine", "--questions", questions)
    assert "'realmops adapt' trains further on your questions" in proposal
    assert (values.finetune.epochs, values.questions.test) == (0, "questions/test.jsonl")
    stages = yaml.safe_load((tmp_path / "mine" / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert "tag" not in stages, "nothing reads spans"
    sizes.clear()
    _, proposal, values = created(tmp_path / "own", "--questions", questions)
    assert "trained on your questions from the encoder" in proposal
    assert values.reader.init == "encoder"
