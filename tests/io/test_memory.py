"""The pause of the garbage collector."""

from __future__ import annotations

import gc

import pytest

from deepspeed_ucp.io.memory import pause_collection


def fail_inside() -> None:
    with pause_collection():
        assert not gc.isenabled()
        raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_inside_and_restored(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail_inside()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
