"""What the chip is, at trace time: the target of a compile-only mesh, or the default device."""

import os
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """``capability`` is the CUDA compute capability, None where the platform has none."""

    platform: str
    kind: str
    capability: tuple[int, int] | None = None


def current_chip() -> Chip:
    """The chip that the code being traced will run on."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return Chip(target.platform, target.device_kind, _capability(target.device_kind))
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    declared = getattr(device, "compute_capability", None)
    major, minor = map(int, declared.split(".")) if declared else (0, 0)
    return Chip(device.platform, device.device_kind, (major, minor) if declared else None)


# A compile-only target names its chip and does not say its compute capability.
_CAPABILITY_OF_NAME = {
    "A100": (8, 0),
    "L4": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
}


def _capability(kind: str) -> tuple[int, int] | None:
    return next((cc for name, cc in _CAPABILITY_OF_NAME.items() if name in kind), None)


def num_multiprocessors() -> int:
    """The multiprocessors of the current chip; 2 where there is none, for the interpreter."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return target.num_cores or 2
    return getattr(jax.devices()[0], "core_count", None) or 2


def one_of_several() -> bool:
    """Whether the code being traced runs on each of several devices, in a ``shard_map``."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.manual_axes)


# GiB, for compile-only targets; a device says itself.
_MEMORY_OF_NAME = {"A100": 80, "L4": 24, "H100": 80, "H200": 139, "B200": 178, "B300": 268}


def memory_bytes() -> int:
    """The memory of the current chip."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    kind = current_chip().kind if target is not None else ""
    known = next((gib for name, gib in _MEMORY_OF_NAME.items() if name in kind), None)
    if known is not None:
        return known << 30
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return int(stats["bytes_limit"] / fraction)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
