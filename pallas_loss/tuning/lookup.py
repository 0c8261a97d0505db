"""Which config a call gets: an override in force, else the backend's heuristic.

Nothing is measured while tracing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

_overrides: contextvars.ContextVar[Mapping[type, object]] = contextvars.ContextVar(
    "pallas_loss_configs", default=MappingProxyType({})
)


@contextlib.contextmanager
def override(config: object) -> Iterator[None]:
    """Uses ``config`` for every call traced inside; a function already jitted keeps its own.

    >>> from pallas_loss import tuning
    >>> with tuning.override(tuning.XlaConfig(token_tile=256)):
    ...     tuning.lookup(tuning.XlaConfig, tuning.XlaConfig).token_tile
    256
    """
    token = _overrides.set({**_overrides.get(), type(config): config})
    try:
        yield
    finally:
        _overrides.reset(token)


def lookup[Config](kind: type[Config], heuristic: Callable[[], Config]) -> Config:
    """The config of this kind to use here."""
    return _overrides.get().get(kind) or heuristic()  # type: ignore[return-value]
