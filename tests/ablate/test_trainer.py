"""AblationTrainer against stock TRL, and what it promises by itself."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import GRPOConfig

import losses
from ablate.models.tiny import tiny_tokenizer
from ablate.rollout import Rollout
from ablate.trainer import AblationTrainer
from tests.ablate.training import PROMPTS, Scripted, StockScripted, digits, history, make, weights


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (False, {}),
        (False, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
        (False, {"num_iterations": 2, "max_steps": 4, "epsilon": 0.05}),
        (
            False,
            {
                "steps_per_generation": 4,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "max_steps": 4,
            },
        ),
        (False, {"temperature": 0.7, "mask_truncated_completions": False}),
        (True, {}),
    ],
    ids=["plain", "accumulation", "iterations", "off-policy", "temperature", "lora"],
)
def test_reference_is_stock_trl(folder: Path, tmp_path: Path, lora: bool, config: dict[str, Any]) -> None:
    """Losses, gradient norms, metrics and weights of loss_type='grpo', step for step.

    Under SGD: Adam makes a step of a gradient entry that is rounding and nothing else, and the two round differently.
    """
    config = {"optim": "sgd", "learning_rate": 0.1, **config}
    stock = make(StockScripted, folder, tmp_path / "a", lora=lora, config={"loss_type": "grpo", **config})
    stock.train()
    ours = make(
        AblationTrainer, folder, tmp_path / "b", lora=lora, config=config, loss_variant="reference", engine=Scripted(),
    )  # fmt: skip
    ours.train()
    keys = ["loss", "grad_norm", "reward", "reward_std"]
    if (
        "per_device_train_batch_size" not in config
    ):  # over micro-batches TRL takes the mean of means, ours pools by tokens
        keys += ["kl", "entropy", "clip_ratio/region_mean"]
    for key in keys:
        assert history(ours, key) == pytest.approx(history(stock, key), rel=1e-4, abs=2e-6), key
    for (name, a), b in zip(weights(stock).items(), weights(ours).values(), strict=True):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_policy_and_reference_agree_to_the_bit(folder: Path, tmp_path: Path, lora: bool, accumulation: int) -> None:
    """Before the first update |n - p| is exactly 0, so no_detach never moves."""
    config = {
        "per_device_train_batch_size": 16 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 5,
    }
    trainer = make(
        AblationTrainer, folder, tmp_path, lora=lora, config=config, loss_variant="no_detach", engine=Scripted()
    )
    before = weights(trainer)
    trainer.train()
    assert history(trainer, "kl") == [0.0] * 5
    assert history(trainer, "weight_distance") == [0.0] * 5
    assert all(torch.equal(before[n], p) for n, p in weights(trainer).items())


@pytest.mark.parametrize("variant", losses.names())
def test_every_variant_trains(folder: Path, tmp_path: Path, variant: str) -> None:
    trainer = make(AblationTrainer, folder, tmp_path, loss_variant=variant, engine=Scripted(), config={"max_steps": 2})
    trainer.train()
    assert all(map(math.isfinite, history(trainer, "loss")))
    assert len(history(trainer, "loss")) == 2
    kl = history(trainer, "kl")
    assert kl[0] == 0 and len(kl) == 2
    assert (kl[1] == 0) == (variant == "no_detach")


@pytest.mark.parametrize("variant", ["kl_in_reward", "kl_in_reward_token", "exact_reverse_kl"])
def test_without_a_kl_term_every_variant_is_the_policy_gradient(folder: Path, tmp_path: Path, variant: str) -> None:
    runs = []
    for name in ("reference", variant):
        trainer = make(
            AblationTrainer, folder, tmp_path / name, loss_variant=name, engine=Scripted(), config={"beta": 0.0}
        )
        trainer.train()
        runs.append(trainer)
    assert history(runs[0], "loss") == history(runs[1], "loss")
    assert all(torch.equal(a, b) for a, b in zip(*(weights(r).values() for r in runs), strict=True))


def test_accumulation_does_not_change_the_loss(folder: Path, tmp_path: Path) -> None:
    """One micro-batch or eight: the same loss, gradient norm and weights, for a loss of uneven parts."""
    runs = []
    for name, size in (("one", 16), ("eight", 2)):
        config = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": 16 // size,
            "mask_truncated_completions": True,
        }
        trainer = make(AblationTrainer, folder, tmp_path / name, config=config, loss_variant="dapo", engine=Scripted())
        trainer.train()
        runs.append(trainer)
    for key in ("loss", "grad_norm", "kl", "entropy"):
        assert history(runs[1], key) == pytest.approx(history(runs[0], key), rel=1e-3, abs=1e-6), key


def test_a_resume_from_the_last_step_trains_no_further(folder: Path, tmp_path: Path) -> None:
    config = {"save_strategy": "steps", "save_steps": 3}
    runs: list[Any] = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        trainer = make(AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(), config=config)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(trainer)
    assert [trainer.state.global_step for trainer in runs] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(*map(lambda r: weights(r).values(), runs), strict=True))


def test_a_token_without_the_samplers_log_prob_stands_for_the_policys(folder: Path, tmp_path: Path) -> None:
    """One gap in one micro-batch: every micro-batch gets old log-probs, so that they can be stored side by side."""

    class Gap(Scripted):
        def generate(self, *args, **kwargs):
            rows = super().generate(*args, **kwargs).completion_ids
            return Rollout(rows, [[math.nan if i == 0 else -1.0] * len(row) for i, row in enumerate(rows)])

    seen = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Gap(),
        config={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        on_generation=lambda g: seen.append(["old_per_token_logps" in batch for batch in g._batches]),
    )  # fmt: skip
    trainer.train()
    assert seen == [[True] * 4] * 3
    assert all(map(math.isfinite, history(trainer, "loss")))


def test_empty_completions_enter_no_mean(folder: Path, tmp_path: Path) -> None:
    seen = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(empty=True),
        reward_funcs=[digits], on_generation=lambda g: seen.append((g.column("completion_mask").any(-1), g)),
    )  # fmt: skip
    trainer.train()
    kept, generation = seen[0]
    assert kept.tolist() == [i % 3 != 0 for i in range(16)]
    assert all(map(math.isfinite, history(trainer, "loss")))
    assert generation._batches[0]["num_sequences"].item() == int(kept.sum())


def test_all_completions_empty(folder: Path, tmp_path: Path) -> None:
    class Nothing(Scripted):
        def generate(self, model, prompt_ids, **kwargs):
            return Rollout([[] for _ in prompt_ids])

    trainer = make(AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Nothing(), reward_funcs=[digits])
    before = weights(trainer)
    trainer.train()
    assert history(trainer, "loss") == [0.0] * 3
    assert all(torch.equal(before[n], p) for n, p in weights(trainer).items())


def test_truncated_completions_leave_both_sides_of_the_mean(folder: Path, tmp_path: Path) -> None:
    batches = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(),
        config={"mask_truncated_completions": True}, on_generation=lambda g: batches.append(g._batches),
    )  # fmt: skip
    trainer.train()
    mask = batches[0][0]["completion_mask"]
    assert 0 < mask.any(-1).sum() < len(mask)
    assert batches[0][0]["num_sequences"] == mask.any(-1).sum()


def test_missing_and_equal_rewards(folder: Path, tmp_path: Path) -> None:
    """Rows 10 and 11: None leaves the group's statistics; equal rewards, to rounding, give no advantage."""
    values = [1.0, None, 0.0, 1.0] + [100.0, 100.0 + 1e-5, 100.0, 100.0] * 3

    def scripted(prompts, completions, **kwargs):
        return values

    seen = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(), reward_funcs=[scripted],
        config={"max_steps": 1}, on_generation=lambda g: seen.append(g.advantages),
    )  # fmt: skip
    trainer.train()
    std = torch.tensor([1.0, 0.0, 1.0]).std().item()
    expected = [(r - 2 / 3) / (std + 1e-4) if r is not None else 0.0 for r in values[:4]]
    assert seen[0][:4].tolist() == pytest.approx(expected, abs=1e-5)
    assert seen[0][4:].abs().max() < 1e-3


