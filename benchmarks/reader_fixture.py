"""Make tests/fixtures/peer_readers.safetensors: the answers of transformers' question answering pipeline.

transformers 5 removed the pipeline, so this runs in a throw-away environment:

    python3 -m venv runs/peer
    runs/peer/bin/pip install transformers==4.57.3 torch safetensors
    runs/peer/bin/python benchmarks/reader_fixture.py

The readers and the pairs of question and passage are those of tests/small_readers.py, which makes the same ones in
every transformers. tests/model/test_extractive_reader.py compares our answers. A pair is left out if its two best
spans, or the best one and the null answer, are so close that rounding decides.

The pipeline sums the scores of spans of equal text, also if overlapping windows hold the same span. Here a span counts
once, with its best window: its scores are taken before that sum, from the pipeline's own ``select_starts_ends``. Spans
leave out blanks at their ends.

Shape suffixes: N pairs, T best spans of a passage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

try:
    from transformers.pipelines.question_answering import QuestionAnsweringPipeline, select_starts_ends
except ImportError:
    raise SystemExit("this transformers has no question answering pipeline; see the script's first lines") from None

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import small_readers

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "peer_readers.safetensors"
PAIRS, BEST = 500, 10
DEPTH = 80  # best spans of a window: enough for ten after blanks and repeats are left out
CLOSE = 0.005  # relative difference of scores that rounding could reverse


def windows_of(pipeline: Any, question: str, passage: str) -> list[dict[str, Any]]:
    """The pipeline's outputs for each window of a passage."""
    example = pipeline.create_sample(question, passage)
    stride = min(small_readers.LIMIT // 2, 128)
    inputs = pipeline.preprocess(example, doc_stride=stride, max_seq_len=small_readers.LIMIT)
    return [pipeline.forward(window) for window in inputs]


def best_spans(pipeline: Any, passage: str, windows: list[dict[str, Any]]) -> tuple[list[list[float]], float]:
    """Score, start and end character of all spans, best first, and the score of the null answer."""
    scores: dict[tuple[int, int], tuple[float, int, int]] = {}
    null, first = 1e6, 0
    for window in windows:
        encoding = window["encoding"]
        rows = [n for n, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
        starts, ends, found, null = select_starts_ends(
            window["start"], window["end"], window["p_mask"], window["attention_mask"].numpy(), null, DEPTH, True,
            small_readers.ANSWER,
        )  # fmt: skip
        for start, end, score in zip(starts.tolist(), ends.tolist(), found.tolist(), strict=True):
            low, high = pipeline.get_indices(encoding, start, end, 1, align_to_words=False)
            text = passage[low:high]
            if not text.strip():
                continue
            low, high = low + len(text) - len(text.lstrip()), high - len(text) + len(text.rstrip())
            span = (first + start - rows[0], first + end - rows[0])
            scores[span] = max(scores.get(span, (0.0, 0, 0)), (score, low, high))
        first += len(rows) - min(small_readers.LIMIT // 2, 128)
    return sorted(map(list, scores.values()), reverse=True), null


def answers(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The first pairs whose answer is clear, their best spans and the pipeline's own answer."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = QuestionAnsweringPipeline(model=model, tokenizer=tokenizer)
    numbers, spans_NT2, scores_NT, null_N, counts_N = [], [], [], [], []
    answer_N3, number, nulls = [], -1, 0
    while len(numbers) < PAIRS:
        number += 1
        question, passage = small_readers.question_and_passage(number)
        windows = windows_of(pipeline, question, passage)
        spans, null = best_spans(pipeline, passage, windows)
        ranked = sorted([*(score for score, *_ in spans[:2]), null], reverse=True)
        if not spans or any(a - b < CLOSE * a for a, b in pairwise(ranked)):
            continue
        own = pipeline.postprocess(
            windows, top_k=1, handle_impossible_answer=True, max_answer_len=small_readers.ANSWER, align_to_words=False
        )
        nulls += not own["answer"]
        spans = (spans + [[0.0, 0, 0]] * BEST)[:BEST]
        numbers.append(number)
        scores_NT.append([score for score, *_ in spans])
        spans_NT2.append([[low, high - low] for _, low, high in spans])
        null_N.append(null)
        counts_N.append(len(windows))
        answer_N3.append([own["start"], own["end"], own["score"]])
    scores = np.array(scores_NT)
    print(
        f"{family}: {number + 1} pairs, {np.mean(np.array(counts_N) > 1):.0%} with several windows, {nulls} null "
        f"answers; the best score is {scores[:, 0].min():.3g} to {scores[:, 0].max():.3g}"
    )
    assert scores[:, 0].std() > 0.05, "answers are alike"
    starts, lengths = np.array(spans_NT2, np.int16).transpose(2, 0, 1)
    assert lengths.max() < 256
    found = {
        "numbers": np.array(numbers, np.int16), "windows": np.array(counts_N, np.uint8), "start_NT": starts,
        "length_NT": lengths.astype(np.uint8), "score_NT": scores.astype(np.float32),
        "null_N": np.array(null_N, np.float32), "answer_N3": np.array(answer_N3, np.float32),
    }  # fmt: skip
    return {f"{family}/{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    tensors: dict[str, torch.Tensor] = {}
    for family in small_readers.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            tensors |= answers(family, small_readers.write_reader(Path(folder), family))
    pairs = small_readers.questions_and_passages(range(PAIRS))
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    save_file(tensors, out, metadata={"transformers": transformers.__version__, "pairs": digest})
    print(f"{out}: {len(tensors)} tensors, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
