"""`reference` with the exact forward KL, summed over the vocabulary, in place of an estimate on the sampled token."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register

register(
    Variant(
        name="exact_forward_kl",
        summary="the forward KL of the next token, summed over the vocabulary: no noise from the sampled one",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta \sum_v p_v (\log p_v - \log q_v)",
        paper="the definition: distillation's loss; what `reference` trains on average, on-policy",
        surrogate=clipped_surrogate,
        vocabulary="forward_kl",
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "forward KL",
            "kl off-policy": "forward KL",
            "value on-policy": "forward KL",
            "value off-policy": "forward KL",
            "length": "biased",
        },
    )
)
