"""Rollouts by vLLM beside a trainer, measured on a CUDA device with random weights of known shapes.

    python experiments/results/rollout/measure.py --out DIR [--parts small,stock,large,fp8,memory]

    small   SmolLM2-135M's shape, LoRA r = 16, 64 completions of 256 tokens a step: step time by part, adapter refresh
    memory  two of its layers, 200 steps of 64 completions of 16 tokens: device memory after steps 20 and 200
    large   Llama-3.1-8B's shape, bf16 LoRA: memory without KV cache, release and wake, shared against unshared weights
    fp8     tokens that a GiB of fp8 KV cache holds and the log-prob mismatch, to be compared with `small`'s bf16
    stock   the step of `small` by TRL's GRPOTrainer with colocated vLLM and sleep mode, in a process of its own

Each part runs in a process of its own; they load side by side and measure one after the other. Writes DIR/<part>.json
as each part ends. Compare only what one call has measured, and nothing where another part was still running.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from workload import GIB, PROMPT, Clock, arguments, folder, lora, median, prompts, reward


def spec(path: Path, rows: int, length: int, rank: int = 16, **options: Any) -> Any:
    import torch

    from ablate.rollout import vllm_memory
    from ablate.rollout.vllm import Spec

    need = vllm_memory.Need(sequences=rows, prompt=PROMPT + 16, completion=length)
    return Spec(path, path.name, torch.bfloat16, torch.device("cuda:0"), rank, need, options)


def train(live: Any, model: Any, rows: int, length: int, steps: int, shared: bool = True, **options: Any) -> dict:
    """Steps of AblationTrainer on an engine: step times, memory, and the logged figures of every step."""
    from datasets import Dataset

    from ablate.models import load_tokenizer
    from ablate.rollout.vllm import VllmEngine
    from ablate.trainer import AblationTrainer

    clock = Clock()
    trainer = AblationTrainer(
        model=model, reward_funcs=[reward], args=arguments(Path("/tmp/out"), rows, length, steps),
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}), processing_class=load_tokenizer(live.spec.folder),
        peft_config=lora() if live.spec.rank else None, loss_variant="reference",
        loss_backend=backend(), callbacks=[clock.callback],
    )  # fmt: skip
    trainer.engine = VllmEngine(
        live, eos_token_ids=[1], max_completion_length=length, run_seed=1, options=options, shared=shared
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    parts = [k for k in logs[-1] if k.startswith(("rollout/", "time/", "memory/", "sampling/"))]
    seconds = clock.seconds()
    return {
        "loss_backend": backend(),
        "completions": rows,
        "tokens": length,
        "step_seconds_median": median(seconds[3:]),
        "step_seconds": [round(s, 4) for s in seconds][:40],
        "medians": {k: median([row[k] for row in logs[3:]]) for k in parts},
        "direct_adapter_copy": live.adapter is not None and live.adapter.direct,
        "engine": trainer.engine.describe(),
        "used_bytes": clock.used,
    }


def wait_for(*parts: str) -> None:
    """Until these parts, where they run in this call, have ended."""
    asked = os.environ.get("MEASURE_PARTS", "").split(",")
    files = [Path(os.environ["MEASURE_OUT"]) / f"{part}.json" for part in parts if part in asked]
    while not all(file.is_file() for file in files):
        time.sleep(0.1)
    time.sleep(1.0 if files else 0)  # for their memory


_backend = ""


def backend() -> str:
    """The Triton backend where it runs here, the chunked one where not."""
    global _backend
    if not _backend:
        import torch

        import losses

        try:
            h = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            w = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
            ids = torch.randint(0, 128, (2, 8), device="cuda")
            inputs = losses.LossInputs(ids, torch.ones_like(ids), torch.tensor([1.0, -1.0], device="cuda"))
            losses.linear_policy_loss(h, w, inputs, "reference", beta=0.0, backend="triton").loss.backward()
            _backend = "triton"
        except Exception as error:
            print("triton backend:", type(error).__name__, error)
            _backend = "chunked"
    return _backend


def small() -> dict[str, Any]:
    from ablate.rollout import vllm_live

    path = folder("smollm2", True)
    try:
        live = vllm_live.acquire(spec(path, 64, 256))
    except vllm_live.EngineError as error:
        print("with decode graphs alone:", error)
        live = vllm_live.acquire(spec(path, 64, 256, compilation_config={"cudagraph_specialize_lora": False}))
    ready, deadline = Path(os.environ["MEASURE_OUT"]) / "stock.ready", time.monotonic() + 75
    while "stock" in os.environ.get("MEASURE_PARTS", "") and not ready.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)  # its start takes cores away
    out = {"tokens_per_gib": live.kv_tokens * GIB / live.plan["kv_cache_memory_bytes"]}
    out |= train(live, live.shared_model(), 64, 256, 12)
    return out | {"generate_ms": breakdown(live)}


def breakdown(live: Any) -> dict[str, float]:
    """Milliseconds of 64 x 256 tokens, by what is asked of the engine."""
    import torch
    from vllm import SamplingParams

    from ablate.models import load_tokenizer
    from ablate.rollout import vllm_sampling

    live.wake()
    tokenizer = load_tokenizer(live.spec.folder)
    ids = [tokenizer(p)["input_ids"] for p in prompts(8) for _ in range(8)]
    plain = SamplingParams(max_tokens=256, ignore_eos=True, detokenize=False)
    scored = SamplingParams(max_tokens=256, ignore_eos=True, detokenize=False, logprobs=0)
    seeded = [SamplingParams(max_tokens=256, ignore_eos=True, detokenize=False, seed=i) for i in range(64)]

    def recorded() -> Any:
        with vllm_sampling.Recorder(live.worker.model_runner):
            return live.generate(ids, plain)

    cases = {
        "adapter": lambda: live.generate(ids, plain),
        "adapter, log-probs read off the sampler": recorded,
        "adapter, vLLM's log-probs": lambda: live.generate(ids, scored),
        "adapter, a generator per request": lambda: live.generate(ids, seeded),
    }
    out = {}
    for name, case in cases.items():
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            case()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        out[name] = min(times)
    return out


def memory() -> dict[str, Any]:
    from ablate.rollout import vllm_live

    wait_for("large")
    live = vllm_live.acquire(spec(folder("thin", True), 64, 64))
    wait_for("fp8")
    out = train(live, live.shared_model(), 64, 16, 200, min_p=0.05)
    used = out.pop("used_bytes")
    out |= {"used_after_20": used[19], "used_after_200": used[199], "growth": used[199] / used[19] - 1}
    try:
        out["full_fine_tuning"] = full()
    except Exception:
        out["full_fine_tuning"] = traceback.format_exc()
    return out


def full() -> dict[str, Any]:
    """All weights trained, on another engine of the same process: the engine sleeps while the trainer steps."""
    import torch
    from transformers import AutoModelForCausalLM

    from ablate.rollout import vllm_live

    vllm_live.release()
    path = folder("thin", True)
    live = vllm_live.acquire(spec(path, 64, 16, rank=0, enforce_eager=True))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
    out = train(live, model, 64, 16, 5, shared=False)
    return out | {"sleep_mode": live.kv.able}


def large() -> dict[str, Any]:
    import torch

    from ablate.rollout import vllm_live, vllm_memory

    wait_for("small", "stock")
    device = torch.device("cuda:0")
    before = vllm_memory.used(device)
    path = folder("llama8b", False)
    live = vllm_live.acquire(spec(path, 16, 64, load_format="dummy", enforce_eager=True))
    model = live.shared_model()
    weights = sum(p.numel() * p.element_size() for p in live.model.parameters())
    live.kv.release()
    torch.cuda.empty_cache()
    without = vllm_memory.used(device) - before
    out: dict[str, Any] = {
        "weights_bytes": weights,
        "device_bytes_before": before,
        "bytes_without_kv": without,
        "ratio": without / weights,
        "kv_bytes": live.plan["kv_cache_memory_bytes"],
    }
    turns = []
    for _ in range(5):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        live.kv.wake()
        torch.cuda.synchronize()
        t1 = time.perf_counter()
        freed = live.kv.release()
        torch.cuda.synchronize()
        turns.append((1e3 * (t1 - t0), 1e3 * (time.perf_counter() - t1), freed))
    out["wake_ms"], out["release_ms"], out["freed_bytes"] = (median([t[i] for t in turns]) for i in range(3))
    out["shared"] = train(live, model, 16, 64, 8)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    copy = live.shared_model()
    for p in copy.parameters():
        p.data = p.data.clone()
    out["unshared"] = train(live, copy, 16, 64, 8)  # its KV cache released likewise, the engine's weights resident
    out["shared_over_unshared"] = out["shared"]["step_seconds_median"] / out["unshared"]["step_seconds_median"]
    return out


def fp8() -> dict[str, Any]:
    from ablate.rollout import vllm_live

    wait_for("large")
    options = {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 2 * GIB, "enforce_eager": True}
    live = vllm_live.acquire(spec(folder("smollm2", True), 64, 256, **options))
    return {"tokens_per_gib": live.kv_tokens / 2} | train(live, live.shared_model(), 64, 64, 5)


def stock() -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOTrainer

    from ablate.models import load_tokenizer

    path = folder("smollm2", True)
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(path), reward_funcs=[reward],
        args=arguments(
            Path("/tmp/stock"), 64, 256, 9, use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=0.3, vllm_max_model_length=PROMPT + 16 + 256,
            model_init_kwargs={"dtype": "bfloat16"},
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}), processing_class=load_tokenizer(path),
        peft_config=lora(), callbacks=[clock.callback],
    )  # fmt: skip
    (Path(os.environ["MEASURE_OUT"]) / "stock.ready").touch()
    wait_for("small")
    trainer.train()
    seconds = clock.seconds()
    return {"step_seconds_median": median(seconds[3:]), "step_seconds": seconds, "used_bytes": clock.used}


PARTS = {"small": small, "memory": memory, "large": large, "fp8": fp8, "stock": stock}


def provenance() -> dict[str, Any]:
    import peft
    import torch
    import transformers
    import trl
    import vllm

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl, peft, vllm)},
        "commit": os.environ.get("COMMIT"),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="small,stock,large,fp8,memory")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asked = options.parts.split(",")
    if len(asked) == 1:
        measure(asked[0], options.out)
        return
    command = [sys.executable, __file__, "--out", str(options.out), "--parts"]
    environment = {**os.environ, "MEASURE_PARTS": options.parts, "MEASURE_OUT": str(options.out)}
    for process in [subprocess.Popen([*command, part], env=environment) for part in asked]:
        process.wait()


def measure(part: str, out: Path) -> None:
    import trl  # noqa: F401
    import vllm  # noqa: F401

    import ablate.trainer  # noqa: F401

    os.environ.setdefault("MEASURE_OUT", str(out))
    started = time.perf_counter()
    try:
        result = PARTS[part]()
    except Exception:
        traceback.print_exc()
        result = {"error": traceback.format_exc()}
    result |= {"part": part, "wall_seconds": round(time.perf_counter() - started, 1), **provenance()}
    brief = {k: v for k, v in result.items() if k not in ("step_seconds", "used_bytes", "error", "versions")}
    print(part, json.dumps(brief, default=str)[:2500], flush=True)
    partial = out / f"{part}.partial"
    partial.write_text(json.dumps(result, indent=1, default=str) + "\n")
    partial.rename(out / f"{part}.json")
    os._exit(0)  # at once: the next part waits for this one's memory


if __name__ == "__main__":
    main()
