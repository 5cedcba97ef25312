"""What a pre-trained model makes of one masked sentence: its candidates, what each is worth, and its guess.

The paper's Table 3 for a sentence of one's own: the words behind [MASK] without retrieval, with one passage, and with
the marginal over all candidates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmops.artifacts import read_json
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, tune_process
from realmops.model import likelihood
from realmops.model.checkpoint_files import load_models
from realmops.model.retriever import Retriever
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, query_sequences
from realmops.search.embeddings import INDEX, embed_corpus, load_index
from realmops.search.exact import exact
from realmops.stages import METRICS, STAGES
from realmops.stages.corpus_states import CorpusState
from realmops.stages.trained import options_of
from realmops.train.candidates import Candidates
from realmops.train.examples import NULL, Example
from realmops.train.index_source import Index
from realmops.train.realm import Realm

MASK = "[MASK]"


@dataclass(frozen=True)
class Pretrained:
    """What ``pretrain`` left, in evaluation mode, with an index of a corpus; ``searched`` says which in words."""

    realm: Realm
    index: Index
    searched: str


@torch.no_grad()
def explain_sentence(sentence: str, root: Path, where: CorpusState, answer: str | None = None) -> dict[str, Any]:
    """Explain a sentence with [MASK] by the models that ``pretrain`` left under ``root``.

    ``p_y_without`` (of the null document), ``p_y_best`` (with the best passage, None where there is none) and ``p_y``
    (equation 1) are the lines of the paper's Table 3, whose first is another model, trained without retrieval. ``y`` is
    the answer, or else the marginal's guess. Of each candidate, the null document last: p(z|x), p(z|x,y), p(y|z,x), its
    utility in nats over the null document (appendix D), and its own guess.

    Args:
        where: the corpus that is searched: the pipeline's own or an update's.
        answer: the words behind the mask; a single [MASK] then stands for all of their wordpieces.

    Raises ValueError when the sentence has no [MASK], when it is too long, when the answer has another number of
    wordpieces than there are masks, and when pre-training has no null document to compare with.
    """
    if MASK not in sentence:
        raise ValueError(
            f"the sentence has no {MASK}: put it in the place of the words to guess; --question asks a question"
        )
    model = pretrained(root, where)
    realm, snapshot = model.realm, model.realm.snapshot
    if not realm.options.null_document:
        raise ValueError(
            f"{root / STAGES['pretrain'].folder} was trained with pretrain.null_document=false: there is nothing to "
            "compare with"
        )
    example = _example(sentence, answer, realm)
    query_BE = embed(realm.retriever.query, query_sequences(realm.queries([example])), realm.dtype)
    [passages] = Candidates(snapshot, realm.options, realm.words).retrieve([example], query_BE, model.index)
    prior_BK, missing_BK = realm.log_prior([example], [passages])
    log_prior_K = prior_BK[0, ~missing_BK[0]].double().cpu()  # the null document last, as in log_word_KMV
    log_word_KMV = realm.log_words(example, passages).double().cpu()

    def log_likelihood(y_M: Tensor) -> Tensor:
        return log_word_KMV.gather(2, y_M.expand(len(log_word_KMV), -1)[:, :, None]).sum((1, 2))

    def words(y_M: Tensor) -> str:
        text: str = snapshot.tokenizer.decode(y_M.tolist(), skip_special_tokens=False)
        return text.strip()

    guess_KM = log_word_KMV.argmax(-1)  # masks are independent given z, so this is the likeliest y of each z
    marginal_K = torch.stack([(log_prior_K + log_likelihood(y_M)).logsumexp(0) for y_M in guess_KM])
    best_M, without_M = guess_KM[int(marginal_K.argmax())], guess_KM[-1]
    y_M = torch.from_numpy(example.targets) if answer is not None else best_M
    given_K = log_likelihood(y_M)
    figures = {
        "p_z": log_prior_K.exp(),
        "p_z_given_y": likelihood.log_posterior(log_prior_K[None], given_K[None])[0].exp(),
        "p_y": given_K.exp(),
        "utility": likelihood.retrieval_utility(given_K[None], given_K[-1:])[0],
    }
    named = [*((snapshot.title(p), snapshot.passage_id(p)) for p in passages), ("(null document)", "")]
    candidates: list[dict[str, Any]] = [
        {"title": title, "passage_id": passage, **{n: float(v[k]) for n, v in figures.items()}, "guess": words(guess_M)}
        for k, ((title, passage), guess_M) in enumerate(zip(named, guess_KM, strict=True))
    ]
    return {
        "sentence": sentence,
        "y": words(y_M),
        "index": model.searched,
        "with_retrieval": {"words": words(best_M), "probability": float(marginal_K.max().exp())},
        "without_retrieval": {"words": words(without_M), "probability": float(log_likelihood(without_M)[-1].exp())},
        "p_y": float((log_prior_K + given_K).logsumexp(0).exp()),
        "p_y_without": candidates[-1]["p_y"],
        "p_y_best": max((z["p_y"] for z in candidates[:-1]), default=None),
        "candidates": candidates,
    }


def pretrained(root: Path, where: CorpusState) -> Pretrained:
    """The models of ``pretrain`` under ``root``, over a corpus.

    The index of the fine-tuned model is taken where the same passage tower made it; otherwise passages are embedded.
    """
    trained = root / STAGES["pretrain"].folder
    options, run = options_of(root, ["pretrain"], ("pretrain", "run"))
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    snapshot = Snapshot.open(where.snapshot / "corpus")
    retriever, reader = load_models(trained, snapshot.vocabulary_hash)
    retriever.to(device).eval()
    reader.to(device).eval()
    if _same_passage_tower(where.finetune, retriever, snapshot):
        place, passages = str(where.finetune / INDEX), load_index(where.finetune, snapshot)
    else:
        place, passages = "embedded now", embed_corpus(retriever, snapshot, dtype)
    step = read_json(trained / METRICS).get("best_step", options.steps)
    index = Index(step, exact(passages.to(device), retriever.vectors), retriever, 0.0, False)
    words = Bm25.of(snapshot) if retriever.mixture.lexical else None
    searched = f"{len(snapshot)} passages, {place}, with the weights of pretrain after step {step}"
    return Pretrained(Realm(retriever, reader, snapshot, options, dtype, words), index, searched)


def _same_passage_tower(tuned: Path, retriever: Retriever, snapshot: Snapshot) -> bool:
    """Whether the index of a fine-tuned model, whose passage tower is frozen, is that of this retriever."""
    if not (tuned / INDEX).is_file():
        return False
    theirs = load_models(tuned, snapshot.vocabulary_hash)[0].document.state_dict()
    ours = retriever.document.state_dict()
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name].cpu()) for name in ours)


def _example(sentence: str, answer: str | None, realm: Realm) -> Example:
    def pieces(text: str) -> list[int]:
        found: list[int] = realm.snapshot.tokenizer.encode(text.rstrip(), add_special_tokens=False).ids
        return found

    before, *behind = sentence.split(MASK)
    hidden = [realm.special.mask] * len(behind) if answer is None else pieces(before[len(before.rstrip()) :] + answer)
    if len(behind) > 1 and len(hidden) != len(behind):
        raise ValueError(
            f"the answer {answer!r} has {len(hidden)} wordpieces, the sentence {len(behind)} {MASK}: write one "
            f"{MASK} for all of them, or as many as there are wordpieces"
        )
    if not hidden:
        raise ValueError(f"the answer {answer!r} has no wordpiece")
    original = pieces(before)
    positions: list[int] = []
    for group, part in zip([hidden] if len(behind) == 1 else [[piece] for piece in hidden], behind, strict=True):
        positions += range(len(original), len(original) + len(group))
        original += [*group, *pieces(part)]
    limit = min(realm.options.query_wordpieces - 2, realm.options.reader_wordpieces - 3)
    if len(original) > limit:
        raise ValueError(f"the sentence has {len(original)} wordpieces, at most {limit} are read: shorten it")
    whole, at = np.array(original, dtype=np.int64), np.array(positions, dtype=np.int64)
    x = whole.copy()
    x[at] = realm.special.mask
    return Example(NULL, whole, x, at, whole[at], sentence.replace(MASK, " "))
