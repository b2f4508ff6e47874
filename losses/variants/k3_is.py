"""k3 as a loss, weighted by the importance ratio with its gradient: DeepSeek-V3.2's unbiased estimate."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """r (exp(p - n) - (p - n) - 1), r = exp(n - sg(o)); its derivative in n is r (n - p)."""
    x = p - n
    r = tl.exp(n - stop_grad(o))
    return r * (tl.exp(x) - x - 1.0), -r * x


register(
    Variant(
        name="k3_is",
        summary="k3 weighted by the ratio with gradient: the reverse KL in value and gradient, on- and off-policy",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{n - \mathrm{sg}(o)} (e^{p-n} - (p-n) - 1)",
        paper="DeepSeek-V3.2, arXiv 2512.02556, eq. 7",
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
