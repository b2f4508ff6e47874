"""A small problem through every kernel, for a checker: `compute-sanitizer --tool memcheck python -m tests.gpu.small`.

The numbers are compared with torch's, so that a clean report is one of a right computation. `--tiny`: bfloat16 alone on
a sixth of the tokens and a third of the vocabulary, for a checker that is slow.
"""

from __future__ import annotations

import sys

import torch

import losses


def step(
    backend: str, dtype: torch.dtype, trained: bool, precision: str, tiny: bool, **head: float
) -> list[torch.Tensor]:
    length, vocab = (25, 230) if tiny else (150, 700)
    rng = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, length, 136, generator=rng, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, 136, generator=rng, device="cuda") * 0.2).to(dtype).requires_grad_(trained)
    bias = torch.randn(vocab, generator=rng, device="cuda").to(dtype).requires_grad_(trained)
    mask = torch.rand(2, length, generator=rng, device="cuda") < 0.8
    n = torch.full((2, length), -6.0, device="cuda")
    inputs = losses.LossInputs(
        completion_ids=torch.randint(0, vocab, (2, length), generator=rng, device="cuda"),
        completion_mask=mask,
        advantages=torch.randn(2, generator=rng, device="cuda"),
        old_per_token_logps=n,
        ref_per_token_logps=n - 0.5,
    )
    out = losses.linear_policy_loss(
        hidden,
        weight,
        inputs,
        lm_head_bias=bias,
        backend=backend,
        precision=precision,
        epsilon=0.2,
        chunk_size=22 if tiny else 130,
        **head,
    )
    out.loss.backward()
    return [out.loss.detach(), hidden.grad, *([weight.grad, bias.grad] if trained else [])]


def main(tiny: bool = False) -> None:
    for dtype in (torch.bfloat16,) if tiny else (torch.bfloat16, torch.float16, torch.float32):
        for trained in (False, True):
            for precision in ("auto", "fp8"):
                for head in ({}, {"logit_softcap": 3.0, "temperature": 0.7}):
                    got, want = (step(b, dtype, trained, precision, tiny, **head) for b in ("triton", "chunked"))
                    for a, b in zip(got, want, strict=True):
                        off = float((a.float() - b.float()).norm() / b.float().norm())
                        limit = (
                            0.05 if precision == "fp8" else {torch.bfloat16: 0.01, torch.float16: 2e-3}.get(dtype, 1e-4)
                        )
                        assert off < limit, (dtype, trained, precision, head, off)
    print("right")


if __name__ == "__main__":
    main(tiny="--tiny" in sys.argv[1:])
