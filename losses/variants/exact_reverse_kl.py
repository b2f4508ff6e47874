"""`reference` with the exact reverse KL, summed over the vocabulary, in place of an estimate on the sampled token."""

from losses.elementwise import clipped_surrogate
from losses.spec import Variant, register

register(
    Variant(
        name="exact_reverse_kl",
        summary="the reverse KL of the next token, summed over the vocabulary: no noise from the sampled one",
        formula=r"-e^{n - \mathrm{sg}(o)} A + \beta \sum_v q_v (\log q_v - \log p_v)",
        paper="the definition; as a loss term: Shah et al. 2025, arXiv 2512.21852",
        surrogate=clipped_surrogate,
        vocabulary="reverse_kl",
        claims={
            "surrogate on-policy": "policy gradient",
            "surrogate off-policy": "local policy gradient",
            "kl on-policy": "reverse KL",
            "kl off-policy": "reverse KL",
            "value on-policy": "reverse KL",
            "value off-policy": "reverse KL",
            "length": "biased",
        },
    )
)
