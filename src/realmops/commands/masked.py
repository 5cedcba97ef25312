"""What a pre-trained model makes of one masked sentence: its candidates, what each is worth, and its guess.

The paper's Table 3 for a sentence of one's own: the words behind [MASK] without retrieval, with one passage, and with
the marginal over all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from realmops.commands.trained import options_of, trained_steps
from realmops.commands.update import CorpusState
from realmops.corpus.snapshot import Snapshot
from realmops.encoders.devices import device_and_dtype, tune_process
from realmops.index.embed import embed, query_sequences
from realmops.index.embeddings import INDEX, embed_corpus, load_index
from realmops.index.lexical import Bm25
from realmops.index.mips import exact
from realmops.index.source import Index
from realmops.model import likelihood
from realmops.model.files import load_models
from realmops.model.retriever import Retriever
from realmops.stages import STAGES
from realmops.train.candidates import Candidates
from realmops.train.examples import NULL, Example
from realmops.train.realm import Realm

MASK = "[MASK]"
NULL_TITLE = "(null document)"


@dataclass(frozen=True)
class MaskedCandidate:
    """One document z beside the sentence; the null document has no passage id."""

    title: str
    passage_id: str
    p_z: float  # p(z|x)
    p_z_given_y: float  # p(z|x, y)
    p_y: float  # p(y|z, x)
    utility: float  # nats over the null document, appendix D
    guess: str  # the likeliest words with this document alone


@dataclass(frozen=True)
class Guess:
    """Words behind the masks, and their probability."""

    words: str
    probability: float


@dataclass(frozen=True)
class MaskedExplanation:
    """A masked sentence explained. ``y`` is the answer that was given, or else the marginal's guess.

    ``p_y_without``, ``p_y_best`` and ``p_y`` are the three lines of the paper's Table 3. Its first line is another
    model, a BERT trained without retrieval; here it is REALM's own reader with the null document.
    """

    sentence: str
    y: str
    index: str  # which one was searched
    with_retrieval: Guess
    without_retrieval: Guess
    p_y: float  # p(y|x), equation 1
    p_y_without: float  # p(y|null, x)
    p_y_best: float | None  # the largest p(y|z, x) of a passage; None where no passage is a candidate
    candidates: tuple[MaskedCandidate, ...]  # by p(z|x), the null document last


def explain_sentence(sentence: str, root: Path, where: CorpusState, answer: str | None = None) -> MaskedExplanation:
    """Explain a sentence with [MASK] by the models that ``pretrain`` left under ``root``.

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
    realm, index, searched = pretrained(root, where)
    if not realm.options.null_document:
        raise ValueError(
            f"{root / STAGES['pretrain'].folder} was trained with pretrain.null_document=false: there is nothing to "
            "compare with"
        )
    example = _example(sentence, answer, realm)
    with torch.no_grad():
        query_BE = embed(index.retriever.query, query_sequences(realm.queries([example])), realm.dtype)
        [passages] = Candidates(realm.snapshot, realm.options, realm.words).retrieve([example], query_BE, index)
        prior_BK, missing_BK = realm.log_prior([example], [passages])
        log_word_KMV = realm.log_words(example, passages).double().cpu()
    log_prior_K = prior_BK[0, ~missing_BK[0]].double().cpu()  # the null document last, as in log_word_KMV

    def log_likelihood(y_M: torch.Tensor) -> torch.Tensor:
        return log_word_KMV.gather(2, y_M.expand(len(log_word_KMV), -1)[:, :, None]).sum((1, 2))

    def words(y_M: torch.Tensor) -> str:
        text: str = realm.snapshot.tokenizer.decode(y_M.tolist(), skip_special_tokens=False)
        return text

    guess_KM = log_word_KMV.argmax(-1)  # masks are independent given z, so this is the likeliest y of each z
    marginal_K = torch.stack([(log_prior_K + log_likelihood(y_M)).logsumexp(0) for y_M in guess_KM])
    best_M = guess_KM[int(marginal_K.argmax())]
    y_M = torch.from_numpy(example.targets) if answer is not None else best_M
    given_K = log_likelihood(y_M)
    posterior_K = likelihood.log_posterior(log_prior_K[None], given_K[None])[0].exp()
    utility_K = likelihood.retrieval_utility(given_K[None], given_K[-1:])[0]
    named = [*((realm.snapshot.title(p), realm.snapshot.passage_id(p)) for p in passages), (NULL_TITLE, "")]
    numbers = zip(*(v.tolist() for v in (log_prior_K.exp(), posterior_K, given_K.exp(), utility_K)), strict=True)
    candidates = tuple(
        MaskedCandidate(title, passage, p_z, p_z_given_y, p_y, utility, words(guess_M))
        for (title, passage), (p_z, p_z_given_y, p_y, utility), guess_M in zip(named, numbers, guess_KM, strict=True)
    )
    return MaskedExplanation(
        sentence,
        words(y_M),
        searched,
        Guess(words(best_M), float(marginal_K.max().exp())),
        Guess(words(guess_KM[-1]), float(log_likelihood(guess_KM[-1])[-1].exp())),
        float((log_prior_K + given_K).logsumexp(0).exp()),
        float(given_K[-1].exp()),
        max((c.p_y for c in candidates[:-1]), default=None),
        candidates,
    )


