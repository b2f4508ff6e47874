"""The exact KL's kernels on a GPU: real vocabularies, large offsets, graphs, memory."""

from __future__ import annotations

import pytest
import torch

import losses

pytestmark = pytest.mark.gpu
directions = pytest.mark.parametrize("direction", ["reverse", "forward"])
BF16 = torch.bfloat16


def problem(tokens, width, vocab, dtype=BF16, batch=2, distance=0.3, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda", dtype=dtype)

    hidden, weight = normal(batch, tokens // batch, width), normal(vocab, width) * (2 / width**0.5)
    return (
        hidden.requires_grad_(),
        weight,
        (hidden + distance * normal(*hidden.shape)).detach(),
        weight.flip(0).contiguous(),
    )


def exact(hidden, weight, ref_hidden, ref_weight, direction, rows):
    h = hidden.detach().flatten(0, 1)[rows].double().requires_grad_()
    own = torch.log_softmax(h @ weight.double().T, -1)
    other = torch.log_softmax(ref_hidden.flatten(0, 1)[rows].double() @ ref_weight.double().T, -1)
    if direction == "forward":
        own, other = other, own
    kl = (own.exp() * (own - other)).sum(-1)
    return kl.detach(), torch.autograd.grad(kl.sum(), h)[0]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@directions
@pytest.mark.parametrize("vocab", [151_936, 262_144, 32_001, 1000])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_real_vocabularies(direction, vocab, dtype):
    given = problem(300, 256, vocab, dtype)
    upstream = torch.rand(2, 150, device="cuda") + 0.5
    kl = losses.exact_kl(*given, direction=direction, backend="triton")
    kl.backward(upstream)
    rows = torch.arange(0, 300, 7, device="cuda")
    value, v = exact(*given, direction, rows)
    assert (kl.flatten()[rows].double() - value).abs().max() < 2e-5
    got = given[0].grad.flatten(0, 1)[rows].double() / upstream.flatten()[rows, None]
    assert error(got, v) < (2.5e-3 if dtype == BF16 else 5e-4)


@directions
def test_the_head_trained(direction):
    hidden, weight, *ref = problem(700, 128, 20_001)
    weight.requires_grad_()
    losses.exact_kl(hidden, weight, *ref, direction=direction, backend="triton", chunk_size=256).sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses.exact_kl(h, w, *(x.double() for x in ref), direction=direction, backend="reference").sum().backward()
    assert error(hidden.grad, h.grad) < 2.5e-3 and error(weight.grad, w.grad) < 2.5e-3


def test_more_than_two_to_the_31_logits():
    given = problem(18_000, 64, 128_256)
    small = losses.exact_kl(*given, backend="triton")
    small.sum().backward()
    want, given[0].grad = given[0].grad, None
    large = losses.exact_kl(*given, backend="triton", chunk_size=18_000)
    large.sum().backward()
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-5)
    assert error(given[0].grad, want.double()) < 2e-3


@directions
def test_repeated_calls_are_equal_to_the_bit(direction):
    given = problem(512, 256, 50_257)
    results = []
    for _ in range(3):
        given[0].grad = None
        kl = losses.exact_kl(*given, direction=direction, backend="triton")
        kl.sum().backward()
        results.append((kl.detach(), given[0].grad))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_captured_graph_replays():
    given = problem(512, 256, 5000)

    def step():
        given[0].grad = None
        kl = losses.exact_kl(*given, backend="triton")
        kl.mean().backward()
        return kl.detach(), given[0].grad

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kl, grad = step()
    with torch.no_grad():
        given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    replayed = kl.clone(), grad.clone()
    want = step()
    assert torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1])


def test_near_the_reference():
    """A KL far below the rounding of a log-sum-exp keeps its digits, and its gradient."""
    hidden, weight, ref_hidden, _ = problem(256, 512, 128_256, distance=1e-2)
    kl = losses.exact_kl(hidden, weight, ref_hidden, backend="triton")
    kl.sum().backward()
    value, v = exact(hidden, weight, ref_hidden, weight, "reverse", torch.arange(0, 256, 4, device="cuda"))
    assert float(value.median()) < 1e-3
    assert error(kl.detach().flatten()[::4], value) < 1e-4 and error(hidden.grad.flatten(0, 1)[::4], v) < 2.5e-3


def test_memory():
    """Two buffers of a chunk's logits, and the gradient."""
    tokens, width, vocab = 16_384, 1024, 128_256
    given = problem(tokens, width, vocab)
    for _ in range(2):
        given[0].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.exact_kl(*given, backend="triton").mean().backward()
        extra = torch.cuda.max_memory_allocated() - before
    assert extra < 2**30 + tokens * width * 2 + 2**26
