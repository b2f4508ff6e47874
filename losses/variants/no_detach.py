"""`reference` with the detach removed: exp(n - n), whose gradient is exactly zero."""

from losses.elementwise import k3, tl
from losses.spec import Variant, register


def surrogate(n, o, a):
    """-exp(n - n) A: the ratio is 1 and both sides carry gradient, so the derivative is 0 whatever o is."""
    return -tl.exp(n - n) * a, n * 0.0


register(
    Variant(
        name="no_detach",
        summary="the detach removed: the ratio's gradient vanishes, only the KL term trains",
        formula=r"-e^{n - n} A + \beta\,(e^{p-n} - (p-n) - 1)",
        paper="the 'removable' detach of exp(q - q.detach())",
        surrogate=surrogate,
        kl=k3,
        claims={
            "surrogate on-policy": "nothing",
            "surrogate off-policy": "nothing",
            "kl on-policy": "forward KL",
            "kl off-policy": "biased",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
        },
    )
)
