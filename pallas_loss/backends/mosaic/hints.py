"""A store that says so when nobody will read what it writes: Pallas has no word for it."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_loss.backends.mosaic.common import Ref

_STORE = """
{
.reg .b64 policy;
createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
@$0 cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [$1], [$2], $3, policy;
}
"""


def store_evict_first(smem: Ref, gmem: Ref, shape: tuple[int, ...], itemsize: int) -> None:
    """``plgpu.copy_smem_to_gmem`` of contiguous memory, without its group, for L2 to drop first.

    The interpreter does not know it.
    """
    nbytes = math.prod(shape) * itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def store(ctx, smem, gmem):
        i32 = ir.IntegerType.get_signless(32)
        one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [
                one,
                mgpu.utils.memref_ptr(gmem),
                mgpu.utils.memref_ptr(smem),
                arith.constant(i32, nbytes),
            ],
            _STORE,
            "b,l,l,r",
            has_side_effects=True,
        )

    store(smem, gmem)
