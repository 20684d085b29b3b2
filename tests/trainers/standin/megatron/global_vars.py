"""The arguments, which all modules share."""

from argparse import Namespace

_HELD: list[Namespace] = []


def get_args() -> Namespace:
    return _HELD[0]


def set_args(args: Namespace) -> None:
    _HELD[:] = [args]
