"""Documents in Chinese, end to end: names without a tagger, generated questions, a reader, a search, an answer."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from small_project import Quiet, cli, stage, toy_values, write_json_lines, write_params

from realmops.answering.answer import Span
from realmops.answering.record import _context, enclosing_sentence
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.questions.question_sets import read_questions

NAMES = ("安娜贝格", "卡尔伦德", "玛丽霍姆", "约恩维克", "奥拉斯塔")
NAMES += ("英格费尔", "比约舍夫", "索菲丽塔", "拉斯莫恩", "尼尔斯科")
TOWNS = ("奥斯陆", "卑尔根", "特隆赫姆", "哈马尔", "纳尔维克")
TEXTS = [
    f"{name}于{1900 + 7 * (n % 5)}年出生在{TOWNS[n % 5]}。后来{name}在{TOWNS[(n + 1) % 5]}的大学学习。"
    f"诗人{NAMES[(n + 3) % 10]}写了关于{name}的第{10 + n % 5}本书。"
    for n, name in enumerate(NAMES)
]
FILES = {part: f"data/cloze/questions.{part}.jsonl" for part in ("train", "dev", "test")}


def output(*arguments: object) -> dict[str, Any]:
    result = cli(*arguments, "--json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_run_on_chinese_documents_ends_in_answers(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "documents.jsonl", [{"title": "", "text": text} for text in TEXTS])
    values = toy_values(
        snapshot={"language": "zh", "documents": "documents.jsonl", "warmup": "", "block_wordpieces": 128},
        tag={"method": "phrases"},
        questions=FILES,
        pretrain={"steps": 0},
        retriever={"hybrid": True},
    )
    params = write_params(tmp_path / "params.yaml", values)
    for name in ("snapshot", "tag"):
        stage(name, values, tmp_path, tmp_path)
    snapshot, spans = Snapshot.open(tmp_path / "data/snapshot/corpus"), Spans.open(tmp_path / "data/spans/corpus")
    assert [len(snapshot), len(snapshot.sentences(0)), snapshot.language_of(0)] == [len(TEXTS), 3, "zh"]
    salient = {snapshot.text(int(row[0]))[row[4] : row[5]] for row in spans.rows}
    assert {"1900年", "1907年", "安娜贝格", "卡尔伦德", "约恩维克"} <= salient

    result = cli("run", "cloze", "--params", params, "--root", tmp_path)
    assert result.exit_code == 0, result.output
    questions = read_questions([tmp_path / name for name in FILES.values()], format="jsonl")
    assert len(questions) >= 3
    for question in questions:
        assert question.language == "zh"
        assert re.fullmatch(r"(什么|何时|多少|哪一年).*？", question.question)
        assert not re.search("[一-龥] [一-龥]", question.question)

    for name in ("ict", "pretrain", "finetune", "evaluate"):
        stage(name, values, tmp_path, tmp_path, Quiet())
    assert json.loads((tmp_path / "results/metrics.json").read_text())["questions"] >= 1
    best = output("search", "约恩维克在哪里学习？", "--root", tmp_path, "--by", "words")["passages"][0]
    assert {"约恩维克", "学习"} <= {best["text"][start:end] for start, end in best["highlights"]}
    record = output("ask", "安娜贝格出生在哪一年？", "--root", tmp_path)
    assert record["answer"] in record["passages"][0]["text"] or record["abstained"]


def test_span_that_ends_its_sentence_is_not_in_the_next_one() -> None:
    """Without a blank, the character after the span begins the next sentence."""
    chars = np.array([(n, n + 1) for n in range(8)])  # 他走了。她来了。
    snapshot: Any = SimpleNamespace(chars=lambda _: chars, sentences=lambda _: np.array([(0, 4), (4, 8)]))
    for characters, place in (((1, 4), (0, 4)), ((4, 5), (4, 8)), ((3, 5), (0, 8))):
        assert enclosing_sentence(snapshot, Span("", 0, characters, 0.0)) == place
    text = "他" * 100 + "出生在奥斯陆" + "她" * 100
    assert _context(text, 103, 106) == ("… " + "他" * 57 + "出生在", "她" * 60 + " …")
