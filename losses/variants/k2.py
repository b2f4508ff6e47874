"""k2 as a loss: half the squared log-ratio."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register


def kl(n, p, o):
    """(n - p)^2 / 2; its derivative in n is n - p."""
    x = n - p
    return 0.5 * x * x, x


register(
    Variant(
        name="k2",
        summary="half the squared log-ratio as a loss: the reverse KL's gradient on-policy, a biased value",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\tfrac{1}{2} (n - p)^2",
        paper="Schulman 2020, 'Approximating KL divergence'; as a loss: Liu et al. 2025, arXiv 2510.01555",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "reverse KL",
            "kl off-policy": "biased",
            "value on-policy": "biased",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
