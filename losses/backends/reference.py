"""Full logits and autograd: the plainest way to the same numbers, in any dtype, for float64 above all."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.backends.head import Head, Pass
from losses.precision import products

AUTOGRAD = True


def forward(head: Head, ids: Tensor, index: Tensor | None, *, entropy: bool) -> Pass:
    """Log-probs with autograd's own graph; half-precision operands are multiplied in float32."""
    shape, dtype = head.hidden.shape[:2], head.logps_dtype
    with torch.autocast(head.hidden.device.type, enabled=False):
        hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
        if index is not None:
            hidden, ids = hidden[index], ids[index]
        z = products(head).logits(hidden.to(head.dtype), head.weight.to(head.dtype), dtype, ids=ids)
        if head.bias is not None:
            z = z + head.bias.to(dtype)
        z = z * head.scale
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        log_p = torch.log_softmax(z / head.temperature, -1)
        logps = log_p.gather(1, ids.unsqueeze(1)).squeeze(1)
        h = -(log_p.detach().exp() * log_p.detach()).sum(-1) if entropy else None
    if index is not None:
        logps = torch.zeros(shape.numel(), dtype=dtype, device=ids.device).index_copy(0, index, logps)
        h = None if h is None else torch.zeros_like(logps).index_copy(0, index, h)
    return Pass(logps.view(shape), None if h is None else h.view(shape))
