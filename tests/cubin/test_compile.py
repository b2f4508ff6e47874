"""Every kernel compiles to machine code for the GPUs it is meant for, on a machine without one.

Not interpreted, so not in tests/triton: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from tests.cubin.capture import call, compiling_for

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets")

FROZEN = {"own_logit", "product", "finalize", "rescale", "own_minus_mixture"}
TRAINED = FROZEN | {"scaled_rows", "add_own_rows"}


def _tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout


def _compile(capability, *arguments, **options):
    with compiling_for(capability) as compiled:
        call(*arguments, **options)
    kernels = dict(compiled)
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels.values())
    assert all(kernel.metadata.target.arch == capability for kernel in kernels.values())
    return kernels


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """What is compiled here is compiled now."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(
    ("dtype", "width", "vocab", "options"),
    [
        (torch.bfloat16, 4096, 128_256, {}),
        (torch.bfloat16, 576, 49_152, {}),
        (torch.float16, 77, 32_001, {"softcap": 30.0, "scale": -0.5, "temperature": 0.7}),
        (torch.float32, 1536, 151_936, {}),
    ],
    ids=["wide", "narrow", "odd float16 with a softcap", "float32"],
)
def test_frozen_head(capability, dtype, width, vocab, options):
    kernels = _compile(capability, "reference", 512, width, vocab, dtype, **options)
    assert kernels.keys() == (FROZEN if dtype != torch.float32 else FROZEN - {"product"} | {"logits_tile"})


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("variant", ["reference", "full_reverse_kl"])
def test_trained_head(capability, variant):
    """The token term is compiled into `finalize`."""
    bias = torch.empty(128_256, dtype=torch.bfloat16, device="meta")
    kernels = _compile(capability, variant, 512, 4096, 128_256, torch.bfloat16, trained=True, bias=bias)
    assert kernels.keys() == TRAINED | {"bias_gradient"}


def test_float8():
    kernels = _compile(90, "reference", 512, 4096, 128_256, torch.bfloat16, precision="fp8")
    assert kernels.keys() == FROZEN | {"quantize_rows", "requantize"}


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("mask", [torch.bool, torch.int64], ids=str)
def test_checks(capability, mask):
    from losses.backends import triton_checks

    def meta(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    chosen = {"ids": [meta(8, 70, dtype=torch.int64)], "mask": [] if mask == torch.bool else [meta(8, 70, dtype=mask)]}
    half = meta(8, 70, dtype=torch.bfloat16)
    with compiling_for(capability) as compiled:
        triton_checks._launch(
            meta(9, dtype=torch.int32), meta(8, 70, dtype=mask), 32_001,
            chosen | {"token": [meta(8, 70), half, meta(8, 70, dtype=torch.float64)], "row": [meta(8)]},
        )  # fmt: skip
        triton_checks._launch(
            meta(9, dtype=torch.int32), meta(8, 70, dtype=mask), 0, {"ids": [], "mask": [], "token": [half], "row": []}
        )
    assert [name for name, _ in compiled] == ["find_bad"] * 2
    assert all(kernel.metadata.target.arch == capability for _, kernel in compiled)


@pytest.mark.parametrize(("precision", "instruction"), [("auto", "HGMMA"), ("fp8", "QGMMA")])
def test_the_product_runs_on_hoppers_matrix_units_without_spills(tmp_path, precision, instruction):
    kernels = _compile(90, "reference", 512, 4096, 128_256, torch.bfloat16, precision=precision)
    file = tmp_path / "product.cubin"
    file.write_bytes(kernels["product"].asm["cubin"])
    code = _tool("cuobjdump", "--dump-sass", str(file))
    assert instruction in code and "UTMALDG" in code and "UTMASTG" in code
    stack = int(re.search(r"STACK:(\d+)", _tool("cuobjdump", "--dump-resource-usage", str(file))).group(1))
    assert stack <= 16
