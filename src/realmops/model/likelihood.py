"""The equations of REALM as pure functions of scores (paper, sections 3.2 to 3.4, appendices A, B and D).

Everything is in log space: a sum of wordpieces' log probabilities may reach -2,000, whose exponential is 0.

Shape suffixes: B examples, K candidates (the null document included), M masked wordpieces of an example,
S spans, Q queries, P passages.
"""

import torch
from torch import Tensor


def log_prior(relevance_BK: Tensor) -> Tensor:
    """log p(z|x): softmax of the relevance f(x, z) over the candidates (section 3.2, equation for p(z|x))."""
    return relevance_BK.log_softmax(-1)


def log_likelihood_given_document(log_token_BKM: Tensor, is_mask_BM: Tensor) -> Tensor:
    """log p(y|z,x): the sum over masked wordpieces of their log probabilities (section 3.2), B x K.

    ``is_mask_BM`` is False where an example has fewer than M masks.
    """
    return log_token_BKM.masked_fill(~is_mask_BM[:, None, :], 0.0).sum(-1)


def log_marginal_joint(log_prior_BK: Tensor, log_likelihood_BK: Tensor) -> Tensor:
    """log p(y|x), equation 1: the sum over z of p(z|x) times the PRODUCT over masked wordpieces."""
    return (log_prior_BK + log_likelihood_BK).logsumexp(-1)


def log_marginal_per_token(log_prior_BK: Tensor, log_token_BKM: Tensor, is_mask_BM: Tensor) -> Tensor:
    """The released code's form: the sum over z for EACH masked wordpiece, then the sum over wordpieces.

    Equal to :func:`log_marginal_joint` for one masked wordpiece only.
    """
    per_token_BM = (log_prior_BK[:, :, None] + log_token_BKM).logsumexp(1)
    return per_token_BM.masked_fill(~is_mask_BM, 0.0).sum(-1)


def log_posterior(log_prior_BK: Tensor, log_likelihood_BK: Tensor) -> Tensor:
    """log p(z|y,x) by Bayes' rule (appendix A)."""
    return (log_prior_BK + log_likelihood_BK).log_softmax(-1)


def retrieval_utility(log_likelihood_BK: Tensor, log_likelihood_null_B: Tensor) -> Tensor:
    """RU(z|x) = log p(y|z,x) - log p(y|null,x), for each document (appendix D, equation 2)."""
    return log_likelihood_BK - log_likelihood_null_B[:, None]


def marginal_gain(log_marginal_B: Tensor, log_likelihood_null_B: Tensor) -> Tensor:
    """log p(y|x) - log p(y|null,x): what the released code calls retrieval utility."""
    return log_marginal_B - log_likelihood_null_B


def in_batch_loss(relevance_QP: Tensor, own_Q: Tensor) -> Tensor:
    """Inverse cloze task: -log softmax of the own passage among all passages of the batch (section 3.4), per query."""
    return -relevance_QP.log_softmax(-1).gather(1, own_Q[:, None])[:, 0]


def log_sum_correct(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """log(sum over correct / sum over all) of exponentiated scores; -inf where nothing is correct.

    Entries with score -inf do not exist.  It is the marginal over the spans that match the answer
    (section 3.2, fine-tuning) and, over passages, ORQA's early retriever loss.
    """
    correct_B = score_BS.masked_fill(~is_correct_BS, -torch.inf).logsumexp(-1)
    return correct_B - score_BS.logsumexp(-1)


def marginal_span_loss(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """-log of the share of the correct, per question; 0 where nothing correct exists, so that it teaches nothing."""
    score_BS, is_correct_BS, _ = _taught(score_BS, is_correct_BS)
    return -log_sum_correct(score_BS, is_correct_BS)


def hard_em_span_loss(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """-log of the likeliest of the correct alone (hard EM, Min et al. 2019), per question; 0 where there is none."""
    score_BS, is_correct_BS, teaches_B = _taught(score_BS, is_correct_BS)
    best_B = score_BS.masked_fill(~is_correct_BS, -torch.inf).amax(-1)
    return torch.where(teaches_B, score_BS.logsumexp(-1) - best_B, 0.0)


def _taught(score_BS: Tensor, is_correct_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and correct entries, and whether a question has one that exists (a score above -inf).

    One that has none is given scores of 0 that all count as correct: log 1 = 0, and a gradient of 0 instead of NaN.
    """
    teaches_B = (is_correct_BS & (score_BS > -torch.inf)).any(-1)
    return torch.where(teaches_B[:, None], score_BS, 0.0), is_correct_BS | ~teaches_B[:, None], teaches_B
