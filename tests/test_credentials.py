"""Credentials in addresses: refused where an address is read, removed from texts of servers and libraries."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import kfp_lab
import pyarrow.parquet as pq
import pytest
from cluster_lab import Output
from compiled import init_dvc
from kfp_lab import KfpLab, arguments_of
from small_project import cli, write_project
from stored_objects import object_store

from realmops.answering.feedback import FILE, Rating, read_feedback
from realmops.cluster import tasks
from realmops.cluster.kfp_client import KfpClient
from realmops.cluster.packed_options import unpack_options
from realmops.cluster.submit import Pipeline, prepare
from realmops.config import load_params, parse_sections
from realmops.config_yaml import parse_yaml
from realmops.credentials import redact, refuse_credentials
from realmops.inputs.addresses import name_of
from realmops.options import Options
from realmops.questions.beir_queries import read_queries
from realmops.questions.question_sets import read_questions
from realmops.tracking.client import resolve_tracking_uri

SECRET = "s3cret"


NAMES = ("authorization", "subscription-key", "app_key", "api.key", "sig%20", "x[sig]", "x-ms-sig", "bearer", "pw")


@pytest.mark.parametrize(
    ("address", "variable"),
    [
        ("s3://me:s3/cret@bucket/documents", "AWS_SECRET_ACCESS_KEY"),
        ("s3://me:s3 cret@bucket/documents", "AWS_SECRET_ACCESS_KEY"),
        ("s3://me%3As3cret@bucket/documents", "AWS_SECRET_ACCESS_KEY"),
        ("https://me:[s3cret@host/a.jsonl", "NETRC"),
        ("https://me:1%2Fs3cret@host/a.jsonl", "NETRC"),
        ("s3://me:%2Fs3cret@bucket/documents", "AWS_SECRET_ACCESS_KEY"),
        ("https://s3%2Fcret@host/a.jsonl", "NETRC"),
        ("hf://datasets/o/n,https://me:s3cret@host/a.jsonl", "NETRC"),
        *((f"https://host/a.jsonl?{name}=s3cret", "NETRC") for name in NAMES),
        ("https://s3cret@host/documents.jsonl", "NETRC"),
        ("https://host/a.jsonl?X%2DAmz%2DSignature=s3cret", "NETRC"),
        ("https://host/a.jsonl?sv=2026&sig=s3cret", "NETRC"),
        ("HTTPS://host/a.jsonl?access_token=s3cret", "NETRC"),
        ("abfs://container/a.jsonl?account_key=s3cret", "the variables of its client"),
        ("gs://bucket/a.jsonl#key=s3cret", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("hf://datasets/o/n/a.jsonl?token=s3cret", "HF_TOKEN"),
        ("simplecache::https://me:s3cret@host/a.jsonl", "NETRC"),
        ("Who wrote ('https://me:s3cret@host/a')?", "NETRC"),
    ],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(address: str, variable: str) -> None:
    for value in (address, {"nested": [address]}, {address: 1}):
        with pytest.raises(ValueError, match=f"here .*with credentials in it.*{variable}") as refused:
            refuse_credentials(value, f"here {address}")
        assert not re.search(r"s3[ /]?cret|cret@", str(refused.value))


@pytest.mark.parametrize(
    "address",
    [
        "hf://datasets/owner/name@main/a.jsonl",
        "abfss://container@account.dfs.core.windows.net/a.jsonl",
        "http://host:8080/a@2.jsonl?version=2&page=3",
        "https://host/a.jsonl?author=me&tokenizer=bert&keyword=x",
        "s3://bucket/tokens/key.jsonl",
        "sftp://me@host/a.jsonl",
        "http://[::1]:80/a@2.jsonl",
        "http://[::1]/a@2.jsonl",
        "Write to https://host/a or to me:you@host?",
    ],
)
def test_an_address_without_credentials_is_accepted(address: str) -> None:
    refuse_credentials(address, "here")


def refused(secret: str) -> str:
    return f"https://me:{secret}@host/documents.jsonl"


ADDRESS = refused(SECRET)
IN_JSON, IN_YAML = (ADDRESS.replace("/", slash) for slash in ("\\/", "\\x2f"))


def written(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def params(folder: Path, text: str = "{}", *settings: str) -> Any:
    return load_params(written(folder, "params.yaml", text), settings=settings)


def question(folder: Path, **changes: Any) -> Any:
    return read_questions([written(folder, "q.jsonl", {"question": "Who?", "answers": ["she"], **changes})])


RATING = {"question": "Who?", "answer": "she", "right": True}
DOORS: dict[str, Callable[[Path], Any]] = {
    "params file": lambda folder: params(folder, f"questions: {{test: '{ADDRESS}'}}"),
    "list in a params file": lambda folder: params(folder, f"questions: {{test: ['{ADDRESS}']}}"),
    "section's name": lambda folder: params(folder, f"'{ADDRESS}': 3"),
    "key's name": lambda folder: params(folder, f"run: {{'{ADDRESS}': 3}}"),
    "presets": lambda folder: params(folder, f"presets: ['{ADDRESS}']"),
    "setting": lambda folder: params(folder, "{}", f"retriever.init={ADDRESS}"),
    "escaped setting": lambda folder: params(folder, "{}", f'retriever.init="{IN_YAML}"'),
    "section of a stage": lambda folder: parse_sections(("here", {"snapshot": {"documents": ADDRESS}})),
    "options of a pipeline": lambda folder: unpack_options(json.dumps({"snapshot": {"documents": ADDRESS}})),
    "inputs of a pipeline": lambda folder: unpack_options(
        json.dumps({"inputs": {"tag.dev": {"remote": {"url": ADDRESS}}}})
    ),
    "parameter of a pipeline": lambda folder: prepare(
        Options(),
        folder,
        Pipeline.read("refresh"),
        [f'tolerations=["{ADDRESS.replace("/", chr(92) + "/")}"]'],
        "e",
        None,
    ),
    "judged document": lambda folder: question(folder, relevant={ADDRESS: 1}),
    "query": lambda folder: [*read_queries(written(folder, "queries.jsonl", {"_id": "1", "text": ADDRESS}))],
    "question": lambda folder: question(folder, question=f"Is it {ADDRESS}?"),
    "answer": lambda folder: question(folder, answers=["no", ADDRESS]),
    "id of a question": lambda folder: question(folder, id=ADDRESS),
    "feedback": lambda folder: Rating("Who?", "she", False, f"at {ADDRESS}"),
    "feedback file": lambda folder: [*read_feedback(written(folder, FILE, {**RATING, "answer": ADDRESS, "time": 1}))],
    "name of an input": lambda folder: name_of(ADDRESS),
    "endpoint": lambda folder: KfpClient(ADDRESS),
    "tracking server": lambda folder: resolve_tracking_uri(folder),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_an_address_with_credentials(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    with pytest.raises(ValueError, match=r"with credentials in it; remove them, and set [A-Z]\w+") as refused:
        DOORS[door](tmp_path)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("text", [f"documents: {ADDRESS} : x: y", f'documents: "{ADDRESS}\\q"', f"[{ADDRESS}"])
def test_an_error_of_yaml_has_no_quotation(text: str) -> None:
    with pytest.raises(ValueError, match=r"here: .*line 1, column") as refused:
        parse_yaml(text, "here")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ("init", "--documents", ADDRESS),
        ("run", "all", f"--set=snapshot.documents={ADDRESS}"),
        ("search", "Who?", "--root", ADDRESS),
        ("ask", f"Is it {ADDRESS}?"),
        ("upload", "--params", ADDRESS),
        ("export", ADDRESS),
        ("compare", "first", ADDRESS),
        ("submit", "--argument", f"model={ADDRESS}"),
        ("serve", "--host", ADDRESS),
        (ADDRESS,),
    ],
    ids=lambda words: words[0],
)
def test_no_command_line_has_credentials(words: tuple[str, ...]) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert "the argument " in result.output
    assert "NETRC" in result.output
    assert SECRET not in result.output


def test_an_error_of_yaml_shows_no_credentials() -> None:
    with pytest.raises(ValueError, match=r"params.yaml: .*https://host/documents.jsonl") as refused:
        parse_yaml(f"a: '{ADDRESS}'\na: 'x'\n", "params.yaml")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/api?token=s3cret", "http://host:5000/api"),
        ("https://me:p@s/5#?x@host/a", "https://host/a"),
        ("got 'me:s3cret@host:5000'", "got 'host:5000'"),
        ("postgresql://me:s3@cret@db/mlflow?password=s3cret", "postgresql://db/mlflow"),
        ("retries exceeded with url: /api/2.0?token=s3cret (for", "retries exceeded with url: /api/2.0 (for"),
        ("GET 'https://host/a?b=s3'c)re\"t', sent", "GET 'https://host/a', sent"),
        ("('https://me:s3'cre)t\"@host/a',)", "('https://host/a',)"),
        ("see https://host/C#1;sig=s3'cret.", "see https://host/C#1."),
        ("to http:/me:s3cret@host:5000", "to http:/host:5000"),
        ("host:5000?token=s3cret", "host:5000"),
        ("/data/C#/x.txt is missing; is it there/here?",) * 2,
        ("Who wrote to a@b? I did.", "Who wrote to a@b? I did."),
        ("models:/first@champion, sqlite:////mlflow.db; is it there?",) * 2,
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text", ["/" * (1 << 21), "a:'" * (1 << 20), "x//y?" * (1 << 19), "@" * (1 << 21), f"/&{'token' * (1 << 19)}"]
)
def test_redacting_takes_linear_time(text: str) -> None:
    assert len(redact(text)) <= len(text)


# A whole run

MARK = "a-marked-s3cret"
VARIABLES = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "REALMOPS_TOKEN", "PGPASSWORD")


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """All files below a folder, those of gzip and Parquet as text."""
    for path in folder.rglob("*"):
        if path.suffix == ".gz":
            yield path, gzip.decompress(path.read_bytes())
        elif path.suffix == ".parquet":
            yield path, str(pq.read_table(path).to_pydict()).encode()
        elif path.is_file():
            yield path, path.read_bytes()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    yield from kfp_lab.named_by_environment(tmp_path, monkeypatch)


def test_nothing_that_a_run_writes_or_prints_has_a_secret(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lab: KfpLab,
    mlflow_database: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Here and on a cluster: its files, MLflow's database, the compiled pipeline with its parameters, and messages."""
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": MARK}
    for name in VARIABLES:
        monkeypatch.setenv(name, MARK)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "id", "secret": MARK})
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    project, root, shown = tmp_path / "project", tmp_path / "root", Output(tmp_path / "output")
    project.mkdir()
    options = {"snapshot": {"documents": "s3://bucket/documents.jsonl", "warmup": ""}, "pretrain": {"steps": 0}}
    file = write_project(project, **options, tracking={"enabled": True})
    init_dvc(project, "s3://bucket/store")
    local = project / ".dvc/config.local"
    local.write_text(f"['remote \"store\"']\n    access_key_id = id\n    secret_access_key = {MARK}\n")
    (root / ".realmops/mlflow").mkdir(parents=True)
    shutil.copy(mlflow_database, root / ".realmops/mlflow/mlflow.db")
    printed = []
    with object_store("bucket", keys) as (endpoint, client):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client.put_object(Bucket="bucket", Key="documents.jsonl", Body=(project / "documents.jsonl").read_bytes())
        for words in (
            ("run", "all", "--params", file, "--root", root),
            ("run", "snapshot", "--params", file, "--root", root, "--set", f"questions.dev={refused(MARK)}"),
            ("run", "snapshot", "--params", file, "--root", root, "--set", "snapshot.documents=s3://bucket/missing"),
            ("doctor", "--root", root),
            ("export", tmp_path / "export", "--root", root),
            ("submit", "--params", file, "--argument", "image=realmops:1", "--dry-run"),
            ("submit", "--params", file, "--argument", "image=realmops:1"),
            ("submit", "--params", file, "--argument", f"model={refused(MARK)}"),
            ("init", tmp_path / "new", "--documents", project / "documents.jsonl"),
        ):
            result = cli(*words)
            assert result.exit_code == 2 * any("missing" in str(word) or MARK in str(word) for word in words), (
                result.output
            )
            printed.append(result.output)
        arguments = json.dumps(arguments_of(lab.runs[0])["options"])
        tasks.inputs(json.loads(arguments), str(tmp_path / "runs/first"), shown, shown)
        tasks.run_stage("snapshot", json.loads(arguments), str(tmp_path / "runs/first"), shown, shown)
    local.unlink()
    printed += [*capfd.readouterr(), json.dumps(lab.kept), json.dumps(lab.specs)]
    assert "snapshot.documents: " in printed[0]
    assert "s3://bucket/documents.jsonl" in printed[-2]
    assert not [text for text in printed if MARK in text]
    files = dict(contents(tmp_path))
    assert root / ".realmops/mlflow/mlflow.db" in files
    assert not [path for path, content in files.items() if MARK.encode() in content]
