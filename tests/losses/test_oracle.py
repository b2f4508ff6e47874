"""The oracle on the enumerable problem: every printed figure, and every claim 'exact' to 1e-12."""

from __future__ import annotations

import pytest
import torch

from tests import oracles

Q, P, MU, A = oracles.Q, oracles.REFERENCE, oracles.SAMPLER, oracles.ADVANTAGES
TERM = oracles.SAMPLED_TERMS

# (term, sampler) -> gradient with respect to the logits, to the digits printed (half a unit of the last one)
PRINTED = [
    ("k1", Q, (0.0, 0.0, 0.0), 4),
    ("k1", MU, (-0.2, 0.1, 0.1), 4),
    ("k2", Q, (0.4325, -0.2081, -0.2244), 4),
    ("k2", MU, (0.498, -0.158, -0.340), 3),
    ("k3", Q, (0.5, -0.1, -0.4), 4),
    ("k3", MU, (0.772, -0.031, -0.741), 3),
    ("exp(n) k3", Q, (0.207, -0.133, -0.074), 3),
    ("exp(p) (p-n)", Q, (0.035, -0.010, -0.025), 3),
    ("r k3", Q, (0.4325, -0.2081, -0.2244), 4),
    ("r k3", MU, (0.4325, -0.2081, -0.2244), 4),
    ("sg(r) k2", Q, (0.4325, -0.2081, -0.2244), 4),
    ("sg(r) k2", MU, (0.4325, -0.2081, -0.2244), 4),
    ("r k2", Q, (0.495, -0.331, -0.164), 3),
    ("sg(r) k3", Q, (0.5, -0.1, -0.4), 4),
    ("sg(r) k3", MU, (0.5, -0.1, -0.4), 4),
]


@pytest.mark.parametrize(("name", "sampler", "printed", "digits"), PRINTED)
def test_printed_figure(name, sampler, printed, digits):
    got = oracles.expected_gradient(TERM[name], sampler)
    torch.testing.assert_close(got, torch.tensor(printed, dtype=torch.float64), rtol=0, atol=0.5 * 10**-digits + 1e-9)


def closed_reverse_kl_gradient(q=Q, p=P):
    """q_v (log q_v/p_v - KL), by hand, so that autograd is not its own judge."""
    log_ratio = (q / p).log()
    return q * (log_ratio - (q * log_ratio).sum())


@pytest.mark.parametrize(
    ("name", "sampler", "exact"),
    [
        ("k1", Q, torch.zeros(3, dtype=torch.float64)),
        ("k1", MU, MU - Q),  # minus the gradient of KL(mu || q)
        ("k2", Q, closed_reverse_kl_gradient()),
        ("k3", Q, Q - P),
        ("r k3", Q, closed_reverse_kl_gradient()),
        ("r k3", MU, closed_reverse_kl_gradient()),
        ("sg(r) k2", Q, closed_reverse_kl_gradient()),
        ("sg(r) k2", MU, closed_reverse_kl_gradient()),
        ("sg(r) k3", Q, Q - P),
        ("sg(r) k3", MU, Q - P),
    ],
)
def test_exact_claim(name, sampler, exact):
    torch.testing.assert_close(oracles.expected_gradient(TERM[name], sampler), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_off_policy_bias(name):
    exact = oracles.expected_gradient(TERM[name], Q)
    assert (oracles.expected_gradient(TERM[name], MU) - exact).abs().max() > 0.01


@pytest.mark.parametrize("name", ["exp(n) k3", "exp(p) (p-n)", "r k2"])
def test_no_divergence_is_trained(name):
    got = oracles.expected_gradient(TERM[name], Q)
    for divergence in (oracles.reverse_kl, oracles.forward_kl):
        assert (got - oracles.true_gradient(divergence)).abs().max() > 0.01


def test_true_gradients_and_value():
    torch.testing.assert_close(
        oracles.true_gradient(oracles.reverse_kl), closed_reverse_kl_gradient(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(oracles.true_gradient(oracles.forward_kl), Q - P, rtol=0, atol=1e-12)
    value = oracles.reverse_kl(Q.log(), P.log())
    assert abs(float(value) - 0.6349) < 5e-5
    assert abs(float(value) - float((Q * (Q / P).log()).sum())) < 1e-12


def test_sum_over_vocabulary_of_exp_n_k3_is_the_reverse_kl():
    z = Q.log().requires_grad_(True)
    n = oracles.log_softmax(z)
    value = (n.exp() * oracles.k3(n, P.log())).sum()
    torch.testing.assert_close(value, oracles.reverse_kl(Q.log(), P.log()), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(value, z)[0], closed_reverse_kl_gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sampler", [Q, MU])
def test_surrogate_follows_the_policy_gradient(sampler):
    def loss_gradient(ratio):
        z = Q.log().requires_grad_(True)
        n = oracles.log_softmax(z)
        old = sampler.log()
        value = sum(sampler[y] * -ratio(n[y], old[y]) * A[y] for y in range(3))
        return torch.autograd.grad(value, z)[0]

    closed = Q * (A - (Q * A).sum())
    torch.testing.assert_close(oracles.policy_gradient(), closed, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss_gradient(oracles.token_ratio), -closed, rtol=0, atol=1e-12)
    torch.testing.assert_close(-closed, -torch.tensor([0.3150, -0.3100, -0.0050]).double(), rtol=0, atol=5e-5)
    assert torch.equal(loss_gradient(oracles.unit_ratio), torch.zeros(3, dtype=torch.float64))


def test_sequence_ratio_is_the_geometric_mean():
    n = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    o = torch.tensor([-1.5, -1.0, -0.7], dtype=torch.float64)
    ratio = oracles.sequence_ratio(n, o)
    geometric = torch.exp(n - o).prod() ** (1 / 3)
    torch.testing.assert_close(ratio, geometric.expand(3), rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(ratio[0], n)
    torch.testing.assert_close(grad, geometric.detach().expand(3) / 3, rtol=0, atol=1e-12)


def test_aggregations_by_hand():
    rows = [torch.tensor([1.0, 3.0]), torch.tensor([]), torch.tensor([8.0])]
    assert oracles.aggregate(rows, "sequence_mean") == (2 + 8) / 2
    assert oracles.aggregate(rows, "sequence_mean", num_sequences=4) == (2 + 8) / 4
    assert oracles.aggregate(rows, "token_mean") == 4
    assert oracles.aggregate(rows, "token_mean", num_items=6) == 2
    assert oracles.aggregate(rows, "constant", constant=4) == 12 / 8


def test_sampling_weight_by_hand():
    o = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    mu = torch.tensor([-1.5, -3.0], dtype=torch.float64)
    rate = torch.exp(torch.tensor([0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(oracles.sampling_weight(o, mu, "token", "truncate", 100.0), rate)
    torch.testing.assert_close(oracles.sampling_weight(o, mu, "sequence", "truncate", 100.0), rate.prod().expand(2))
    assert torch.equal(oracles.sampling_weight(o, mu, "sequence", "truncate", 3.0), torch.tensor([3.0, 3.0]).double())
    torch.testing.assert_close(oracles.sampling_weight(o, mu, "token", "mask", 2.0)[0], rate[0])
    assert oracles.sampling_weight(o, mu, "token", "mask", 2.0)[1] == 0
