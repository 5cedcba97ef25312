"""The seams have room for others: an index type without FAISS, and a reader that answers yes or no.

``tests/model/test_encoder.py`` has the second encoder.
"""

import json
import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_open_qa import options
from small_world import World, section, tiny_models
from torch import Tensor, nn

from realmops.answering import opening
from realmops.answering.answer import Answer, ReadPassage, RetrievedPassages, Span
from realmops.answering.record import answer_record, enclosing_sentence
from realmops.answering.retrieval import RetrieveAndRead
from realmops.baselines.rankers import BASELINES
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, load_reader, save_models
from realmops.model.sequences import join_reader
from realmops.questions.question_sets import Question
from realmops.search import approximate
from realmops.search.approximate import ApproximateIndex
from realmops.search.embeddings import embed_corpus, load_passages, save_passages
from realmops.search.exact import exact_index

CPU, FP32 = torch.device("cpu"), torch.float32


class FewDimensions(ApproximateIndex):
    """Looks at some dimensions of every passage, drawn by the seed."""

    def build(self) -> None:
        width = self.embedding_PE.shape[1]
        self.order_E = torch.randperm(width, generator=torch.Generator().manual_seed(self.recipe.seed))

    def candidates(self, query_QE: Tensor, k: int) -> Tensor:
        some = self.order_E[: self.dimensions]
        return (query_QE[:, some] @ self.embedding_PE[:, some].T).topk(k).indices

    def set_search_width(self, width: int) -> None:
        self.dimensions = width

    @property
    def max_search_width(self) -> int:
        return self.embedding_PE.shape[1]


def test_an_index_type_widens_to_its_recall_and_is_opened_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(approximate.TYPES, "few", FewDimensions)
    retriever, _ = tiny_models(world, seed=1)
    embedding_PE = embed_corpus(retriever, world.snapshot, FP32)
    query_QE = torch.randn(40, embedding_PE.shape[1], generator=torch.Generator().manual_seed(3))
    wanted = section("index", target_recall=0.65).model_copy(update={"type": "few"})
    built = approximate.passage_index(embedding_PE, wanted, CPU, 5, lambda: query_QE, 3)
    assert isinstance(built, FewDimensions)
    assert 1 < built.recipe.width < built.max_search_width
    assert built.recall(query_QE, 3) == built.recipe.recall >= 0.65
    score_QK, id_QK = built.search(query_QE, 3)
    torch.testing.assert_close(score_QK, (query_QE[:, None] * embedding_PE[id_QK]).sum(-1))
    save_passages(tmp_path, built, world.snapshot.corpus_hash, "")
    again = load_passages(tmp_path, world.snapshot, CPU, 1)
    assert isinstance(again, FewDimensions)
    assert torch.equal(again.search(query_QE, 3)[1], id_QK)
    recipe = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(recipe | {"type": "of tomorrow"}))
    with pytest.raises(ValueError, match=r"index.json: unknown type 'of tomorrow'; .*ivf, pq, hnsw, few"):
        load_passages(tmp_path, world.snapshot, CPU, 1)


