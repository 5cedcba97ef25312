"""Make tests/fixtures/peer_realm.safetensors and peer_published: what transformers' REALM computes and saves.

transformers dropped REALM after 4.x, so this runs in a throw-away environment:

    python3 -m venv runs/peer
    runs/peer/bin/pip install transformers==4.35.2 torch 'numpy<2' safetensors
    runs/peer/bin/python benchmarks/peer_fixture.py

All weights are small and random. tests/model/test_peer.py loads the first file's weights into our modules and compares
numbers; tests/model/test_peer_published.py imports the folders under peer_published, which the peer saved in the format
of the checkpoints on the hub, and compares retrieval, scores and answers (expected.safetensors, expected.json).

Shape suffixes: B queries, K candidates of each, L padded length, R passages that are read, P passages that
are retrieved, A answers of a passage, S spans.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

try:
    from transformers import (
        RealmConfig,
        RealmEmbedder,
        RealmForOpenQA,
        RealmKnowledgeAugEncoder,
        RealmReader,
        RealmRetriever,
        RealmScorer,
        RealmTokenizer,
    )
except ImportError:
    raise SystemExit("this transformers has no REALM; run the script as its first lines say") from None

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "peer_realm.safetensors"
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
}
RETRIEVER_WIDTH, SPAN_WIDTH, LONGEST_SPAN = 8, 12, 4
QUERIES, CANDIDATES, READ, RETRIEVED = 3, 4, 3, 5
CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5

# ---- the folders in the published format
FOLDER = "peer_published"
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 48,
    "retriever_proj_size": 6,
    "span_hidden_size": 10,
    "max_span_width": 4,
    "reader_seq_len": 40,
}  # all else as published: gelu_new, layer norms of 1e-12 and, over spans, 1e-3
NAMES = ["anna", "karl", "maria", "jon", "berg", "lund", "holm", "vik", "oslo", "bergen", "norway"]
WORDS = [*NAMES, "sea", "ship", "play", "town", "king", "was", "born", "in", "wrote", "built", "sang", "lived"]
WORDS += ["the", "a", "of", "who", "where", "what"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BLOCKS = 24
ASKED = ("who wrote the play", "where was karl lund born", "what town of norway", "who built a ship of the king")


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Weights and biases large enough that a term left out shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.3  # float32, as in the fixture
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(value + 1.0 if is_scale else value)


def join(parts: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[CLS] part [SEP] part [SEP] of random words, and the segments 0 ... 1 ..."""
    tokens, segments = [CLS], [0]
    for segment, length in enumerate(parts):
        words = torch.randint(FIRST_WORD, SHAPE["vocab_size"], (length,), generator=generator)
        tokens += [*words.tolist(), SEP]
        segments += [segment] * (length + 1)
    return torch.tensor(tokens), torch.tensor(segments)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def scores(config: RealmConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Relevance of queries and documents, with the document tower of its own that the scorer allows."""
    document, query = RealmEmbedder(config).double().eval(), RealmEmbedder(config).double().eval()
    randomise(document, generator)
    randomise(query, generator)
    queries = [join([length], generator) for length in (4, 7, 2)]
    lengths = [(1 + k % 3, 3 + (5 * b + 2 * k) % 9) for b in range(QUERIES) for k in range(CANDIDATES)]
    candidates = [join([title, body], generator) for title, body in lengths]
    query_BL, document_NL = pad([t for t, _ in queries]), pad([t for t, _ in candidates])
    segment_NL = pad([s for _, s in candidates])
    by_query = (QUERIES, CANDIDATES, -1)
    with torch.no_grad():
        out = RealmScorer(config, query_embedder=query).double().eval()
        out.embedder = document
        result = out(
            input_ids=query_BL,
            attention_mask=query_BL.ne(0).long(),
            token_type_ids=torch.zeros_like(query_BL),
            candidate_input_ids=document_NL.view(by_query),
            candidate_attention_mask=document_NL.ne(0).long().view(by_query),
            candidate_token_type_ids=segment_NL.view(by_query),
        )
    return {
        **weights("query", query),
        **weights("document", document),
        "scorer.query_BL": query_BL,
        "scorer.document_NL": document_NL,
        "scorer.segment_NL": segment_NL,
        "scorer.query_BE": result.query_score,
        "scorer.relevance_BK": result.relevance_score,
    }


def masked_words(config: RealmConfig, relevance_BK: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The marginal masked word loss, and its gradient in the relevance."""
    encoder = RealmKnowledgeAugEncoder(config).double().eval()
    randomise(encoder, generator)
    tokens, segments, labels = [], [], []
    for b, (length, masks) in enumerate(((5, [0, 3]), (3, [1]), (6, [1, 2, 5]))):
        x, _ = join([length], generator)
        rows = torch.tensor(masks) + 1
        target_L = torch.zeros(SHAPE["max_position_embeddings"], dtype=torch.int64)
        target_L[rows] = x[rows]
        labels.append(target_L)
        x[rows] = MASK
        for k in range(CANDIDATES):
            body, _ = join([(3 * b + 4 * k) % 11], generator)
            tokens.append(torch.cat([x, body[1:]]))
            segments.append(torch.tensor([0] * len(x) + [1] * (len(body) - 1)))
    token_NL, segment_NL = pad(tokens), pad(segments)
    label_BL = torch.stack(labels)[:, : token_NL.shape[1]]
    relevance_BK = relevance_BK.clone().requires_grad_()
    by_query = (QUERIES, CANDIDATES, -1)
    loss = encoder(
        input_ids=token_NL.view(by_query),
        attention_mask=token_NL.ne(0).long().view(by_query),
        token_type_ids=segment_NL.view(by_query),
        relevance_score=relevance_BK,
        labels=label_BL,
        mlm_mask=label_BL.ne(0).long(),
    ).loss
    (gradient_BK,) = torch.autograd.grad(loss, relevance_BK)
    return {
        **weights("encoder", encoder),
        "encoder.token_NL": token_NL,
        "encoder.segment_NL": segment_NL,
        "encoder.label_BL": label_BL,
        "encoder.loss": loss.detach(),
        "encoder.relevance_gradient_BK": gradient_BK,
    }


def answer_spans(config: RealmConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Span scores of one question's passages, and both losses of Open-QA fine-tuning."""
    reader = RealmReader(config).double().eval()
    randomise(reader, generator)
    question = 4
    sequences = []
    for length in (9, 5, 12):
        x, _ = join([question, length], generator)
        if sequences:
            x[: question + 2] = sequences[0][0][: question + 2]
        sequences.append((x, torch.tensor([0] * (question + 2) + [1] * (length + 1))))
    token_RL, segment_RL = pad([t for t, _ in sequences]), pad([s for _, s in sequences])
    block_RL = segment_RL.bool() & token_RL.ne(SEP)
    relevance_P = torch.randn(RETRIEVED, generator=generator, dtype=torch.float64)
    has_answer_P = torch.tensor([True, False, True, False, True])
    first = question + 2
    start_RA = torch.tensor([[first + 1, first + 4], [-1, -1], [first + 7, -1]])
    end_RA = torch.tensor([[first + 2, first + 4], [-1, -1], [first + 10, -1]])
    inputs = {
        "input_ids": token_RL,
        "attention_mask": token_RL.ne(0).long(),
        "token_type_ids": segment_RL,
    }
    with torch.no_grad():
        result = reader(
            **inputs,
            relevance_score=relevance_P,
            block_mask=block_RL,
            start_positions=start_RA,
            end_positions=end_RA,
            has_answers=has_answer_P,
        )
        score_RS, start_S, end_S = reader.qa_outputs(reader.realm(**inputs)[0], block_RL)
    return {
        **weights("reader", reader),
        "reader.token_RL": token_RL,
        "reader.segment_RL": segment_RL,
        "reader.relevance_P": relevance_P,
        "reader.has_answer_P": has_answer_P,
        "reader.gold_start_RA": start_RA,
        "reader.gold_end_RA": end_RA,
        "reader.span_start_S": start_S,
        "reader.span_end_S": end_S,
        "reader.span_score_RS": score_RS,
        "reader.retriever_loss": result.retriever_loss,
        "reader.reader_loss": result.reader_loss,
    }


def weights(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": parameter.detach().float() for name, parameter in module.named_parameters()}


def published(folder: Path, generator: torch.Generator) -> None:
    """Checkpoint folders as the peer saves them, with the passages and with what it answers."""
    shutil.rmtree(folder, ignore_errors=True)
    vocabulary = [*SPECIAL, *WORDS, "."]
    config = RealmConfig(**SMALL, vocab_size=len(vocabulary), num_block_records=BLOCKS)
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary))
    tokenizer = RealmTokenizer(folder / "vocab.txt")
    blocks, titles = random_blocks(generator)
    retriever = RealmRetriever(np.array([block.encode() for block in blocks], dtype=object), tokenizer)
    openqa = RealmForOpenQA(config, retriever).eval()
    scorer = RealmScorer(config).eval()
    encoder = RealmKnowledgeAugEncoder(config).eval()
    for module in (openqa, scorer, encoder):
        randomise(module, generator)
    with torch.no_grad():
        openqa.block_emb.copy_(document_embeddings(scorer.embedder, tokenizer, titles, blocks))
    openqa.save_pretrained(folder / "openqa", safe_serialization=False)
    scorer.embedder.save_pretrained(folder / "embedder", safe_serialization=False)
    scorer.save_pretrained(folder / "scorer", safe_serialization=True)
    encoder.save_pretrained(folder / "encoder", safe_serialization=True)
    openqa.reader.save_pretrained(folder / "reader", safe_serialization=True)
    for name in ("openqa", "embedder", "scorer", "encoder", "reader"):
        tokenizer.save_pretrained(folder / name)
    (folder / "vocab.txt").unlink()
    write_records(folder / "blocks.tfr", blocks)
    write_records(folder / "titles.tfr", titles)
    answers, numbers = zip(*(answer(openqa, tokenizer, question) for question in ASKED), strict=True)
    expected = {f"{n}.{name}": tensor for n, found in enumerate(numbers) for name, tensor in found.items()}
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(dict(zip(ASKED, answers, strict=True)), indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size} bytes; answers {answers}")


def random_blocks(generator: torch.Generator) -> tuple[list[str], list[str]]:
    """Passages of known words, of several lengths, and their titles."""

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator))

    numbers = range(BLOCKS)
    return [f"{words(5 + n % 7)} . {words(4 + n % 5)} ." for n in numbers], [words(1 + n % 2) for n in numbers]


