"""Errors. Each says what is wrong (file or parameter), what was expected, what was found and what to do."""

from __future__ import annotations


class UcpError(RuntimeError):
    """Base of every error that this package raises on purpose.

    Args:
        lines: what is told, a line each; characters in them that would not show as themselves are escaped.

    Attributes:
        shared: every rank of the launch raises it.
        echo: and another rank than this one is to tell it.
    """

    shared = False
    echo = False

    def __init__(self, *lines: object) -> None:
        super().__init__(*(escape(str(line)) for line in lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class ConfigError(UcpError):
    """The ds_config (``checkpoint.universal``, batch sizes) cannot be honoured."""


class CheckpointError(UcpError):
    """The checkpoint on disk is missing something, damaged, or mixes files of several runs or steps."""


class MismatchError(UcpError):
    """Checkpoint and live engine disagree: parameters, shapes, param groups or the kind of optimizer."""


class UnsupportedError(UcpError):
    """The checkpoint or the engine uses a feature that the plugin does not cover (yet)."""


class StorageError(UcpError):
    """The system cannot read or write a file."""


class DiskFullError(StorageError):
    """What is to be written does not fit: the disk is full, a quota is used up, or a file would be too large."""


class RemoteError(UcpError):
    """Another rank failed with an error that is not one of ours; carries its text."""


def escape(text: str) -> str:
    """Text of a checkpoint as one line that shows what it is: no line breaks, terminal codes, changes of direction."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shorten(names: object, limit: int = 8) -> str:
    """Join names for a message, naming at most ``limit`` of them."""
    items = [str(name) for name in names]  # type: ignore[attr-defined]
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text}, … ({len(items)} in all)"
