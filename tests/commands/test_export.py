"""``realmops export``: other programs find with it what the run itself finds; uploads to the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from click.testing import Result
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from sentence_transformers import SentenceTransformer
from serving import tuned
from small_encoders import write_encoder
from small_project import QUESTIONS, SHORT, cli, contents, stage, toy_values, write_project
from small_world import World, embed_documents, section, tiny_models
from tokenizers import Tokenizer

from realmops import artifacts
from realmops.answering.opened_model import OpenedModel
from realmops.answering.openqa import OpenQa
from realmops.commands.card import Publication
from realmops.commands.export import INPUTS, export
from realmops.commands.public_reader import KIND as TRAINED
from realmops.devices import freeze_linear_weights
from realmops.evaluate.model_index import reader_results, retriever_results
from realmops.model.build import add_span_head
from realmops.model.encoder import Encoder
from realmops.model.retriever import Embedder, FusionWeights, Retriever
from realmops.opening import open_run
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed
from realmops.search.embeddings import INDEX, save_index
from realmops.search.exact import exact_index

ASKED = [question for split in QUESTIONS.values() for question, _ in split]
FIRST, FP32 = 10, torch.float32


@pytest.fixture(scope="module")
def generation(answering: Path) -> OpenedModel:
    return open_run(answering / "root")


@pytest.fixture(scope="module")
def exported(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One export of each format, by the command."""
    folders = {name: tmp_path_factory.mktemp("exports") / name for name in ("sentence-transformers", "onnx", "parquet")}
    for name, folder in folders.items():
        result = cli("export", folder, "--format", name, "--root", answering / "root")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{folder}: {name}{' of 12 passages' * (name == 'parquet')}, "), result.stdout
    return folders


def passages(generation: OpenedModel) -> list[tuple[str, str]]:
    snapshot = generation.model.snapshot
    return [(snapshot.title(i), snapshot.text(i)) for i in range(len(snapshot))]


def check_finds_the_same(query_QE: np.ndarray, document_PE: np.ndarray, generation: OpenedModel) -> None:
    """Check that faiss over these embeddings finds the passages of the run's search, with the same f(x, z)."""
    assert not generation.model.hybrid
    index = faiss.IndexFlatIP(document_PE.shape[1])
    index.add(np.ascontiguousarray(document_PE, np.float32))
    score_QK, found_QK = index.search(np.ascontiguousarray(query_QE, np.float32), FIRST)
    relevance_QK, id_QK = generation.model.relevance(ASKED, FIRST)
    np.testing.assert_array_equal(found_QK, id_QK)
    scaled_QK = generation.model.retriever.scale * score_QK
    np.testing.assert_allclose(scaled_QK, relevance_QK.detach(), atol=1e-4, rtol=1e-4)


def test_sentence_transformers_find_what_the_run_finds(exported: dict[str, Path], generation: OpenedModel) -> None:
    library = SentenceTransformer(str(exported["sentence-transformers"]), device="cpu", local_files_only=True)
    query_QE, document_PE = library.encode_query(ASKED), library.encode_document(passages(generation))
    assert generation.model.passages is not None
    np.testing.assert_allclose(document_PE, generation.model.passages.vectors(slice(None)), atol=1e-5)
    check_finds_the_same(query_QE, document_PE, generation)


def onnx_embeddings(file: Path, limit: int, texts: list[Any]) -> np.ndarray:
    """Compute embeddings as the card does."""
    tokenizer = Tokenizer.from_file(str(file.parent / "tokenizer.json"))
    tokenizer.enable_truncation(limit)
    tokenizer.enable_padding()
    found = tokenizer.encode_batch(texts)
    columns = [[one.ids for one in found], [one.attention_mask for one in found], [one.type_ids for one in found]]
    inputs = dict(zip(INPUTS, map(np.array, columns), strict=True))
    return np.asarray(onnxruntime.InferenceSession(str(file)).run(None, inputs)[0])


