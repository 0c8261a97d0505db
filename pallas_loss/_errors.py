"""The library's own error. Bad input is a ValueError or TypeError; this one means "not here"."""


class UnsupportedError(NotImplementedError):
    """The request is valid, but this backend or device cannot serve it."""
