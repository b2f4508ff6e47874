"""|k1| as a loss: the absolute log-ratio."""

from losses.elementwise import clipped_surrogate, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """|n - p|; its derivative in n is the sign of n - p, and 0 where they are equal."""
    x = n - p
    size = tl.abs(x)
    return size, x / tl.maximum(size, 1e-30)


register(
    Variant(
        name="k1_abs",
        summary="the absolute log-ratio as a loss: no KL",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,|n - p|",
        paper="verl's kl_loss_type='abs'",
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
