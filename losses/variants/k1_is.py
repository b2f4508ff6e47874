"""k1 as a loss, weighted by the importance ratio with its gradient: the score-function estimate."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """r (n - p), r = exp(n - sg(o)); its derivative in n is r (n - p + 1)."""
    r = tl.exp(n - stop_grad(o))
    return r * (n - p), r * (n - p + 1.0)


register(
    Variant(
        name="k1_is",
        summary="k1 weighted by the ratio with gradient: the reverse KL, with the noise of a missing baseline",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{n - \mathrm{sg}(o)} (n - p)",
        paper="Tang & Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "reverse KL",
            "kl off-policy": "reverse KL",
            "value on-policy": "reverse KL",
            "value off-policy": "reverse KL",
            "length": "biased",
        },
    )
)