def test_the_time_limit_of_a_reward_function(folder: Path, tmp_path: Path) -> None:
    def stuck(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(5)
        return digits(prompts, completions)

    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(), reward_funcs=[digits, stuck],
        reward_timeout=0.2, config={"max_steps": 1},
    )  # fmt: skip
    trainer.train()
    assert history(trainer, "rewards/stuck/timed_out") == [1.0]
    assert history(trainer, "rewards/digits/timed_out") == [0.0]
    assert history(trainer, "reward") == history(trainer, "rewards/digits/mean")


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "nan"), (math.inf, "inf"), ("short", "gave 1 rewards for 16")]
)
def test_bad_rewards_are_named(folder: Path, tmp_path: Path, value: Any, message: str) -> None:
    def broken(prompts, completions, **kwargs):
        return [1.0] if value == "short" else [0.0] * (len(prompts) - 1) + [value]

    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(), reward_funcs=[broken]
    )
    with pytest.raises(ValueError, match=rf"reward function 'broken' gave.*{message.split()[-1]}.*step 1"):
        trainer.train()


@pytest.mark.parametrize(
    ("config", "loss_variant", "match"),
    [
        ({"delta": 2.0}, "reference", "delta"),
        ({"top_entropy_quantile": 0.2}, "reference", "top_entropy_quantile"),
        ({"loss_type": "sapo"}, None, "sapo"),
        ({"loss_type": "dr_grpo"}, "reference", "name two losses"),
        ({}, "referense", "did you mean reference"),
    ],
)
def test_options_without_effect_are_refused(folder, tmp_path, config, loss_variant, match) -> None:
    with pytest.raises(ValueError, match=match):
        make(AblationTrainer, folder, tmp_path, config=config, loss_variant=loss_variant, engine=Scripted())


