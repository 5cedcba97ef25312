"""What a pre-trained model makes of one masked sentence: its candidates, what each is worth, and its guess.

The paper's Table 3 for a sentence of one's own: the words behind [MASK] without retrieval, with each passage, and with
the marginal over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch

from realmops import artifacts
from realmops.config import parse_section
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.report import page_of, table_of
from realmops.index.embed import embed, query_sequences
from realmops.model import likelihood
from realmops.model.files import load_models
from realmops.model.retriever import Retriever
from realmops.stages import STAGES
from realmops.stages.common import INDEX, load_index, passage_embeddings, prepare
from realmops.train.pretrain import NULL, Candidates, Example, Index, Realm

MASK = "[MASK]"
NULL_TITLE = "(null document)"


@dataclass(frozen=True)
class Candidate:
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
class Explanation:
    """A masked sentence explained. ``y`` is the answer that was given, or else the marginal's guess."""

    sentence: str
    y: str
    index: str
    with_retrieval: Guess
    without_retrieval: Guess
    p_y: float  # p(y|x), equation 1
    p_y_without: float  # p(y|null, x): what a BERT without retrieval says
    candidates: tuple[Candidate, ...]  # by p(z|x), the null document last


def explain(sentence: str, root: Path, *, answer: str | None = None) -> Explanation:
    """Explain a sentence with [MASK] by the models that ``pretrain`` left under ``root``.

    Args:
        answer: the words behind the mask; a single [MASK] then stands for all of their wordpieces.

    Raises ValueError when the sentence has no [MASK], when it is too long, when the answer has another number of
    wordpieces than there are masks, and when pre-training has no null document to compare with.
    """
    trained = root / STAGES["pretrain"].folder
    sections = artifacts.read_manifest(trained, "pretrain")["sections"]
    options, run = (parse_section(name, sections[name], str(trained)) for name in ("pretrain", "run"))
    if not options.null_document:
        raise ValueError(f"{trained} was trained with pretrain.null_document=false: there is nothing to compare with")
    device, dtype = prepare(run)
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    retriever, reader = load_models(trained, snapshot.vocabulary_hash)
    retriever.to(device).eval()
    reader.to(device).eval()
    realm = Realm(retriever, reader, snapshot, options, dtype)
    example = _example(sentence, answer, snapshot, realm)
    tuned = root / STAGES["finetune"].folder
    if _same_passage_tower(tuned, retriever, snapshot):
        passages, index = load_index(tuned, snapshot), f"that of {tuned}, of the same weights"
    else:
        passages, index = passage_embeddings(trained, retriever, snapshot, dtype), "made now, with these weights"
    with torch.no_grad():
        query_BE = embed(retriever.query, query_sequences(realm.queries([example])), dtype)
        found = Candidates(snapshot, options).retrieve([example], query_BE, Index(0, passages, retriever, 0.0, False))
        prior_BK, missing_BK = realm.log_prior([example], found)
        log_word_KMV = realm.log_words(example, found[0])
    log_prior_K = prior_BK[0, ~missing_BK[0]].double()
    return _explanation(sentence, example, found[0], log_prior_K, log_word_KMV.double(), snapshot, answer, index)


def _same_passage_tower(tuned: Path, retriever: Retriever, snapshot: Snapshot) -> bool:
    """Whether the index of a fine-tuned model, whose passage tower is frozen, is that of this retriever."""
    if not (tuned / INDEX).is_file():
        return False
    theirs = load_models(tuned, snapshot.vocabulary_hash)[0].document.state_dict()
    ours = retriever.document.state_dict()
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name].cpu()) for name in ours)


def _example(sentence: str, answer: str | None, snapshot: Snapshot, realm: Realm) -> Example:
    parts = sentence.split(MASK)
    if len(parts) == 1:
        raise ValueError(f"the sentence has no {MASK}: put it in the place of the words to guess")

    def pieces(text: str) -> list[int]:
        found: list[int] = snapshot.tokenizer.encode(text, add_special_tokens=False).ids
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
    return Example(NULL, whole, x, positions, whole[positions])


