"""Every equation of the paper's sections 3.2 to 3.4 and appendices A, B and D against a slow version.

The slow versions are loops over documents z and masked words j in probability space, in the paper's letters:
f(x, z), p(z|x), p(y_j|z, x), p(y|z, x), p(y|x), r(z). Shape suffixes as in model/likelihood.py.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from realmops.model import likelihood

F64 = torch.float64
B, K, M = 3, 4, 5
MASKS = (3, 5, 1)  # J_x of each example


@pytest.fixture
def relevance_BK() -> Tensor:
    return 2 * torch.randn(B, K, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.fixture
def log_token_BKM() -> Tensor:
    """Log probabilities; where an example has no mask there is rubbish."""
    p = torch.rand(B, K, M, generator=torch.Generator().manual_seed(2), dtype=F64)
    return torch.where(IS_MASK_BM[:, None, :], p.log(), torch.tensor(123.0, dtype=F64))


IS_MASK_BM = torch.tensor([[j < count for j in range(M)] for count in MASKS])


def p_z_given_x(f: list[float]) -> list[float]:
    """Section 3.2: p(z|x) = exp f(x, z) / sum over z' of exp f(x, z')."""
    return [math.exp(value) / sum(map(math.exp, f)) for value in f]


def same(values: Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(values, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def joint(relevance_BK: Tensor, log_token_BKM: Tensor) -> Tensor:
    log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM)
    return likelihood.log_marginal_joint(likelihood.log_prior(relevance_BK), log_likelihood_BK)


def test_every_quantity_equals_loops_in_probability_space(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """The null document is the last candidate."""
    slow: dict[str, list[Any]] = {name: [] for name in ("p_z", "p_y_z", "p_y", "release", "p_z_y", "ru", "gain", "r")}
    for b in range(B):
        p_z = p_z_given_x(relevance_BK[b].tolist())
        tokens = [[math.exp(v) for v in row[: MASKS[b]]] for row in log_token_BKM[b].tolist()]
        p_y_z = [math.prod(row) for row in tokens]  # section 3.2
        p_y = sum(y * z for y, z in zip(p_y_z, p_z, strict=True))  # equation 1
        slow["p_z"].append(p_z)
        slow["p_y_z"].append(p_y_z)
        slow["p_y"].append(p_y)
        # the released code: a sum over documents for each masked word, the product over words outside it
        slow["release"].append(math.prod(sum(p_z[z] * tokens[z][j] for z in range(K)) for j in range(MASKS[b])))
        slow["p_z_y"].append([p_y_z[z] * p_z[z] / p_y for z in range(K)])  # appendix A
        slow["ru"].append([math.log(p) - math.log(p_y_z[-1]) for p in p_y_z])  # appendix D, equation 2
        slow["gain"].append(math.log(p_y) - math.log(p_y_z[-1]))
        slow["r"].append([(p_y_z[z] / p_y - 1) * p_z[z] for z in range(K)])  # section 3.3
    log_prior_BK = likelihood.log_prior(relevance_BK)
    log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM)
    marginal_B, null_B = joint(relevance_BK, log_token_BKM), log_likelihood_BK[:, -1]
    release_B = likelihood.log_marginal_per_token(log_prior_BK, log_token_BKM, IS_MASK_BM)
    same(log_prior_BK.exp(), slow["p_z"])
    same(log_likelihood_BK.exp(), slow["p_y_z"])
    same(marginal_B.exp(), slow["p_y"])
    same(release_B.exp(), slow["release"])
    same(likelihood.log_posterior(log_prior_BK, log_likelihood_BK).exp(), slow["p_z_y"])
    same(likelihood.retrieval_utility(log_likelihood_BK, null_B), slow["ru"])
    same(likelihood.marginal_gain(marginal_B, null_B), slow["gain"])
    assert release_B[2].item() == pytest.approx(marginal_B[2].item(), rel=1e-12), "equal for one mask"
    assert (release_B[:2] - marginal_B[:2]).abs().min() > 1e-3, "not for several"
    relevance_BK.requires_grad_()
    same(torch.autograd.grad(joint(relevance_BK, log_token_BKM).sum(), relevance_BK)[0], slow["r"])


@pytest.mark.parametrize("impossible", [-math.inf, -2000.0])
def test_the_supervised_limit_of_appendix_b(relevance_BK: Tensor, impossible: float) -> None:
    """Only z* predicts y: the gradient becomes that of log p(z*|x), which is 1 - p(z*|x) and -p(z|x)."""
    gold = [2, 0, 3]
    log_likelihood_BK = torch.full((B, K), impossible, dtype=F64)
    for b, z in enumerate(gold):
        log_likelihood_BK[b, z] = 0.0
    relevance_BK.requires_grad_()
    log_prior_BK = likelihood.log_prior(relevance_BK)
    marginal_B = likelihood.log_marginal_joint(log_prior_BK, log_likelihood_BK)
    (realm_BK,) = torch.autograd.grad(marginal_B.sum(), relevance_BK, retain_graph=True)
    (supervised_BK,) = torch.autograd.grad(log_prior_BK[range(B), gold].sum(), relevance_BK)
    same(realm_BK, supervised_BK.tolist())
    for b in range(B):
        p_z = p_z_given_x(relevance_BK[b].tolist())
        same(realm_BK[b], [float(z == gold[b]) - p_z[z] for z in range(K)])


def test_inverse_cloze_loss_of_section_3_4() -> None:
    """-log p(own passage | query) among all passages of the batch."""
    relevance_QP = torch.randn(3, 5, generator=torch.Generator().manual_seed(4), dtype=F64)
    own = [4, 0, 2]
    expected = [-math.log(p_z_given_x(row)[z]) for row, z in zip(relevance_QP.tolist(), own, strict=True)]
    same(likelihood.in_batch_loss(relevance_QP, torch.tensor(own)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("marginal", ["joint", "per_token"])
def test_minus_log_p_of_2000_stays_finite(dtype: torch.dtype, marginal: str) -> None:
    """Ten words of probability e^-200: exp(-2000) is 0, the loss 2,000, its gradient as usual."""
    relevance_BK = torch.tensor([[0.5, -0.5, 0.0]], dtype=dtype, requires_grad=True)
    # differences between documents: 2, 0 and 4 in one word of the ten
    log_token_BKM = torch.full((1, 3, 10), -200.0, dtype=dtype)
    log_token_BKM[0, :, 0] += torch.tensor([2.0, 0.0, 4.0], dtype=dtype)
    log_token_BKM.requires_grad_()
    is_mask_BM = torch.ones(1, 10, dtype=torch.bool)

    def loss(log_token_BKM: Tensor) -> Tensor:
        log_prior_BK = likelihood.log_prior(relevance_BK)
        if marginal == "per_token":
            return -likelihood.log_marginal_per_token(log_prior_BK, log_token_BKM, is_mask_BM).sum()
        log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, is_mask_BM)
        return -likelihood.log_marginal_joint(log_prior_BK, log_likelihood_BK).sum()

    far = loss(log_token_BKM)
    assert 1990 < far.item() < 2000
    far_BK, far_BKM = torch.autograd.grad(far, [relevance_BK, log_token_BKM])
    assert torch.isfinite(far_BK).all()
    assert torch.isfinite(far_BKM).all()
    near = loss(log_token_BKM + 200)
    near_BK, near_BKM = torch.autograd.grad(near, [relevance_BK, log_token_BKM])
    precision = {"rtol": 0.0, "atol": 1e-3 if dtype == torch.float32 else 1e-11}
    torch.testing.assert_close(far_BK, near_BK, **precision)
    torch.testing.assert_close(far_BKM, near_BKM, **precision)
    assert near_BK.abs().max() > 0.1


def test_a_missing_candidate_changes_nothing(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """A relevance of -inf takes a candidate out: marginal and gradient are as without it."""
    relevance_BK[:, 1] = -math.inf
    log_token_BKM[:, 1] = 0.0
    relevance_BK.requires_grad_()
    marginal_B = joint(relevance_BK, log_token_BKM)
    (gradient_BK,) = torch.autograd.grad(marginal_B.sum(), relevance_BK)
    rest = [0, 2, 3]
    fewer_BK = relevance_BK.detach()[:, rest].requires_grad_()
    fewer_B = joint(fewer_BK, log_token_BKM[:, rest])
    torch.testing.assert_close(marginal_B, fewer_B)
    torch.testing.assert_close(gradient_BK[:, rest], torch.autograd.grad(fewer_B.sum(), fewer_BK)[0])
    assert gradient_BK[:, 1].tolist() == [0.0] * B


def test_span_marginal_of_section_3_2() -> None:
    """p(y|x) = sum over matching spans of exp(score), over that of all; -inf marks no span."""
    score_BS = torch.tensor([[1.0, -0.5, 0.2, 2.0], [0.3, 0.1, -math.inf, -math.inf]], dtype=F64)
    is_correct_BS = torch.tensor([[True, False, True, False], [False, True, False, False]])
    expected = [
        (math.exp(1.0) + math.exp(0.2)) / (math.exp(1.0) + math.exp(-0.5) + math.exp(0.2) + math.exp(2.0)),
        math.exp(0.1) / (math.exp(0.3) + math.exp(0.1)),
    ]
    same(likelihood.log_sum_correct(score_BS, is_correct_BS).exp(), expected)
    same(likelihood.marginal_span_loss(score_BS, is_correct_BS), [-math.log(p) for p in expected])


@pytest.mark.parametrize("name", ["marginal_span_loss", "hard_em_span_loss"])
def test_a_question_without_correct_entries_has_no_loss_and_no_gradient(name: str) -> None:
    """Nothing correct, rows of -inf, a correct entry that does not exist: loss and gradient are 0, next to others."""
    some = [1.0, 2.0, -math.inf]
    score_BS = torch.tensor([[-math.inf] * 3, some, [-math.inf] * 3, some, some], dtype=F64, requires_grad=True)
    no = [False] * 3
    is_correct_BS = torch.tensor([no, [True, False, False], [True] * 3, [False, False, True], no])
    loss_B = getattr(likelihood, name)(score_BS, is_correct_BS)
    share = 1 / (1 + math.e)
    assert loss_B.tolist() == pytest.approx([0.0, -math.log(share), 0.0, 0.0, 0.0])
    (gradient_BS,) = torch.autograd.grad(loss_B.sum(), score_BS)
    assert gradient_BS[[0, 2, 3, 4]].tolist() == [[0.0] * 3] * 4
    assert gradient_BS[1].tolist() == pytest.approx([share - 1, 1 - share, 0.0])
    assert likelihood.log_sum_correct(score_BS[4:].detach(), is_correct_BS[4:]).tolist() == [-math.inf]
