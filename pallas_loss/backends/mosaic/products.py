"""Which main loop multiplies: the config says for which chip it was made."""

import jax

from pallas_loss.backends.mosaic import blackwell, hopper
from pallas_loss.backends.mosaic.common import Config
from pallas_loss.tuning import BlackwellConfig


def matmul(
    a: hopper.Side,
    b: hopper.Side,
    size_k: int | jax.Array,
    tiles: tuple[int | jax.Array, int],
    config: Config,
    epilogue: hopper.Epilogue,
) -> None:
    """Hands every tile of ``A @ B`` to the epilogue; ``tiles`` counts the rows and columns of them.

    Elements past the end of an operand are loaded as zeros. The rows of tiles, in whole clusters,
    and a positive ``size_k`` may be known on the device alone.
    """
    if isinstance(config, BlackwellConfig):
        blackwell.matmul(a, b, size_k, tiles, config, epilogue)
    else:
        hopper.matmul(a, b, size_k, tiles, config, epilogue)
