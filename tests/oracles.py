"""Plain float64 transcriptions of the published formulas, one loop per sentence of the paper.

Nothing of `losses` is imported here: an oracle that shares code with what it judges proves nothing. Gradients come from
torch's autograd on these value expressions, never from a derivative written by hand. Masked positions are never read:
every function first picks the unmasked tokens, so whatever lies in the padding cannot matter.

Notation, per token: n = log pi_theta(y), o = log pi_old(y), p = log pi_ref(y), mu = the sampler's log-prob,
A the advantage, sg(x) = x without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

F64 = torch.float64


# The head: logits, log-probs, entropy, divergences ------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """z = softcap((h W^T + b) x scale) / temperature, softcap(x) = c tanh(x / c)."""

    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0


def logits(hidden: Tensor, weight: Tensor, head: Head | None = None) -> Tensor:
    """(..., H), (V, H) -> (..., V), in the dtype of `hidden` (float64 here; a budget calls it in float32)."""
    head = head or Head()
    z = hidden @ weight.T
    if head.bias is not None:
        z = z + head.bias
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / head.temperature


def log_softmax(z: Tensor) -> Tensor:
    """log p_v = z_v - log sum_u exp(z_u), shifted by the largest logit."""
    top = z.max(dim=-1, keepdim=True).values.detach()
    return z - top - (z - top).exp().sum(-1, keepdim=True).log()


def entropy(z: Tensor) -> Tensor:
    """-sum_v p_v log p_v, nats; a token whose probability underflows contributes 0."""
    logp = log_softmax(z)
    p = logp.exp()
    return -torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1)


def reverse_kl(z_policy: Tensor, z_reference: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary."""
    n, p = log_softmax(z_policy), log_softmax(z_reference)
    return (n.exp() * (n - p)).sum(-1)


def forward_kl(z_policy: Tensor, z_reference: Tensor) -> Tensor:
    """KL(reference || policy) over the whole vocabulary."""
    n, p = log_softmax(z_policy), log_softmax(z_reference)
    return (p.exp() * (p - n)).sum(-1)


def picked(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, head: Head | None = None) -> list[Tensor]:
    """Log-probs of the unmasked tokens, one 1-d tensor per completion."""
    out = []
    for b in range(ids.shape[0]):
        at = torch.nonzero(mask[b] != 0).flatten()
        logp = log_softmax(logits(hidden[b][at], weight, head))
        out.append(logp[torch.arange(len(at)), ids[b][at].long()])
    return out


def log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, head: Head | None = None) -> Tensor:
    """(B, T) log-probs, 0 at masked positions."""
    return scatter(picked(hidden, weight, ids, mask, head), mask)


def scatter(rows: list[Tensor], mask: Tensor) -> Tensor:
    """Puts per-completion lists of unmasked values back on (B, T), zeros elsewhere."""
    out = torch.zeros(mask.shape, dtype=rows[0].dtype if rows else F64)
    for b, row in enumerate(rows):
        out[b, torch.nonzero(mask[b] != 0).flatten()] = row
    return out


# Token terms --------------------------------------------------------------------------------------------------------


def k1(n: Tensor, p: Tensor) -> Tensor:
    return n - p


def k2(n: Tensor, p: Tensor) -> Tensor:
    return (n - p) ** 2 / 2


def k3(n: Tensor, p: Tensor) -> Tensor:
    """Schulman 2020: exp(p - n) - (p - n) - 1."""
    return torch.exp(p - n) - (p - n) - 1


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float | None, high: float | None) -> Tensor:
    """PPO's -min(r A, clip(r, 1 - low, 1 + high) A), -r A without clipping."""
    if low is None:
        return -ratio * advantage
    high = low if high is None else high
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


@dataclass(frozen=True)
class Definition:
    """A variant on paper. `ratio(n, o)` gives the ratio of every token of one completion, `kl(n, p)` its KL term (None:
    it has none), which `kl_weight(n, o)` multiplies; `shape(a, o, p, beta)` changes the advantages at first."""

    ratio: Callable[[Tensor, Tensor], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor] | None
    aggregation: str = "sequence_mean"
    kl_weight: Callable[[Tensor, Tensor], Tensor] | None = None
    shape: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None


def token_ratio(n: Tensor, o: Tensor) -> Tensor:
    """Shao et al. 2024: exp(n - sg(o))."""
    return torch.exp(n - o.detach())


def unit_ratio(n: Tensor, o: Tensor) -> Tensor:
    """The forgotten detach: exp(n - n), 1 with gradient 0."""
    return torch.exp(n - n)


def sequence_ratio(n: Tensor, o: Tensor) -> Tensor:
    """GSPO (Zheng et al. 2025): the geometric mean of the token ratios, the same for every token of the completion."""
    if len(n) == 0:
        return n
    return torch.exp((n - o.detach()).mean()).expand(len(n))


