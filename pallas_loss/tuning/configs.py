"""Frozen tile configurations; each refuses bad values at birth."""

from dataclasses import dataclass, fields


def _require_positive(config) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, int) or value < 1:
            name = f"{type(config).__name__}.{field.name}"
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class XlaConfig:
    """Tiles of the XLA sweep. One float32 tile of logits, token_tile x vocab_tile, is live.

    1024 x 4096 keeps that tile at 16 MiB and the slice of ``w`` at 64 MiB for H = 4096 in float32,
    and is large enough to fill a matrix unit.
    """

    token_tile: int = 1024
    vocab_tile: int = 4096

    def __post_init__(self):
        _require_positive(self)
