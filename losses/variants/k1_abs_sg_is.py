"""|k1| as a loss, weighted by the detached importance ratio."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """sg(r) |n - p|, r = exp(n - o); its derivative in n is r times the sign of n - p."""
    x = n - p
    size = tl.abs(x)
    r = stop_grad(tl.exp(n - o))
    return r * size, r * x / tl.maximum(size, 1e-30)


register(
    Variant(
        name="k1_abs_sg_is",
        summary="the absolute log-ratio weighted by the detached ratio: off-policy what k1_abs is on-policy",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\mathrm{sg}(e^{n - o}) |n - p|",
        paper="verl's kl_loss_type='abs', with the weighting of k2_sg_is",
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
