"""What differs between JAX versions, and what JAX does not say in public."""

from jax._src import config


def interpreting() -> bool:
    """Whether kernels traced here run in the interpreter (``force_gpu_interpret_mode``)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None
