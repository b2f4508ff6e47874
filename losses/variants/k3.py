"""k3 as a loss: the same loss as `reference`, under the name of its estimator."""

from losses.elementwise import clipped_surrogate, k3
from losses.spec import Variant, register

register(
    Variant(
        name="k3",
        summary="k3 as a loss, the same as `reference`: the value of the reverse KL, the gradient of the forward KL",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta\,(e^{p-n} - (p-n) - 1)",
        paper="Schulman 2020, 'Approximating KL divergence'; as a loss: Shao et al. 2024, arXiv 2402.03300, eq. 4",
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
