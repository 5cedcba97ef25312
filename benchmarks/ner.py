"""The tagger on real sentences: seqeval's F1 per type, trained on one CoNLL file and scored on others.

    realmops public-data ner    # into data/public/ner
    python benchmarks/ner.py --encoder FOLDER --train wikigold.conll.txt --test en_pud-ud-test.iob2 en_ewt-ud-dev.iob2

--encoder is what retriever.init takes; `small` learns its vocabulary from the training sentences. Every other option is
that of params.yaml, changed with --set tag.steps=400. Types are compared as PER, LOC, ORG and MISC (WNUT-17's
corporation and group are ORG, product and creative-work MISC); predictions of a type that a test file does not have are
left out.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

TYPES = {
    "person": "PER",
    "location": "LOC",
    "corporation": "ORG",
    "group": "ORG",
    "product": "MISC",
    "creative-work": "MISC",
}
PARAMS = Path(__file__).parents[1] / "params.yaml"


def common(tags: Sequence[str]) -> list[str]:
    """Tags with the four types' names."""
    return [tag if tag == "O" else f"{tag[:2]}{TYPES.get(tag[2:], tag[2:])}" for tag in tags]


def main() -> None:
    """Train, predict, print one table row per file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="small")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, nargs="+", required=True)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    import torch
    from seqeval.metrics import classification_report
    from seqeval.scheme import IOB2

    from realmops import config
    from realmops.console import Console
    from realmops.corpus.encoder_tokenizer import read_encoder_vocabulary
    from realmops.corpus.vocabulary import UNCASED, bert_words, build_tokenizer, learn_pieces
    from realmops.devices import resolve_precision
    from realmops.hub import encoder_folder
    from realmops.model.build import build_encoder
    from realmops.process import configure_process
    from realmops.train.conll import read_conll
    from realmops.train.loop import TrainingContext
    from realmops.train.tagger import HIDDEN_SMALL, Tagger, predict_words, tag_names, train_tagger

    values = config.load_params(PARAMS, settings=[f"retriever.init={arguments.encoder}", *arguments.settings])
    sections = {name: values.get(name) for name in ("bert", "run", "tag", "optimiser")}
    training = [replace(s, tags=tuple(common(s.tags))) for s in read_conll(arguments.train)]
    casing = UNCASED
    if arguments.encoder == "small":
        words = bert_words(Counter(word for s in training for word in s.words))
        vocabulary = learn_pieces(words, size=sections["bert"].vocabulary)
    else:
        vocabulary, casing = read_encoder_vocabulary(encoder_folder(arguments.encoder))
    tokenizer = build_tokenizer(vocabulary, casing)
    configure_process(sections["run"].threads)
    encoder, _ = build_encoder(arguments.encoder, sections["bert"], len(vocabulary), sections["run"].seed)
    tagger = Tagger(encoder, tag_names(training))
    torch.nn.init.normal_(tagger.output.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(tagger.output.bias)
    dtype = resolve_precision(sections["run"].precision, torch.device("cpu"), encoder.width)
    progress = Console().progress("tagger", sections["tag"].steps)
    places = (Nothing(), Nothing())
    context = TrainingContext(
        "tag", sections["run"].seed, torch.device("cpu"), dtype, *places, progress, sections["optimiser"]
    )
    start = time.perf_counter()
    train_tagger(context, tagger, training, tokenizer, sections["tag"], HIDDEN_SMALL)
    print(f"{len(training)} sentences, {sections['tag'].steps} steps, {time.perf_counter() - start:.0f} s\n")
    print("| file | sentences | F1 | PER | LOC | ORG | MISC | sentences/s |\n|---|---|---|---|---|---|---|---|")
    for path in arguments.test:
        held_out = read_conll(path)
        gold = [common(s.tags) for s in held_out]
        known = {tag[2:] for tags in gold for tag in tags if tag != "O"}
        start = time.perf_counter()
        found = predict_words(tagger, held_out, tokenizer, dtype)
        rate = len(held_out) / (time.perf_counter() - start)
        kept = [[tag if tag[2:] in known else "O" for tag in tags] for tags in found]
        report = classification_report(gold, kept, mode="strict", scheme=IOB2, output_dict=True, zero_division=0)
        rows = ("micro avg", "PER", "LOC", "ORG", "MISC")
        scores = " | ".join(f"{report[row]['f1-score']:.3f}" if row in report else "" for row in rows)
        print(f"| {path.name} | {len(gold)} | {scores} | {rate:.0f} |")


class Nothing:
    """No checkpoints and no journal."""

    def restore(self) -> None:
        """There is none."""

    def save(self, step: int, files: object) -> None:
        """Nothing is kept."""

    def log(self, step: int, **metrics: float) -> None:
        """Nothing is written."""

    def position(self) -> int:
        """At the start."""
        return 0

    def truncate(self, position: int) -> None:
        """There is nothing to forget."""


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"ner.py: {error}") from None