def document_embeddings(
    embedder: RealmEmbedder, tokenizer: RealmTokenizer, titles: list[str], blocks: list[str]
) -> Tensor:
    """What the index of a checkpoint holds: [CLS] title [SEP] body [SEP] of every block."""
    inputs = tokenizer(titles, blocks, padding=True, return_tensors="pt")
    return embedder(**inputs).projected_score


def answer(openqa: RealmForOpenQA, tokenizer: RealmTokenizer, question: str) -> tuple[str, dict[str, Tensor]]:
    """The peer's answer, the passages it retrieved with their scores, and the scores of all their spans."""
    inputs = tokenizer([question], return_tensors="pt")
    with torch.no_grad():
        _, predicted = openqa(**inputs, return_dict=False)
        query_QE = openqa.embedder(**inputs).projected_score
        score_B = openqa.block_emb @ query_QE[0]
        top = score_B.topk(openqa.config.reader_beam_size)
        limit = openqa.config.reader_seq_len
        *_, read = openqa.retriever(top.indices, inputs.input_ids, None, max_length=limit, return_tensors="pt")
        block_RL = ~read.special_tokens_mask.bool() & read.token_type_ids.bool()
        hidden = openqa.reader.realm(read.input_ids, read.attention_mask, read.token_type_ids)[0]
        score_RS, start_S, end_S = openqa.reader.qa_outputs(hidden, block_RL)
    numbers = {
        "query": query_QE[0],
        "retrieved": top.indices,
        "relevance": top.values,
        "span_score": score_RS,
        "span_start": start_S,
        "span_end": end_S,
        "first_of_body": block_RL.int().argmax(1),
    }
    return tokenizer.decode(predicted), numbers


def write_records(path: Path, texts: list[str]) -> None:
    """TensorFlow's record format, its checksums left empty."""
    frames = [struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4) for data in (t.encode() for t in texts)]
    path.write_bytes(b"".join(frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    config = RealmConfig(
        **SHAPE,
        attention_probs_dropout_prob=0.0,
        retriever_proj_size=RETRIEVER_WIDTH,
        num_candidates=CANDIDATES,
        span_hidden_size=SPAN_WIDTH,
        max_span_width=LONGEST_SPAN,
        reader_layer_norm_eps=1e-5,
        reader_beam_size=READ,
        searcher_beam_size=RETRIEVED,
        pad_token_id=0,
    )
    generator = torch.Generator().manual_seed(0)
    tensors = scores(config, generator)
    tensors |= masked_words(config, tensors["scorer.relevance_BK"], generator)
    tensors |= answer_spans(config, generator)
    out.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out, metadata={"config": json.dumps(SHAPE, sort_keys=True)})
    print(f"{out}: {len(tensors)} tensors, {out.stat().st_size} bytes")
    published(out.parent / FOLDER, torch.Generator().manual_seed(1))


if __name__ == "__main__":
    main()