def _explanation(
    sentence: str,
    example: Example,
    passages: list[int],
    log_prior_K: torch.Tensor,
    log_word_KMV: torch.Tensor,
    snapshot: Snapshot,
    answer: str | None,
    index: str,
) -> Explanation:
    """``log_prior_K`` and ``log_word_KMV`` have the null document last."""

    def log_likelihood(y_M: torch.Tensor) -> torch.Tensor:
        return log_word_KMV.gather(2, y_M.expand(len(log_word_KMV), -1)[:, :, None]).sum((1, 2))

    def words(y_M: torch.Tensor) -> str:
        text: str = snapshot.tokenizer.decode(y_M.tolist(), skip_special_tokens=False)
        return text

    guess_KM = log_word_KMV.argmax(-1)  # masks are independent given z, so this is the likeliest y of each z
    marginal_K = torch.stack([(log_prior_K + log_likelihood(y_M)).logsumexp(0) for y_M in guess_KM])
    best_M = guess_KM[int(marginal_K.argmax())]
    y_M = torch.from_numpy(example.targets) if answer is not None else best_M
    given_K = log_likelihood(y_M)
    posterior_K = likelihood.log_posterior(log_prior_K[None], given_K[None])[0].exp()
    utility_K = likelihood.retrieval_utility(given_K[None], given_K[-1:])[0]
    named = [*((snapshot.title(p), snapshot.passage_id(p)) for p in passages), (NULL_TITLE, "")]
    numbers = zip(*(v.tolist() for v in (log_prior_K.exp(), posterior_K, given_K.exp(), utility_K)), strict=True)
    candidates = tuple(
        Candidate(title, passage, p_z, p_z_given_y, p_y, utility, words(guess_M))
        for (title, passage), (p_z, p_z_given_y, p_y, utility), guess_M in zip(named, numbers, guess_KM, strict=True)
    )
    return Explanation(
        sentence,
        words(y_M),
        index,
        Guess(words(best_M), float(marginal_K.max().exp())),
        Guess(words(guess_KM[-1]), float(log_likelihood(guess_KM[-1])[-1].exp())),
        float((log_prior_K + given_K).logsumexp(0).exp()),
        float(given_K[-1].exp()),
        candidates,
    )


def lines(found: Explanation) -> list[str]:
    """For a terminal."""
    rows = [
        found.sentence,
        f"  REALM:             {found.with_retrieval.words}  (p = {found.with_retrieval.probability:.3g})",
        f"  without retrieval: {found.without_retrieval.words}  (p = {found.without_retrieval.probability:.3g})",
        f"  y = {found.y}: p(y|x) = {found.p_y:.3g}, without retrieval {found.p_y_without:.3g}",
        f"  index: {found.index}",
        "   p(z|x)  p(z|x,y)  p(y|z,x)  utility  passage: its own guess",
    ]
    for c in found.candidates:
        name = f"{c.title} [{c.passage_id[:12]}]" if c.passage_id else c.title
        rows.append(f"  {c.p_z:7.3f}  {c.p_z_given_y:8.3f}  {c.p_y:8.3g}  {c.utility:+7.2f}  {name}: {c.guess}")
    return rows


def as_page(found: Explanation) -> str:
    """One HTML page that opens without a network."""
    head = ("p(z|x)", "p(z|x,y)", "p(y|z,x)", "utility, nats", "document", "its own guess")
    rows = [
        (
            f"{c.p_z:.3f}",
            f"{c.p_z_given_y:.3f}",
            f"{c.p_y:.3g}",
            f"{c.utility:+.2f}",
            f"{c.title} {c.passage_id}",
            c.guess,
        )
        for c in found.candidates
    ]
    guesses = {"REALM": found.with_retrieval, "without retrieval": found.without_retrieval}
    said = "".join(f"<p>{name}: <b>{escape(g.words)}</b>, p = {g.probability:.3g}</p>" for name, g in guesses.items())
    return page_of(
        "A masked sentence",
        [
            f'<div class="card"><p class="question">{escape(found.sentence)}</p>{said}<p>y = {escape(found.y)}: '
            f"p(y|x) = {found.p_y:.3g}, without retrieval {found.p_y_without:.3g}</p></div>",
            f'<div class="card scroll">{table_of(head, rows)}</div>',
        ],
    )
