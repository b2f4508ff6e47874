"""python -m losses.bench_kl_rows: the exact KL's row kernel alone, over tile shapes. Needs a CUDA device."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from typing import Any

import torch

SHAPES = tuple((high, 128 * warps, warps) for warps, high in itertools.product((4, 8, 16, 32), (1, 2, 4, 8)))
Shape = tuple[int, int, int]  # columns of the vocabulary to one of a tile, a tile's columns, warps


class Chunk:
    """Float32 logits of two models (rows, vocab), and where the kernel writes."""

    def __init__(self, rows: int, vocab: int, device: str) -> None:
        self.stride = -(-vocab // 8) * 8
        self.rows, self.vocab = rows, vocab
        self.own = torch.randn(rows, self.stride, device=device) * 2
        self.other = self.own + 0.5 * torch.randn(rows, self.stride, device=device)
        self.kl, self.factor = torch.empty(rows, device=device), torch.empty(rows, device=device)
        self.slope = self.own.view(torch.bfloat16)[:, self.stride :]

    def launch(self, shape: Shape, store: bool, reverse: bool, **options: Any) -> None:
        from losses.backends import triton_divergence

        high, wide, warps = shape
        triton_divergence.divergence_rows[(self.rows,)](
            self.own, self.other, self.stride, None, None, self.vocab, 1.0, 1.0, 1.0, 0, None, self.kl, self.slope,
            self.slope.stride(0), self.factor, HIGH=high, WIDE=wide, SOFTCAP=False, REVERSE=reverse,
            STORE=store, DIVIDE=False, num_warps=warps, **options,
        )  # fmt: skip

    def milliseconds(self, shape: Shape, store: bool, reverse: bool, reps: int, **options: Any) -> float:
        """Median over `reps` launches; the policy's logits are drawn again before each, since slopes overwrite them."""
        times = []
        for i in range(reps + 2):
            self.own.normal_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.launch(shape, store, reverse, **options)
            end.record()
            end.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end))
        return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m losses.bench_kl_rows", description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="of a chunk (%(default)s)")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, default=16_384, help="that figures are given for (%(default)s)")
    parser.add_argument("--reps", type=int, default=12)
    parser.add_argument("--maxnreg", type=int, help="registers a thread at most")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    chunk = Chunk(options.rows, options.vocab, "cuda")
    limits = {} if options.maxnreg is None else {"maxnreg": options.maxnreg}
    print(f"{torch.cuda.get_device_name()}: ms for {options.tokens} tokens of {options.vocab}")
    print("high wide warps | reverse, slopes | forward, slopes | value alone")
    for shape in SHAPES:
        times = [
            chunk.milliseconds(shape, *mode, options.reps, **limits) * options.tokens / options.rows
            for mode in ((True, True), (True, False), (False, True))
        ]
        print(*shape, "|", *(f"{t:.2f}" for t in times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
