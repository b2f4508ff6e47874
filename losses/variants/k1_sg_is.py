"""k1 as a loss, weighted by the detached importance ratio."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """sg(r) (n - p), r = exp(n - o); its derivative in n is r."""
    r = stop_grad(tl.exp(n - o))
    return r * (n - p), r


register(
    Variant(
        name="k1_sg_is",
        summary="k1 weighted by the detached ratio: right value off-policy too, still no gradient on average",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\mathrm{sg}(e^{n - o}) (n - p)",
        paper="Schulman 2020, 'Approximating KL divergence'; weighting: Tang & Munos 2025, arXiv 2506.09477",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "nothing",
            "kl off-policy": "nothing",
            "value on-policy": "reverse KL",
            "value off-policy": "reverse KL",
            "length": "biased",
        },
    )
)
