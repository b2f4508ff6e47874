"""How much is alive: `chunked` never holds more than chunks of logits, whatever the number of tokens.

tracemalloc does not see torch's allocations. A dispatch mode sees the size of every tensor an operation gives out, and
torch's own profiler every allocation and release.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import losses
from tests.losses.common import VARIANTS, call
from tests.strategies import generator, make_case

heads = pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids=["frozen", "trained"])


class Largest(TorchDispatchMode):
    """The number of elements of the largest floating-point tensor that any operation gives out, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.elements = max(self.elements, x.numel())
        return out


def largest(variant: str, backend: str, trained: tuple[str, ...], dtype: torch.dtype, chunk: int) -> int:
    case = make_case(60, batch=4, length=64, width=8, vocab=331, mask_kind="holes", bias=True, softcap=9.0).cast(dtype)
    with Largest() as seen:
        call(variant, case, backend, trained=trained, chunk_size=chunk)
    return seen.elements


@pytest.mark.parametrize("variant", VARIANTS)
@heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_larger_than_a_chunk_of_logits(variant, trained, dtype):
    chunk, vocab, width, tokens = 8, 331, 8, 256
    seen = largest(variant, "chunked", trained, dtype, chunk)
    assert seen <= max(chunk * vocab, vocab * width, tokens * width)


def test_the_measurement_sees_full_logits():
    """It finds the (unmasked tokens, vocab) tensor of the reference backend."""
    assert largest("reference", "reference", ("hidden",), torch.float32, 8) > 100 * 331


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that torch held at most during `work`, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peak(
    backend: str, trained: tuple[str, ...], tokens: int, chunk: int | None, vocab: int = 1000, width: int = 4,
    dtype: torch.dtype = torch.float32,
) -> int:  # fmt: skip
    rng = generator(62)
    hidden = torch.randn(1, tokens, width, generator=rng).to(dtype).requires_grad_(True)
    weight = torch.randn(vocab, width, generator=rng).to(dtype).requires_grad_("weight" in trained)
    ids = torch.randint(0, vocab, (1, tokens), generator=rng)
    inputs = losses.LossInputs(ids, torch.ones(1, tokens, dtype=torch.bool), torch.ones(1))

    def work() -> None:
        losses.linear_policy_loss(hidden, weight, inputs, beta=0.0, backend=backend, chunk_size=chunk).loss.backward()

    return peak_bytes(work)


@heads
def test_peak_memory_is_a_few_chunks(trained):
    """Twice the tokens cost their rows of d hidden and a few numbers each, not their rows of logits."""
    chunk, vocab, width = 32, 1000, 4
    short, long = (peak("chunked", trained, tokens, chunk) for tokens in (512, 1024))
    per_token = (long - short) / 512
    assert per_token < 4 * (2 * width + 40)
    assert short < 4 * (3 * chunk * vocab + 4 * vocab * width + 512 * (2 * width + 40))
    assert peak("reference", trained, 512, None) > 4 * 512 * vocab


@heads
def test_a_chunk_of_its_own_choice_is_bounded(trained):
    """Without chunk_size the chunk follows from the vocabulary, not from the number of tokens."""
    tokens, vocab = 2048, 40_000
    assert peak("chunked", trained, tokens, None, vocab, 1) < 150 * 2**20
    assert 4 * tokens * vocab > 300 * 2**20  # full logits alone, before their softmax and its gradient


def test_a_half_precision_head_is_widened_block_by_block():
    """64 MiB in float32, of which 8 MiB are alive at a time."""
    vocab, width = 8192, 2048
    assert peak("chunked", ("hidden",), 16, None, vocab, width, torch.bfloat16) < 12 * 2**20
    assert 4 * vocab * width == 64 * 2**20
