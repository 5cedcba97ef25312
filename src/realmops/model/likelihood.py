"""The equations of REALM as pure functions of scores (paper, sections 3.2 to 3.4, appendices A, B and D).

Everything is in log space: a sum of wordpieces' log probabilities may reach -2,000, whose exponential is 0.

Shape suffixes: B examples, K candidates (the null document included), M masked wordpieces of an example,
S spans or passages, Q queries, P passages.
"""

import torch
from torch import Tensor


def log_prior(relevance_BK: Tensor) -> Tensor:
    """Compute log p(z|x): the log softmax of f(x, z) over the candidates (section 3.2)."""
    return relevance_BK.log_softmax(-1)


def log_likelihood_given_document(log_token_BKM: Tensor, is_mask_BM: Tensor) -> Tensor:
    """Compute log p(y|z,x), B x K: the sum over the masked wordpieces that exist (section 3.2)."""
    return log_token_BKM.masked_fill(~is_mask_BM[:, None, :], 0.0).sum(-1)


def log_marginal_joint(log_prior_BK: Tensor, log_likelihood_BK: Tensor) -> Tensor:
    """Compute log p(y|x), equation 1: the sum over z of p(z|x) times the PRODUCT over masked wordpieces."""
    return (log_prior_BK + log_likelihood_BK).logsumexp(-1)


def log_marginal_per_token(log_prior_BK: Tensor, log_token_BKM: Tensor, is_mask_BM: Tensor) -> Tensor:
    """Compute the released code's objective: the sum over z for EACH masked wordpiece, then over wordpieces."""
    per_token_BM = (log_prior_BK[:, :, None] + log_token_BKM).logsumexp(1)
    return per_token_BM.masked_fill(~is_mask_BM, 0.0).sum(-1)


def log_posterior(log_prior_BK: Tensor, log_likelihood_BK: Tensor) -> Tensor:
    """Compute log p(z|y,x) by Bayes' rule (appendix A)."""
    return (log_prior_BK + log_likelihood_BK).log_softmax(-1)


def retrieval_utility(log_likelihood_BK: Tensor, log_likelihood_null_B: Tensor) -> Tensor:
    """Compute RU(z|x) = log p(y|z,x) - log p(y|null,x) of each document (appendix D, equation 2)."""
    return log_likelihood_BK - log_likelihood_null_B[:, None]


def marginal_gain(log_marginal_B: Tensor, log_likelihood_null_B: Tensor) -> Tensor:
    """Compute log p(y|x) - log p(y|null,x), which the released code calls retrieval utility."""
    return log_marginal_B - log_likelihood_null_B


def in_batch_loss(relevance_QP: Tensor, own_Q: Tensor) -> Tensor:
    """Compute the inverse cloze loss per query: cross entropy of its passage among those in the batch (section 3.4)."""
    return -relevance_QP.log_softmax(-1).gather(1, own_Q[:, None])[:, 0]


def log_sum_correct(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """Compute the log of the probability mass on correct entries; a score of -inf marks a missing entry.

    Over spans this is the marginal of fine-tuning (section 3.2), over passages ORQA's early retriever loss.
    """
    correct_B = score_BS.masked_fill(~is_correct_BS, -torch.inf).logsumexp(-1)
    return correct_B - score_BS.logsumexp(-1)


def marginal_span_loss(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """Compute -log of the probability mass on correct entries, per question; 0 without a correct entry."""
    score_BS, is_correct_BS, _ = _mask_unanswerable(score_BS, is_correct_BS)
    return -log_sum_correct(score_BS, is_correct_BS)


def hard_em_span_loss(score_BS: Tensor, is_correct_BS: Tensor) -> Tensor:
    """Compute -log p of the most probable correct entry (hard EM, Min et al. 2019), per question; 0 without one."""
    score_BS, is_correct_BS, has_correct_B = _mask_unanswerable(score_BS, is_correct_BS)
    best_B = score_BS.masked_fill(~is_correct_BS, -torch.inf).amax(-1)
    return torch.where(has_correct_B, score_BS.logsumexp(-1) - best_B, 0.0)


def _mask_unanswerable(score_BS: Tensor, is_correct_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    has_correct_B = (is_correct_BS & (score_BS > -torch.inf)).any(-1)
    return torch.where(has_correct_B[:, None], score_BS, 0.0), is_correct_BS | ~has_correct_B[:, None], has_correct_B
