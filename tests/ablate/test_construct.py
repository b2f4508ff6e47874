"""Values that a library refuses are refused before the sweep, with the key's name and the library's words."""

import typing
from pathlib import Path

import pytest

from ablate import cell as cells
from ablate import config, construct, plan
from ablate.errors import ConfigError
from ablate.rundir import CellDir

LORA = "train.lora=true"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trl.weight_decay=abc"], ["trl.weight_decay=abc", "GRPOConfig takes float", "a str"]),
        (["trl.shuffle_dataset=maybe"], ["trl.shuffle_dataset=maybe", "bool"]),
        (["trl.optim=adamw_foo"], ["trl.optim=adamw_foo: adamw_foo is not a valid OptimizerNames"]),
        (["trl.lr_scheduler_type=foo"], ["trl.lr_scheduler_type=foo: foo is not a valid SchedulerType"]),
        (["trl.adam_beta2=7", "trl.weight_decay=0.1"], ["trl.adam_beta2=7: Invalid beta parameter"]),
        (["grid.trl.adam_beta2=0.9,1.5"], ["trl.adam_beta2=1.5: Invalid beta"]),
        (
            ["trl.lr_scheduler_type=cosine", "trl.lr_scheduler_kwargs.foo=1", "trl.weight_decay=0.1"],
            ["trl.lr_scheduler_type=cosine, trl.lr_scheduler_kwargs={'foo': 1}: ", "unexpected keyword argument 'foo'"],
        ),
        ([LORA, "peft.r=0"], ["peft.r=0: `r` should be a positive integer"]),
        ([LORA, "peft.r=x"], ["peft.r=x: LoraConfig takes int"]),
        ([LORA, "peft.r=4", "peft.init_lora_weights=foo"], ["peft.init_lora_weights=foo: Unknown initialization"]),
        ([LORA, "peft.lora_dropout=2"], ["peft.lora_dropout=2: dropout probability"]),
        ([LORA, "peft.bias=some"], ["peft.bias=some: LoraConfig takes Literal['none', 'all', 'lora_only']"]),
        ([LORA, "grid.peft.r=4,-1"], ["peft.r=-1: `r` should be a positive integer"]),
        (["sampling.top_k=-5", "sampling.top_p=0.9"], ["sampling.top_k=-5: `top_k` has to be a strictly positive"]),
        (["sampling.min_p=3"], ["sampling.min_p=3: `min_p` has to be a float in the [0, 1] interval"]),
        (["sampling.cache_implementation=foo"], ["sampling.cache_implementation=foo: Invalid `cache_implementation`"]),
        (["grid.sampling.repetition_penalty=1,-1"], ["sampling.repetition_penalty=-1: `penalty`"]),
        (["sampling.top_p=2"], ["sampling.top_p=2: must be above 0 and at most 1"]),
    ],
)
def test_refusals(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(overrides)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trl.lr_scheduler_type=cosine_with_min_lr", "trl.lr_scheduler_kwargs.min_lr_rate=0.1", "trl.weight_decay=0"],
        ["trl.optim=adafactor", "trl.disable_dropout=true"],
        ["trl.report_to=tensorboard"],
        [LORA, "peft.init_lora_weights=pissa_niter_4", "peft.r=64"],
        [LORA, "peft.init_lora_weights=olora", "peft.target_modules=[q_proj]", "peft.modules_to_save=[lm_head]"],
        [LORA, "peft.use_dora=true", "peft.rank_pattern={a.b: 4}", "peft.exclude_modules=[lm_head]"],
        ["sampling.suppress_tokens=[5,151000]", "sampling.top_k=4", "sampling.min_new_tokens=5"],
        ["sampling.stop_strings=[a]", "sampling.min_p=0.1"],
        ["peft.r=4", "grid.train.lora=true,false"],
    ],
)
def test_what_runs_is_not_refused(overrides: list[str]) -> None:
    config.load(overrides)


def test_what_is_refused_would_have_failed_in_the_cell(tmp_path: Path) -> None:
    """Two of the above, unchecked: the cell ends with the same words."""
    for override, words in (("trl.adam_beta2=7", "Invalid beta parameter"), ("sampling.min_p=3", "`min_p` has to be")):
        given = [override, "seeds=0,", "grid=none", "variants=reference", "eval.prompts=4", "train.steps=1"]
        (cell,) = plan.cells(config.load(given, check=False))
        directory = CellDir(tmp_path / override)
        directory.write_config(cell)
        with pytest.raises(ValueError, match=words):
            cells.run_cell(cell, directory, lambda *a: None)


def test_a_point_is_named(tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text("seeds: 1\npoints: {good: {trl.adam_beta2: 0.9}, bad: {trl.adam_beta2: 2}}\n")
    with pytest.raises(ConfigError, match=r"points\.bad: trl\.adam_beta2=2: Invalid beta"):
        config.load([f"experiment={preset}"])
    config.load([f"experiment={preset}", "points=good"])


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, float, True),
        (1.5, int, False),
        (True, int, False),
        (True, bool, True),
        (None, float | None, True),
        (None, float, False),
        ("x", str | list[str], True),
        (["x", 3], list[str], False),
        ({"a": 1}, dict[str, typing.Any] | None, True),
        ("b", typing.Literal["a", "b"], True),
        ("c", typing.Literal["a", "b"], False),
        ("pissa_niter_16", typing.Literal["pissa_niter_[number of iters]"], True),
        (3, typing.Annotated[int, "positive"], True),
        ({"a": 1}, Path, True),
    ],
)
def test_types(value: object, hint: object, fits: bool) -> None:
    assert construct.fits(value, hint) is fits
