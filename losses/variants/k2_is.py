"""k2 as a loss, weighted by the importance ratio with its gradient: a wrong turn."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """r (n - p)^2 / 2, r = exp(n - sg(o)); its derivative in n is r ((n - p) + (n - p)^2 / 2)."""
    x = n - p
    r = tl.exp(n - stop_grad(o))
    k2 = 0.5 * x * x
    return r * k2, r * (k2 + x)


register(
    Variant(
        name="k2_is",
        summary="k2 weighted by the ratio with gradient: the gradient of k2's own expectation, which is no KL",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{n - \mathrm{sg}(o)}\, \tfrac{1}{2} (n - p)^2",
        paper="the counterpart of k3_is; Liu et al. 2025, arXiv 2510.01555",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "biased",
            "kl off-policy": "biased",
            "value on-policy": "biased",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
