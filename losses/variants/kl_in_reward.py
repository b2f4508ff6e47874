"""The KL in the reward: the completion's summed log-ratio is taken off its reward before the advantages are formed."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register


def shape_reward(rewards, n, p, mask, params):
    """rewards (B,) - beta x the sum over the completion of n - p, with n (B, T) of the policy that drew it."""
    kept = mask.bool()
    log_ratio = (n - p).where(kept, n.new_zeros(())).sum(-1)
    return rewards - params["beta"] * log_ratio.to(rewards.dtype)


register(
    Variant(
        name="kl_in_reward",
        summary="k1 of the whole completion in the reward: the reverse KL of completions, later tokens' share included",
        formula=r"-e^{n - \mathrm{sg}(o)} \hat A,\quad \hat A = \mathrm{norm}\Big(R - \beta \sum_t (o_t - p_t)\Big)",
        paper="Ziegler et al. 2019, arXiv 1909.08593, eq. 2; TRL's RLOOTrainer",
        surrogate=clipped_surrogate,
        shape_reward=shape_reward,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "sequence reverse KL",
            "kl off-policy": "biased",
            "length": "biased",
        },
    )
)
