"""``realmops init``: a folder that is no clone of ours, with what its documents and questions ask for."""

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

import manifests
import pytest
import small_project
import yaml
from manifest_rules import faults
from manifests import find, instructions, read_all, render
from small_project import cli
from small_world import DOCUMENTS

from realmops import __version__, config
from realmops.answering.own_questions import WHAT_THEY_BRING
from realmops.config_yaml import read_params
from realmops.questions.question_sets import read_questions
from realmops.stages import STAGES, stages_to_run
from realmops.starter.choose_questions import match_splits
from realmops.starter.cluster_files import BASES, CLUSTERS, PLACEHOLDER
from realmops.starter.project_files import dvc_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, no download."""

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


def test_without_documents_it_is_the_sample_and_the_chain_is_ours(tmp_path: Path) -> None:
    made(tmp_path / "mine")
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    assert values == config.load_params(ROOT / "params.yaml") | {"tracking": values["tracking"]}
    assert values["tracking"]["experiment"] == "mine"
    assert stages_to_run(values) == tuple(STAGES)
    _, own = read_params(ROOT / "params.yaml")
    assert (ROOT / "dvc.yaml").read_text(encoding="utf-8") == dvc_text(config.load_params(ROOT / "params.yaml"), own)


def test_documents_alone_have_questions_made_and_no_sample(tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    told = made(folder, "--documents", folder / "documents.jsonl")
    assert "documents: 1 jsonl" in told
    assert told.startswith("search, not answers: no reader can be loaded: give one with --reader\n")
    assert "encoder: from scratch (presets: squad)" in told
    assert "questions: none" in told
    assert all(line in told for line in ("'realmops questions --label'", *WHAT_THEY_BRING))
    presets, own = read_params(folder / "params.yaml")
    assert presets == ["squad", "documents"]
    assert own["snapshot"] == {"documents": "documents.jsonl", "block_wordpieces": 288}
    assert config.load_params(folder / "params.yaml")["reader"]["init"] == "none"
    stages = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert [*stages] == ["snapshot", "tag", "cloze", "ict", "pretrain", "finetune", "evaluate"]
    assert stages["finetune"]["deps"].count("data/cloze") == 1
    assert "sample" not in str(stages)


@pytest.mark.parametrize(
    ("encoder", "size", "presets"),
    [
        ("plain", 0, ["squad", "minilm"]),
        ("pooled", 0, ["squad", "minilm"]),
        ("some/name", 0, ["squad", "minilm"]),
        ("wide", 0, ["squad", "minilm", "base"]),
        ("google-bert/bert-base-uncased", 0, ["squad", "minilm", "base"]),
        ("small", 0, ["squad"]),
        ("small", 20_000_000, ["squad", "large"]),
    ],
)
def test_encoder_and_size_choose_the_presets(
    encoder: str, size: int, presets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "wide"):
        (tmp_path / name).mkdir()
    (tmp_path / "wide" / "config.json").write_text('{"hidden_size": 768}')
    (tmp_path / "pooled" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "pooled" / "1_Pooling" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    documents = with_documents(tmp_path / "docs")
    with (documents / "large.txt").open("wb") as file:
        file.write(b"Words.\n")
        file.truncate(max(7, size))
    told = made(tmp_path / "mine", "--documents", documents, "--encoder", encoder)
    assert f"(presets: {', '.join(presets)})" in told
    assert "documents: 1 jsonl, 1 txt," in told
    values = yaml.safe_load((tmp_path / "mine" / "params.yaml").read_text())
    assert values["presets"] == [*presets, "documents"]
    is_plain = encoder in ("plain", "wide", "google-bert/bert-base-uncased")
    assert (values["retriever"] or {}).get("pooling") == ("mean" if is_plain else None)
    stages = yaml.safe_load((tmp_path / "mine" / "dvc.yaml").read_text())["stages"]
    assert stages["snapshot"]["params"] == ["presets", "snapshot", "bert", "retriever.init"]


def test_questions_are_split_once_and_for_all(tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    told = made(folder, "--documents", folder, "--questions", questions(tmp_path / "asked.jsonl", 100))
    parts = {name: (folder / f"questions/{name}.jsonl").read_text().splitlines() for name in ("train", "dev", "test")}
    assert sum(map(len, parts.values())) == 100
    assert min(map(len, parts.values())) > 3
    assert f"questions.test: {len(parts['test'])} of 100" in told
    assert config.load_params(folder / "params.yaml")["questions"]["train"] == "questions/train.jsonl"
    again = with_documents(tmp_path / "again")
    made(again, "--documents", again, "--questions", questions(tmp_path / "asked.jsonl", 140))
    for name, lines in parts.items():
        assert lines == (again / f"questions/{name}.jsonl").read_text().splitlines()[: len(lines)]


def test_files_named_by_their_splits_are_used_unchanged(tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    files = [questions(folder / f"my.{name}.jsonl", 5) for name in ("test", "train", "dev")]
    made(folder, "--documents", folder / "documents.jsonl", *(word for file in files for word in ("--questions", file)))
    assert read_params(folder / "params.yaml")[1]["questions"] == {
        name: f"my.{name}.jsonl" for name in ("train", "dev", "test")
    }
    assert "questions" not in [path.name for path in folder.iterdir()]


def test_a_split_is_a_whole_word_of_a_file_name() -> None:
    names = {"dev": "latest_dev.jsonl", "train": "my-TRAIN.jsonl", "test": "final.test.jsonl"}
    files = {split: Path(name) for split, name in names.items()}
    assert match_splits([*files.values()]) == files
    for no_splits in (["latest_dev.jsonl", "constraints.jsonl", "test.jsonl"], ["train/a.jsonl", "dev/a.jsonl"]):
        assert match_splits([*map(Path, no_splits)]) == {}
    assert match_splits([Path("train_dev_test.jsonl")]) == {}, "one file for all is split"
    for name, message in (
        ("test_2.jsonl", r"final\.test\.jsonl and test_2\.jsonl both match questions\.test; give one file for each of"),
        ("train_test.jsonl", r"train_test\.jsonl: no split in the name; give one file for each of"),
    ):
        with pytest.raises(ValueError, match=message):
            match_splits([*files.values(), Path(name)])


@pytest.mark.parametrize(
    ("name", "language", "line"),
    [
        ("german", "de", "language: German 100% (snapshot.language: de)"),
        ("both", "auto", "language: English 67%, German 33% (snapshot.language: auto)"),
        ("english", "en", ""),
    ],
)
def test_languages_of_documents_are_detected(name: str, language: str, line: str, tmp_path: Path) -> None:
    german = "Die Stadt wurde von ihren Bewohnern am Fluss erbaut, und viele Menschen leben heute noch dort. " * 30
    english = "The town was built by the people of the valley, and many of them live in it to this day. " * 30
    texts = {"german": [german], "both": [english, german, english], "english": [english]}[name]
    documents = [{"title": "", "text": text} for text in texts]
    small_project.write_json_lines(tmp_path / "documents.jsonl", documents)
    asked = questions(tmp_path / "questions.jsonl", 60)
    printed = made(tmp_path / "mine", "--documents", tmp_path / "documents.jsonl", "--questions", asked)
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    assert line in printed
    assert (values["snapshot"]["language"], values["tag"]["method"]) == (language, "phrases")
    assert ("as the public tagged sentences are English" in printed) == bool(line)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--documents", "nowhere"], "nowhere: there is no such file or folder"),
        (["--questions", "asked.jsonl"], "need --documents"),
        (["--documents", "documents.jsonl", "--questions", "asked.jsonl"], "5 questions; at least 60 are needed"),
        (["--documents", "documents.jsonl", "--questions", "documents.jsonl"], "documents.jsonl"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_documents(tmp_path / "mine")
    questions(folder / "asked.jsonl", 5)
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    result = cli("init", ".", *words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert sorted(folder.rglob("*")) == before


def test_what_a_user_has_stays(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["1e5", "no", "2020-01-01", "a: b", "it's, [x]"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Also texts that a YAML parser could read as another type."""
    folder = with_documents(tmp_path / name)
    told = made(folder, "--documents", folder / "documents.jsonl")
    assert config.load_params(folder / "params.yaml")["tracking"]["experiment"] == name
    assert f"next: cd {shlex.quote(str(folder))} && realmops run all" in told


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ((), "git init && dvc init && dvc repro"),
        (("mine/.git",), "dvc init && dvc repro"),
        ((".git",), "dvc init --subdir && dvc repro"),
        (("mine/.git", "mine/.dvc"), "dvc repro"),
    ],
)
def test_the_last_line_has_the_commands_that_initialise_dvc(there: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """And what it says works: dvc repro then knows the chain."""
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    folder = tmp_path / "mine"
    assert made(folder).endswith(f"with DVC: cd {folder} && {words}\n")
    for name in there:
        shutil.rmtree(tmp_path / name)
    if ".git" in there:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    if ".dvc" not in "".join(there):
        setting = words.replace("dvc repro", "dvc stage list --name-only")
        if "mine/.git" in there:
            setting = f"git init --quiet && {setting}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        listed = subprocess.run(
            setting, shell=True, cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        assert listed.stdout.split()[-len(STAGES) :] == [*STAGES], listed.stderr


# What a cluster gets


@pytest.mark.parametrize(("cluster", "namespace"), CLUSTERS.items())
def test_a_cluster_takes_the_folder(cluster: str, namespace: str, tmp_path: Path) -> None:
    """And the Job of Argo CD or Flux submits the project's own params."""
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

    def find_job() -> manifests.Object:
        objects = render(tmp_path)
        assert faults(objects) == []
        return find(objects, "Job/realmops-retrain")

    job = find_job()
    assert cli("params", "--params", tmp_path / "params.yaml", "--set", "pretrain.steps=7", "--write").exit_code == 0
    other = find_job()
    assert other["spec"] != job["spec"], "an option's change is another Job, and no other image"
    [container], [same] = (one["spec"]["template"]["spec"]["containers"] for one in (other, job))
    assert container["image"] == same["image"]


def test_the_workflow_is_ours_but_for_what_it_installs(tmp_path: Path) -> None:
    made(tmp_path)
    ours, own = (folder / ".github/workflows/retrain.yml" for folder in (ROOT, tmp_path))
    lines = [
        (a, b)
        for a, b in zip(ours.read_text().splitlines(), own.read_text().splitlines(), strict=True)
        if a != b and "#" not in a
    ]
    assert [b.strip() for _, b in lines] == [f"- run: python -m pip install 'realmops[cluster]=={__version__}'"]


# An installed package


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made of the sdist, unpacked as an installer does it; of the files that the image is made of."""
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
    wanted = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    wanted = {path for path in wanted if "__pycache__" not in path.parts}
    wanted |= {path.relative_to(ROOT) for path in (*(ROOT / "k8s").rglob("*.*"), *(ROOT / "pipelines").glob("*.yaml"))}
    assert {path.relative_to(installed / "realmops") for path in (installed / "realmops").rglob("*.*")} == {
        path for path in wanted if "." in path.name
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
    told = run("submit", "--pipeline", "ablations", "--argument", "none=1", code=2)
    assert f"not a parameter of {installed}/realmops/pipelines/ablations.yaml; allowed are " in told


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
        ({"train": 40, "validation": 3, "test": 5}, {"train": 40, "dev": 3, "test": 5}),
        ({"train": 3, "dev": 5}, {"train": 2, "dev": 1, "test": 5}),
        ({"train": 1, "test": 5}, {"test": 5}),
        ({"test": 5}, {"test": 5}),
    ],
)
def test_a_beir_folder_has_documents_and_judged_questions(
    tmp_path: Path, splits: dict[str, int], counts: dict[str, int]
) -> None:
    told = made(tmp_path / "mine", "--documents", beir_folder(tmp_path / "beir", splits), "--encoder", "small")
    assert told.startswith("search, not answers: the questions have relevance judgements; --reader adds a reader\n")
    assert "documents: 1 beir" in told
    values = config.load_params(tmp_path / "mine" / "params.yaml")
    files = {split: tmp_path / "mine" / "questions" / f"{split}.jsonl" for split in counts}
    parts = {split: read_questions([file], format="auto") for split, file in files.items()}
    assert {split: len(part) for split, part in parts.items()} == counts
    assert parts["test"][1].relevant == (("d1", 1),)
    if "train" in counts:
        assert {values["questions"][split] for split in counts} == {f"questions/{split}.jsonl" for split in counts}
        assert len({question.id for split in ("train", "dev") for question in parts[split]}) in (3, 40, 43)
        assert stages_to_run(values) == ("snapshot", "ict", "pretrain", "finetune", "evaluate")
        assert (values["ict"]["steps"], values["finetune"]["retriever_training"]) == (0, "queries")
        assert values["finetune"]["retriever_epochs"] == 4
    else:
        assert values["questions"]["test"] == "questions/test.jsonl"
        assert {values["questions"][split] for split in ("train", "dev")} == {
            f"data/cloze/questions.{split}.jsonl" for split in ("train", "dev")
        }
    assert (values["reader"]["init"], values["finetune"]["epochs"]) == ("none", 0)
