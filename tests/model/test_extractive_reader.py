"""Published readers: threads, windows, blanks, padding on the left, bf16, saving, and errors of their folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_readers import (
    ANSWER,
    FAMILIES,
    LIMIT,
    questions_and_passages,
    write_left_padded,
    write_reader,
)
from tokenizers import processors

from realmops.devices import freeze_linear_weights
from realmops.hub import READER, encoder_folder
from realmops.model.extractive_reader import ExtractiveReader, PassageSpans, load_extractive_reader

FP32 = torch.float32
STRIDE = min(LIMIT // 2, 128)
FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExtractiveReader]:
    folder, opened = tmp_path_factory.mktemp("readers"), dict[str, ExtractiveReader]()

    def reader(family: str) -> ExtractiveReader:
        if family not in opened:
            opened[family] = load_extractive_reader(write_reader(folder / family, family)).eval()
        return opened[family]

    return reader


def read(
    reader: ExtractiveReader, pairs: Sequence[tuple[str, str]], limit: int = LIMIT, dtype: torch.dtype = FP32
) -> list[PassageSpans]:
    return reader.read(pairs, limit=limit, answer_wordpieces=ANSWER, dtype=dtype)


def flat(spans: Sequence[PassageSpans]) -> np.ndarray:
    return np.concatenate([np.column_stack([part.chars, part.log_p]).ravel() for part in spans])


def test_threads_read_as_one_after_another(tmp_path: Path) -> None:
    folder = write_reader(tmp_path, "roberta")
    pairs = questions_and_passages(range(24))
    alone = load_extractive_reader(folder).eval()
    expected = [flat(read(alone, pairs[n : n + 3], limit=60 + n)) for n in range(0, 24, 3)]
    together = load_extractive_reader(folder).eval()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: flat(read(together, pairs[n : n + 3], limit=60 + n)), range(0, 24, 3)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_is_read_as_its_pairs_alone(readers: Callable[[str], ExtractiveReader]) -> None:
    pairs = questions_and_passages(range(20))
    for ours, pair in zip(read(readers("bert"), pairs), pairs, strict=True):
        [alone] = read(readers("bert"), [pair])
        np.testing.assert_allclose(flat([ours]), flat([alone]), rtol=1e-4, atol=1e-4)


def test_windows_cover_the_passage(readers: Callable[[str], ExtractiveReader]) -> None:
    """A passage that fits has one window; one more wordpiece makes a second, which shares half a window."""
    reader = readers("bert")
    room = LIMIT - 3 - len(reader.tokenize("who was").ids)
    assert len(reader.tokenize("norway").ids) == 1
    [window] = reader.windows([("who was", "norway " * room)], LIMIT)
    assert (window.end - window.first, len(window.encoding.ids), window.offset) == (room, LIMIT, 0)
    windows = reader.windows([("who was", "norway " * (room + 1))], LIMIT)
    assert [slice(window.offset, window.offset + window.end - window.first) for window in windows] == [
        slice(0, room),
        slice(room - STRIDE, room + 1),
    ]
    [short, *_, last] = reader.windows([("who", ""), ("who was", "norway " * 500)], LIMIT)
    assert (short.pair, short.first, short.end, short.null_positions) == (0, 0, 0, (0,))
    assert (last.pair, last.offset + last.end - last.first) == (1, 500)
    [ours] = read(reader, [("who was", "norway " * 500)])
    assert len(ours.log_p) == sum(min(ANSWER, 500 - n) for n in range(500))


def test_a_question_is_cut_between_characters(readers: Callable[[str], ExtractiveReader]) -> None:
    """Byte-level wordpieces can be a part of a character, which is left out whole."""
    reader, passage = readers("roberta"), "the town of rain " * 40
    for blanks in range(4):
        for window in reader.windows([("a" * blanks + "東京🙂" * 30, passage)], 60):
            assert 0 < window.encoding.sequence_ids.count(0) <= reader.longest_question(60)


@pytest.mark.parametrize("limit", [24, 60, LIMIT])
def test_a_long_question_is_cut(readers: Callable[[str], ExtractiveReader], limit: int) -> None:
    """Windows then still advance, by at least a 32nd of a window."""
    reader = readers("bert")
    most = reader.longest_question(limit)
    assert 0 < most <= limit // 2
    passage = "the town of rain " * 40
    asked = " ".join(["in"] * 300)
    windows = reader.windows([(asked, passage)], limit)
    assert windows[0].encoding.sequence_ids.count(0) == most
    assert windows[1].offset >= max(1, limit // 32)
    np.testing.assert_array_equal(
        flat(read(reader, [(asked, passage)], limit)), flat(read(reader, [(" ".join(["in"] * most), passage)], limit))
    )


@FAMILY
def test_spans_have_no_blanks_at_their_ends(family: str, readers: Callable[[str], ExtractiveReader]) -> None:
    pairs = [("who?", " \n the  poet\t (1931) .  é東京 \u00a0 "), ("who?", "  \n "), ("who?", "x"), ("?", ".")]
    whole, blank, letter, mark = read(readers(family), pairs)
    texts = [pairs[0][1][start:end] for start, end in whole.chars.tolist()]
    assert all(text and text == text.strip() for text in texts)
    assert "(1931)" in texts
    assert (len(blank.log_p), blank.chars.shape) == (0, (0, 2))
    assert blank.log_null == pytest.approx(0.0, abs=1e-6) or family in ("roberta", "deberta-v2", "albert")
    for part in (letter, mark):
        assert part.chars.tolist()[-1] == [0, 1]


@torch.no_grad()
def test_a_reader_with_padding_on_the_left_reads_passages_first(tmp_path: Path) -> None:
    """The scores are those of each sequence without padding; the question is never an answer."""
    folder = write_left_padded(tmp_path / "xlnet")
    reader = load_extractive_reader(folder).eval()
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    pairs = [pair for pair in questions_and_passages(range(40)) if pair[1].strip()]
    windows = reader.windows(pairs, LIMIT)
    assert len(windows) > len(pairs)
    for (question, passage), ours in zip(pairs, read(reader, pairs), strict=True):
        best: dict[tuple[int, int], float] = {}
        nulls = []
        for window in reader.windows([(question, passage)], LIMIT):
            encoding = window.encoding
            assert (window.first, window.null_positions) == (0, (len(encoding.ids) - 1,))
            ids, types = (torch.tensor([values]) for values in (encoding.ids, encoding.type_ids))
            out = model(input_ids=ids, token_type_ids=types)
            kept = [*range(window.end), len(encoding.ids) - 1]
            start, end = (logits[0, kept].softmax(-1).tolist() for logits in (out.start_logits, out.end_logits))
            nulls.append(start[-1] * end[-1])
            for first in range(window.end):
                for last in range(first, min(first + ANSWER, window.end)):
                    span = (encoding.offsets[first][0], encoding.offsets[last][1])
                    best[span] = max(best.get(span, 0.0), start[first] * end[last])
        excess = max(1.0, sum(best.values()) + min(nulls)) if len(nulls) > 1 else 1.0
        mine = dict(zip(map(tuple, ours.chars.tolist()), np.exp(ours.log_p), strict=True))
        assert mine.keys() == best.keys()
        np.testing.assert_allclose([mine[span] * excess for span in best], list(best.values()), rtol=1e-3, atol=1e-7)
        assert np.exp(ours.log_null) * excess == pytest.approx(min(nulls), rel=1e-3, abs=1e-9)


def test_a_reader_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    folder = write_reader(tmp_path, "bert")
    tokenizer = FAMILIES["bert"].tokenizer()
    ids = [("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    del about["cls_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "tokenizer_class": "PreTrainedTokenizerFast"}))
    reader = load_extractive_reader(folder).eval()
    [window] = reader.windows([("who?", "the poet")], LIMIT)
    assert window.null_positions == ()
    one, none = read(reader, [("who?", "the poet"), ("who?", " ")])
    assert one.log_null == none.log_null == -np.inf
    assert len(none.log_p) == 0
    assert 0 < np.exp(one.log_p).sum() < 1 + 1e-6
    assert not np.isnan(one.log_p).any()


def test_the_head_computes_in_fp32(readers: Callable[[str], ExtractiveReader], tmp_path: Path) -> None:
    """Under autocast, and after the other layers are cast to bf16; the answers stay close."""
    reader = load_extractive_reader(write_reader(tmp_path, "bert")).eval()
    freeze_linear_weights(reader, torch.bfloat16)
    assert reader.head.weight.dtype == FP32
    linear = next(part for part in reader.modules() if isinstance(part, torch.nn.Linear))
    assert linear.weight.dtype == torch.bfloat16
    pairs = [pair for pair in questions_and_passages(range(30)) if pair[1].strip()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert reader.log_probabilities(reader.windows(pairs[:2], LIMIT))[0].dtype == FP32
        assert reader.head(torch.ones(1, 1, 32, dtype=torch.bfloat16)).dtype == FP32
    exact = read(readers("bert"), pairs)
    for ours, theirs in zip(read(reader, pairs, dtype=torch.bfloat16), exact, strict=True):
        np.testing.assert_array_equal(ours.chars, theirs.chars)
        np.testing.assert_allclose(ours.log_p, theirs.log_p, atol=1.0)


@FAMILY
def test_a_saved_reader_is_the_same_and_opens_in_transformers(family: str, tmp_path: Path) -> None:
    first = load_extractive_reader(write_reader(tmp_path / "first", family)).eval()
    pairs = questions_and_passages(range(20))
    expected = flat(read(first, pairs))
    folders = [tmp_path / "second", tmp_path / "third"]
    reader = first
    for folder in folders:
        folder.mkdir()
        reader.save(folder)
        reader = load_extractive_reader(folder).eval()
        np.testing.assert_array_equal(flat(read(reader, pairs)), expected)
    names = sorted(path.name for path in folders[0].iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
        assert (folders[0] / name).stat().st_mode == (folders[0] / "config.json").stat().st_mode
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folders[0]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    [window] = first.windows([pairs[5]], LIMIT)
    encoded = tokenizer(*pairs[5], return_tensors="pt", return_token_type_ids=True)
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if FAMILIES[family].segments else ()))
    kept = [*window.null_positions[:1], *range(window.first, window.end)]
    with torch.no_grad():
        out = model(**{name: encoded[name] for name in names})
        for ours, theirs in zip(first.log_probabilities([window]), (out.start_logits, out.end_logits), strict=True):
            torch.testing.assert_close(ours[0, kept], theirs[0, kept].log_softmax(-1), rtol=0, atol=1e-4)


# ---- files


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_head(weights: dict[str, torch.Tensor]) -> None:
    for name in ("qa_outputs.weight", "qa_outputs.bias"):
        del weights[name]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "encoder": (
        lambda folder: edit_weights(folder, without_head),
        r"{folder} has no trained span head \(qa_outputs\.bias\): it is an encoder, not a reader; set reader\.init",
    ),
    "code": (
        lambda folder: edit_json(folder / "config.json", model_type="custom", auto_map={"AutoModel": "code.Model"}),
        r"{folder}/config\.json: model_type 'custom' needs custom code \(auto_map\), which is never executed",
    ),
    "images": (
        lambda folder: edit_json(folder / "config.json", model_type="vit"),
        r"{folder}/config\.json: model_type 'vit' reads no spans; set reader\.init to a model",
    ),
    "slow": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            edit_json(folder / "tokenizer_config.json", tokenizer_class="CanineTokenizer"),
        ),
        r"{folder}: its tokenizer gives no character offsets",
    ),
    "lost": (
        lambda folder: edit_weights(folder, lambda weights: weights.pop("bert.encoder.layer.1.output.dense.weight")),
        r"{folder}: the parameter bert\.encoder\.layer\.1\.output\.dense\.weight is missing; download the folder again",
    ),
    "nan": (
        lambda folder: edit_weights(folder, lambda weights: weights["qa_outputs.weight"].view(-1)[3].fill_(torch.nan)),
        r"{folder}: the parameter qa_outputs\.weight has a value that is not finite; choose other weights",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{{}"),
        r"{folder}: transformers cannot open its tokenizer \(",
    ),
    "shape": (
        lambda folder: edit_weights(folder, lambda weights: weights.update({"qa_outputs.bias": torch.zeros(3)})),
        r"{folder}: transformers cannot open it \(",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_named(case: str, tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "reader", "bert")
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(ValueError, match=message.replace("{folder}", re.escape(str(folder)))):
        load_extractive_reader(folder)


def test_a_beam_head_is_no_span_head(tmp_path: Path) -> None:
    folder = write_left_padded(tmp_path / "beam", "XLNetForQuestionAnswering")
    with pytest.raises(ValueError, match=r"beam has no trained span head \(qa_outputs\.bias\)"):
        load_extractive_reader(folder)


def test_weights_of_torch_are_refused(tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "reader", "bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"reader lacks model\.safetensors; the folder of a reader of answer spans"):
        encoder_folder(str(folder), READER)


def test_a_new_head_depends_on_the_seed(tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "encoder", "bert")
    edit_weights(folder, without_head)
    warned: list[str] = []
    heads = [load_extractive_reader(folder, seed=seed, warn=warned.append).head.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.01 < heads[0].std() < 0.03
    assert warned == [f"{folder} has no span head: a new one is trained"] * 3
