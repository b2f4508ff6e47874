"""The reference: GRPO as TRL implements it, with the k3 estimate as its KL term."""

from losses.elementwise import clipped_surrogate, k3
from losses.spec import Variant, register

register(
    Variant(
        name="reference",
        summary="GRPO with the k3 estimate of the reverse KL, as in TRL",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,(e^{p-n} - (p-n) - 1)",
        paper="Shao et al. 2024, arXiv 2402.03300, eq. 3-4; TRL's loss_type='grpo'",
        surrogate=clipped_surrogate,
        kl=k3,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "forward KL",
            "kl off-policy": "biased",
            "value on-policy": "reverse KL",
            "value off-policy": "biased",
            "length": "biased",
        },
    )
)
