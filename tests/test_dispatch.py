"""Which backend and which kind of config a device gets; the devices are made up."""

import logging

import jax.numpy as jnp
import pytest

from pallas_loss import UnsupportedError, _device, select, tuning
from pallas_loss.backends import mosaic
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform

# What JAX calls the device, its compute capability, the backend, the kind of config.
DEVICES = {
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), "mosaic_gpu", tuning.HopperConfig),
    "H200": ("NVIDIA H200", (9, 0), "mosaic_gpu", tuning.HopperConfig),
    "B200": ("NVIDIA B200", (10, 0), "mosaic_gpu", tuning.BlackwellConfig),
    "B300": ("NVIDIA B300 SXM6 AC", (10, 3), "mosaic_gpu", tuning.BlackwellConfig),
    "Thor": ("NVIDIA Thor", (11, 0), "xla", None),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", (12, 0), "xla", None),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), "xla", None),
    "CPU": ("cpu", None, "xla", None),
}


def _problem():
    problem = LinearProblem("vh", jnp.dtype(jnp.bfloat16), LogitTransform())
    zeros = jnp.zeros((8, 64), jnp.bfloat16)
    return problem, LinearOperands(zeros, zeros, jnp.zeros((8,), jnp.int32))


@pytest.mark.parametrize("name", DEVICES)
def test_every_kind_of_device(name, monkeypatch, caplog):
    """9.0 and 10.x get kernels, each with its own configs; others XLA, and the log says why."""
    kind, capability, backend, config = DEVICES[name]
    chip = _device.Chip("cpu" if capability is None else "gpu", kind, capability)
    for module in (_device, select):
        monkeypatch.setattr(module, "current_chip", lambda: chip)
    select._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_loss"):
        assert select.linear_backend(None, *_problem()).name == backend
    (line,) = caplog.messages
    assert f"picks {backend!r} on {kind}" in line
    if config is None:
        assert f"not {kind}" in line
        with pytest.raises(UnsupportedError, match=f"not {kind}"):
            select.linear_backend("mosaic_gpu", *_problem())
    else:
        assert type(mosaic.product_config("add_dx", 8192, 4096)) is config
