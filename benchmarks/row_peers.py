"""Times the PyTorch peers of the losses from logits; ``benchmarks.rows`` starts it.

Liger's kernels take log-probabilities for the divergences, so its callers' ``log_softmax`` is part
of the time; its cross-entropy writes the gradient over the logits, and the copy that keeps them for
the next call is not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import rounds
from benchmarks.results import error_words
from benchmarks.torch_peers import F, clock_of, on_gpu, torch, torch_absent
from benchmarks.workloads import LOGIT_STD, select_rows

FORWARD, GRADIENT = "forward", "value_and_grad"


def _log_softmaxes(z, t):
    return F.log_softmax(z.float(), dim=-1), F.log_softmax(t.float(), dim=-1)


def _reverse_kl(z, t, y):
    p, q = _log_softmaxes(z, t)
    return (p.exp() * (p - q)).sum(-1).mean()


def _forward_kl(z, t, y):
    p, q = _log_softmaxes(z, t)
    return (q.exp() * (q - p)).sum(-1).mean()


def _soft_ce(z, t, y):
    p, q = _log_softmaxes(z, t)
    return -(q.exp() * p).sum(-1).mean()


PLAIN = {
    "ce": lambda z, t, y: F.cross_entropy(z.float(), y),
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "soft_ce": _soft_ce,
}


def torch_compile(loss: str) -> Callable:
    return torch.compile(PLAIN[loss], dynamic=False)


def liger(loss: str) -> Callable | None:
    """None where Liger has no such loss."""
    if loss == "ce":
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def ce(z, t, y):
            return LigerCrossEntropyFunction.apply(z, y, None)[0]

        return ce
    if loss in ("reverse_kl", "forward_kl"):
        from liger_kernel.ops.jsd import LigerJSDFunction

        beta = 1.0 if loss == "reverse_kl" else 0.0

        def divergence(z, t, y):
            p, q = F.log_softmax(z, dim=-1), F.log_softmax(t, dim=-1)
            return LigerJSDFunction.apply(p, q, None, beta)

        return divergence
    return None


PEERS = {"torch_compile": torch_compile, "liger": liger}


def clocks_of(f: Callable, z, t, y) -> dict[str, rounds.Clock]:
    """Milliseconds of one call in both modes; a fresh copy of the logits is made before each."""

    def gradient() -> float:
        mine = z.clone().requires_grad_()
        if not on_gpu():
            start = time.perf_counter()
            f(mine, t, y).backward()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f(mine, t, y).backward()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def forward():
        with torch.no_grad():
            return f(z, t, y)

    return {GRADIENT: gradient, FORWARD: clock_of(forward)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default="all")
    parser.add_argument("--losses", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=float("inf"))
    args = parser.parse_args()
    found: dict = {}
    if torch is None:
        sys.exit(f"PyTorch peers left out: {torch_absent}")
    device = "cuda" if on_gpu() else "cpu"
    for workload in select_rows(args.workloads):
        draw = torch.Generator(device).manual_seed(0)
        shape = (workload.T, workload.V)
        z, noise = (LOGIT_STD * torch.randn(shape, device=device, generator=draw) for _ in range(2))
        z = z.to(getattr(torch, args.dtype))
        t = ((z + noise) / 2).to(z.dtype)
        del noise
        y = torch.randint(0, workload.V, shape[:1], device=device, generator=draw)
        for loss in args.losses.split(","):
            for name in args.peers.split(","):
                entries = found.setdefault(workload.name, {}).setdefault(loss, {})
                if time.time() > args.deadline:
                    continue
                try:
                    torch.compiler.reset()
                    if (f := PEERS[name](loss)) is None:
                        continue
                    modes = {}
                    for mode, clock in clocks_of(f, z, t, y).items():
                        clock()
                        taken = [clock() for _ in range(args.repeats)]
                        modes[mode] = rounds.summary(taken) | {"clock": "cuda events"}
                    entries[name] = modes
                except Exception as error:  # absent, or out of memory
                    entries[name] = {GRADIENT: {"error": error_words(error)}}
                print(f"  {workload.name} {loss} {name}: {entries[name]}", flush=True)
                args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
