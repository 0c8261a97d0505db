"""Which backend runs. An explicit request runs or raises; the default takes the first that can."""

import functools
import logging

from pallas_loss._device import Chip, current_chip
from pallas_loss._errors import UnsupportedError
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.mosaic import MosaicGpu
from pallas_loss.backends.reference import Reference
from pallas_loss.backends.xla import Xla

LINEAR_BACKENDS: tuple[LinearBackend, ...] = (MosaicGpu(), Xla(), Reference())

_log = logging.getLogger("pallas_loss")


def implementations() -> tuple[str, ...]:
    """The names that ``implementation=`` accepts, in the order of preference."""
    return tuple(backend.name for backend in LINEAR_BACKENDS)


def linear_backend(
    implementation: str | None, problem: LinearProblem, operands: LinearOperands
) -> LinearBackend:
    """The backend for a loss from hidden states.

    Raises:
        UnsupportedError: the one named cannot serve this call on this device.
    """
    reasons: list[str] = []
    for backend in LINEAR_BACKENDS:
        if implementation not in (None, backend.name):
            continue
        reason = backend.unsupported(problem, operands)
        if reason is None:
            if implementation is None:
                _log_choice(backend.name, current_chip(), tuple(reasons))
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"implementation={implementation!r} cannot run here; {reasons[0]}")


@functools.cache
def _log_choice(name: str, chip: Chip, passed_over: tuple[str, ...]) -> None:
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    _log.info("implementation=None picks %r on %s%s", name, chip.kind, why)
