"""The store that saves go to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from deepspeed_ucp.io import remote
from tests.stores.server import BUCKET, Server, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An S3 server with a bucket, which this process's stores go to."""
    pytest.importorskip("s3fs", reason="the store of these tests is S3")
    with serve() as found:
        remote.set_options(found.options)
        with suppress(FileExistsError):
            remote.connect("s3://x", writing=True)[0].mkdir(BUCKET)
        yield found
    remote.set_options({})
