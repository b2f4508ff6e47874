"""One file per variant. The import list is the registry's order: the founding four first.

KL terms are named after the estimate they put in the loss, with r = exp(n - sg(o)) the importance ratio: `k2` as it is,
`k2_sg_is` times sg(r), `k2_is` times r with its gradient; `k3_value_k2_grad` has the value of one and the gradient of
another.
"""

from losses.variants import reference  # isort: skip
from losses.variants import no_detach  # isort: skip
from losses.variants import full_reverse_kl  # isort: skip
from losses.variants import forward_kl  # isort: skip
from losses.variants import dapo, dr_grpo, gspo  # isort: skip
from losses.variants import k1, k1_sg_is, k1_is, k2, k2_sg_is, k2_is, k3, k3_sg_is, k3_is  # isort: skip
from losses.variants import k1_abs, k1_abs_sg_is, k1_abs_is, k1_value_k2_grad, k3_value_k2_grad  # isort: skip
from losses.variants import exact_reverse_kl, exact_forward_kl, kl_in_reward, kl_in_reward_token  # isort: skip

__all__ = [
    "reference",
    "no_detach",
    "full_reverse_kl",
    "forward_kl",
    "dapo",
    "dr_grpo",
    "gspo",
    "k1",
    "k1_sg_is",
    "k1_is",
    "k2",
    "k2_sg_is",
    "k2_is",
    "k3",
    "k3_sg_is",
    "k3_is",
    "k1_abs",
    "k1_abs_sg_is",
    "k1_abs_is",
    "k1_value_k2_grad",
    "k3_value_k2_grad",
    "exact_reverse_kl",
    "exact_forward_kl",
    "kl_in_reward",
    "kl_in_reward_token",
]
