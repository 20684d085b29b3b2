"""Differences between releases of Python that tests see."""

from __future__ import annotations

import sys

OLD_MEMBERS = (3, 11) <= sys.version_info < (3, 11, 4)
"""This Python pickles members of enums by `getattr`, and several of them by `operator.or_`, which is refused."""
