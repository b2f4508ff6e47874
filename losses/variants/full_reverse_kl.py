"""`reference` with the 'missing Q' multiplied into the k3 term, not detached."""

from losses.elementwise import clipped_surrogate, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """exp(n) (exp(p - n) - (p - n) - 1); its derivative in n is exp(n) (n - p)."""
    q = tl.exp(n)
    x = p - n
    return q * (tl.exp(x) - x - 1.0), -q * x


register(
    Variant(
        name="full_reverse_kl",
        summary="the k3 term multiplied by Q = exp(n), n not detached",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{n} (e^{p-n} - (p-n) - 1)",
        paper="the 'missing Q factor' of the reverse KL; right when summed over the vocabulary, not on samples",
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
