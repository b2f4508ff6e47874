"""`reference` with exp(p) (p - n) in place of the k3 term."""

from losses.elementwise import clipped_surrogate, tl
from losses.spec import Variant, register


def kl(n, p, o):
    """exp(p) (p - n); its derivative in n is -exp(p)."""
    r = tl.exp(p)
    return r * (p - n), -r + n * 0.0


register(
    Variant(
        name="forward_kl",
        summary="the summand of the forward KL, exp(p) (p - n), on sampled tokens",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,e^{p} (p - n)",
        paper="the forward KL in place of the reverse; right when summed over the vocabulary, not on samples",
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