def pretrained(root: Path, where: CorpusState) -> tuple[Realm, Index, str]:
    """What ``pretrain`` left under ``root``, in evaluation mode, an index of a corpus, and the index in words.

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
    step = trained_steps(root, "pretrain")
    index = Index(
        options.steps if step is None else step, exact(passages.to(device), retriever.vectors), retriever, 0.0, False
    )
    after = "at a step that is not known" if step is None else f"after step {step}"
    searched = f"{len(snapshot)} passages, {place}, with the weights of pretrain {after}"
    words = Bm25.of(snapshot) if retriever.mixture.lexical else None
    return Realm(retriever, reader, snapshot, options, dtype, words), index, searched


def _same_passage_tower(tuned: Path, retriever: Retriever, snapshot: Snapshot) -> bool:
    """Whether the index of a fine-tuned model, whose passage tower is frozen, is that of this retriever."""
    if not (tuned / INDEX).is_file():
        return False
    theirs = load_models(tuned, snapshot.vocabulary_hash)[0].document.state_dict()
    ours = retriever.document.state_dict()
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name].cpu()) for name in ours)


def _example(sentence: str, answer: str | None, realm: Realm) -> Example:
    parts = sentence.split(MASK)

    def pieces(text: str) -> list[int]:
        found: list[int] = realm.snapshot.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    hidden = pieces(answer) if answer is not None else [realm.special.mask] * (len(parts) - 1)
    if answer is not None and len(parts) > 2 and len(hidden) != len(parts) - 1:
        raise ValueError(
            f"the answer {answer!r} has {len(hidden)} wordpieces, the sentence {len(parts) - 1} {MASK}: write one "
            f"{MASK} for all of them, or as many as there are wordpieces"
        )
    if not hidden:
        raise ValueError(f"the answer {answer!r} has no wordpiece")
    groups = [hidden] if len(parts) == 2 else [[piece] for piece in hidden]
    original = pieces(parts[0])
    at: list[int] = []
    for group, part in zip(groups, parts[1:], strict=True):
        at += range(len(original), len(original) + len(group))
        original += [*group, *pieces(part)]
    limit = min(realm.options.query_wordpieces - 2, realm.options.reader_wordpieces - 3)
    if len(original) > limit:
        raise ValueError(f"the sentence has {len(original)} wordpieces, at most {limit} are read: shorten it")
    whole, positions = np.array(original, dtype=np.int64), np.array(at, dtype=np.int64)
    x = whole.copy()
    x[positions] = realm.special.mask
    return Example(NULL, whole, x, positions, whole[positions], sentence.replace(MASK, " "))
