"""How the gradients of a loss from hidden states are made, chosen from shapes alone.

    recompute    4 products of 2 T H V FLOP; any cotangent; per-row sums are all that is kept
    in_forward   3 products; a loss that is one number; keeps a token chunk's exponentials

``in_forward`` computes the gradients in the forward rule, which runs under differentiation only.
Its workspace is one chunk of ``e^(z - z_y)``, ``[chunk, V]``, and with more than one chunk the
float32 sum of ``dw``, ``[H, V]``, which each chunk reads and writes once.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from pallas_loss import _device
from pallas_loss._errors import UnsupportedError
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem

Backward = Literal["auto", "recompute", "in_forward"]
Share = tuple[int, int]

# Adding a chunk to dw moves 8 H V bytes where its products take 6 chunk H V FLOP: at 4 TB/s and
# 700 TFLOP/s that is 230 / chunk of their time, against the third that recomputing costs.
SMALLEST_FAST_CHUNK = 2048
_CHUNK_MULTIPLE = 256  # whole tiles of any kernel

_log = logging.getLogger("pallas_loss")


@dataclass(frozen=True)
class GradientPlan:
    """A plan and its price; ``reason`` says why it is this one.

    ``token_chunk`` tokens go by at a time, all T in the plan ``recompute``, which keeps no
    exponentials (``workspace_bytes`` 0): a split of d-logits and dx in float32.
    """

    name: Literal["recompute", "in_forward"]
    reason: str
    token_chunk: int
    num_chunks: int
    workspace_bytes: int
    flops: float

    def __str__(self) -> str:
        chunks = f"{self.num_chunks} chunk{'s' if self.num_chunks > 1 else ''}"
        return (
            f"{self.name} ({self.reason}): {chunks} of {self.token_chunk} tokens, "
            f"{self.flops / 1e12:.3g} TFLOP for value and both gradients, "
            f"{self.workspace_bytes / 2**30:.3g} GiB of exponentials and sums"
        )


def choose(
    backward: Backward,
    workspace_bytes: int | None,
    backend: LinearBackend,
    problem: LinearProblem,
    operands: LinearOperands,
    obstacle: str | None,
    share: Share | None = None,
    one_chunk: bool = False,
) -> GradientPlan:
    """The plan that ``backward`` asks for; ``obstacle`` is what the loss has against in_forward.

    ``share`` is one device's part of T and V; with ``one_chunk`` its tokens go by together.

    Raises:
        UnsupportedError: ``in_forward`` was asked for and cannot serve this call.
        ValueError: its workspace does not hold one chunk.
    """
    all_t, h, all_v = operands.sizes(problem.layout)
    t, v = share or (all_t, all_v)
    recompute = functools.partial(
        GradientPlan, "recompute", token_chunk=all_t, num_chunks=1, workspace_bytes=0,
        flops=8.0 * t * h * v,
    )  # fmt: skip
    if backward == "recompute":
        return _logged(recompute("as asked"))
    obstacle = obstacle or _obstacle(problem, operands)
    if workspace_bytes is None:
        workspace_bytes = _device.memory_bytes() // 32
    chunk, num_chunks, needed = _chunks(problem, operands, t, v, workspace_bytes)
    if one_chunk and num_chunks != 1:
        obstacle = (
            obstacle or f"over a mesh it takes one chunk, and {workspace_bytes} bytes hold none"
        )
        chunk = all_t
    elif num_chunks == 1:
        chunk = all_t
    if backward == "auto":
        if not backend.prefers_in_forward:
            obstacle = obstacle or f"{backend.name} promises to keep no [T, V] array"
        if chunk < min(t, SMALLEST_FAST_CHUNK):
            obstacle = obstacle or f"{workspace_bytes} bytes of workspace hold {chunk} tokens"
        if obstacle:
            return _logged(recompute(obstacle))
    if obstacle:
        raise UnsupportedError(f"backward='in_forward' cannot serve this call: {obstacle}")
    if chunk == 0 and t > 0:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} does not hold one chunk of "
            f"{min(t, _CHUNK_MULTIPLE)} tokens of backward='in_forward', which needs {needed}"
        )
    reason = "as asked" if backward == "in_forward" else "one number, and it fits"
    return _logged(GradientPlan("in_forward", reason, chunk, num_chunks, needed, 6.0 * t * h * v))


def _obstacle(problem: LinearProblem, operands: LinearOperands) -> str | None:
    if problem.compute_dtype == jnp.float16:
        return "float16 cannot hold the exponentials; pass compute_dtype=jnp.bfloat16"
    if problem.transform.soft_cap is not None and operands.scale is not None:
        return "with a soft cap, the gradient of a traced logit_scale is read off dx"
    return None


def _chunks(
    problem: LinearProblem, operands: LinearOperands, t: int, v: int, workspace_bytes: int
) -> tuple[int, int, int]:
    """``(tokens a chunk, chunks, bytes)``; 0 tokens where not even the smallest chunk fits."""
    h = operands.x.shape[1]
    row_bytes = v * problem.exponentials_dtype.itemsize
    if t * row_bytes <= workspace_bytes:
        return t, 1, t * row_bytes
    sum_bytes = 0 if operands.w.dtype == jnp.float32 else 4 * h * v
    smallest = min(t, _CHUNK_MULTIPLE)
    fits = max(workspace_bytes - sum_bytes, 0) // row_bytes // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    if fits == 0:
        return 0, 0, sum_bytes + smallest * row_bytes
    num_chunks = -(-t // fits)
    # Equal chunks are one loop; a smaller last one is compiled a second time.
    equal = (n for n in range(num_chunks, 2 * num_chunks) if t % (n * _CHUNK_MULTIPLE) == 0)
    chunk = -(-t // next(equal, num_chunks) // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    return chunk, -(-t // chunk), sum_bytes + chunk * row_bytes


@functools.cache
def _log_plan(plan: GradientPlan) -> None:
    _log.info("gradients: %s", plan)


def _logged(plan: GradientPlan) -> GradientPlan:
    _log_plan(plan)
    return plan
