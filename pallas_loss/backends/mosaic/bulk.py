"""Copies of whole lines between memory and shared memory, which tell L2 what it need not keep.

Pallas (JAX 0.11.2) has neither an eviction policy nor a copy whose length is known on the device
only, and its ``inline_mgpu`` takes no barrier. Hence two primitives, of one PTX instruction each.
The interpreter does not know them and runs Pallas's copies instead.
"""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.extend as jex
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import llvm
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.state.types import ReadEffect, WriteEffect
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_loss.backends.mosaic import compat
from pallas_loss.backends.mosaic.common import Ref

# As `createpolicy.fractional` encodes them, all of a copy.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
# What L2 is to keep for a second load, what it is not, what is stored. With a normal policy for the
# first, and without any, cross-entropy takes 2.5 and 7% longer at V = 128256, reverse KL 0 and 5%
# (H200).
KEPT, LOADED, STORED = EVICT_LAST, EVICT_FIRST, EVICT_FIRST


def load(src: Ref, dst: Ref, barriers: Ref, row, first, lines, wg, slot, keep) -> None:
    """``src[row, first : first + lines]`` to the first lines of ``dst[wg, slot]``; one arrival.

    The slot's other lines hold anything. ``keep`` asks L2 to have these lines for another load.
    """
    index = wg * dst.shape[1] + slot
    if compat.interpreting():
        there = src.at[row, pl.ds(first, dst.shape[2])]
        oob = plgpu.OOBFillMode.ZEROS
        plgpu.copy_gmem_to_smem(there, dst.at[wg, slot], barriers.at[index], oob_mode=oob)
    else:
        line, size = row * src.shape[1] + first, lines * _bytes(src, -1)
        _load.bind(src, dst, barriers, line, _address(dst, index), size, index, keep)


def store(src: Ref, dst: Ref, row, first, lines, wg, slot) -> None:
    """The first ``lines`` lines of ``src[wg, slot]`` to ``dst[row, first:]``: a group."""
    if compat.interpreting():
        _store_in_interpreter(src.at[wg, slot], dst, row, first, lines)
    else:
        address = _address(src, wg * src.shape[1] + slot)
        line, size = row * dst.shape[1] + first, lines * _bytes(dst, -1)
        _store.bind(src, dst, line, address, size)
    plgpu.commit_smem_to_gmem_group()


def _store_in_interpreter(src: Ref, dst: Ref, row, first, lines) -> None:
    def whole():
        there = dst.at[row, pl.ds(first, src.shape[0])]
        plgpu.copy_smem_to_gmem(src, there, commit_group=False)

    def line_by_line():
        @pl.loop(0, lines)
        def _line(line):
            there = dst.at[row, pl.ds(first + line, 1)]
            plgpu.copy_smem_to_gmem(src.at[pl.ds(line, 1)], there, commit_group=False)

        # The interpreter does not count an empty group.
        pl.when(lines == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    if isinstance(lines, int):
        return whole()
    pl.when(lines == src.shape[0])(whole)
    pl.when(lines < src.shape[0])(line_by_line)


def _bytes(ref: Ref, axis: int) -> int:
    """Of what lies along an axis and those after it."""
    return math.prod(ref.shape[axis:]) * ref.dtype.itemsize


def _address(smem: Ref, slot):
    """Of a slot. Primitives that Mosaic does not know cannot ask a reference in shared memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT),
    )
    def start(_, ref):
        address = llvm.ptrtoint(_value(0).type, utils.memref_ptr(ref))
        return mgpu.FragmentedArray.splat(address, (), is_signed=True)

    return start(smem) + slot * _bytes(smem, 2)


_load, _store = jex.core.Primitive("bulk_load"), jex.core.Primitive("bulk_store")
_WARPGROUP = mgpu.LoweringSemantics.Warpgroup

for _primitive in (_load, _store):
    _primitive.multiple_results = True
    _primitive.def_effectful_abstract_eval(lambda *_: ([], {ReadEffect(0), WriteEffect(1)}))


@lowering.register_lowering_rule(_load, _WARPGROUP)
def _lower_load(ctx, src, dst, barriers, line, address, size, index, keep):
    barrier = barriers.barrier_ref[_value(index)]
    # All threads arrive; a line is a multiple of 128 bytes, of which each expects its part.
    barrier.arrive_expect_tx(arith.divui(_value(size), _value(utils.WARPGROUP_SIZE)))
    utils.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1], $2, [$3], $4;",
        *(_value(address), _line(src, line), _value(size), barrier.get_ptr()),
        arith.select(_value(keep, jnp.bool_), _policy(KEPT), _policy(LOADED)),
        predicate=_one_thread_if_any(ctx, size),
    )
    return []


@lowering.register_lowering_rule(_store, _WARPGROUP)
def _lower_store(ctx, src, dst, line, address, size):
    utils.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [$0], [$1], $2, $3;",
        *(_line(dst, line), _value(address), _value(size), _policy(STORED)),
        predicate=_one_thread_if_any(ctx, size),
    )
    return []


def _line(gmem, line):
    """The address of a line; lines are counted in int32, their bytes may be more."""
    lines, (i8, i64) = ir.MemRefType(gmem.type), map(ir.IntegerType.get_signless, (8, 64))
    line_bytes = lines.shape[-1] * utils.bitwidth(lines.element_type) // 8
    offset = arith.muli(arith.extsi(i64, _value(line)), utils.c(line_bytes, i64))
    return utils.getelementptr(utils.memref_ptr(gmem), [offset], i8)


def _one_thread_if_any(ctx, size):
    """Of a warpgroup always the same one, which so has all of its groups; none for no bytes."""
    some = arith.cmpi(arith.CmpIPredicate.ne, _value(size), _value(0))
    return arith.andi(ctx.module_ctx.single_wg_lane_predicate, some)


def _value(x, dtype=jnp.int32):
    return lowering._ensure_ir_value(x, dtype)


def _policy(bits: int):
    return utils.c(bits, ir.IntegerType.get_signless(64))
