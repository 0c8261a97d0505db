"""Which backend runs. An explicit request runs or raises; the default takes the first that can."""

import functools
import logging

from pallas_loss._device import Chip, current_chip
from pallas_loss._errors import UnsupportedError
from pallas_loss.backends.active import ActiveRows
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.mosaic import MosaicGpu
from pallas_loss.backends.mosaic.row_backend import RowMosaicGpu
from pallas_loss.backends.reference import Reference, RowReference
from pallas_loss.backends.rows import RowBackend, RowOperands, RowProblem
from pallas_loss.backends.triton import RowTriton
from pallas_loss.backends.xla import RowXla, Xla

LINEAR_BACKENDS: tuple[LinearBackend, ...] = (ActiveRows(MosaicGpu()), Xla(), Reference())
ROW_BACKENDS: tuple[RowBackend, ...] = (
    RowMosaicGpu(),
    RowTriton(),
    RowXla(),
    RowReference(),
)

_log = logging.getLogger("pallas_loss")


def implementations() -> tuple[str, ...]:
    """The names that ``implementation=`` accepts, in the order of preference."""
    return tuple(backend.name for backend in LINEAR_BACKENDS)


def row_implementations() -> tuple[str, ...]:
    """The same of the losses from logits."""
    return tuple(backend.name for backend in ROW_BACKENDS)


def linear_backend(
    implementation: str | None, problem: LinearProblem, operands: LinearOperands
) -> LinearBackend:
    """The backend for a loss from hidden states.

    Raises:
        UnsupportedError: the one named cannot serve this call on this device.
    """
    return _first(LINEAR_BACKENDS, implementation, problem, operands)


def row_backend(
    implementation: str | None, problem: RowProblem, operands: RowOperands
) -> RowBackend:
    """The backend for a loss from logits.

    Raises:
        UnsupportedError: the one named cannot serve this call on this device.
    """
    return _first(ROW_BACKENDS, implementation, problem, operands)


def _first[Backend: LinearBackend | RowBackend](
    backends: tuple[Backend, ...], implementation: str | None, problem, operands
) -> Backend:
    reasons: list[str] = []
    for backend in backends:
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
