"""Straight-through: the value of k3, the gradient of k2."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """exp(p - n) - (p - n) - 1 in value; its derivative in n is that of (n - p)^2 / 2."""
    x = n - p
    k2 = 0.5 * x * x
    return k2 + stop_grad(tl.exp(-x) + x - 1.0 - k2), x


register(
    Variant(
        name="k3_value_k2_grad",
        summary="k3's value with k2's gradient: the reverse KL in both, on-policy, with k3's low noise in the value",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\left[\tfrac{1}{2} (n - p)^2 +\,"
        r"\mathrm{sg}\left(e^{p-n} - (p-n) - 1 - \tfrac{1}{2} (n - p)^2\right)\right]",
        paper="verl's kl_loss_type='k3+'; Liu et al. 2025, arXiv 2510.01555",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "reverse KL",
            "kl off-policy": "biased",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
