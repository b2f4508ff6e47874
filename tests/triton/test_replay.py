"""The trainer's gradients on stored rollouts of the tiny model: the kernels' equal torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate import replay, replay_backends
from tests.ablate.replaying import train
from tests.triton.common import DEVICE

VARIANTS = "reference,full_reverse_kl,gspo,k3_is,exact_reverse_kl,kl_in_reward_token"
STORED = (
    "loss.backend=chunked",
    "train.steps=2",
    "train.rollouts_every=1",
    "train.adapter_every=1",
    "rollout=transformers",  # vLLM applies adapters on a GPU in 16 bit only
    f"device={DEVICE}",
)


@pytest.mark.parametrize(
    ("dtype", "lora", "limit"),
    [("float32", True, 1e-5), ("float32", False, 1e-5), ("bfloat16", True, 1e-2)],
    ids=["frozen head", "trained head", "bfloat16"],
)
def test_stored_rollouts(tmp_path: Path, dtype: str, lora: bool, limit: float) -> None:
    folder = train(tmp_path, *STORED, f"train.dtype={dtype}", f"train.lora={str(lora).lower()}")
    words = [f"run={folder}", f"variants={VARIANTS}", "backends=triton,chunked,reference", f"device={DEVICE}"]
    result = replay_backends.compare(replay.parse([*words, "step=2"]))
    assert result["backends"] == ["triton", "chunked", "reference"] and result["device"].startswith(DEVICE)
    for row in result["variants"]:
        assert all(norms["model"] > 0 for norms in row["grad_norm"].values())
        for pair in row["pairs"]:
            assert max(pair["relative"].values()) <= limit, (row["name"], pair)
            assert pair["log_probs"] <= 1e-4
