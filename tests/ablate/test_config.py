"""Configuration: typed keys, presets and overrides, names checked against what is installed, things set twice."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import aliases, config, keys, passthrough, schema
from ablate import help as help_texts
from ablate.config import Config, ConfigError

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def load(*overrides: str, check: bool = False) -> Config:
    return config.load(overrides, check=check)


def preset(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return f"experiment={path}"


def test_default_preset_is_the_cpu_experiment() -> None:
    c = load()
    assert (c.experiment, c.model, c.task, c.seeds) == ("default", "tiny", "arithmetic", [0, 1, 2])
    assert c.variants == ["all"] and tuple(c.variants_all) == schema.FOUNDING
    assert c.grid == {"loss.beta": [0.04, 1.0]}
    assert (c.train.prompts_per_step, c.train.num_generations) == (16, 8)


def test_founding_names_are_those_of_the_registry() -> None:
    import losses

    assert losses.founding == schema.FOUNDING


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.learning_rate=1e-5", "train.learning_rate", 1e-5),
        ("learning_rate=1e-5", "train.learning_rate", 1e-5),
        ("steps=7", "train.steps", 7),
        ("loss.backend=chunked", "loss.backend", "chunked"),
        ("beta=1", "loss.beta", 1.0),
        ("epsilon=null", "loss.epsilon", None),
        ("micro_batch_size=32", "train.micro_batch_size", 32),
        ("lora=true", "train.lora", True),
        ("jobs=2", "jobs", 2),
        ("jobs=auto", "jobs", "auto"),
        ("model=123", "model", "123"),
        ("out=a=b", "out", "a=b"),
        ("task_options.form=chat", "task_options.form", "chat"),
        ("arithmetic.form=chat", "task_options.form", "chat"),
        ("trl.weight_decay=0.1", "trl.weight_decay", 0.1),
        ("trl.lr_scheduler_kwargs.num_cycles=2", "trl.lr_scheduler_kwargs.num_cycles", 2),
        ("sampling.stop_token_ids=[1,2]", "sampling.stop_token_ids", [1, 2]),
        ("wandb.project=p", "wandb.project", "p"),
        ("loss.params.alpha=2", "loss.params.alpha", 2),
        # other libraries' names for the schema's own keys
        ("trl.learning_rate=1e-5", "train.learning_rate", 1e-5),
        ("trl.beta=0.5", "loss.beta", 0.5),
        ("trl.temperature=0.7", "sampling.temperature", 0.7),
        ("trl.generation_kwargs.top_k=5", "sampling.top_k", 5),
        ("sampling.max_new_tokens=9", "train.max_completion_length", 9),
        ("vllm.model=x", "model", "x"),
    ],
)
def test_overrides(override: str, key: str, value: object) -> None:
    found = keys.select(config.to_dict(load(override)), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("0,1,7", [0, 1, 7]), ("7,", [7]), ("[5]", [5]), ("[0,1]", [0, 1]), ("1", [0])],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert load(f"seeds={text}").seeds == seeds


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.learnign_rate=1"], ["train.learnign_rate", "train.learning_rate"]),
        (["learnign_rate=1"], ["learnign_rate", "learning_rate"]),
        (["tain.steps=1"], ["tain.steps", "train.steps"]),
        (["zzzzqq=1"], ["zzzzqq", "--help"]),
        (["train=1"], ["train is a group", "train.steps"]),
        (["trl=1"], ["trl is a group"]),
        (["steps"], ["'steps'", "key=value"]),
        (["=3"], ["key=value"]),
        (["train.steps=abc"], ["train.steps=abc", "Integer"]),
        (["train.steps=2.5"], ["train.steps"]),
        (["train.steps="], ["train.steps", "no value"]),
        (["train.learning_rate=true"], ["train.learning_rate"]),
        (["train.learning_rate=nan"], ["train.learning_rate", "finite"]),
        (["train.learning_rate=-1"], ["train.learning_rate"]),
        (["steps=0"], ["train.steps=0", "1 or more"]),
        (["num_generations=1"], ["train.num_generations", "2 or more"]),
        (["micro_batch_size=7"], ["train.micro_batch_size=7", "128 completions"]),
        (["loss.backend=chunkd"], ["loss.backend", "chunked"]),
        (["precision=fp9"], ["loss.precision", "fp8"]),
        (["rollout=vlm"], ["rollout", "vllm"]),
        (["dtype=bfloat"], ["train.dtype", "bfloat16"]),
        (["device=cudo"], ["device", "cuda"]),
        (["jobs=-1"], ["jobs=-1"]),
        (["jobs=many"], ["jobs=many"]),
        (["epsilon_high=0.2"], ["loss.epsilon_high", "loss.epsilon"]),
        (["seeds=0"], ["seeds=0", "seeds=0,"]),
        (["seeds=1,1"], ["seeds"]),
        (["seeds=-1,2"], ["seeds"]),
        (["seeds=a,b"], ["seeds"]),
        (["seeds="], ["seeds"]),
        (["variants="], ["variants"]),
        (["variants_all="], ["variants_all: none given"]),
        (["seeds=99999999999999999999"], ["seeds=99999999999999999999", "at most 1000"]),
        (["seeds=4294967296,"], ["seeds=[4294967296]", "4294967295"]),
        (["seeds=500", "grid.beta=0,1,2"], ["1500 cells", "at most 1000"]),
        (["grid.beta=" + ",".join(map(str, range(1001)))], ["grid.loss.beta", "1001 values"]),
        (["sampling.temperature=0"], ["sampling.temperature=0", "above 0"]),
        (["trl.temperature=nan"], ["sampling.temperature=nan", "above 0"]),
        (["grid.sampling.temperature=1,hot"], ["sampling.temperature=hot", "above 0"]),
        (["temperature=1"], ["sampling.temperature"]),
        (["experiment=defalt"], ["experiment", "default"]),
        (["experiment=no/such.yaml"], ["no/such.yaml", "no such file"]),
        (["experiment=a", "experiment=b"], ["experiment", "twice"]),
        (["peft.r=8"], ["peft.r", "train.lora=true"]),
        (["gsm8k.form=think"], ["gsm8k.form", "task=gsm8k"]),
        (["grid=0.1"], ["grid.KEY"]),
        (["grid.beta="], ["grid.loss.beta", "no values"]),
        (["grid.beta=1,1.0"], ["grid.loss.beta", "twice"]),
        (["grid.beta=x"], ["loss.beta"]),
        (["grid.steps=0,1"], ["train.steps=0"]),
        (["grid.seeds=1,2"], ["seeds", "axis already"]),
        (["grid.out=a,b"], ["out", "cannot be an axis"]),
        (["grid.sampling.stop=[[1],[2]]"], ["grid.sampling.stop", "single values"]),
        (["model=${nowhere}"], ["does not resolve"]),
        # refused, with the key to use
        (["trl.bf16=true"], ["trl.bf16", "train.dtype=bfloat16"]),
        (["trl.logging_steps=5"], ["trl.logging_steps", "every step"]),
        (["out=runs\udcff"], ["out=runs", "UTF-8"]),
        (["out=a\0b"], ["UTF-8"]),
        (["trl.seed=1"], ["trl.seed", "seeds=0,1,7"]),
        (["trl.loss_type=dapo"], ["trl.loss_type", "variants=NAME"]),
        (["trl.use_vllm=true"], ["trl.use_vllm", "rollout=vllm"]),
        (["trl.model_init_kwargs.dtype=bfloat16"], ["trl.model_init_kwargs", "train.dtype"]),
        (["trl.vllm_server_host=h"], ["trl.vllm_server_host", "no server"]),
        (["trl.generation_kwargs=1"], ["sampling.NAME"]),
        # one thing by two names
        (["train.learning_rate=1", "trl.learning_rate=2"], ["twice", "train.learning_rate", "trl.learning_rate"]),
        (["sampling.temperature=1", "trl.temperature=1"], ["twice", "sampling.temperature", "trl.temperature"]),
        (["trl.beta=1", "loss.beta=1"], ["twice", "trl.beta", "loss.beta"]),
        (["beta=1", "loss.beta=1"], ["twice", "as beta", "loss.beta"]),
        (["beta=1", "grid.beta=1,2"], ["twice", "grid.beta"]),
        (["arithmetic.form=chat", "task_options.form=plain"], ["twice", "arithmetic.form"]),
        (["sampling.max_tokens=3", "max_completion_length=4"], ["twice", "sampling.max_tokens"]),
    ],
)
def test_refusals(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["variants=referense"], ["referense", "reference"]),
        (["task=arithmetics"], ["arithmetics", "arithmetic"]),
        (["task_options.frm=chat"], ["frm", "form"]),
        (["arithmetic.form=chatty"], ["form", "chat"]),
        (["model=/no/such/folder"], ["model=/no/such/folder", "no such"]),
        (["model=weights.gguf"], ["weights.gguf", "no such"]),
        (["model=tinny"], ["model", "tinny", "did you mean tiny"]),
        (["loss.params.alfa=1"], ["loss.params.alfa", "none of the variants"]),
        (["loss.params.beta=1"], ["loss.params.beta", "loss.beta"]),
        (["sampling.temperatur=1"], ["sampling.temperatur", "temperature"]),
        (["sampling.stop=x"], ["sampling.stop", "stop_strings"]),
        (["train.lora=true", "peft.lora_alfa=1"], ["peft.lora_alfa", "lora_alpha"]),
        (["wandb.projekt=p"], ["wandb.projekt", "project"]),
        (["vllm.max_num_seqs=4"], ["vllm.max_num_seqs", "rollout=vllm"]),
        (["grid.sampling.temprature=1,2"], ["sampling.temprature", "temperature"]),
    ],
)
def test_names_are_checked_against_what_is_installed(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(*overrides, check=True)
    for word in words:
        assert word in str(error.value)


def test_trl_names_are_those_of_the_installed_config() -> None:
    load("trl.weight_decay=0.1", check=True)
    with pytest.raises(ConfigError, match=r"trl\.wait_decay.*weight_decay"):
        load("trl.wait_decay=0.1", check=True)
    with pytest.raises(ConfigError, match=r"trl\.delta would be ignored"):
        load("trl.delta=0.1", check=True)
    known = passthrough.trl_names()
    ours = [key.partition(".")[2] for key in (*aliases.SAME, *aliases.REFUSED) if key.startswith("trl.")]
    assert set(ours) <= set(known), "an alias for a name that TRL no longer has"
    peft = [key.partition(".")[2] for key in aliases.SAME if key.startswith("peft.")]
    assert set(peft) <= set(passthrough.peft_names())


def test_aliases_lead_to_keys_of_the_schema() -> None:
    schema = keys.Schema(Config)
    for key in aliases.SAME.values():
        assert key in schema.leaves or keys.in_open_group(key)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    for override in ("device=cuda", "device=cuda:1", "grid.device=cpu,cuda"):
        with pytest.raises(ConfigError, match=r"device=cuda.*no CUDA device"):
            load(override, check=True)


def test_vllm_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    with pytest.raises(ConfigError, match="rollout=vllm"):
        load("rollout=vllm", check=True)


def test_parameters_of_one_variant(tmp_path: Path) -> None:
    import losses

    own = {name: losses.get(name).params for name in losses.names()}
    taker = next(name for name, params in own.items() if params)
    parameter = own[taker][0]
    key = f"loss.params.{parameter.name}"
    value = parameter.default if parameter.default is not None else parameter.low or 16
    c = load(f"variants={taker},reference", f"{key}={value}", check=True)
    assert c.loss.params == {parameter.name: value}
    with pytest.raises(ConfigError, match="reference has no such parameter"):
        load(f"variants={taker},reference", f"grid.{key}={value}", check=True)
    load(f"variants={taker}", f"grid.{key}={value}", check=True)
    with pytest.raises(ConfigError, match=parameter.name):
        load(f"variants={taker}", f"{key}=word", check=True)


def test_grid_of_a_preset_and_of_the_command_line(tmp_path: Path) -> None:
    own = preset(tmp_path, "grid: {beta: [0.04, 1], train.steps: [1, 2]}\nloss: {epsilon: 0.2}\n")
    assert load(own).grid == {"loss.beta": [0.04, 1.0], "train.steps": [1, 2]}
    assert load(own, "grid=none").grid == {}
    assert load(own, "grid=none", "grid.steps=3").grid == {"train.steps": [3]}
    assert load(own, "grid.beta=0.5").grid == {"loss.beta": [0.5], "train.steps": [1, 2]}
    fixed = load(own, "beta=0.5")
    assert fixed.grid == {"train.steps": [1, 2]} and fixed.loss.beta == 0.5
    assert load(own, "grid.epsilon=0.1,null").grid["loss.epsilon"] == [0.1, None]


def test_command_line_wins_over_the_preset_by_any_name(tmp_path: Path) -> None:
    own = preset(tmp_path, "train: {learning_rate: 1.0e-3}\nsampling: {temperature: 1.0}\ntrl: {weight_decay: 0.1}\n")
    assert load(own).train.learning_rate == 1e-3
    assert load(own, "trl.learning_rate=2e-3").train.learning_rate == 2e-3
    c = load(own, "trl.temperature=0.5", "trl.adam_beta2=0.9")
    assert c.sampling == {"temperature": 0.5} and c.trl == {"weight_decay": 0.1, "adam_beta2": 0.9}
    assert load("steps=3", "steps=4").train.steps == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "a preset is a mapping"),
        ("a: [\n", "not a readable preset"),
        ("train: {stps: 1}\n", "train.stps"),
        ("experiment: x\n", "named by its file"),
        ("trl: {beta: 1}\nloss: {beta: 1}\n", "twice"),
        ("grid: {beta: [1]}\nloss: {beta: 1}\n", "twice"),
        ("steps: 1\ntrain: {steps: 1}\n", "twice"),
        ("peft: {rank_pattern: {a.b: 1}}\n", "train.lora=true"),
        ("train: 3\n", "train is a group"),
    ],
)
def test_faulty_presets(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(preset(tmp_path, text))


def test_values_below_a_passthrough_name_keep_their_keys(tmp_path: Path) -> None:
    own = preset(tmp_path, "train: {lora: true}\npeft: {r: 4, rank_pattern: {model.layers.0: 8}}\n")
    assert load(own).peft == {"r": 4, "rank_pattern": {"model.layers.0": 8}}


def test_shipped_presets_are_valid() -> None:
    names = config.preset_names()
    assert config.DEFAULT_PRESET in names
    for name in names:
        c = load(f"experiment={name}")
        assert c.experiment == name
        here = [n for n, point in c.points.items() if HAS_VLLM or not any(key.startswith("vllm.") for key in point)]
        load(f"experiment={name}", *([f"points={','.join(here)}"] if here else []), check=True)


def test_hash_follows_what_decides_the_numbers() -> None:
    base = load()
    same = load(
        "out=elsewhere",
        "jobs=1",
        "threads=2",
        "variants=reference",
        "seeds=9",
        "retries=0",
        "wandb.project=p",
        "keep_checkpoint=true",
    )
    assert config.config_hash(base, "reference", 0) == config.config_hash(same, "reference", 0)
    others = [
        load("steps=81"),
        load("beta=1"),
        load("arithmetic.form=chat"),
        load("device=cpu"),
        load("trl.adam_beta2=0.9"),
    ]
    hashes = {config.config_hash(c, "reference", 0) for c in [base, *others]}
    hashes |= {config.config_hash(base, "reference", 1), config.config_hash(base, "no_detach", 0)}
    assert len(hashes) == len(others) + 3


def test_a_key_that_came_later_leaves_older_cells_as_they_were() -> None:
    before, now = config.to_dict(load()), config.to_dict(load())
    for key in schema.LATER_KEYS:
        head, _, name = key.partition(".")
        assert before[head].pop(name) == schema.LATER_KEYS[key], "its default is how cells ran before"
    assert schema.config_hash(before, "reference", 0) == schema.config_hash(now, "reference", 0)
    assert config.differences(before, now) == []
    assert config.differences(before, config.to_dict(load("load_in_4bit=true", "lora=true"))) == [
        "train.load_in_4bit: not set -> True",
        "train.lora: False -> True",
    ]


def test_differences_name_the_keys() -> None:
    before, after = config.to_dict(load()), config.to_dict(load("steps=9", "trl.weight_decay=0.1", "jobs=1"))
    assert config.differences(before, after) == ["train.steps: 80 -> 9", "trl.weight_decay: not set -> 0.1"]
    assert config.differences(before, before) == []


@given(st.lists(st.text(alphabet="ab1.'\"[](), ", max_size=12), max_size=4))
def test_list_splitting_never_loses_plain_parts(parts: list[str]) -> None:
    keys.split_list(",".join(parts))  # whatever is typed, a list comes back
    plain = [part for part in parts if part.strip(" ") and not set(part) & set("'\"[](),")]
    assert len(keys.split_list(",".join(plain))) == len(plain)


def test_lists_in_brackets() -> None:
    config = load("variants=[reference,k2]", "grid.beta=[0.5, 1.0]")
    assert (config.variants, config.grid) == (["reference", "k2"], {"loss.beta": [0.5, 1.0]})


def test_list_splitting() -> None:
    assert keys.split_list("0.04,1.0") == [0.04, 1.0]
    assert keys.split_list("a, null ,true,'x,y'") == ["a", None, True, "x,y"]
    assert keys.split_list("[1,2]") == [[1, 2]]
    assert keys.split_list(7) == [7]


def test_short_names() -> None:
    schema = keys.Schema(Config)
    assert schema.short("loss.beta") == "beta"
    assert schema.short("task") == "task"
    assert schema.short("trl.weight_decay") == "trl.weight_decay"
    assert schema.short("loss.params.alpha") == "alpha"
    assert schema.short("loss.params.beta") == "loss.params.beta"


def test_reading_a_config_loads_neither_torch_nor_trl(root: Path) -> None:
    code = "import sys; from ablate import config; config.load(); print({'torch', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_help_names_every_key() -> None:
    named = {key.removesuffix(".*") for key, _, _ in help_texts.key_lines()}
    schema = keys.Schema(Config)
    assert set(schema.leaves) | set(keys.OPEN_GROUPS) | {"grid", "points"} == named
    assert keys.help_of("train.steps", Config) == "optimizer steps"


def test_help_says_what_the_options_of_a_task_mean() -> None:
    from ablate import tasks

    lines = {key: (default, meaning) for key, default, meaning in help_texts.task_lines()}
    assert set(lines) == {f"{name}.{option}" for name in tasks.names() for option in tasks.options(name)}
    assert lines["gsm8k.form"] == ("plain", '"plain" or "think".')
    assert lines["gsm8k.path"][0] == "null" and "test.jsonl" in lines["gsm8k.path"][1]
    assert lines["gsm8k.conversational"][0] == "true"
    without = [key for key, (_, meaning) in lines.items() if not meaning]
    assert without == [], "a line 'option: meaning' in the task's docstring"
