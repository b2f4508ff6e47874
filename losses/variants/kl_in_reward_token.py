"""The KL in the reward, token by token: a token's advantage loses the log-ratios of it and of those after it."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register


def shape_advantage(a, o, p, mask, params):
    """A_t - beta x the sum over s >= t of (o_s - p_s): what came before is no consequence of token t."""
    cost = (o - p).where(mask, o.new_zeros(()))
    return a - params["beta"] * cost.flip(-1).cumsum(-1).flip(-1)


register(
    Variant(
        name="kl_in_reward_token",
        summary="k1 in each token's reward, summed from the token on: kl_in_reward without the noise of earlier tokens",
        formula=r"-e^{n - \mathrm{sg}(o)} \Big(A - \beta \sum_{s \ge t} (o_s - p_s)\Big)",
        paper="Ouyang et al. 2022, arXiv 2203.02155, eq. 2; Hu et al. 2025 (REINFORCE++), arXiv 2501.03262",
        surrogate=clipped_surrogate,
        shape_advantage=shape_advantage,
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "sequence reverse KL",
            "kl off-policy": "biased",
            "length": "biased",
        },
    )
)
