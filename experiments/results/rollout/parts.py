"""The parts of `measure.py`. Each is called with a function that saves figures, by name, as they come."""

from __future__ import annotations

import gc
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import (
    CPU,
    GIB,
    PROMPT,
    Clock,
    arguments,
    drain,
    folder,
    lora,
    median,
    prompts,
    reward,
    scaled,
    used_bytes,
)

Save = Callable[..., None]
OUT = Path("/tmp/measure-out")  # TRL's output folders, in which nothing is saved


def load(part: str) -> None:
    """Imports what a part needs and makes its model; takes no device memory."""
    import torch

    from ablate.rollout import vllm_live

    if part != "stock":  # vLLM reads it when it is imported; TRL has settings of its own
        vllm_live.environment(torch.device("cpu" if CPU else "cuda"))
    import trl  # noqa: F401
    import vllm  # noqa: F401

    import ablate.trainer  # noqa: F401

    shape = {"large": "llama8b", "memory": "thin"}.get(part, "smollm2")
    folder(shape, with_weights=shape != "llama8b")


def provenance() -> dict[str, Any]:
    import peft
    import torch
    import transformers
    import triton
    import trl
    import vllm

    from ablate.provenance import git

    return {
        "device": "cpu" if CPU else torch.cuda.get_device_name(),
        "versions": {m.__name__: m.__version__ for m in (torch, triton, transformers, trl, peft, vllm)},
        "commit": git()["sha"],
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def start(shape: str, rows: int, length: int, rank: int = 16, **options: Any) -> Any:
    """The process's engine on a shape."""
    import torch

    from ablate.rollout import vllm_live, vllm_memory

    path = folder(shape)
    device = torch.device("cpu" if CPU else "cuda:0")
    need = vllm_memory.Need(sequences=rows, prompt=PROMPT + 16, completion=length)
    return vllm_live.acquire(vllm_live.Spec(path, path.name, torch.bfloat16, device, rank, need, options))


def train(
    live: Any, model: Any, rows: int, length: int, steps: int, *, backend: str, shared: bool = True, **sampling: Any
) -> dict[str, Any]:
    """Steps of AblationTrainer on an engine: step times, memory, and medians of the figures logged after step 3."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from ablate.models import load_tokenizer
    from ablate.rollout.vllm import VllmEngine
    from ablate.trainer import AblationTrainer

    clock = Clock()
    trainer = AblationTrainer(
        model=model, reward_funcs=[reward], args=arguments(OUT, rows, length, steps), loss_variant="reference",
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}), processing_class=load_tokenizer(live.spec.folder),
        peft_config=lora() if live.spec.rank else None, loss_backend=backend, callbacks=[clock.callback],
    )  # fmt: skip
    trainer.engine = VllmEngine(live, eos_token_ids=[1], max_completion_length=length, options=sampling, shared=shared)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    seconds = clock.seconds()
    return {
        "loss_backend": backend,
        "completions": rows,
        "tokens": length,
        "step_seconds_median": median(seconds[3:] or seconds),
        "step_seconds": seconds[:40],
        "medians": medians(logs[3:] or logs),
        "direct_adapter_copy": live.adapter is not None and live.adapter.direct,
        "engine": trainer.engine.describe(),
        "used_bytes": clock.used,
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each logged figure, over the rows that have it: a step may be too short for a sample of gpu/busy."""
    groups = ("rollout/", "time/", "memory/", "sampling/", "gpu/", "peak_memory")
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(groups))
    return {name: median([row[name] for row in rows if name in row]) for name in names}


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures, or the error in their place: the stages after this one still run."""
    try:
        return function()
    except Exception:
        return {"error": failure()}
    finally:
        gc.collect()


def failure() -> str:
    """Prints the exception at hand, and returns its traceback without the folders of this machine."""
    text = traceback.format_exc()
    print(text, flush=True)
    for place in (Path(__file__).parents[3], Path(sysconfig.get_paths()["purelib"])):
        text = text.replace(f"{place}/", "")
    return text


def small(save: Save) -> None:
    rows, length = scaled(64, 8), scaled(256, 8)
    live = start("smollm2", rows, length)
    save(tokens_per_gib=live.kv_tokens * GIB / live.plan["kv_cache_memory_bytes"])

    def steps(count: int, backend: str) -> dict[str, Any]:
        return attempt(lambda: train(live, live.shared_model(), rows, length, count, backend=backend))

    save(triton=steps(scaled(12, 4), "triton"))
    save(chunked=steps(scaled(8, 4), "chunked"))


def large(save: Save) -> None:
    import torch

    rows, length, steps = scaled(16, 8), scaled(64, 8), scaled(8, 4)
    before = used_bytes()
    kv_bytes = scaled(8 * GIB, 1 << 24)
    live = start("llama8b", rows, length, load_format="dummy", kv_cache_memory_bytes=kv_bytes)
    model = live.shared_model()
    weights = sum(p.numel() * p.element_size() for p in live.model.parameters())
    live.kv.release()
    if not CPU:
        torch.cuda.empty_cache()
    without = used_bytes() - before
    save(
        weights_bytes=weights, device_bytes_before=before, bytes_without_kv=without, ratio=without / weights,
        kv_bytes=kv_bytes,
    )  # fmt: skip
    turns = [turn(live) for _ in range(5)]
    wake, release, freed = (median([t[i] for t in turns]) for i in range(3))
    save(wake_ms=wake, release_ms=release, freed_bytes=freed)
    backend = working_backend()
    del model
    shared = attempt(lambda: train(live, live.shared_model(), rows, length, steps, backend=backend))
    save(shared=shared)
    copy = live.shared_model()
    for p in copy.parameters():
        p.data = p.data.clone()
    # Its KV cache is released likewise, the engine's weights stay.
    unshared = attempt(lambda: train(live, copy, rows, length, steps, backend=backend))
    save(unshared=unshared, shared_over_unshared=shared["step_seconds_median"] / unshared["step_seconds_median"])


def turn(live: Any) -> tuple[float, float, int]:
    """(ms to wake the KV cache, ms to release it, bytes that became free)."""
    drain()
    started = time.perf_counter()
    live.kv.wake()
    drain()
    woken = time.perf_counter()
    freed = live.kv.release()
    drain()
    return 1e3 * (woken - started), 1e3 * (time.perf_counter() - woken), freed


def fp8(save: Save) -> None:
    rows, length = scaled(64, 8), scaled(64, 8)
    size = scaled(2 * GIB, 1 << 24)
    live = start("smollm2", rows, length, kv_cache_dtype="fp8", kv_cache_memory_bytes=size, enforce_eager=True)
    save(tokens_per_gib=live.kv_tokens * GIB / size)
    save(train=train(live, live.shared_model(), rows, length, 5, backend=working_backend()))


def memory(save: Save) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from ablate.rollout import vllm_live

    rows, length, steps = scaled(32, 8), 16, scaled(200, 24)
    live = start("thin", rows, length)
    figures = train(live, live.shared_model(), rows, length, steps, backend=working_backend(), min_p=0.05)
    used = figures.pop("used_bytes")
    save(used_after_20=used[19], used_at_the_end=used[-1], steps=steps, growth=used[-1] / used[19] - 1, train=figures)

    def full() -> dict[str, Any]:
        """All weights trained, on another engine of the same process: the engine sleeps while the trainer steps."""
        other = start("thin", rows, length, rank=0, enforce_eager=True)
        model = AutoModelForCausalLM.from_pretrained(folder("thin"), dtype=torch.float32).to(other.device)
        figures = train(other, model, rows, length, 5, backend=working_backend(), shared=False)
        return figures | {"sleep_mode": other.kv.able}

    del live
    vllm_live.release()
    save(full_fine_tuning=attempt(full))


def stock(save: Save) -> None:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    from ablate.models import load_tokenizer

    path, clock = folder("smollm2"), Clock()
    rows, length = scaled(64, 8), scaled(256, 8)
    vllm = dict(
        use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=PROMPT + 16 + length,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(path), reward_funcs=[reward],
        args=arguments(
            OUT, rows, length, scaled(9, 5), model_init_kwargs={"dtype": "bfloat16"}, **({} if CPU else vllm)
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}), processing_class=load_tokenizer(path),
        peft_config=lora(), callbacks=[clock.callback],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = clock.seconds()
    save(step_seconds_median=median(seconds[3:]), step_seconds=seconds, used_bytes=clock.used)


def four_bit(save: Save) -> None:
    rows, length = scaled(64, 8), scaled(64, 8)
    live = start("smollm2", rows, length, quantization="bitsandbytes", enforce_eager=True)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(live.spec.folder, dtype=live.spec.dtype).to(live.device)
    save(train=train(live, model, rows, length, 5, backend=working_backend(), shared=False))


def decode(save: Save) -> None:
    """What bounds a decode step of `small`: its kernels by name, and the host's time."""
    from peft import get_peft_model

    from ablate.rollout.vllm import VllmEngine

    rows, length = scaled(64, 8), scaled(256, 8)
    live = start("smollm2", rows, length)
    model = get_peft_model(live.shared_model(), lora())
    ids = [[100 + (i * 37 + k) % 900 for k in range(PROMPT)] for i in range(rows // 8) for _ in range(8)]

    def generate(tokens: int, step: int) -> float:
        engine = VllmEngine(live, eos_token_ids=[1], max_completion_length=tokens, shared=True)
        engine.checked_difference = 0.0  # the check's tokens would count as well
        return engine.generate(model, ids, seed=step, step=step, num_generations=8).stats["rollout/generate_seconds"]

    seconds = [generate(length, step) for step in range(6)][1:]
    save(generate_ms=[round(1e3 * s, 1) for s in seconds], ms_a_token=1e3 * median(seconds) / length)
    save(**profiled(generate, max(2, length // 4)))


def profiled(generate: Callable[[int, int], float], tokens: int) -> dict[str, Any]:
    """Kernels by name, in microseconds a token, and cProfile's report of the host."""
    import cProfile
    import io
    import pstats

    import torch

    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if CPU else activity.CUDA]) as profile:
        wall = generate(tokens, 6)
    events = profile.key_averages()
    if not CPU:  # an operator would count its kernels again
        events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted(events, key=lambda event: -event.self_device_time_total)
    host = cProfile.Profile()
    host.runcall(generate, tokens, 7)
    text = io.StringIO()
    pstats.Stats(host, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
    return {
        "profiled_ms_a_token": 1e3 * wall / tokens,
        "device_us_a_token": sum(event.self_device_time_total for event in kernels) / tokens,
        "kernels": [
            [event.key[:90], round(event.count / tokens, 2), round(event.self_device_time_total / tokens, 2)]
            for event in kernels[:40]
        ],
        "host": text.getvalue().splitlines(),
    }


PARTS: dict[str, Callable[[Save], None]] = {
    "small": small, "large": large, "fp8": fp8, "memory": memory, "stock": stock, "four_bit": four_bit,
    "decode": decode,
}  # fmt: skip


def working_backend() -> str:
    """The Triton backend where it runs here, the chunked one where not: `small` says why."""
    import torch

    import losses

    device = "cpu" if CPU else "cuda"
    try:
        h = torch.randn(2, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
        ids = torch.randint(0, 128, (2, 8), device=device)
        inputs = losses.LossInputs(ids, torch.ones_like(ids), torch.tensor([1.0, -1.0], device=device))
        losses.linear_policy_loss(h, w, inputs, "reference", beta=0.0, backend="triton").loss.backward()
        return "triton"
    except Exception as error:
        print("the loss in the chunked backend, since triton says", type(error).__name__, error)
        return "chunked"
