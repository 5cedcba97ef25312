"""Rules across options, each with the message for where it is broken."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

Rules = Iterable[tuple[bool, str]]  # whether each is broken, and the message then


def check(rules: Rules) -> None:
    """Raise ValueError with the message of the first rule that is broken."""
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(message)


def option_rules(values: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Return the rules that can be checked before a stage runs; a message names the keys of all its options."""
    bert, sample, reader, finetune = (values[name] for name in ("bert", "sample", "reader", "finetune"))
    positions, shares = bert["positions"], sample["test_share"] + sample["dev_share"]
    for section, key in product(values, ("block_wordpieces", "wordpieces", "query_wordpieces", "reader_wordpieces")):
        yield (
            values[section].get(key, 0) > positions,
            f"{section}.{key} is {values[section].get(key)}, but the encoder has bert.positions={positions}; lower the "
            "one or raise the other",
        )
    yield (
        bert["init"] == "small" and bert["width"] % bert["heads"] > 0,
        f"bert.width is {bert['width']}, no multiple of bert.heads={bert['heads']}; choose such a width",
    )
    yield (
        shares >= 1,
        f"sample.test_share + sample.dev_share is {shares}; it must be below 1 so that subjects are left for training",
    )
    yield (
        reader["apart"] and not reader["copies"],
        "reader.apart is true and reader.copies false: what is read apart is joined by the copy head alone; set "
        "reader.copies=true, or reader.apart=false",
    )
    question, together = finetune["query_wordpieces"], finetune["reader_wordpieces"]
    yield (
        together <= question + 1,
        f"finetune.reader_wordpieces is {together}: no room for a passage beside a question of "
        f"finetune.query_wordpieces={question}; raise the first",
    )
    yield from _tower_rules(values["retriever"], bert)


def _tower_rules(options: Mapping[str, Any], bert: Mapping[str, Any]) -> Rules:
    """Return the rules of the retriever's options that can be checked without the encoder."""
    head, width, vectors = options["head"], options["embedding_width"], options["document_vectors"]
    pooling, projection = options["pooling"], options["projection"]
    if options["tower"] == "bag":
        bag = "retriever.tower is bag and retriever"
        yield head != "cosine", f"{bag}.head {head}: a bag's vectors have the length 1; set retriever.head=cosine"
        why = "there is no encoder whose width could be taken"
        yield not width, f"{bag}.embedding_width 0: {why}; set retriever.embedding_width=384"
        remedy = "set retriever.document_vectors=1, or retriever.tower=bert"
        yield vectors > 1, f"{bag}.document_vectors {vectors}: a bag makes one vector of a passage; {remedy}"
        return
    yield from vector_rules(vectors, pooling, pooling)
    yield (
        head == "release" and (pooling in ("mean", "last") or projection in ("identity", "pca", "first")),
        f"retriever.head is release, with retriever.pooling {pooling} and retriever.projection {projection}: the "
        "released code has a dense layer behind BERT's pooler, which reads [CLS]; set retriever.pooling=cls and "
        "retriever.projection=orthogonal, or another retriever.head",
    )
    if bert["init"] == "small":
        yield from width_rules(projection, width, bert["width"])


def width_rules(projection: str, width: int, encoder_width: int) -> Rules:
    """Embeddings of which widths a projection makes from vectors of the encoder."""
    yield (
        projection == "identity" and width not in (0, encoder_width),
        f"retriever.projection is identity, which keeps the encoder's width of {encoder_width}, and "
        f"retriever.embedding_width is {width}; set retriever.embedding_width=0, or another retriever.projection",
    )
    most = {"first": f"{encoder_width} numbers", "pca": f"no more than {encoder_width} components"}
    yield (
        projection in most and width > encoder_width,
        f"retriever.projection is {projection}, and retriever.embedding_width is {width}: the encoder's vectors have "
        f"{most.get(projection)}; set retriever.embedding_width={encoder_width} or less",
    )


def vector_rules(vectors: int, pooling: str, resolved: str) -> Rules:
    """How many vectors of a passage a pooling makes; ``resolved`` is the pooling that ``auto`` is for the encoder."""
    what = "[CLS]" if resolved == "cls" else "the last wordpiece"
    yield (
        vectors > 1 and resolved in ("cls", "last"),
        f"retriever.document_vectors is {vectors}, and retriever.pooling {pooling} makes one vector, that of {what}; "
        "set retriever.pooling=mean, or retriever.document_vectors=1",
    )
