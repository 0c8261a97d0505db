"""bfloat16 to float32 in two instructions a pair.

The upper half of a pair needs a mask and no shift. A conversion of 16 bits, which is what Mosaic
(JAX 0.11.2) asks for, moves it down first and takes three.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector


def widened(v: jax.Array, layout) -> jax.Array:
    """A tile of bfloat16, an even number side by side in a thread, as float32."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(v.shape, jnp.dtype(jnp.float32), layout=layout),
    )
    def widen(_, v):
        registers = np.empty_like(v.registers)
        for place, register in np.ndenumerate(v.registers):
            registers[place] = _widened(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=v.layout, _is_signed=None)

    return widen(v)


def _widened(pairs: ir.Value) -> ir.Value:
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    (size,) = ir.VectorType(pairs.type).shape
    words = utils.bitcast(pairs, ir.VectorType.get((size // 2,), i32))
    lower = arith.shli(words, utils.c(16, words.type))
    upper = arith.andi(words, utils.c(-(1 << 16), words.type))
    return utils.bitcast(vector.interleave(lower, upper), ir.VectorType.get((size,), f32))
