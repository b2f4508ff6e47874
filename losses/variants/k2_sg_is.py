"""k2 as a loss, weighted by the detached importance ratio."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """sg(r) (n - p)^2 / 2, r = exp(n - o); its derivative in n is r (n - p)."""
    x = n - p
    r = stop_grad(tl.exp(n - o))
    return 0.5 * r * x * x, r * x


register(
    Variant(
        name="k2_sg_is",
        summary="k2 weighted by the detached ratio: the reverse KL's gradient on- and off-policy",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\mathrm{sg}(e^{n - o})\, \tfrac{1}{2} (n - p)^2",
        paper="Liu et al. 2025, arXiv 2510.01555; Tang & Munos 2025, arXiv 2506.09477",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "reverse KL",
            "kl off-policy": "reverse KL",
            "value on-policy": "biased",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
