"""The exact KL's kernels compile to machine code; where rows are long, without spills and with 16-byte accesses."""

from __future__ import annotations

import re

import pytest
import torch

from tests.cubin.capture import compiling_for
from tests.cubin.test_compile import _own_cache, _tool, pytestmark  # noqa: F401  (both apply to this file)


def _compile(capability, vocab, dtype, direction, *, trained=False, keep_v=True, bias=False, **options):
    from losses.backends import triton_vocabulary
    from losses.backends.head import Head

    def head() -> Head:
        settings = {
            "temperature": 1.0,
            "softcap": None,
            "scale": 1.0,
            "precision": "auto",
            "chunk_size": None,
        } | options
        return Head(
            hidden=torch.empty(2, 256, 128, dtype=dtype, device="meta"),
            weight=torch.empty(vocab, 128, dtype=dtype, device="meta"),
            bias=torch.empty(vocab, dtype=dtype, device="meta") if bias else None, dtype=dtype, **settings,
        )  # fmt: skip

    with compiling_for(capability) as compiled:
        kl, v, size = triton_vocabulary.forward(head(), head(), None, direction, keep_v and not trained)
        if v is not None:
            triton_vocabulary.scale_rows_(v, kl if size is None else size)
        if trained:
            triton_vocabulary.backward(head(), head(), None, direction, kl, (True, True, bias))
    kernels = dict(compiled)
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels.values())
    return kernels


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(
    ("vocab", "dtype", "direction", "options"),
    [
        (128_256, torch.bfloat16, "reverse", {}),
        (32_001, torch.float16, "forward", {"softcap": 30.0, "scale": -0.5, "temperature": 0.7, "bias": True}),
        (5000, torch.float32, "reverse", {"bias": True}),
    ],
    ids=["wide", "odd float16 with all options", "float32"],
)
def test_every_kernel(capability, vocab, dtype, direction, options):
    assert _compile(capability, vocab, dtype, direction, **options).keys() == {
        "divergence_rows", "write_rows", "scale_rows_to",
    }  # fmt: skip
    trained = _compile(capability, vocab, dtype, direction, trained=True, **options)
    bias = {"add_columns"} if "bias" in options else set()
    assert trained.keys() == {"divergence_rows", "write_rows", "scaled_rows"} | bias


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_long_rows(tmp_path, direction):
    file = tmp_path / "rows.cubin"
    file.write_bytes(_compile(90, 128_256, torch.bfloat16, direction)["divergence_rows"].asm["cubin"])
    usage = _tool("cuobjdump", "--dump-resource-usage", str(file))
    assert re.search(r"STACK:0 .*LOCAL:0", usage), usage
    code = _tool("cuobjdump", "--dump-sass", str(file))
    assert len(re.findall(r"LDG\.E\.128", code)) >= 16 and "STG.E.128" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
