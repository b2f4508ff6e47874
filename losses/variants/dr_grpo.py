"""Dr. GRPO: a constant in place of the completion's length, and advantages that are centred but not scaled."""

from losses.aggregation import centred_advantages
from losses.elementwise import clipped_surrogate, k3
from losses.spec import Param, Variant, register

register(
    Variant(
        name="dr_grpo",
        summary="sum over tokens divided by a constant; advantages centred, not divided by the group's deviation",
        formula=r"\frac{1}{B L} \sum_{i,t} \left[-e^{n - \mathrm{sg}(o)} A + \beta\,(e^{p-n} - (p-n) - 1)\right]",
        paper="Liu et al. 2025, arXiv 2503.20783, sec. 3.2; TRL's loss_type='dr_grpo', scale_rewards='none'",
        surrogate=clipped_surrogate,
        kl=k3,
        aggregation="constant",
        params=(
            Param("max_completion_length", None, "the constant L, in tokens: the generation limit", type=int, low=1),
        ),
        advantage=centred_advantages,
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