class YesNo(RetrieveAndRead):
    """p(yes|x) is the sum over passages of p(z|x) p(yes|z, x), the latter from [CLS]."""

    kind = "yes_no"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head = nn.Linear(self.reader.encoder.width, 1)

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> Reader:
        return load_reader(folder, snapshot.vocabulary_hash)

    def restore(self, folder: Path) -> None:
        self.head.load_state_dict(load_file(folder / "yes_no.safetensors"))

    def save(self, folder: Path) -> None:
        super().save(folder)
        save_file(self.head.state_dict(), folder / "yes_no.safetensors")

    @torch.no_grad()
    def read(self, found: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        return [self._answer(one) for one in found]

    def _answer(self, found: RetrievedPassages) -> Answer:
        x, limit = self.wordpieces(found.question.question), self.options.reader_wordpieces
        bodies = [self.reader.document(self.snapshot, passage) for passage in found.passages]
        joined = [join_reader(x, body, self.special, limit)[:2] for body in bodies]
        batch = PackedBatch([tokens for tokens, _ in joined], [segments for _, segments in joined])
        yes_K = self.head(self.reader.encode(batch)[batch.starts[:-1]])[:, 0].sigmoid().tolist()
        joint = [(p_z * yes, p_z * (1 - yes)) for p_z, yes in zip(found.p_z, yes_K, strict=True)]
        p_yes = sum(yes for yes, _ in joint)
        said, p_y = ("yes", p_yes) if p_yes >= 0.5 else ("no", 1 - p_yes)
        p_y_z = [yes if said == "yes" else no for yes, no in joint]
        read = tuple(
            ReadPassage(z, prior, p, p / p_y, None, None)
            for z, prior, p in zip(found.passages, found.log_prior, p_y_z, strict=True)
        )
        question = found.question.question
        return Answer(question, None, math.log(p_y), said, p_y, read, ranked=list(found.ranked), generated=said)


def test_what_is_quoted_are_the_sentences_that_a_span_touches(world: World) -> None:
    snapshot, several = world.snapshot, 0
    for passage in range(len(snapshot)):
        chars = snapshot.chars(passage)
        bounds = [(int(chars[a, 0]), int(chars[b - 1, 1])) for a, b in snapshot.sentences(passage)]
        for first, last in combinations_with_replacement(range(len(chars)), 2):
            start, end = int(chars[first, 0]), int(chars[last, 1])
            touched = [(a, b) for a, b in bounds if start < b and a < end]
            found = enclosing_sentence(snapshot, Span("", passage, (start, end), 0.0))
            assert found == (touched[0][0], touched[-1][1])
            several += len(touched) > 1
    assert several, "one passage has two sentences"


def test_a_reader_of_another_kind_answers_and_is_saved_with_its_kind(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(opening.KINDS, "yes_no", YesNo)
    retriever, reader = tiny_models(world)
    passages = exact_index(embed_corpus(retriever, world.snapshot, FP32), 1)
    chosen = options().model_copy(update={"reader": "yes_no"})
    model = YesNo(retriever.eval(), reader.eval(), world.snapshot, passages, chosen, FP32)
    asked = [Question("1", "Was Anna Berg born in Oslo?", ("yes",)), Question("2", "Is Bergen a poet?", ("no",))]
    answers = model.answer(asked)
    assert {answer.text for answer in answers} <= {"yes", "no"}
    for answer in answers:
        assert sum(z.p_y_z for z in answer.read) == pytest.approx(answer.p_y) == answer.probability
    record = answer_record(world.snapshot, answers[0], {}, None)
    assert (record["answer"], record["score"], record["abstained"]) == (answers[0].text, answers[0].probability, True)
    assert record["citations"] == []
    assert [passage["span"] for passage in record["passages"]] == [None] * 3
    over = model.with_ranker(lambda question, k: np.arange(k)[::-1].copy())
    assert over.head is model.head, "the same reader over what a ranker finds"
    assert over.find(asked)[0].passages == (2, 1, 0)
    assert model.answer(asked) == answers, "and the model as it was"
    opening.save_tuned(tmp_path, model)
    fp32 = section("run", precision="fp32", device="cpu")
    again = opening.open_tuned(tmp_path, chosen, fp32, world.snapshot, BASELINES)
    assert isinstance(again, YesNo)
    assert [answer.log_p for answer in again.answer(asked)] == [answer.log_p for answer in answers]
    closed_book = options().model_copy(update={"reader": "t5"})
    with pytest.raises(ValueError, match=r"has a model of the class 'yes_no', which finetune.reader=t5 does not have"):
        opening.open_tuned(tmp_path, closed_book, fp32, world.snapshot, BASELINES)
    (tmp_path / opening.KIND).write_text('{"class": "of tomorrow"}')
    with pytest.raises(ValueError, match=r"'of tomorrow', which finetune.reader=yes_no does not have"):
        opening.open_tuned(tmp_path, chosen, fp32, world.snapshot, BASELINES)


def test_an_unknown_class_of_readers_is_named(world: World, tmp_path: Path) -> None:
    save_models(tmp_path, *tiny_models(world), world.text)
    path = tmp_path / "reader/realmops.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class": "of tomorrow"}))
    with pytest.raises(ValueError, match=r"class is 'of tomorrow'; allowed: together, apart"):
        load_models(tmp_path, world.snapshot.vocabulary_hash)
