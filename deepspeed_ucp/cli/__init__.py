"""The ``ds_ucp`` command."""

from .main import main

__all__ = ["main"]
