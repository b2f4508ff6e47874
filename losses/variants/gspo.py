"""GSPO: one ratio for the whole completion, the geometric mean of its token ratios."""

from losses.elementwise import clipped_surrogate, k3
from losses.spec import Variant, register

register(
    Variant(
        name="gspo",
        summary="clipped surrogate at the completion's mean log-ratio instead of at each token's",
        formula=r"-s A + \beta\,(e^{p-n} - (p-n) - 1),\quad "
        r"s = \exp\Big(\tfrac{1}{|y|}\sum_t (n_t - \mathrm{sg}(o_t))\Big)",
        paper="Zheng et al. 2025, arXiv 2507.18071, eq. 5-7; TRL's importance_sampling_level='sequence'",
        surrogate=clipped_surrogate,
        kl=k3,
        ratio_level="sequence",
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "biased",
            "kl on-policy": "forward KL",
            "kl off-policy": "biased",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
