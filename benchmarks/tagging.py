"""Tagging sentences: our tagger against transformers' token-classification pipeline, same weights and sentences.

    python benchmarks/tagging.py --sentences 256

MiniLM-L6's shape with random weights, nine tags, sentences of some 25 wordpieces (two of the generated text's). Ours is
given words, the pipeline their sentence; both tokenise. The pipeline works as it does by default, one sentence at a
time, so that it pads nothing. One thread, processor time. Ours marks words with a capital by their segment, which the
pipeline does not know: both segments have equal embeddings here.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

SHAPE = "MiniLM-L6"
TAGS = ("O", *(f"{prefix}-{name}" for name in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))


def make_tagger() -> Any:
    """Ours with random weights."""
    import generated
    import torch

    from realmops.train.tagger import Tagger

    torch.manual_seed(0)
    encoder, _ = generated.random_bert(SHAPE, std=0.05)
    tagger = Tagger(encoder, TAGS).eval()
    with torch.no_grad():
        tagger.output.weight.normal_(std=0.05)
        segment = encoder.model.embeddings.token_type_embeddings
        segment.weight[1] = segment.weight[0]
    return tagger


def make_pipeline(tagger: Any, folder: Path) -> Any:
    """The peer's pipeline with the same weights."""
    import copy

    import generated
    from transformers import BertForTokenClassification, BertTokenizerFast, pipeline

    from realmops.corpus.vocabulary import vocabulary_bytes

    (folder / "vocab.txt").write_bytes(vocabulary_bytes(generated.vocabulary()))
    config = copy.deepcopy(tagger.bert.model.config)
    config.id2label, config._attn_implementation = dict(enumerate(TAGS)), "sdpa"
    model = BertForTokenClassification(config).eval()
    model.bert.load_state_dict(tagger.bert.model.state_dict())
    model.classifier.load_state_dict(tagger.output.state_dict())
    return pipeline(
        "token-classification", model=model, tokenizer=BertTokenizerFast(str(folder / "vocab.txt")),
        ignore_labels=[], device="cpu",
    )  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rates of both, and how many words have the same tag."""
    against.one_thread()
    against.quiet_transformers()
    import generated
    import torch

    from realmops.devices import resolve_precision
    from realmops.train.conll import TaggedSentence
    from realmops.train.tagger import predict_words

    known = generated.sentences()[: 2 * arguments.sentences]
    texts = [" ".join(pair) for pair in zip(known[::2], known[1::2], strict=True)]
    spans = [[match.span() for match in re.finditer(r"\w+|[^\w\s]", text)] for text in texts]
    sentences = [
        TaggedSentence(tuple(text[a:b] for a, b in found), ("O",) * len(found))
        for text, found in zip(texts, spans, strict=True)
    ]
    dtype = resolve_precision("auto", torch.device("cpu"))
    tagger, found = make_tagger(), dict[str, Any]()

    with tempfile.TemporaryDirectory() as folder:
        peer = make_pipeline(tagger, Path(folder))

        def run_ours() -> float:
            def predict() -> None:
                found["ours"] = predict_words(tagger, sentences, generated.tokenizer(), dtype)

            return len(texts) / against.processor_seconds(predict)

        def run_theirs() -> float:
            return len(texts) / against.processor_seconds(lambda: found.update(theirs=peer(texts)))

        predict_words(tagger, sentences[:8], generated.tokenizer(), dtype)
        peer(texts[:8])
        rates, peers = against.interleave([run_ours, run_theirs], arguments.repeats)
    tags = [{piece["start"]: piece["entity"] for piece in pieces} for pieces in found["theirs"]]
    pairs = [
        (ours, theirs[start])
        for words, theirs, places in zip(found["ours"], tags, spans, strict=True)
        for ours, (start, _) in zip(words, places, strict=True)
        if start in theirs
    ]
    same = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    pieces = sum(map(len, found["theirs"])) / len(texts)
    note = (
        f"{len(texts)} sentences of {pieces:.0f} wordpieces in the mean, ours in {str(dtype).removeprefix('torch.')}; "
        f"{same:.2%} of {len(pairs)} words have the same tag"
    )
    return [Row(f"tagging, {SHAPE}", "transformers' pipeline", "sentences/s", rates, peers, Goal(7), note)]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sentences", type=int, default=512, help="(%(default)s)")


if __name__ == "__main__":
    against.command(__doc__, "tagging", measure, options)