@pytest.mark.parametrize(
    ("config", "name"),
    [({"loss_type": "grpo"}, "reference"), ({"loss_type": "dr_grpo"}, "dr_grpo"), ({}, "dapo"),
     ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo")],
)  # fmt: skip
def test_loss_type_names_a_variant(folder, tmp_path, config, name) -> None:
    trainer = make(AblationTrainer, folder, tmp_path, config=config, engine=Scripted())
    assert trainer.variant.name == name
    assert trainer.loss_params["epsilon"] == 0.2


def test_adapter_on_the_head_is_refused(folder, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    from ablate import lm_head

    base = LlamaForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="target_modules"):
        lm_head.head_parameters(model.get_base_model())


@pytest.mark.parametrize("iterations", [1, 2])
def test_resume_gives_the_same_numbers(folder: Path, tmp_path: Path, iterations: int) -> None:
    """Eight steps at once, or four and four from the checkpoint: the same bits, TRL's own generation included."""
    config = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "num_iterations": iterations}
    whole = make(AblationTrainer, folder, tmp_path / "whole", config=config, loss_variant="reference")
    whole.train()
    resumed = make(AblationTrainer, folder, tmp_path / "resumed", config=config, loss_variant="reference")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True))
    assert history(whole, "loss")[4:] == history(resumed, "loss")[4:]


def test_samplers_log_probs_weigh_the_surrogate(folder: Path, tmp_path: Path) -> None:
    """An engine that says it sampled with other log-probs: old log-probs are computed and the ratio is logged."""

    class Biased(Scripted):
        def generate(self, model, prompt_ids, **kwargs):
            rows = super().generate(model, prompt_ids, **kwargs).completion_ids
            return Rollout(rows, [[-2.0] * len(row) for row in rows])

    trainer = make(AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Biased())
    trainer.train()
    ratios = history(trainer, "sampling/importance_sampling_ratio/mean")
    assert len(ratios) == 3 and all(0 < r <= 3 and r != 1 for r in ratios)


def test_qlora_trains_an_adapter_on_a_4_bit_base(folder: Path, tmp_path: Path) -> None:
    """The reference is the 4-bit base with the adapter off: equal to the policy before the first update."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    trainer = AblationTrainer(
        model=LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization),
        reward_funcs=[digits],
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=3, beta=0.1,
            per_device_train_batch_size=16, num_generations=4, max_completion_length=4, learning_rate=1e-2,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer("heldout"),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        loss_variant="reference",
        engine=Scripted(),
    )  # fmt: skip
    trainer.train()
    kl = history(trainer, "kl")
    assert kl[0] == 0 and kl[-1] > 0
    assert history(trainer, "weight_distance")[-1] > 0
