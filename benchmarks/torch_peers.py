"""Times the PyTorch peers of losses from hidden states: ``python -m benchmarks.torch_peers``.

``benchmarks.run`` starts it as a process of its own. A peer is found by importing it, so a folder
of packages on ``PYTHONPATH`` will do; one that is absent or fails is written down as such.
Without a GPU it runs on the CPU, for what can run there.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from benchmarks import rounds, stage
from benchmarks.results import (
    NUM_PRODUCTS,
    OUT_OF_TIME,
    PRODUCTS,
    Entry,
    Store,
    derive,
    error_words,
    gemms_ms,
)
from benchmarks.workloads import LOGIT_STD, Workload

# It copies the labels to the host to check them, which no other peer does.
os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")

torch_absent: ImportError | None = None
try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    torch, torch_absent = None, error

FORWARD, GRADIENTS, GEMMS = "forward", "value_and_grad", "torch_gemms"
MODES = (GRADIENTS, FORWARD)


def torch_compile():
    return torch.compile(lambda x, w, y: F.cross_entropy((x @ w.T).float(), y), dynamic=False)


def liger():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x, w, y):
        out = LigerFusedLinearCrossEntropyFunction.apply(x, w, y)
        return out[0] if isinstance(out, tuple) else out

    return loss


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as ops

    return ops.LigerFusedLinearCrossEntropySM90Function.apply


def liger_sm90_recompute():
    """Per-token losses without stored logits; here reduced to their mean."""
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as ops

    return lambda x, w, y: ops.LigerFusedScaledCrossEntropySM90Function.apply(x, w, y).mean()


def cce():
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


@cache
def quack():
    """The pipeline that stores logits; the first call at a shape tunes for minutes."""
    from quack.gemm_runtime import identity

    strict = identity.semantic_value_key

    def lenient(value, *args, **kwargs):
        try:
            return strict(value, *args, **kwargs)
        except TypeError:  # 0.6.5 has no key for some objects of cutlass-dsl 4.7 and 4.8
            return ("unkeyed", type(value).__module__, type(value).__qualname__, repr(value))

    identity.semantic_value_key = lenient
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return partial(chunked_linear_cross_entropy, use_scaled_exp=False)


def verl():
    """Recomputes in Triton kernels; log-probabilities and entropies of all tokens."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda x, w, y: linear_cross_entropy(x, w, y, 1.0, "none")


def torch_compile_entropy():
    def outputs(x, w, y):
        logp = F.log_softmax((x @ w.T).float(), dim=-1)
        return logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    return torch.compile(outputs, dynamic=False)


@dataclass(frozen=True)
class Peer:
    """``load()`` imports a peer and returns what it makes of ``(x, w, labels)``."""

    load: Callable
    slow_start: bool = False


def _weighed(outputs, bench: "Bench"):
    """``sum_t g_t logprob_t + h_t entropy_t``, with g and h drawn per token."""
    g = bench.cotangents
    return lambda x, w, y: sum((c * out).sum() for c, out in zip(g, outputs(x, w, y), strict=True))


def _weighed_terms(z, y, g):
    logp = z.log_softmax(dim=-1)
    at_label = logp.gather(1, y[:, None])[:, 0]
    return g[0] * at_label - g[1] * (logp.exp() * logp).sum(-1)


@dataclass(frozen=True)
class Suite:
    """``scalar(peer's, bench)`` is what is differentiated, a function of ``(x, w, labels)``.

    ``terms(float32 logits, labels, cotangents)`` are its parts, a token, of which it is the sum or
    the mean; ``products`` what counts as work with gradients.
    """

    peers: dict[str, Peer]
    scalar: Callable
    terms: Callable
    products: int
    mean: bool = False


