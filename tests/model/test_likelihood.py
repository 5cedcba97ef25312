"""Every equation of the paper's sections 3.2 to 3.4 and appendices A, B and D against a slow version.

The slow versions are loops over documents z and masked words j in probability space, in the paper's letters:
f(x, z), p(z|x), p(y_j|z, x), p(y|z, x), p(y|x), r(z). Shape suffixes as in model/likelihood.py.
"""

import math

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
    total = 0.0
    for value in f:
        total += math.exp(value)
    return [math.exp(value) / total for value in f]


def p_y_given_zx(p_token: list[float]) -> float:
    """Section 3.2: p(y|z, x) = product over j of p(y_j|z, x)."""
    product = 1.0
    for p in p_token:
        product *= p
    return product


def p_y_given_x(p_z: list[float], p_y: list[float]) -> float:
    """Equation 1: p(y|x) = sum over z of p(y|z, x) p(z|x)."""
    return sum(y * z for y, z in zip(p_y, p_z, strict=True))


def r(z: int, p_z: list[float], p_y: list[float]) -> float:
    """Section 3.3: r(z) = [p(y|z, x) / p(y|x) - 1] p(z|x)."""
    return (p_y[z] / p_y_given_x(p_z, p_y) - 1) * p_z[z]


def slow(relevance_BK: Tensor, log_token_BKM: Tensor, b: int) -> tuple[list[float], list[list[float]]]:
    """p(z|x) for each z, and p(y_j|z, x) for each z and masked word j, of one example."""
    tokens = [[math.exp(v) for v in row[: MASKS[b]]] for row in log_token_BKM[b].tolist()]
    return p_z_given_x(relevance_BK[b].tolist()), tokens


def same(found: Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def joint(relevance_BK: Tensor, log_token_BKM: Tensor) -> Tensor:
    log_prior_BK = likelihood.log_prior(relevance_BK)
    log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM)
    return likelihood.log_marginal_joint(log_prior_BK, log_likelihood_BK)


def test_prior_and_likelihood_of_section_3_2(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    priors, likelihoods = [], []
    for b in range(B):
        p_z, tokens = slow(relevance_BK, log_token_BKM, b)
        priors.append(p_z)
        likelihoods.append([p_y_given_zx(row) for row in tokens])
    same(likelihood.log_prior(relevance_BK).exp(), priors)
    same(likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM).exp(), likelihoods)


def test_marginal_of_equation_1(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    expected = []
    for b in range(B):
        p_z, tokens = slow(relevance_BK, log_token_BKM, b)
        expected.append(p_y_given_x(p_z, [p_y_given_zx(row) for row in tokens]))
    same(joint(relevance_BK, log_token_BKM).exp(), expected)


def test_marginal_of_the_release(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """A sum over documents for each masked word, the product over words outside it."""
    expected = []
    for b in range(B):
        p_z, tokens = slow(relevance_BK, log_token_BKM, b)
        product = 1.0
        for j in range(MASKS[b]):
            product *= sum(p_z[z] * tokens[z][j] for z in range(K))
        expected.append(product)
    log_prior_BK = likelihood.log_prior(relevance_BK)
    found = likelihood.log_marginal_per_token(log_prior_BK, log_token_BKM, IS_MASK_BM)
    same(found.exp(), expected)
    both = joint(relevance_BK, log_token_BKM)
    assert found[2].item() == pytest.approx(both[2].item(), rel=1e-12), "one mask: the two forms are one"
    assert (found[:2] - both[:2]).abs().min() > 1e-3, "several masks: they are not"


def test_posterior_of_appendix_a(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """p(z|y, x) = p(y|z, x) p(z|x) / p(y|x)."""
    expected = []
    for b in range(B):
        p_z, tokens = slow(relevance_BK, log_token_BKM, b)
        p_y = [p_y_given_zx(row) for row in tokens]
        expected.append([p_y[z] * p_z[z] / p_y_given_x(p_z, p_y) for z in range(K)])
    log_prior_BK = likelihood.log_prior(relevance_BK)
    log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM)
    same(likelihood.log_posterior(log_prior_BK, log_likelihood_BK).exp(), expected)


def test_the_retrievers_gradient_is_r_of_z(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """Section 3.3: d log p(y|x) / d f(x, z) = r(z), by formula and by autograd."""
    relevance_BK.requires_grad_()
    (gradient_BK,) = torch.autograd.grad(joint(relevance_BK, log_token_BKM).sum(), relevance_BK)
    expected = []
    for b in range(B):
        p_z, tokens = slow(relevance_BK.detach(), log_token_BKM, b)
        p_y = [p_y_given_zx(row) for row in tokens]
        expected.append([r(z, p_z, p_y) for z in range(K)])
        better = [p > p_y_given_x(p_z, p_y) for p in p_y]
        assert [value > 0 for value in expected[b]] == better, "positive where z does better than expected"
    same(gradient_BK, expected)


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


def test_utilities_of_appendix_d(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
    """Equation 2 for each document; the release's metric compares the marginal instead. The null is last."""
    log_prior_BK = likelihood.log_prior(relevance_BK)
    log_likelihood_BK = likelihood.log_likelihood_given_document(log_token_BKM, IS_MASK_BM)
    utilities, gains = [], []
    for b in range(B):
        p_z, tokens = slow(relevance_BK, log_token_BKM, b)
        p_y = [p_y_given_zx(row) for row in tokens]
        utilities.append([math.log(p) - math.log(p_y[-1]) for p in p_y])
        gains.append(math.log(p_y_given_x(p_z, p_y)) - math.log(p_y[-1]))
    null_B = log_likelihood_BK[:, -1]
    same(likelihood.retrieval_utility(log_likelihood_BK, null_B), utilities)
    same(likelihood.marginal_gain(joint(relevance_BK, log_token_BKM), null_B), gains)
    assert [row[-1] for row in utilities] == [0.0] * B
    assert log_prior_BK.shape == (B, K)


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


def test_posterior_at_minus_log_p_of_2000() -> None:
    log_prior_BK = likelihood.log_prior(torch.tensor([[0.0, 0.0]], dtype=F64))
    log_likelihood_BK = torch.tensor([[-2000.0, -2000.0 - math.log(3)]], dtype=F64)
    same(likelihood.log_posterior(log_prior_BK, log_likelihood_BK).exp(), [[0.75, 0.25]])


def test_a_candidate_that_does_not_exist_changes_nothing(relevance_BK: Tensor, log_token_BKM: Tensor) -> None:
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
def test_a_question_with_nothing_to_choose_teaches_nothing(name: str) -> None:
    """Nothing correct, rows of -inf, a correct entry that does not exist: loss and gradient are 0, beside others."""
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
