"""What GRPOConfig says about the loss, mapped to the registry or refused; nothing it says is ignored in silence."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import losses

# (loss_type, importance_sampling_level) -> variant
VARIANT_OF = {
    ("grpo", "token"): "reference",
    ("grpo", "sequence"): "gspo",
    ("dapo", "token"): "dapo",
    ("dr_grpo", "token"): "dr_grpo",
}
# Options of TRL's own loss. Another value than the default would have no effect here.
REFUSED = {
    "delta": "two-sided clipping is no part of the registered variants",
    "top_entropy_quantile": "the entropy mask is no part of the registered variants",
    "off_policy_mask_threshold": "off-policy masking is no part of the registered variants",
    "entropy_coef": "the entropy bonus is no part of the registered variants",
    "use_adaptive_entropy": "the entropy bonus is no part of the registered variants",
    "router_aux_loss_coef": "the load-balancing loss of mixture models is not added",
    "sapo_temperature_neg": "loss_type='sapo' is not registered",
    "sapo_temperature_pos": "loss_type='sapo' is not registered",
    "vespo_k_pos": "loss_type='vespo' is not registered",
    "vespo_lambda_pos": "loss_type='vespo' is not registered",
    "vespo_k_neg": "loss_type='vespo' is not registered",
    "vespo_lambda_neg": "loss_type='vespo' is not registered",
    "vllm_importance_sampling_clip_min": "the sampling ratio has no lower bound here",
}


def variant_of(args: Any, loss_variant: str | None) -> str:
    """The registered variant that `loss_variant` or, where it is None, loss_type and importance_sampling_level name.

    Raises ValueError where the two disagree, or where an option of TRL's own loss is set that would have no effect.
    """
    defaults = {f.name: f.default for f in fields(args)}
    for name, reason in REFUSED.items():
        if name in defaults and getattr(args, name) != defaults[name]:
            raise ValueError(
                f"{name}={getattr(args, name)!r} would be ignored: {reason}. Leave it at {defaults[name]!r}"
            )
    key = (args.loss_type, args.importance_sampling_level)
    given = key != (defaults["loss_type"], defaults["importance_sampling_level"])
    mapped = VARIANT_OF.get(key)
    if loss_variant is None:
        if mapped is None:
            raise ValueError(
                f"loss_type={key[0]!r} with importance_sampling_level={key[1]!r} is not registered; "
                f"set loss_variant to one of {', '.join(losses.names())}"
            )
        return mapped
    if given and mapped != losses.get(loss_variant).name:
        raise ValueError(
            f"loss_variant={loss_variant!r} and loss_type={key[0]!r} with {key[1]!r} ratios name two losses: "
            "leave loss_type and importance_sampling_level at their defaults"
        )
    return losses.get(loss_variant).name


def loss_params(args: Any, variant: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """The variant's parameters: GRPOConfig's beta, epsilon and sampling correction, then those given beside it."""
    known = {p.name for p in losses.get(variant).all_params}
    clip_max = args.vllm_importance_sampling_clip_max
    params = {
        "beta": args.beta,
        "epsilon": args.epsilon,
        "epsilon_high": args.epsilon_high,
        "sampling_mode": args.vllm_importance_sampling_mode,
        "sampling_clip_max": 1e30 if clip_max is None else clip_max,
    }
    if "max_completion_length" in known:
        params["max_completion_length"] = args.max_completion_length
    given = dict(given or {})
    if "beta" in given and given["beta"] != args.beta:
        raise ValueError(
            f"loss_params beta={given['beta']} and GRPOConfig's beta={args.beta} differ: set beta in GRPOConfig"
        )
    if "epsilon" in given and "epsilon_high" not in given:
        params.pop("epsilon_high")
    params.update(given)
    losses.get(variant).resolve(params)
    return params
