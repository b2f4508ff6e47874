"""GRPO loss variants as interchangeable chunked kernels.

    losses.linear_policy_loss(hidden, lm_head_weight, inputs, variant="forward_kl").loss.backward()

Knows tensors only: no model, no trainer. `losses.names()` lists the variants, `losses.get(name)` describes one.
"""

from losses import variants as variants
from losses.aggregation import centred_advantages, group_advantages
from losses.divergence import exact_kl
from losses.linear import linear_policy_loss, logps_and_entropy, per_token_logps
from losses.policy import policy_loss
from losses.spec import LossInputs, LossOutput, Metric, Param, Variant, founding, get, names, register

__all__ = [
    "LossInputs",
    "LossOutput",
    "Metric",
    "Param",
    "Variant",
    "centred_advantages",
    "exact_kl",
    "founding",
    "get",
    "group_advantages",
    "linear_policy_loss",
    "logps_and_entropy",
    "names",
    "per_token_logps",
    "policy_loss",
    "register",
]
