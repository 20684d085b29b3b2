"""The ``ds_ucp`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default); returns the exit code."""
    try:
        from . import dispatch
    except KeyboardInterrupt:
        print("ds_ucp: interrupted", file=sys.stderr)
        return 130
    return dispatch.main(argv)


__all__ = ["main"]
