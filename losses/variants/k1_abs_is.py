"""|k1| as a loss, weighted by the importance ratio with its gradient."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """r |n - p|, r = exp(n - sg(o)); its derivative in n is r (|n - p| + the sign of n - p)."""
    x = n - p
    size = tl.abs(x)
    r = tl.exp(n - stop_grad(o))
    return r * size, r * (size + x / tl.maximum(size, 1e-30))


register(
    Variant(
        name="k1_abs_is",
        summary="the absolute log-ratio weighted by the ratio with gradient: the gradient of its own "
        "expectation, which is no KL",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{n - \mathrm{sg}(o)} |n - p|",
        paper="verl's kl_loss_type='abs', with the weighting of k3_is",
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