LINEAR_CE: dict[str, Peer] = {
    "torch_compile": Peer(torch_compile),
    "liger": Peer(liger),
    "liger_sm90": Peer(liger_sm90),
    "liger_sm90_recompute": Peer(liger_sm90_recompute),
    "cce": Peer(cce),
    "quack": Peer(quack, slow_start=True),
}
SUITES = {
    "linear_ce": Suite(
        LINEAR_CE,
        scalar=lambda loss, bench: loss,
        terms=lambda z, y, _: F.cross_entropy(z, y, reduction="none"),
        products=3,
        mean=True,
    ),
    "linear_entropy": Suite(
        {"torch_compile": Peer(torch_compile_entropy), "verl": Peer(verl)},
        scalar=_weighed,
        terms=_weighed_terms,
        products=4,
    ),
}


def on_gpu() -> bool:
    return torch.cuda.is_available()


def make_inputs(workload: Workload, dtype, seed: int):
    """``x, w [V,H], labels`` drawn as ``benchmarks.inputs`` draws them, by another generator."""
    device = "cuda" if on_gpu() else "cpu"
    draw = torch.Generator(device).manual_seed(seed)
    kind = {"device": device, "generator": draw}
    t, h, v = workload.T, workload.H, workload.V
    labels = torch.randint(0, v, (t,), **kind)
    w = (torch.randn(v, h, **kind) * (LOGIT_STD / h**0.5)).to(dtype)
    typical_lse = torch.log(torch.tensor(float(v))).item() + LOGIT_STD**2 / 2
    margin = torch.rand(t, 1, **kind) * (2 * typical_lse)
    x = torch.randn(t, h, **kind) + margin / LOGIT_STD**2 * w[labels].float()
    return x.to(dtype).requires_grad_(), w.requires_grad_(), labels


def clock_of(call: Callable[[], object]) -> rounds.Clock:
    """Milliseconds between device events around a call that follows an untimed one."""

    def by_events() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def by_host() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return by_events if on_gpu() else by_host


def host_clock_of(call: Callable[[], object]) -> rounds.Clock:
    """By the host's clock, over batches of calls like those of ``timing.host_clock``."""
    wait = lambda _: torch.cuda.synchronize() if on_gpu() else None  # noqa: E731
    return rounds.batch_clock(call, wait, batch_ms=30.0, most=8)


def peak_bytes(call: Callable[[], object], returned: int) -> Entry:
    """The allocator's peak in a call, beyond what was there before and what the call leaves."""
    if not on_gpu():
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before - returned}


class Bench:
    """The calls of one workload, by ``(peer, mode)``."""

    def __init__(self, suite: Suite, workload: Workload, dtype, seed: int):
        self.x, self.w, self.y = make_inputs(workload, dtype, seed)
        self.frozen = self.x.detach(), self.w.detach()
        self.shape = workload.T, workload.V
        draw = torch.Generator(self.y.device).manual_seed(seed + 1)
        self.cotangents = torch.randn(2, workload.T, device=self.y.device, generator=draw)
        with torch.no_grad():
            chunks = zip(
                *(v.split(1024) for v in (self.x, self.y)),
                self.cotangents.split(1024, dim=1),
                strict=True,
            )
            logits = (((x @ self.w.T).float(), y, g) for x, y, g in chunks)
            total = float(sum(suite.terms(*args).sum() for args in logits))
            self.value = total / workload.T if suite.mean else total

    def gemms(self):
        x, w = self.frozen
        d = torch.empty(self.shape, device=x.device, dtype=x.dtype)
        for rows in d.split(1024):
            rows.copy_((LOGIT_STD * torch.randn(rows.shape, device=x.device)).softmax(dim=1))

        def in_a_row(products: int):
            return [x @ w.T for _ in range(products - 2)], d @ w, d.T @ x

        rows = {PRODUCTS[n]: partial(in_a_row, n) for n in (3, 4)}
        return rows | {PRODUCTS[1]: lambda: x @ w.T, "dx": lambda: d @ w, "dw": lambda: d.T @ x}

    def peer(self, loss: Callable):
        def gradients():
            self.forget()
            value = loss(self.x, self.w, self.y)
            value.backward()
            return value

        def forward():
            with torch.no_grad():
                return loss(*self.frozen, self.y)

        return {GRADIENTS: gradients, FORWARD: forward}

    def forget(self) -> None:
        """Frees the gradients."""
        self.x.grad = self.w.grad = None

    def facts(self, call, mode: str) -> Entry:
        """Warms a call up; its memory, its value, and how far that is from the truth."""
        for _ in range(2):
            value = float(call().detach())
        self.forget()
        gradients = (self.x, self.w) if mode == GRADIENTS else ()
        entry = peak_bytes(call, sum(a.nbytes for a in gradients))
        self.forget()
        distance = [round(abs(value - self.value) / abs(self.value), 8)]
        return entry | {"value": value, "distance": distance, "distance_from": "torch, chunked"}


