"""DAPO's loss: `reference` averaged over all tokens of the batch, so that long completions weigh more."""

from losses.elementwise import clipped_surrogate, k3
from losses.spec import Variant, register

register(
    Variant(
        name="dapo",
        summary="mean over all tokens of the batch instead of over completions",
        formula=r"\frac{1}{\sum_i |y_i|} \sum_{i,t} "
        r"\left[-e^{n - \mathrm{sg}(o)} A + \beta\,(e^{p-n} - (p-n) - 1)\right]",
        paper="Yu et al. 2025, arXiv 2503.14476, eq. 8; TRL's loss_type='dapo'",
        surrogate=clipped_surrogate,
        kl=k3,
        aggregation="token_mean",
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "forward KL",
            "kl off-policy": "biased",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
            "length": "unbiased",
        },
    )
)
