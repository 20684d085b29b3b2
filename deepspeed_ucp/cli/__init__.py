"""The ``ds_ucp`` command."""

from .dispatch import main

__all__ = ["main"]
