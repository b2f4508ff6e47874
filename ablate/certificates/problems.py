"""Problems small enough to enumerate: every completion, its probability, and the true gradients, in float64.

A policy is a matrix W (V, K): the token after a prefix with state h (K,) has logits W h, so that all prefixes share the
parameters. A problem holds three of them, the policy q, the reference p and the sampler s, and a reward for each
completion. Off-policy, completions are drawn from s, which is also the old policy; on-policy from q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

F64 = torch.float64


@dataclass(frozen=True, eq=False)
class Problem:
    """ids, mask (N, T): every completion there is; states (N, T, K): of the prefix before each token; policy,
    reference, sampler (V, K); rewards (N,); temperature: divides the logits of all three."""

    name: str
    ids: Tensor
    mask: Tensor
    states: Tensor
    policy: Tensor
    reference: Tensor
    sampler: Tensor
    rewards: Tensor
    temperature: float = 1.0

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def log_softmax(self, weight: Tensor) -> Tensor:
        """(N, T, V) log-probs of every token after each prefix."""
        return torch.log_softmax(self.states @ weight.T / self.temperature, -1)

    def log_probs(self, weight: Tensor) -> Tensor:
        """(N, T) log-probs of the completions' tokens, 0 where masked."""
        logps = self.log_softmax(weight).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.mask, logps, 0.0)

    def probabilities(self, weight: Tensor) -> Tensor:
        """(N,) of the completions; they sum to 1."""
        return self.log_probs(weight).sum(-1).exp()

    def source(self, off_policy: bool) -> Tensor:
        """The matrix of the policy that draws the completions."""
        return self.sampler if off_policy else self.policy

    @cached_property
    def jacobian(self) -> Tensor:
        """d log_probs / d policy, (N, T, V K)."""
        whole = torch.autograd.functional.jacobian(self.log_probs, self.policy)
        return whole.reshape(*self.ids.shape, -1)

    def at_temperature(self, temperature: float) -> Problem:
        return replace(self, temperature=temperature)


def _matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


Q, REFERENCE, SAMPLER, REWARDS = (0.7, 0.2, 0.1), (0.2, 0.3, 0.5), (0.5, 0.3, 0.2), (1.0, -1.0, 0.5)
"""The bandit's probabilities and rewards."""


def bandit() -> Problem:
    """One token, three answers, q = (.7, .2, .1): the parameters are the logits."""
    return Problem(
        name="bandit",
        ids=torch.arange(3).unsqueeze(1),
        mask=torch.ones(3, 1, dtype=torch.bool),
        states=torch.ones(3, 1, 1, dtype=F64),
        policy=torch.tensor(Q, dtype=F64).log().unsqueeze(1),
        reference=torch.tensor(REFERENCE, dtype=F64).log().unsqueeze(1),
        sampler=torch.tensor(SAMPLER, dtype=F64).log().unsqueeze(1),
        rewards=torch.tensor(REWARDS, dtype=F64),
    )


STATES = _matrix([[1.0, 0.0], [0.6, 0.8], [-0.5, 0.7], [0.3, -0.9]])  # at the start, and after the tokens 0, 1, 2


def tree(stop: bool = False) -> Problem:
    """Two tokens of three, nine completions, six shared parameters. `stop`: token 0 ends a completion: seven remain."""
    pairs = [(a, b) for a in range(3) for b in range(3) if not (stop and a == 0 and b > 0)]
    ids = torch.tensor(pairs)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if stop:
        mask[:, 1] = ids[:, 0] != 0
    rewards = _matrix([[1.0, -1.0, 0.5], [-0.5, 1.5, 0.0], [0.25, -0.75, 1.0]])
    return Problem(
        name="tree with a stop token" if stop else "two-step tree",
        ids=ids,
        mask=mask,
        states=torch.stack([STATES[0].expand(len(pairs), 2), STATES[1 + ids[:, 0]]], 1),
        policy=_matrix([[0.9, -0.3], [0.1, 0.4], [-0.6, 0.2]]),
        reference=_matrix([[0.1, 0.5], [0.4, -0.2], [0.3, 0.6]]),
        sampler=_matrix([[0.5, -0.5], [0.3, 0.1], [-0.2, 0.4]]),
        rewards=torch.stack([rewards[a, b] for a, b in pairs]),
    )


