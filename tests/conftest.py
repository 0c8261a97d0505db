"""Settings and the backend list that every test shares.

A backend joins the suite by adding its name to `BACKENDS` and, where the defaults do not fit, its
`Hooks`. All else is `implementation=name`. `PALLAS_LOSS_TEST_BACKENDS=name,name` picks others: the
kernels, in the interpreter where there is no such GPU (`test_mosaic_conformance.py`), Hopper's or,
with `PALLAS_LOSS_TEST_CHIP=blackwell`, Blackwell's.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from pallas_loss import _device, tuning

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

BACKENDS = tuple(os.environ.get("PALLAS_LOSS_TEST_BACKENDS", "reference,xla").split(","))

Context = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Hooks:
    """What the suite has to know about a backend.

    dtypes: the input dtypes it serves.
    context: where it runs (an interpreter, say).
    tilings: named tile sizes. The suite uses the first, which should cut its small problems into
        several ragged tiles; tests of tiling use them all.
    transforms: False where the context cannot run under `vmap` or `jax.checkpoint`.
    rounded_dbias: True where it sums d-logits in the compute dtype.
    absolute_tanh: True where a soft cap's tanh is as exact as its largest value, 1, allows.
    full_logits: True where the backend holds `[T, V]` logits by design.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    context: Context = contextlib.nullcontext
    tilings: Mapping[str, Context] = field(default_factory=lambda: {"own": contextlib.nullcontext})
    transforms: bool = True
    rounded_dbias: bool = False
    absolute_tanh: bool = False
    full_logits: bool = False


def _xla_tiles(token_tile: int, vocab_tile: int) -> Context:
    config = tuning.XlaConfig(token_tile=token_tile, vocab_tile=vocab_tile)
    return functools.partial(tuning.override, config)


_ON_BLACKWELL = os.environ.get("PALLAS_LOSS_TEST_CHIP") == "blackwell"


@contextlib.contextmanager
def _gpu_or_interpreter():
    """Where the kernels run: on such a GPU as they are, elsewhere in the interpreter."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if jax.default_backend() == "gpu":
        yield
        return
    with contextlib.ExitStack() as stack:
        if _ON_BLACKWELL:
            chip = _device.Chip("gpu", "NVIDIA B200", (10, 0))
            stack.enter_context(mock.patch.object(_device, "current_chip", lambda: chip))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        yield


@contextlib.contextmanager
def _small_tiles():
    """The smallest, and groups of two; on Blackwell those of a block that multiplies by itself."""
    if _ON_BLACKWELL:
        config = tuning.BlackwellConfig(block_n=64, stages=2, epilogue_n=32, collective=False)
    else:
        config = tuning.HopperConfig(tile_m=64, tile_n=64)
    with contextlib.ExitStack() as stack:
        for role in ("store", "exponentials", "dlogits", "add_dx", "store_dw"):
            stack.enter_context(tuning.override(config, role))
        grouped = dataclasses.replace(config, group=2)
        stack.enter_context(tuning.override(grouped, "row_sums"))
        yield


HOOKS: dict[str, Hooks] = {
    "mosaic_gpu": Hooks(
        dtypes=("bfloat16", "float16"),
        context=_gpu_or_interpreter,
        tilings={"small": _small_tiles, "own": contextlib.nullcontext},
        transforms=False,
        rounded_dbias=True,
        absolute_tanh=True,
    ),
    "reference": Hooks(full_logits=True),
    "xla": Hooks(
        tilings={
            "16x64": _xla_tiles(16, 64),
            "7x13": _xla_tiles(7, 13),
            "64x1000": _xla_tiles(64, 1000),
            "own": contextlib.nullcontext,
        }
    ),
}


@dataclass(frozen=True)
class Backend:
    """A backend under test: pass `implementation=backend.name`."""

    name: str
    hooks: Hooks

    def require(self, dtype: str) -> None:
        """Skips the test if the backend does not serve `dtype`."""
        if dtype not in self.hooks.dtypes:
            pytest.skip(f"{self.name} does not serve {dtype}")

    def require_transforms(self) -> None:
        """Skips the test where `vmap` and `jax.checkpoint` cannot run."""
        if not self.hooks.transforms:
            pytest.skip(f"the context of {self.name} cannot run under this transformation")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn, in its context and, unless marked `own_tiles`, its first tiling."""
    hooks = HOOKS.get(request.param, Hooks())
    tiling = next(iter(hooks.tilings.values()))
    if request.node.get_closest_marker("own_tiles"):
        tiling = contextlib.nullcontext
    with hooks.context(), tiling():
        yield Backend(request.param, hooks)


def pytest_configure(config):
    for line in (
        "own_tiles: run with the tile sizes that the library picks, not the suite's small ones",
        "standard_promotion: run under JAX's default promotion (third-party model code)",
    ):
        config.addinivalue_line("markers", line)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_file():
    """Lets go of a file's programs: each holds memory maps, of which a process has 65530."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """No implicit dtype or rank promotion, unless the test is marked `standard_promotion`."""
    if request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
