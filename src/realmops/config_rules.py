"""Validation rules that involve several options."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

ENCODER, NO_READER = "encoder", "none"  # values of reader.init: the encoder's own reader; search without a reader
Rules = Iterable[tuple[bool, str]]  # pairs (is_broken, error message)


def check_rules(rules: Rules) -> None:
    """Raise ValueError with the message of the first broken rule."""
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(message)


def option_rules(values: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Yield the rules that can be checked before a stage runs; each message names the keys of all options involved."""
    bert, sample, reader, finetune = (values[name] for name in ("bert", "sample", "reader", "finetune"))
    positions, shares = bert["positions"], sample["test_share"] + sample["dev_share"]
    for section, key in product(values, ("block_wordpieces", "wordpieces", "query_wordpieces", "reader_wordpieces")):
        yield (
            values[section].get(key, 0) > positions,
            f"{section}.{key} is {values[section].get(key)}, above the encoder's bert.positions={positions}; lower "
            f"{section}.{key} or raise bert.positions",
        )
    yield (
        values["retriever"]["init"] == "small" and bert["width"] % bert["heads"] > 0,
        f"bert.width is {bert['width']}; it must be a multiple of bert.heads={bert['heads']}",
    )
    yield (
        shares >= 1,
        f"sample.test_share + sample.dev_share is {shares}; it must be below 1 to leave subjects for training",
    )
    yield (
        reader["apart"] and not reader["copies"],
        "reader.apart is true and reader.copies is false: a reader that encodes x and z apart needs the copy head; set "
        "reader.copies=true, or reader.apart=false",
    )
    init, pretrain, ict = reader["init"], values["pretrain"]["steps"], values["ict"]["reader_steps"]
    yield (
        init not in (ENCODER, NO_READER) and bool(pretrain or ict),
        f"reader.init is {init}, a reader of answer spans, with pretrain.steps={pretrain} and ict.reader_steps={ict}: "
        "REALM trains with a reader that predicts masked words, which a published reader does not; set "
        "pretrain.steps=0 and ict.reader_steps=0 (preset reader), or reader.init=encoder",
    )
    question, total = finetune["query_wordpieces"], finetune["reader_wordpieces"]
    yield (
        total <= question + 1,
        f"finetune.reader_wordpieces is {total}, which leaves no room for a passage after a question of "
        f"finetune.query_wordpieces={question}; raise finetune.reader_wordpieces",
    )
    yield from _tower_rules(values["retriever"], bert)


def _tower_rules(options: Mapping[str, Any], bert: Mapping[str, Any]) -> Rules:
    """Yield the rules of the retriever's options that can be checked without the encoder."""
    head, width, vectors = options["head"], options["embedding_width"], options["document_vectors"]
    pooling, projection = options["pooling"], options["projection"]
    if options["tower"] == "bag":
        bag = "retriever.tower is bag and retriever"
        yield head != "cosine", f"{bag}.head is {head}: a bag's vectors have unit length; set retriever.head=cosine"
        why = "a bag has no encoder to take the width from"
        yield not width, f"{bag}.embedding_width is 0: {why}; set retriever.embedding_width=384"
        remedy = "set retriever.document_vectors=1, or retriever.tower=bert"
        yield vectors > 1, f"{bag}.document_vectors is {vectors}: a bag has one vector per passage; {remedy}"
        return
    yield from vector_rules(vectors, pooling, pooling)
    yield (
        head == "release" and (pooling in ("mean", "last") or projection in ("identity", "pca", "first")),
        f"retriever.head is release, with retriever.pooling={pooling} and retriever.projection={projection}: the "
        "released code has a dense layer after BERT's pooler, which reads [CLS]; set retriever.pooling=cls and "
        "retriever.projection=orthogonal, or another retriever.head",
    )
    if options["init"] == "small":
        yield from width_rules(projection, width, bert["width"])


def width_rules(projection: str, width: int, encoder_width: int) -> Rules:
    """Yield the rules on the embedding width that a projection of the encoder's vectors can have."""
    yield (
        projection == "identity" and width not in (0, encoder_width),
        f"retriever.projection is identity, which keeps the encoder's width of {encoder_width}, and "
        f"retriever.embedding_width is {width}; set retriever.embedding_width=0, or another retriever.projection",
    )
    limits = {"first": f"{encoder_width} numbers", "pca": f"no more than {encoder_width} components"}
    yield (
        projection in limits and width > encoder_width,
        f"retriever.projection is {projection}, and retriever.embedding_width is {width}: the encoder's vectors have "
        f"{limits.get(projection)}; set retriever.embedding_width={encoder_width} or less",
    )


def vector_rules(vectors: int, pooling: str, resolved: str) -> Rules:
    """Yield the rule on the number of vectors per passage; ``resolved`` is the encoder's pooling for ``auto``."""
    source = "[CLS]" if resolved == "cls" else "the last wordpiece"
    yield (
        vectors > 1 and resolved in ("cls", "last"),
        f"retriever.document_vectors is {vectors}, and retriever.pooling={pooling} gives one vector, that of {source}; "
        "set retriever.pooling=mean, or retriever.document_vectors=1",
    )