FOUNDING = {
    "reference": Definition(token_ratio, k3),
    "no_detach": Definition(unit_ratio, k3),
    "full_reverse_kl": Definition(token_ratio, lambda n, p: torch.exp(n) * k3(n, p)),
    "forward_kl": Definition(token_ratio, lambda n, p: torch.exp(p.detach()) * (p.detach() - n)),
}
"""The four variants of the founding experiment."""

DEFINITIONS = FOUNDING | {
    "dapo": Definition(token_ratio, k3, "token_mean"),  # Yu et al. 2025, eq. 8
    "dr_grpo": Definition(token_ratio, k3, "constant"),  # Liu et al. 2025, sec. 3.2
    "gspo": Definition(sequence_ratio, k3),  # Zheng et al. 2025, eq. 5-7
}
"""Registered variants; a new one needs its transcription here, or in tests/oracles_kl.py."""


# Sampling importance weight, aggregation, loss ----------------------------------------------------------------------


def sampling_weight(o: Tensor, mu: Tensor, level: str, mode: str, cap: float) -> Tensor:
    """TRL's correction for a sampler that is not the trainer, for the unmasked tokens of one completion.

    level "sequence": exp(sum (o - mu)) for all tokens; "token": exp(o - mu) each. mode "truncate": at most `cap`;
    "mask": 0 above `cap`.
    """
    diff = (o - mu).detach()
    if level == "sequence":
        diff = diff.sum().expand(len(diff))
    weight = torch.exp(diff)
    if mode == "truncate":
        return torch.minimum(weight, torch.full_like(weight, cap))
    return torch.where(weight > cap, torch.zeros_like(weight), weight)


def aggregate(
    rows: list[Tensor],
    kind: str,
    num_items: float | None = None,
    num_sequences: float | None = None,
    constant: float | None = None,
) -> Tensor:
    """One scalar from per-completion lists of token losses (masked tokens already left out).

    "sequence_mean": mean over a completion's tokens, then over the completions that have any;
    "token_mean": sum over all tokens by their number; "constant": sum over all tokens by `constant` per completion;
    "sequence_sum": sum over a completion's tokens, mean over the completions that have any.
    """
    total = sum((row.sum() * 0 for row in rows), torch.zeros((), dtype=rows[0].dtype))
    filled = [row for row in rows if len(row)]
    items = sum(len(row) for row in rows) if num_items is None else num_items
    sequences = len(filled) if num_sequences is None else num_sequences
    for row in filled:
        if kind == "sequence_mean":
            total = total + row.mean() / sequences
        elif kind == "token_mean":
            total = total + row.sum() / items
        else:
            assert kind in ("sequence_sum", "constant"), kind
            total = total + row.sum() / (sequences if kind == "sequence_sum" else sequences * constant)
    return total


@dataclass(frozen=True)
class Batch:
    """What a loss sees besides the model, (B, T) or (B,), any dtype; read at unmasked positions only."""

    ids: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    sampling: Tensor | None = None
    num_items: float | None = None
    num_sequences: float | None = None


@dataclass(frozen=True)
class Options:
    """Parameters of a loss, under the names of the papers."""

    beta: float = 0.04
    epsilon: float | None = None
    epsilon_high: float | None = None
    sampling_level: str = "sequence"
    sampling_mode: str = "truncate"
    sampling_cap: float = 3.0
    constant: float | None = None
    aggregation: str | None = None


@dataclass
class Terms:
    """Per completion and unmasked token: the loss, and what is logged."""

    loss: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    own_kl: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    high: list[Tensor] = field(default_factory=list)
    ratio: list[Tensor] = field(default_factory=list)


def terms(definition: Definition, rows: list[Tensor], batch: Batch, options: Options) -> Terms:
    """Token losses w x surrogate + beta x KL of every completion; `rows` as `picked` gives them."""
    out = Terms()
    for b, n in enumerate(rows):
        at = torch.nonzero(batch.mask[b] != 0).flatten()

        def column(values: Tensor, b: int = b, at: Tensor = at, dtype: torch.dtype = n.dtype) -> Tensor:
            return values[b][at].to(dtype).detach()

        per_token = batch.advantages.ndim == 2
        a = column(batch.advantages if per_token else batch.advantages[:, None].expand(batch.ids.shape))
        o = n.detach() if batch.old is None else column(batch.old)
        if definition.shape is not None and batch.ref is not None:
            a = definition.shape(a, o, column(batch.ref), options.beta)
        ratio = definition.ratio(n, o)
        token = clipped_surrogate(ratio, a, options.epsilon, options.epsilon_high)
        if batch.sampling is not None:
            mu = column(batch.sampling)
            token = token * sampling_weight(o, mu, options.sampling_level, options.sampling_mode, options.sampling_cap)
        if batch.ref is not None:
            p = column(batch.ref)
            out.kl.append(k3(n, p).detach())
            if definition.kl is not None:
                own = definition.kl(n, p) * (1 if definition.kl_weight is None else definition.kl_weight(n, o))
                out.own_kl.append(own.detach())
                token = token + options.beta * own if options.beta != 0 else token
        low = options.epsilon
        high = options.epsilon_high if options.epsilon_high is not None else low
        r = ratio.detach()
        out.ratio.append(r)
        out.low.append((r < 1 - low) & (a < 0) if low is not None else torch.zeros_like(r, dtype=torch.bool))
        out.high.append((r > 1 + high) & (a > 0) if high is not None else torch.zeros_like(r, dtype=torch.bool))
        out.loss.append(token)
    return out


