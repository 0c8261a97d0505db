"""Which config a call gets: an override in force, else the backend's heuristic.

Nothing is measured while tracing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

_overrides: contextvars.ContextVar[Mapping[tuple[type, str], object]] = contextvars.ContextVar(
    "pallas_loss_configs", default=MappingProxyType({})
)


@contextlib.contextmanager
def override(config: object, role: str = "") -> Iterator[None]:
    """Uses ``config`` for every call traced inside; a function already jitted keeps its own.

    ``role`` names the kernel, where several share a kind of config.

    >>> from pallas_loss import tuning
    >>> with tuning.override(tuning.XlaConfig(token_tile=256)):
    ...     tuning.lookup(tuning.XlaConfig, tuning.XlaConfig).token_tile
    256
    """
    token = _overrides.set({**_overrides.get(), (type(config), role): config})
    try:
        yield
    finally:
        _overrides.reset(token)


def lookup[Config](kind: type[Config], heuristic: Callable[[], Config], role: str = "") -> Config:
    """The config of this kind to use here; ``role`` tells kernels apart that share a kind."""
    return _overrides.get().get((kind, role)) or heuristic()  # type: ignore[return-value]