def test_onnx_runtime_finds_what_the_run_finds(exported: dict[str, Path], generation: OpenedModel) -> None:
    folder = exported["onnx"]
    files = [folder / name for name in ("encoder.onnx", "query.onnx", "document.onnx") if (folder / name).is_file()]
    assert len(files) == (1 if generation.model.retriever.shared else 2)
    query_QE = onnx_embeddings(files[0], generation.model.options.query_wordpieces, ASKED)
    pairs = passages(generation)
    document_PE = onnx_embeddings(files[-1], generation.model.snapshot.block_wordpieces, pairs)
    [alone_E] = onnx_embeddings(files[0], 64, ASKED[:1])  # another size of batch
    np.testing.assert_allclose(alone_E, query_QE[0], atol=1e-5)
    check_finds_the_same(query_QE, document_PE, generation)


def test_parquet_holds_every_passage_with_its_place(exported: dict[str, Path], generation: OpenedModel) -> None:
    table = pq.read_table(exported["parquet"] / "passages.parquet")
    model = generation.model
    assert model.passages is not None
    embedding_PE = np.stack(table["embedding"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(embedding_PE, model.passages.vectors(slice(None)))
    rows = table.drop(["embedding"]).to_pylist()
    assert [row["passage_id"] for row in rows] == model.snapshot.column("passage_id")
    for row, (title, text) in zip(rows, passages(generation), strict=True):
        assert (row["title"], row["text"], row["vector"], row["end"] - row["start"]) == (title, text, 0, len(text))
        assert row["start"] == 0  # each document is one passage
    snapshot = model.snapshot
    assert [(row["uri"], row["page"]) for row in rows] == [
        (snapshot.uri(n), snapshot.page(n, 0)) for n in range(len(snapshot))
    ]
    about = json.loads(table.schema.metadata[b"realmops"])
    assert about["scale"] == model.retriever.scale
    assert about["snapshot"] == model.snapshot.corpus_hash


@pytest.mark.parametrize("format", ["sentence-transformers", "onnx", "parquet"])
def test_the_card_describes_the_export(format: str, exported: dict[str, Path], generation: OpenedModel) -> None:
    _, front, text = (exported[format] / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "unknown"
    assert generation.model.snapshot.corpus_hash in text
    assert "| EM (test questions) |" in text
    assert "| initialised from | an encoder from scratch |" in text
    assert ("Without the reader" in text) == (format != "parquet")
    manifest = artifacts.read_manifest(exported[format], "export")
    assert manifest["format"] == format
    assert not [one for one in manifest["files"] if one.endswith((".bin", ".pt", ".pkl"))]


def test_the_base_model_of_a_card_is_what_the_training_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the working directory has under that name: an encoder of the hub, and then a folder of the project."""
    commit = write_encoder(tmp_path / "cache" / ("0" * 40), "bert")
    write_encoder(tmp_path / "project/own/folder", "bert")
    (tmp_path / "here/some/encoder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(commit))
    write_project(tmp_path / "project")
    for init, name in (("some/encoder", "some/encoder"), ("own/folder", None)):
        untrained = {"ict": {"steps": 1, "reader_steps": 0}, "pretrain": {**SHORT["pretrain"], "steps": 0}}
        changes = {**SHORT, **untrained, "retriever": {"init": init}}
        for one in ("snapshot", "ict"):
            stage(one, toy_values(**changes), tmp_path / "project", tmp_path / "root")
        assert Publication(tmp_path / "root").base_model == name
        manifest = artifacts.read_json(tmp_path / "root/models/ict/manifest.json")
        assert manifest.get("hub") == (name and {"retriever.init": f"{name}@{commit.name}"})


def test_a_folder_with_files_of_others_is_left_alone(answering: Path, tmp_path: Path) -> None:
    folder, root = tmp_path / "out", answering / "root"
    options = ("export", folder, "--format", "parquet", "--root", root)
    assert [cli(*options).exit_code for _ in range(2)] == [0, 0], "its own is replaced"
    (folder / "README.md").write_text("mine")
    artifacts.make_folder(tmp_path / "trained")
    (tmp_path / "trained/README.md").write_text("mine")
    artifacts.write_manifest(tmp_path / "trained", TRAINED, format="reader")
    for name in ("out", "trained"):
        result, card = cli("export", tmp_path / name, *options[2:]), tmp_path / name / "README.md"
        assert (result.exit_code, f"{card} was not written by this command" in result.stderr) == (2, True)
        assert card.read_text() == "mine"


def other_generation(folder: Path, world: World, retriever: Retriever | None = None, **changes: Any) -> OpenedModel:
    """A run with another retriever, not trained, and its index."""
    folder.mkdir()
    tiny, reader = tiny_models(world, **changes)
    retriever = retriever or tiny
    add_span_head(reader, 8, 0)
    document_PX = embed_documents(retriever, world.snapshot, range(len(world.snapshot)), FP32)
    index = exact_index(document_PX, retriever.vectors)
    model = OpenQa(retriever.eval(), reader.eval(), world.snapshot, index, section("finetune"), FP32)
    model.save(folder)
    return OpenedModel(model, "of the test", 0, 0, None, folder=folder)


def test_parquet_has_all_of_several_vectors_and_the_library_their_mean(world: World, tmp_path: Path) -> None:
    generation = other_generation(tmp_path / "run", world, document_vectors=3, pooling="mean", head="paper")
    model = generation.model
    assert model.passages is not None
    notes = list(export(tmp_path / "rows", "parquet", lambda: generation, None))
    assert "A passage has 3 rows" in notes[1]
    table = pq.read_table(tmp_path / "rows/passages.parquet", columns=["passage_id", "vector", "embedding"])
    assert table["vector"].to_pylist() == [0, 1, 2] * len(world.snapshot)
    assert table["passage_id"].to_pylist()[::3] == world.snapshot.column("passage_id")
    flat_NE = np.stack(table["embedding"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(flat_NE, model.passages.vectors(slice(None)).reshape(-1, 8))

    notes = list(export(tmp_path / "model", "sentence-transformers", lambda: generation, None))
    assert "An approximation" in notes[1]
    library = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    whole_PE = embed_documents(Retriever(model.retriever.query, model.retriever.document), world.snapshot, [3, 5], FP32)
    np.testing.assert_allclose(library.encode_document([passages(generation)[i] for i in (3, 5)]), whole_PE, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ("hybrid", "2 times the scaled inner product plus 8 times BM25"),
        ("another tower", "not the one that computed this run's index"),
    ],
)
def test_a_partial_export_is_noted_in_its_card(world: World, tmp_path: Path, case: str, note: str) -> None:
    generation = other_generation(tmp_path / "run", world)
    if case == "hybrid":
        generation.model.bm25 = Bm25.of(world.snapshot)
        generation.model.retriever.mixture = FusionWeights(2.0, 8.0)
    else:
        (generation.folder / INDEX).unlink()
        save_index(generation.folder / INDEX, torch.zeros(len(world.snapshot), 8), world.snapshot.corpus_hash)
    notes = list(export(tmp_path / "out", "sentence-transformers", lambda: generation, None))
    assert note in notes[1]
    assert notes[1] in (tmp_path / "out/README.md").read_text()


def test_a_run_without_embeddings_or_network_is_refused(world: World, tmp_path: Path) -> None:
    bag = {"tower": "bag", "head": "cosine", "pooling": "auto", "projection": "orthogonal"}
    generation = other_generation(tmp_path / "run", world, **bag)
    with pytest.raises(ValueError, match="use --format sentence-transformers"):
        list(export(tmp_path / "out", "onnx", lambda: generation, None))
    generation.model.passages = None
    with pytest.raises(ValueError, match=r"no embeddings to export: finetune\.retriever is"):
        list(export(tmp_path / "out", "parquet", lambda: generation, None))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def modernbert(vocabulary: int, local: int) -> Encoder:
    """Two layers, of which the second attends to near wordpieces only, with sharp attention."""
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=1024, layer_types=["full_attention", "sliding_attention"], local_attention=local,
        pad_token_id=0, cls_token_id=2, sep_token_id=3, initializer_range=0.3,
    )  # fmt: skip
    return Encoder(transformers.ModernBertModel(config))


def test_onnx_keeps_the_window_of_a_modernbert_for_any_length(world: World, tmp_path: Path) -> None:
    """The window is 160 to either side; the traced example has five wordpieces."""
    vocabulary = len(world.snapshot.vocabulary)
    tower = Embedder(modernbert(vocabulary, 320), 8, "cosine", segments="one")
    generation = other_generation(tmp_path / "run", world, Retriever(tower, tower))
    list(export(tmp_path / "out", "onnx", lambda: generation, None))
    session = onnxruntime.InferenceSession(str(tmp_path / "out/encoder.onnx"))
    id_BL = np.random.default_rng(0).integers(5, vocabulary, (3, 900))
    length_B = np.array([900, 3, 400])
    is_there_BL = np.arange(900) < length_B[:, None]
    inputs = dict(zip(INPUTS[:2], (np.where(is_there_BL, id_BL, 0), is_there_BL.astype(np.int64)), strict=True))
    texts = [(ids[:n], np.zeros(n, np.int64)) for ids, n in zip(id_BL, length_B, strict=True)]
    np.testing.assert_allclose(session.run(None, inputs)[0], embed(tower, texts, FP32), rtol=0, atol=1e-5)
    wide = tower.with_encoder(modernbert(vocabulary, 2048))
    assert np.abs(session.run(None, inputs)[0][0] - embed(wide, texts[:1], FP32).numpy()).max() > 0.01


def test_weights_are_fp32_where_the_run_computes_in_bf16(world: World, tmp_path: Path) -> None:
    generation = other_generation(tmp_path / "run", world)
    model = generation.model
    assert model.passages is not None
    freeze_linear_weights(model.retriever, torch.bfloat16)
    model.dtype = torch.bfloat16
    _, *notes = export(tmp_path / "out", "sentence-transformers", lambda: generation, None)
    assert [note.partition(":")[0] for note in notes] == ["Without the reader"]  # the index counts as this tower's
    library = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    document_PE = library.encode_document(passages(generation))
    np.testing.assert_allclose(document_PE, model.passages.vectors(slice(None)), atol=1e-5)


NAME, TOKEN = "ann/towns", "hf_of_the_test"


class Hub:
    """The methods of ``HfApi`` that an export calls, over files of repositories in memory."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits = 0
        self.token = ""

    def __call__(self, *, token: str, **_: str) -> Hub:
        self.token = token
        return self

    def model_info(self, name: str) -> SimpleNamespace:
        if self.token != TOKEN:
            raise OSError(f"Invalid credentials: http://user:{self.token}@hub")
        if name not in self.repositories:
            response = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("not found", response=response)  # type: ignore[arg-type]
        files = self.repositories[name]
        siblings = [SimpleNamespace(rfilename=file) for file in files]
        return SimpleNamespace(siblings=siblings, card_data=card(files).data if "README.md" in files else None)

    def hf_hub_download(self, name: str, file: str, local_dir: str) -> str:
        path = Path(local_dir) / file
        path.write_bytes(self.repositories[name][file])
        return str(path)

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert private
        assert exist_ok
        if not name.startswith("ann/"):
            raise OSError("403 Forbidden")
        self.repositories.setdefault(name, {".gitattributes": b""})

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, delete_patterns: list[str] | None, commit_message: str
    ) -> SimpleNamespace:
        files = self.repositories[repo_id]
        for name in delete_patterns or ():
            del files[name]
        files |= contents(folder_path)
        self.commits += 1
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{self.commits}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.HfApi", found)
    return found


def push(folder: Path, project: Path, *options: str, name: str = NAME) -> Result:
    return cli("export", folder, "--root", project / "root", "--push", name, *options)


def evaluated(project: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((project / "root/results/metrics.json").read_text())
    return metrics


def card(files: dict[str, bytes]) -> ModelCard:
    return ModelCard(files["README.md"].decode())


def test_a_push_uploads_the_folder_with_measured_figures(hub: Hub, answering: Path, tmp_path: Path) -> None:
    result = push(tmp_path / "out", answering)
    assert result.exit_code == 0, result.output
    assert f"https://hub/{NAME}/commit/1: uploaded to {NAME}" in result.stdout
    files = hub.repositories[NAME]
    assert files == {".gitattributes": b""} | contents(tmp_path / "out")
    metrics = evaluated(answering)
    figures = {row.metric_type: row for row in card(files).data.eval_results}
    assert [*figures] == ["recall_at_1", "recall_at_5", "recall_at_20"]
    for kind, row in figures.items():
        assert row.metric_value == round(metrics[f"{kind}_token_boundary"], 4)
        assert (row.dataset_name, row.dataset_args) == ("questions.test.jsonl", {"questions": metrics["questions"]})
    assert f'SentenceTransformer("{NAME}")' in str(card(files))
    assert TOKEN not in str(card(files)) + result.output


def test_a_later_push_replaces_its_files_and_keeps_licence_and_files_of_people(
    hub: Hub, answering: Path, tmp_path: Path
) -> None:
    licensed = b"---\nlicense: apache-2.0\n---\n"
    hub.repositories[NAME] = {".gitattributes": b"", "README.md": licensed, "LICENSE": b"Apache"}
    assert push(tmp_path / "first", answering, "--format", "onnx").exit_code == 0
    files = hub.repositories[NAME]
    files["photo.txt"] = b"of the towns"
    assert push(tmp_path / "second", answering).exit_code == 0
    of_people = {".gitattributes": b"", "LICENSE": b"Apache", "photo.txt": b"of the towns"}
    assert files == of_people | contents(tmp_path / "second")
    assert card(files).data.license == "apache-2.0"
    assert "Unknown to realmops" not in str(card(files))


@pytest.mark.parametrize("manifest", [None, b"[1]"])
def test_a_repository_with_files_of_others_is_left_alone(
    manifest: bytes | None, hub: Hub, answering: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = {"config.json": b"{}"} | ({"manifest.json": manifest} if manifest else {})
    result = push(tmp_path / "out", answering)
    assert result.exit_code == 2
    assert "the repository has config.json, which 'realmops export' did not write" in result.stderr
    assert not hub.commits


def test_a_refusal_of_the_hub_is_reported_and_the_folder_stays(
    hub: Hub, answering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = push(tmp_path / "out", answering, name="others/towns")
    assert result.exit_code == 2
    assert "403 Forbidden" in result.stderr
    assert f"hf upload others/towns {tmp_path / 'out'}" in " ".join(result.stderr.split())
    artifacts.read_manifest(tmp_path / "out", "export")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    result = push(tmp_path / "other", answering)
    assert (result.exit_code, "Invalid credentials" in result.stderr) == (2, True)
    assert "hf_expired" not in result.output
    assert not (tmp_path / "other").exists()


def test_figures_of_another_model_are_left_out(copy: Path, tmp_path: Path) -> None:
    results = copy / "root/results"
    shutil.move(results, tmp_path / "results")
    tuned(copy, finetune={"reader_learning_rate": 3e-3})
    shutil.rmtree(results)
    shutil.move(tmp_path / "results", results)
    result = cli("export", tmp_path / "out", "--root", copy / "root")
    assert result.exit_code == 0, result.output
    assert "The card has no figures of 'evaluate'" in result.stdout
    text = (tmp_path / "out/README.md").read_text()
    assert "model-index" not in text
    assert "EM (test questions)" not in text


def test_an_index_has_the_figures_of_this_retriever_and_of_people() -> None:
    metrics = {"questions": 40, "generated_questions": 10, "em": 0.5, "f1": 0.625, "em_low": 0.375, "em_high": 0.75}
    for k in (1, 5, 20):
        metrics |= {f"{prefix}recall_at_{k}_token_boundary": k / 64 for prefix in ("dense_", "")}
        metrics[f"dense_recall_at_{k}_token_boundary"] += 0.5
    metrics |= {"dense_recall_at_5_token_boundary_low": 0.5, "dense_recall_at_5_token_boundary_high": 0.75}
    results = retriever_results("test.jsonl", metrics, "dense_")
    assert {row.dataset_name for row in results} == {"test.jsonl (10 of 40 questions generated from the documents)"}
    assert [row.metric_value for row in results] == [0.5156, 0.5781, 0.8125]
    assert results[1].metric_args == {"interval_95": [0.5, 0.75]}
    results = reader_results("test.jsonl", metrics)
    assert {row.dataset_args["questions"] for row in results} == {30}, "generated questions measure retrieval only"
    assert [row.metric_value for row in results] == [0.5, 0.625]
    assert retriever_results("test.jsonl", metrics, "zero_shot_") == []
    judged = {"questions": 7, "judged_questions": 6, "ndcg_at_10": 0.625, "ndcg_at_10_low": 0.5, "ndcg_at_10_high": 1.0}
    judged |= {"recall_at_5_judged": 0.75, "recall_at_5_judged_low": 0.5, "recall_at_5_judged_high": 1.0}
    results = retriever_results("test.tsv", judged, "")
    assert [(row.metric_type, row.metric_value) for row in results] == [("ndcg_at_10", 0.625), ("recall_at_5", 0.75)]
    assert results[0].dataset_args == {"questions": 6}
    assert reader_results("test.jsonl", {"questions": 40}) == []
