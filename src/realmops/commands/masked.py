"""Explain one masked sentence with a pre-trained model, as the paper's Table 3 does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmops.answering.corpus_states import newest_state
from realmops.artifacts import read_json
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.model import likelihood
from realmops.model.reader_files import load_models
from realmops.model.retriever_files import RETRIEVER_FOLDER, passage_tower_digest
from realmops.opening import trained_options
from realmops.process import configure_process
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, query_sequences
from realmops.search.embeddings import INDEX, embed_corpus, indexed_tower, load_index
from realmops.search.exact import exact_index
from realmops.stages import METRICS, STAGES
from realmops.train.index_source import Index
from realmops.train.masked_sentences import NULL, Example
from realmops.train.pretraining import Candidates
from realmops.train.realm import Realm

MASK = "[MASK]"


@torch.no_grad()
def explain_sentence(sentence: str, root: Path, answer: str | None = None) -> dict[str, Any]:
    """Explain a sentence with [MASK] by the models of ``pretrain`` in a run, over its newest corpus.

    With ``answer``, a single [MASK] represents all of its wordpieces. ``p_y_without`` (null document), ``p_y_best``
    (best passage) and ``p_y`` (equation 1) are the lines of the paper's Table 3. Each candidate, the null document
    last, has p(z|x), p(z|x,y), p(y|z,x), its utility in nats over the null document (appendix D), and its own guess.
    """
    if MASK not in sentence:
        raise ValueError(
            f"no {MASK} in the sentence; write it instead of the words to predict, or use --question for a question"
        )
    realm, index, searched = load_pretrained(root)
    snapshot = realm.snapshot
    if not realm.options.null_document:
        raise ValueError(
            f"{root / STAGES['pretrain'].folder} has no null document; train with pretrain.null_document=true"
        )
    example = _build_example(sentence, answer, realm)
    query_BE = embed(realm.retriever.query, query_sequences(realm.queries([example])), realm.dtype)
    [passages] = Candidates(snapshot, realm.options, realm.bm25).retrieve([example], query_BE, index)
    prior_BK, missing_BK = realm.log_prior([example], [passages])
    log_prior_K = prior_BK[0, ~missing_BK[0]].double().cpu()  # null document last, as in log_word_KMV
    log_word_KMV = realm.log_words(example, passages).double().cpu()

    def log_likelihood(y_M: Tensor) -> Tensor:
        return log_word_KMV.gather(2, y_M.expand(len(log_word_KMV), -1)[:, :, None]).sum((1, 2))

    def words(y_M: Tensor) -> str:
        text: str = snapshot.tokenizer.decode(y_M.tolist(), skip_special_tokens=False)
        return text.strip()

    guess_KM = log_word_KMV.argmax(-1)  # argmax of y for each z, since masks are independent given z
    marginal_K = torch.stack([(log_prior_K + log_likelihood(y_M)).logsumexp(0) for y_M in guess_KM])
    best_M, without_M = guess_KM[int(marginal_K.argmax())], guess_KM[-1]
    y_M = torch.from_numpy(example.targets) if answer is not None else best_M
    log_y_K = log_likelihood(y_M)
    figures = {
        "p_z": log_prior_K.exp(),
        "p_z_given_y": likelihood.log_posterior(log_prior_K[None], log_y_K[None])[0].exp(),
        "p_y": log_y_K.exp(),
        "utility": likelihood.retrieval_utility(log_y_K[None], log_y_K[-1:])[0],
    }
    named = [*((snapshot.title(p), snapshot.passage_id(p)) for p in passages), ("(null document)", "")]
    candidates: list[dict[str, Any]] = [
        {"title": title, "passage_id": passage, **{n: float(v[k]) for n, v in figures.items()}, "guess": words(guess_M)}
        for k, ((title, passage), guess_M) in enumerate(zip(named, guess_KM, strict=True))
    ]
    return {
        "sentence": sentence,
        "y": words(y_M),
        "index": searched,
        "with_retrieval": {"words": words(best_M), "probability": float(marginal_K.max().exp())},
        "without_retrieval": {"words": words(without_M), "probability": float(log_likelihood(without_M)[-1].exp())},
        "p_y": float((log_prior_K + log_y_K).logsumexp(0).exp()),
        "p_y_without": candidates[-1]["p_y"],
        "p_y_best": max((z["p_y"] for z in candidates[:-1]), default=None),
        "candidates": candidates,
    }


def load_pretrained(root: Path) -> tuple[Realm, Index, str]:
    """Load the models of ``pretrain`` in eval mode, and an index of the newest corpus with its description."""
    trained = root / STAGES["pretrain"].folder
    options = trained_options(root, "pretrain")
    where = newest_state(root)
    configure_process(options.run.threads)
    snapshot = Snapshot.open(where.snapshot / "corpus")
    retriever, reader = load_models(trained, snapshot.vocabulary_hash)
    device, dtype = device_and_dtype(options.run, retriever, reader)
    retriever.to(device).eval()
    reader.to(device).eval()
    if indexed_tower(where.finetune) == passage_tower_digest(trained / RETRIEVER_FOLDER):
        place, passages = str(where.finetune / INDEX), load_index(where.finetune, snapshot)
    else:
        place, passages = "embedded now", embed_corpus(retriever, snapshot, dtype)
    step = read_json(trained / METRICS).get("best_step", options.pretrain.steps)
    index = Index(step, exact_index(passages.to(device), retriever.vectors), retriever, 0.0, False)
    words = Bm25.of(snapshot) if retriever.mixture.lexical else None
    searched = f"{len(snapshot)} passages, {place}, with the weights of pretrain after step {step}"
    return Realm(retriever, reader, snapshot, options.pretrain, dtype, words), index, searched


def _build_example(sentence: str, answer: str | None, realm: Realm) -> Example:
    def pieces(text: str) -> list[int]:
        ids: list[int] = realm.snapshot.tokenizer.encode(text.rstrip(), add_special_tokens=False).ids
        return ids

    before, *parts = sentence.split(MASK)
    if answer is not None and len(parts) > 1:
        raise ValueError(f"the sentence has {len(parts)} {MASK}; with an answer write one for all of its words")
    hidden = [realm.special.mask] if answer is None else pieces(before[len(before.rstrip()) :] + answer)
    if not hidden:
        raise ValueError(f"the answer {answer!r} has no wordpieces; give at least one word")
    original = pieces(before)
    positions: list[int] = []
    for part in parts:
        positions += range(len(original), len(original) + len(hidden))
        original += [*hidden, *pieces(part)]
    limit = min(realm.options.query_wordpieces - 2, realm.options.reader_wordpieces - 3)
    if len(original) > limit:
        raise ValueError(f"the sentence has {len(original)} wordpieces; at most {limit} are allowed; shorten it")
    ids, masked = np.array(original, dtype=np.int64), np.array(positions, dtype=np.int64)
    x = ids.copy()
    x[masked] = realm.special.mask
    return Example(NULL, ids, x, masked, ids[masked], sentence.replace(MASK, " "))
