"""k3 as a loss, weighted by the detached importance ratio."""

from losses.elementwise import clipped_surrogate, stop_grad, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """sg(r) (exp(p - n) - (p - n) - 1), r = exp(n - o); its derivative in n is r (1 - exp(p - n))."""
    x = p - n
    e = tl.exp(x)
    r = stop_grad(tl.exp(n - o))
    return r * (e - x - 1.0), r * (1.0 - e)


register(
    Variant(
        name="k3_sg_is",
        summary="k3 weighted by the detached ratio: the value of the reverse KL, the gradient of the forward "
        "KL, on- and off-policy",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,\mathrm{sg}(e^{n - o}) (e^{p-n} - (p-n) - 1)",
        paper="Tang & Munos 2025, arXiv 2506.09477; Shah et al. 2025, arXiv 2512.21852",
        surrogate=clipped_surrogate,
        kl=kl,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "forward KL",
            "kl off-policy": "forward KL",
            "value on-policy": "reverse KL",
            "value off-policy": "reverse KL",
            "length": "biased",
        },
    )
)
