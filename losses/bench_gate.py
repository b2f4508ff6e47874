"""The correctness gate of `losses.bench`: a row's loss and gradients against float64."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from losses.bench_rows import TERMS, Entry, Problem, plain_loss


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of `exact` (float64)."""
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-300))


class Gate:
    """Float64 on the problem: log-probs of all tokens, gradients of sampled rows; a plain computation's error there."""

    def __init__(self, problem: Problem, samples: int = 64) -> None:
        shape = problem.shape
        self.problem = problem
        self.hidden = problem.hidden.reshape(-1, shape.hidden)
        self.ids = problem.ids.reshape(-1)
        rng = torch.Generator().manual_seed(shape.seed + 1)
        self.tokens = torch.randperm(shape.tokens, generator=rng)[:samples].to(self.ids.device)
        # Half of the sampled rows of d weight are of tokens that occur, which hold the one-hot part.
        some = torch.randperm(shape.vocab, generator=rng)[:samples].to(self.ids.device)
        self.words = torch.unique(torch.cat((some[: samples // 2], self.ids[self.tokens[: samples // 2]])))
        weight = problem.weight.double()
        logps, lse, low = [], [], []
        for h, y in zip(self.hidden.split(self._rows()), self.ids.split(self._rows()), strict=True):
            z = h.double() @ weight.t()
            lse.append(z.logsumexp(1))
            logps.append(z.gather(1, y.unsqueeze(1)).squeeze(1) - lse[-1])
            z = self._logits(h, problem.weight)
            low.append(z.gather(1, y.unsqueeze(1)).squeeze(1) - z.logsumexp(1))
        self.logps, self.lse, self.low_logps = torch.cat(logps), torch.cat(lse), torch.cat(low)
        self.rounding = torch.finfo(torch.float32).eps

    def _rows(self) -> int:
        return max(1, (128 << 20) // (8 * self.problem.shape.vocab))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b as a half-precision GEMM has it: accumulated in float32, rounded once."""
        return (a.float() @ b.float()).to(self.problem.shape.torch_dtype)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._product(hidden, weight.t()).float()

    @functools.cache  # noqa: B019  (a gate lives as long as its process)
    def exact(self, variant: str) -> dict[str, Any]:
        """Loss, sampled rows of d hidden and d weight, each with the independent computation's error.

        The loss's is a bound: the errors of all log-probs, in the same direction.
        """
        problem, dtype = self.problem, self.problem.shape.torch_dtype
        loss, g = self._token_gradient(variant, self.logps)
        _, low_g = self._token_gradient(variant, self.low_logps)
        a = problem.advantages.double().unsqueeze(1)
        size = a.abs().mean() + loss.abs()
        if variant in TERMS:
            size = TERMS[variant](self.logps.view_as(problem.ref), problem.ref.double(), a).abs().mean()
        weight = problem.weight.double()

        t, words = self.tokens, self.words
        one = torch.nn.functional.one_hot(self.ids[t], weight.shape[0])
        p = (self.hidden[t].double() @ weight.t() - self.lse[t, None]).exp()
        d_hidden = (g[t, None] * (one - p)) @ weight
        low = (low_g[t, None] * (one - self._logits(self.hidden[t], problem.weight).softmax(1))).to(dtype)
        out = {
            "loss": (loss, float((g * (self.low_logps - self.logps)).abs().sum())),
            "d_hidden": (d_hidden, relative_error(self._product(low, problem.weight), d_hidden)),
            "loss_rounding": 8 * self.rounding * float(size),
        }
        if problem.shape.head == "train":
            hit = self.ids.unsqueeze(1) == words
            p = (self.hidden.double() @ weight[words].t() - self.lse[:, None]).exp()
            d_weight = (g[:, None] * (hit.double() - p)).t() @ self.hidden.double()
            z = self._logits(self.hidden, problem.weight[words])
            low = (low_g[:, None] * (hit.float() - (z - self.lse[:, None].float()).exp())).to(dtype)
            out["d_weight"] = (d_weight, relative_error(self._product(low.t(), self.hidden), d_weight))
        return out

    def _token_gradient(self, variant: str, logps: Tensor) -> tuple[Tensor, Tensor]:
        n = logps.clone().requires_grad_()
        loss = plain_loss(self.problem, n, variant)
        return loss.detach(), torch.autograd.grad(loss, n)[0]

    def check(self, entry: Entry) -> dict[str, Any]:
        """Errors of a row beside what they may be: {"errors": {name: [error, limit]}, "ok": bool}."""
        loss, d_hidden, d_weight = entry.step(self.problem)
        exact, budget = self.exact(entry.variant), entry.row.budget
        floor = 16 * self.rounding
        want, allowed = exact["loss"]
        errors = {"loss": [float((loss.double() - want).abs()), budget * allowed + exact["loss_rounding"]]}
        rows = d_hidden.reshape(-1, d_hidden.shape[-1])[self.tokens]
        errors["d_hidden"] = [relative_error(rows, exact["d_hidden"][0]), budget * exact["d_hidden"][1] + floor]
        if "d_weight" in exact:
            assert d_weight is not None
            errors["d_weight"] = [
                relative_error(d_weight[self.words], exact["d_weight"][0]),
                budget * exact["d_weight"][1] + floor,
            ]
        return {"errors": errors, "ok": all(e <= limit for e, limit in errors.values())}
