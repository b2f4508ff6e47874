"""k1 as a loss: log-ratio of policy and reference, whose gradient is 0 on average."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register


def kl(n, p, o):
    """n - p; its derivative in n is 1, so the reference does not enter it."""
    return n - p, n * 0.0 + 1.0


register(
    Variant(
        name="k1",
        summary="the log-ratio k1 as a loss: right value, no gradient on average",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,(n - p)",
        paper="Schulman 2020, 'Approximating KL divergence'; as a loss: Tang & Munos 2025, arXiv 2506.09477",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "nothing",
            "kl off-policy": "minus KL(sampler || policy)",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
