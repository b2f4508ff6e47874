"""Which calls the fused adapters take over from vLLM's classes, without vLLM or a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ablate.rollout import vllm_adapters as adapters
from ablate.rollout import vllm_live, vllm_memory


class Wrapper:
    """As much of PunicaWrapperGPU as is called; its own methods only say that they were."""

    def __init__(self, max_loras: int = 1, no_lora: bool = False) -> None:
        self.max_loras = max_loras
        self.own: list[Any] = []
        self.token_mapping_meta = SimpleNamespace(
            no_lora_flag_cpu=torch.tensor([no_lora]),
            token_lora_mapping=torch.zeros(512, dtype=torch.int32),
            active_lora_ids=torch.zeros(max_loras + 1, dtype=torch.int32),
        )

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
    ) -> None:
        self.own.append(("linear", scale, tuple(output_slices), buffer, kwargs))

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs) -> None:
        self.own.append("logits")


class Logits:
    def __init__(self, slots: int = 1) -> None:
        self.lora_a_stacked = torch.zeros(slots, 1, 8, 16)

    def reset_lora(self, index):
        self.lora_a_stacked[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self.reset_lora(index)
        self.lora_a_stacked[index, 0, : lora_a.shape[0]] = lora_a


def classes() -> tuple[type, type]:
    return type("Own", (), dict(Wrapper.__dict__)), type("OwnLogits", (), dict(Logits.__dict__))


class Columns:
    """As much of vLLM's merged columns as is called, on a base layer that gives the bias."""

    def __init__(self, wrapper: Any, module: Any, tp_size: int = 1, sharded: bool = False) -> None:
        self.punica_wrapper, self.module, self.tp_size = wrapper, module, tp_size
        self.lora_config = SimpleNamespace(fully_sharded_loras=sharded)

    def apply(self, x, bias):
        return self.module._mcp_apply(x, bias, self)

    def _apply_sync(self, x, bias):
        self.punica_wrapper.add_lora_linear(*call(x=x, y=bias))
        return bias


def module() -> Any:
    """As much of vLLM's column_parallel_linear as is called."""

    def _mcp_apply(x, bias, layer):
        layer.punica_wrapper.own.append("columns")
        return bias

    return SimpleNamespace(_mcp_apply=_mcp_apply)


class Cuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def call(rows=64, inner=576, widths=(576, 192, 192), rank=16, dtype=torch.bfloat16, slots=1, **changes: Any) -> tuple:
    """Arguments of add_lora_linear; changes: of x, y, a, b by name."""
    x = numbers(rows, inner, dtype=dtype).as_subclass(Cuda)
    given = {
        "y": numbers(rows, sum(widths), dtype=dtype),
        "x": x,
        "a": tuple(numbers(slots, 1, rank, inner, dtype=dtype) for _ in widths),
        "b": tuple(numbers(slots, 1, width, rank, dtype=dtype) for width in widths),
    } | changes
    return given["y"], given["x"], given["a"], given["b"], 1.0, widths


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fused adapters switched on; calls of the kernel instead of the kernel."""
    calls: list[Any] = []
    fake = SimpleNamespace(add_lora=lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setitem(__import__("sys").modules, "losses.backends.triton_lora", fake)
    monkeypatch.setattr(adapters, "_enabled", True)
    return calls


def test_a_decode_step_takes_the_kernel(launched: list[Any]) -> None:
    wrapper, logits = classes()
    assert adapters.install(wrapper, logits, module()) and adapters.install(wrapper, logits, module())
    w, arguments = wrapper(), call()
    w.add_lora_linear(*arguments)
    assert w.own == []
    ((args, kwargs),) = launched
    assert all(given is put for given, put in zip(args, arguments[:5], strict=True))
    assert kwargs["mapping"] is w.token_mapping_meta.token_lora_mapping
    assert kwargs["active"] is w.token_mapping_meta.active_lora_ids
    w.add_lora_linear(*arguments, add_inputs=True)
    assert len(launched) == 2


OTHERS = {
    "prefill": call(rows=257),
    "no rows": call(rows=0),
    "wide": call(inner=4096),
    "high rank": call(rank=128),
    "four slices": call(widths=(32,) * 4),
    "float32": call(dtype=torch.float32),
    "on the CPU": call(x=numbers(64, 576)),
    "output in another dtype": call(y=numbers(64, 960, dtype=torch.float32)),
    "output wider than its slices": call(y=numbers(64, 961)),
    "three dimensions": call(x=numbers(1, 64, 576).as_subclass(Cuda)),
    "columns apart": call(x=numbers(576, 64).as_subclass(Cuda).T),
    "A apart": call(a=tuple(numbers(1, 1, 16, 600)[..., :576] for _ in range(3))),
    "A in another dtype": call(a=tuple(numbers(1, 1, 16, 576, dtype=torch.float16) for _ in range(3))),
    "B of another rank": call(b=tuple(numbers(1, 1, width, 8) for width in (576, 192, 192))),
    "fewer B": call(b=(numbers(1, 1, 576, 16),)),
    "two slots in the stacks": call(slots=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_left_to_vllm(launched: list[Any], name: str) -> None:
    wrapper, logits = classes()
    adapters.install(wrapper, logits, module())
    w = wrapper()
    w.add_lora_linear(*OTHERS[name])
    assert w.own == [("linear", 1.0, OTHERS[name][-1], None, {})] and launched == []


def merged(rows: int = 64, **sharding: Any) -> tuple[Any, ...]:
    """(wrapper, input, output that the layer is to fill, output that it returned) of merged columns."""
    owner, logits, columns = *classes(), module()
    adapters.install(owner, logits, columns)
    wrapper, (y, x, *_) = owner(), call(rows)
    return wrapper, x, y, Columns(wrapper, columns, **sharding).apply(x, y)


def test_merged_columns_take_the_kernel(launched: list[Any]) -> None:
    w, x, y, returned = merged()
    ((args, _),) = launched
    assert args[0] is y is returned and args[1] is x and w.own == []


@pytest.mark.parametrize(
    ("changes", "enabled", "own"),
    [
        ({"rows": 257}, True, ("linear", 1.0, (576, 192, 192), None, {})),
        ({"tp_size": 2}, True, "columns"),
        ({"sharded": True}, True, "columns"),
        ({}, False, "columns"),
    ],
)
def test_other_merged_columns_are_left_to_vllm(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], enabled: bool, own: Any
) -> None:
    monkeypatch.setattr(adapters, "_enabled", enabled)
    w, _, y, returned = merged(**changes)
    assert w.own == [own] and launched == [] and returned is y


def test_options_of_the_call_are_left_to_vllm(launched: list[Any]) -> None:
    wrapper, logits = classes()
    adapters.install(wrapper, logits, module())
    w, buffer = wrapper(), torch.empty(1)
    for options in ({"add_inputs": False}, {"buffer": buffer}, {"other": 1}):
        w.add_lora_linear(*call(), **options)
    assert [(entry[3] is buffer, entry[4]) for entry in w.own] == [
        (False, {"add_inputs": False}), (True, {}), (False, {"other": 1}),
    ]  # fmt: skip
    two = wrapper(max_loras=2)
    two.add_lora_linear(*call())
    assert len(two.own) == 1 and launched == []


def test_a_step_without_the_adapter_does_nothing(launched: list[Any]) -> None:
    wrapper, logits = classes()
    adapters.install(wrapper, logits, module())
    w = wrapper(no_lora=True)
    w.add_lora_linear(*call())
    assert w.own == launched == []


def test_an_engine_that_said_no_keeps_vllms_kernels(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, logits = classes()
    adapters.install(wrapper, logits, module())
    monkeypatch.setattr(adapters, "_install_in_vllm", lambda: adapters.install(wrapper, logits, module()))
    layer = logits()
    layer.reset_lora(0)
    w = wrapper()
    assert adapters.use(False) is adapters.in_use() is False
    w.add_lora_linear(*call())
    w.add_lora_logits(None, None, layer.lora_a_stacked, None, 1.0)
    assert len(w.own) == 2 and launched == []
    assert adapters.use(True) is adapters.in_use() is True
    w.add_lora_linear(*call())
    assert len(w.own) == 2 and len(launched) == 1


def test_classes_that_differ_stay_as_they_are() -> None:
    class Other:
        def add_lora_linear(self, y, x, adapters) -> None: ...

        def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs) -> None: ...

    class OtherLogits(Logits):
        def reset_lora(self, index): ...

        def set_lora(self, index, weights): ...

    before = dict(Other.__dict__)

    def other(x, layer): ...

    columns = SimpleNamespace(_mcp_apply=other)
    assert adapters.install(Other, OtherLogits, columns) is False
    assert columns._mcp_apply is other
    assert Other.add_lora_linear is before["add_lora_linear"]
    assert Other.add_lora_logits is before["add_lora_logits"]  # nothing would keep the mark true
    assert adapters.install(type("Empty", (), {}), OtherLogits, SimpleNamespace()) is False


def test_the_head_is_left_out_only_while_nothing_adapts_it(launched: list[Any]) -> None:
    wrapper, logits = classes()
    adapters.install(wrapper, logits, module())
    w, layer = wrapper(), logits()

    def adds() -> bool:
        w.own.clear()
        w.add_lora_logits(None, None, layer.lora_a_stacked, None, 1.0)
        return w.own == ["logits"]

    assert adds()  # vLLM has not said yet
    layer.reset_lora(0)
    assert not adds()
    layer.set_lora(0, lora_a=numbers(4, 16), lora_b=None)
    assert adds()
    layer.reset_lora(0)
    assert not adds()
    with pytest.raises(AttributeError):
        layer.set_lora(0, None, None)
    assert adds()
    layer = logits(slots=2)
    layer.reset_lora(0)
    assert adds()


@pytest.mark.parametrize(
    ("changes", "plan", "fuses"),
    [
        ({}, {"compilation_config": {"mode": 0}}, True),
        ({}, {"enforce_eager": True}, True),
        ({}, {"compilation_config": {"mode": 3}}, False),
        ({}, {"compilation_config": 3}, False),
        ({}, {}, False),
        ({"options": {"fused_adapters": False}}, {"enforce_eager": True}, False),
        ({"options": {}}, {"enforce_eager": True}, False),
        ({"rank": 0}, {"enforce_eager": True}, False),
        ({"device": torch.device("cpu")}, {"enforce_eager": True}, False),
    ],
)
def test_which_engines_have_it(changes: dict[str, Any], plan: dict[str, Any], fuses: bool) -> None:
    need, options = vllm_memory.Need(1, 1, 1), {"fused_adapters": True}
    given: dict[str, Any] = {"device": torch.device("cuda"), "rank": 16, "need": need, "options": options} | changes
    spec = vllm_live.Spec(folder=Path("model"), weights="", dtype=torch.bfloat16, **given)
    assert vllm_live._fuses(spec, plan) is fuses


@pytest.mark.parametrize("name", ["fused_adapters", "share_weights"])
def test_own_options_are_true_or_false(name: str) -> None:
    for value in (True, False):
        assert vllm_live.vllm_options({name: value, "max_num_seqs": 4}) == {"max_num_seqs": 4}
    for other in ("maybe", 1, None):
        with pytest.raises(ValueError, match=rf"vllm\.{name}={other}: it takes true or false"):
            vllm_live.vllm_options({name: other})