def measure(names, args, store: Store, workload: Workload, deadline: rounds.Deadline) -> None:
    """Fills in the entries of one workload."""
    torch.compiler.reset()
    if on_gpu():
        torch.cuda.empty_cache()
    suite = SUITES[args.suite]
    bench = Bench(suite, workload, getattr(torch, args.dtype), args.seed)
    calls, facts = {}, {}
    for name in names:
        try:
            modes = bench.peer(suite.scalar(suite.peers[name].load(), bench))
        except Exception as error:  # absent, mostly
            print(f"  {name}: {error_words(error)}", flush=True)
            for mode in MODES:
                store.fail(workload, name, mode, error)
            continue
        for mode, call in modes.items():
            if not store.needs(workload, name, mode):
                continue
            if deadline.left() < 0:
                store.fail(workload, name, mode, OUT_OF_TIME)
                continue
            with stage.attempt(store, workload, name, mode, broken):
                facts[name, mode] = bench.facts(call, mode)
                calls[name, mode] = call
                print(f"  {name} {mode}: {facts[name, mode]}", flush=True)
    if not calls:
        return
    calls |= {(GEMMS, product): call for product, call in bench.gemms().items()}
    clocks = {key: host_clock_of(call) for key, call in calls.items()}
    by_host, errors = rounds.interleave(clocks, args.repeats, deadline)
    clocks = {key: clock_of(calls[key]) for key in by_host}
    samples, failed = rounds.interleave(clocks, args.repeats, deadline)
    for key, error in (errors | failed).items():
        store.fail(workload, *key, error)
    clock = {"clock": "cuda events" if on_gpu() else "host"}
    for key, taken in samples.items():
        times = rounds.summary(taken) | rounds.summary(by_host[key], prefix="host_")
        store.put(workload, *key, {"run": store.run} | facts.get(key, {}) | clock | times)
    candidates = store.candidates(workload)
    of_mode = {GRADIENTS: (suite.products, (3, 4)), FORWARD: (1, (1,))}
    for name, mode in samples:
        products, compared_with = of_mode.get(mode) or (NUM_PRODUCTS[mode], ())
        gemms = {n: gemms_ms(candidates, "torch", n) for n in compared_with}
        entry = derive(candidates[name][mode], products * workload.gemm_flops, gemms)
        store.put(workload, name, mode, entry)


def broken() -> bool:
    """Whether the device no longer answers; also returns what a failure left allocated."""
    try:
        if on_gpu():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        torch.ones(8, device="cuda" if on_gpu() else "cpu").sum().item()
    except Exception:
        return True
    return False


def main() -> None:
    args = stage.arguments(sys.argv[1:])
    if torch is None:
        print(f"PyTorch peers left out: {torch_absent}")
        return
    if args.suite not in SUITES:
        print(f"no PyTorch peers of {args.suite}; there are some of {', '.join(SUITES)}")
        return
    peers = SUITES[args.suite].peers
    if unknown := set(args.candidates) - set(peers):
        raise SystemExit(f"no peer {', '.join(unknown)}; there are {', '.join(peers)}")
    names = args.candidates or list(peers)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if on_gpu() else 'cpu'}")
    for slow in (False, True):  # those that tune for minutes come when all others are done
        group = [name for name in names if peers[name].slow_start == slow]

        def needed(store: Store, workload: Workload, group=group) -> bool:
            return any(store.needs(workload, name, mode) for name in group for mode in MODES)

        stage.over_workloads(args, needed, partial(measure, group, args))


if __name__ == "__main__":
    main()