def loss_of_rows(definition: Definition, rows: list[Tensor], batch: Batch, options: Options | None = None) -> Tensor:
    options = options or Options()
    return aggregate(
        terms(definition, rows, batch, options).loss,
        options.aggregation or definition.aggregation,
        batch.num_items,
        batch.num_sequences,
        options.constant,
    )


def pooled_mean(rows: Iterable[Tensor]) -> float:
    """Mean over all unmasked tokens of the batch, 0 where there are none."""
    flat = torch.cat([row.to(F64) for row in rows])
    return float(flat.mean()) if len(flat) else 0.0


@dataclass(frozen=True)
class Result:
    """Loss and gradients of one call; `per_token_logps` (B, T) with 0 at masked positions."""

    loss: Tensor
    per_token_logps: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    terms: Terms
    entropy: float


def evaluate(
    definition: Definition,
    hidden: Tensor,
    weight: Tensor,
    batch: Batch,
    options: Options | None = None,
    head: Head | None = None,
    dtype: torch.dtype = F64,
) -> Result:
    """Loss and autograd gradients of hidden, weight and bias, everything computed in `dtype`.

    float64 is the oracle. float32 on the same (possibly half-precision) inputs is the independent low-precision
    computation from which the tests take their error budget.
    """
    options, head = options or Options(), head or Head()
    h = torch.where((batch.mask != 0)[..., None], hidden, torch.zeros_like(hidden)).detach().to(dtype)
    h.requires_grad_(True)
    w = weight.detach().to(dtype).requires_grad_(True)
    b = None if head.bias is None else head.bias.detach().to(dtype).requires_grad_(True)
    head = replace(head, bias=b)
    rows = picked(h, w, batch.ids, batch.mask, head)
    parts = terms(definition, rows, batch, options)
    loss = loss_of_rows(definition, rows, batch, options)
    wanted = [h, w] if b is None else [h, w, b]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    with torch.no_grad():
        inside = h[batch.mask != 0]
        mean_entropy = pooled_mean([entropy(logits(inside, w, head))])
    return Result(
        loss.detach(),
        scatter([row.detach() for row in rows], batch.mask),
        filled[0],
        filled[1],
        filled[2] if b is not None else None,
        parts,
        mean_entropy,
    )


# The enumerable problem: one token, three answers, every expectation a finite sum -----------------------------------

Q = torch.tensor([0.7, 0.2, 0.1], dtype=F64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
SAMPLER = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5], dtype=F64)

SAMPLED_TERMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda n, p, o: k1(n, p),
    "k2": lambda n, p, o: k2(n, p),
    "k3": lambda n, p, o: k3(n, p),
    "exp(n) k3": lambda n, p, o: torch.exp(n) * k3(n, p),
    "exp(p) (p-n)": lambda n, p, o: torch.exp(p) * (p - n),
    "r k3": lambda n, p, o: token_ratio(n, o) * k3(n, p),
    "sg(r) k2": lambda n, p, o: token_ratio(n, o).detach() * k2(n, p),
    "r k2": lambda n, p, o: token_ratio(n, o) * k2(n, p),
    "sg(r) k3": lambda n, p, o: token_ratio(n, o).detach() * k3(n, p),
}
"""KL terms used as a loss on sampled tokens, f(n, p, o)."""


def expected_gradient(term: Callable[[Tensor, Tensor, Tensor], Tensor], sampler: Tensor = Q) -> Tensor:
    """sum_y sampler(y) d term(n_y) / d logits at softmax(logits) = Q, the samples' distribution held fixed."""
    z = Q.log().requires_grad_(True)
    n = log_softmax(z)
    value = torch.zeros((), dtype=F64)
    for y in range(3):
        value = value + sampler[y] * term(n[y], REFERENCE[y].log(), sampler[y].log())
    return torch.autograd.grad(value, z)[0]


def true_gradient(divergence: Callable[[Tensor, Tensor], Tensor], other: Tensor = REFERENCE) -> Tensor:
    """d divergence(softmax(z), other) / d z at softmax(z) = Q."""
    z = Q.log().requires_grad_(True)
    return torch.autograd.grad(divergence(z, other.log()), z)[0]


def policy_gradient() -> Tensor:
    """d / d z of sum_y softmax(z)_y A_y at Q: what the surrogate's loss must descend with the sign turned."""
    z = Q.log().requires_grad_(True)
    return torch.autograd.grad((log_softmax(z).exp() * ADVANTAGES).sum(), z)[0]