# The truth ------------------------------------------------------------------------------------------------------------

POLICY_GRADIENT, LOCAL = "policy gradient", "local policy gradient"
REVERSE, FORWARD = "reverse KL", "forward KL"
SEQUENCE_REVERSE, SEQUENCE_FORWARD = "sequence reverse KL", "sequence forward KL"
AWAY = "minus KL(sampler || policy)"
NOTHING, BIASED = "nothing", "biased"

MEANING = {
    POLICY_GRADIENT: "the gradient of the expected reward (a loss descends its negative)",
    LOCAL: "the gradient of the expected reward when one token is drawn from the policy and the rest from the sampler "
    "(TRPO's local objective): what a token's ratio can correct",
    REVERSE: "the gradient of KL(policy || reference) of the next token, at the prefixes that were sampled, held fixed",
    FORWARD: "the gradient of KL(reference || policy) of the next token, at the prefixes that were sampled, held fixed",
    SEQUENCE_REVERSE: "the gradient of KL(policy || reference) between whole completions: a token answers for the KL "
    "of the prefixes it leads to as well",
    SEQUENCE_FORWARD: "the gradient of KL(reference || policy) between whole completions",
    AWAY: "descending it drives the policy away from the policy that drew the samples; the reference plays no part",
    NOTHING: "the expected gradient is zero",
    BIASED: "none of these",
}


def objectives(problem: Problem, policy: Tensor, off_policy: bool) -> dict[str, Tensor]:
    """What a loss may be meant to minimise, 0-d, as functions of `policy`; sums over tokens, not means."""
    log_q, log_p = problem.log_softmax(policy), problem.log_softmax(problem.reference)
    n, p = problem.log_probs(policy), problem.log_probs(problem.reference)
    source = problem.log_probs(problem.source(off_policy).detach())
    s, q = source.sum(-1).exp(), n.sum(-1).exp()
    reverse = torch.where(problem.mask, (log_q.exp() * (log_q - log_p)).sum(-1), 0.0)
    forward = torch.where(problem.mask, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    one_token = torch.where(problem.mask, (n - source).exp(), 0.0).sum(-1)
    return {
        POLICY_GRADIENT: -(q * problem.rewards).sum(),
        LOCAL: -(s * one_token * problem.rewards).sum(),
        REVERSE: (s * reverse.sum(-1)).sum(),
        FORWARD: (s * forward.sum(-1)).sum(),
        SEQUENCE_REVERSE: (q * (n - p).sum(-1)).sum(),
        SEQUENCE_FORWARD: (p.sum(-1).exp() * (p - n).sum(-1)).sum(),
        AWAY: -(s * (source - n).sum(-1)).sum(),
    }


SURROGATE_TARGETS = (POLICY_GRADIENT, LOCAL)
KL_TARGETS = (REVERSE, FORWARD, SEQUENCE_REVERSE, SEQUENCE_FORWARD, AWAY)


def true_gradients(problem: Problem, off_policy: bool) -> dict[str, Tensor]:
    """Each objective's gradient with respect to the policy, (V K,), by autograd through the enumeration."""
    policy = problem.policy.clone().requires_grad_(True)
    found = objectives(problem, policy, off_policy)
    return {k: torch.autograd.grad(v, policy, retain_graph=True)[0].reshape(-1) for k, v in found.items()}


def true_values(problem: Problem, off_policy: bool) -> dict[str, float]:
    """Each objective's value."""
    return {name: float(value) for name, value in objectives(problem, problem.policy, off_policy).items()}
