"""Model sources: the tiny model's warm start and cache, folders, and what is refused with which way out."""

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ablate import models, tasks
from ablate.models import cache, tiny
from ablate.models.tiny import CHARACTERS, TinySettings, build_tiny, demonstrations, tiny_model, tiny_tokenizer
from ablate.models.weights import folder_sha256, weight_files, weights_sha256

SHORT = TinySettings(steps=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and its tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    tiny_model(TinySettings()).save_pretrained(folder)
    tiny_tokenizer("heldout").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same to damage."""
    return Path(shutil.copytree(made, tmp_path / "model"))


# The tiny model


def test_the_tiny_model_has_the_stated_shape() -> None:
    model = tiny_model(TinySettings())
    config = model.config
    assert sum(parameter.numel() for parameter in model.parameters()) == tiny.PARAMETERS == 84_160
    assert (config.head_dim, config.num_attention_heads, config.vocab_size) == (32, 2, 15)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_tiny_tokenizer_is_one_token_a_character(tmp_path: Path) -> None:
    tiny_tokenizer("heldout").save_pretrained(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    text = "07+35=42"
    assert tokenizer(text)["input_ids"] == [CHARACTERS.index(character) for character in text]
    assert tokenizer.decode(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) == text + "<eos>"
    assert tokenizer.decode([*tokenizer("42")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "42"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("4 2x")["input_ids"].count(tokenizer.unk_token_id) == 2


def test_demonstrations_are_as_imperfect_as_stated() -> None:
    settings = TinySettings()
    train, held_out = tasks.arithmetic.split_pairs("heldout")
    rows = demonstrations(settings)
    texts = ["".join(CHARACTERS[index] for index in row) for row in rows]
    assert len(rows) == 20 * 2244
    assert not {text[:6] for text in texts} & {pair.question for pair in held_out}
    right = plus_one = 0
    for number, text in enumerate(texts):
        pair = train[number // 20]
        answer, _, padding = text[6:].partition("<eos>")
        assert text.startswith(pair.question) and 2 <= len(answer) <= 3 and set(padding.split("<pad>")) == {""}
        right += answer == pair.answer
        plus_one += answer == f"{pair.a + pair.b + 1:02d}"
    wrong = 1 - settings.right
    assert right / len(rows) == pytest.approx(settings.right, abs=0.01)
    assert plus_one / len(rows) == pytest.approx(wrong * settings.systematic, abs=0.01)


def test_the_warm_start_repeats_to_the_bit_and_leaves_torch_alone(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = build_tiny(SHORT, tmp_path / "a")
    torch.manual_seed(1234)
    second = build_tiny(SHORT, tmp_path / "b")
    assert folder_sha256(first) == folder_sha256(second)
    torch.set_rng_state(state)
    tiny.warm_start(SHORT)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    names = {
        build_tiny(TinySettings(steps=1, **change), tmp_path).name
        for change in ({}, {"seed": 1}, {"split": "validation"})
    }
    assert len(names) == 3, "another setting is another folder"


def test_the_warm_start_learns_and_reports_progress() -> None:
    seen: list[tuple[int, int, float]] = []
    tiny.warm_start(TinySettings(steps=60), lambda done, total, loss: seen.append((done, total, loss)))
    assert [done for done, _, _ in seen] == [10, 20, 30, 40, 50, 60]
    assert seen[-1][1] == 60
    assert seen[-1][2] < seen[0][2] - 0.5, "the loss falls"


def test_the_cache_is_used_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_tiny(SHORT, tmp_path)
    before = folder_sha256(path)
    with monkeypatch.context() as patched:
        patched.setattr(tiny, "warm_start", lambda *_: pytest.fail("built again"))
        assert build_tiny(SHORT, tmp_path) == path
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert folder_sha256(build_tiny(SHORT, tmp_path)) == before
    (path / cache.MARKER).write_text("[1")
    assert folder_sha256(build_tiny(SHORT, tmp_path)) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, f"{path.name}.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        cache.cached("thing", fail, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="set ABLATE_CACHE to a folder"):
        cache.cached("thing", lambda folder: None, blocked)


def _slow_build(folder: Path) -> None:
    import os
    import time

    time.sleep(0.3)
    (folder / "who").write_text(str(os.getpid()))


def _ask(root: str, answers: Any) -> None:
    answers.put((cache.cached("shared", _slow_build, root) / "who").read_text())


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_ask, args=(str(tmp_path), answers)) for _ in range(3)]
    for process in processes:
        process.start()
    got = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(got) == 1


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "here"))
    assert cache.cache_root() == tmp_path / "here"
    assert cache.cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("ABLATE_CACHE")
    assert cache.cache_root().name == "grpo-ablation"


@pytest.mark.slow
def test_the_tiny_model_starts_where_it_should() -> None:
    """About a third of held-out sums right when sampling, from the cache that the runs use too."""
    loaded = models.load("tiny")
    task = tasks.get("arithmetic").bind(loaded.tokenizer)
    scores = task.evaluate(tasks.EvalContext(loaded.build(), loaded.tokenizer, lambda *_: []))
    assert 0.33 <= scores["probability"] <= 0.40


# Hashes


@given(st.permutations(["a", "b", "c"]), st.sampled_from(["value", "name", "shape", "dtype", "none"]))
def test_the_hash_sees_every_change_and_no_order(order: list[str], change: str) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5), "c": torch.zeros(2, dtype=torch.bfloat16)}
    other = {name: tensors[name].clone() for name in order}
    if change == "value":
        other["a"].view(torch.int32)[1, 2] += 1
    elif change == "name":
        other["d"] = other.pop("a")
    elif change == "shape":
        other["a"] = other["a"].reshape(3, 2)
    elif change == "dtype":
        other["c"] = other["c"].half()
    assert (weights_sha256(other) == weights_sha256(tensors)) == (change == "none")


def test_the_hash_of_a_folder_is_that_of_its_tensors_however_stored(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = folder_sha256(folder)
    assert whole == weights_sha256(tensors)
    names = sorted(tensors)
    for shard, part in (("x.safetensors", names[::2]), ("y.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
    where = {name: ("x.safetensors", "y.safetensors")[index % 2] for index, name in enumerate(names)}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert folder_sha256(folder) == whole
    assert torch.equal(models.load(str(folder)).build().lm_head.weight, tensors["lm_head.weight"])
    (folder / "y.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks y\.safetensors"):
        weight_files(folder)


# Folders


def test_a_folder_is_built_byte_identical_each_time(made: Path) -> None:
    loaded = models.load(str(made))
    assert loaded.path == made.resolve()
    first, second = loaded.build(), loaded.build()
    assert first is not second
    assert weights_sha256(first.state_dict()) == weights_sha256(second.state_dict()) == loaded.sha256
    with torch.no_grad():
        first.lm_head.weight.add_(1)
    assert weights_sha256(loaded.build().state_dict()) == loaded.sha256, "training one leaves the next alone"
    assert models.load(str(made), dtype=torch.bfloat16).build().dtype == torch.bfloat16
    assert loaded.tokenizer.padding_side == "left"


def test_a_tokenizer_without_pad_token_pads_with_eos(folder: Path) -> None:
    tokenizer = tiny_tokenizer("heldout")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert models.load(str(folder)).tokenizer.pad_token == "<eos>"


def test_pickled_weights_are_refused_and_not_opened(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("the pickle was loaded",))

    (folder / "model.safetensors").unlink()
    torch.save(Bomb(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*refused; take a safetensors version"):
        models.load(str(folder))


def test_a_folder_without_weights_configuration_or_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="no usable tokenizer"):
        models.load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        models.load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.load(str(folder))


def test_damaged_and_incomplete_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors of LlamaForCausalLM, among them .*1\.mlp\.up_proj"):
        models.load(str(folder)).build()
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="is a file cut off"):
        models.load(str(folder))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tinny", "did you mean tiny?"),
        ("smollm", "did you mean smollm2?"),
        ("./no/such/folder", "is no folder, no .gguf file, no hub id"),
        ("", "is no folder"),
        ("no/such/file.gguf", "no file no/such/file.gguf"),
        ("some-org/no-such-model", "is no folder here, and the hub did not give it"),
    ],
)
def test_a_model_path_that_is_none_is_refused(spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        models.load(spec)
    assert message in str(error.value)


def test_a_file_instead_of_its_folder_is_refused(made: Path) -> None:
    with pytest.raises(ValueError, match="give the folder that holds it"):
        models.load(str(made / "model.safetensors"))


def test_a_hub_id_is_downloaded_at_its_revision(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str | None]] = []
    snapshot = Path(shutil.copytree(made, tmp_path / "0123abc"))

    def download(repo: str, revision: str | None, **_: Any) -> str:
        asked.append((repo, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models.load("some-org/some-model@v2").source == "some-org/some-model@0123abc"
    models.load("some-org/some-model")
    assert asked == [("some-org/some-model", "v2"), ("some-org/some-model", None)]
