"""The store that saves go to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.server import Server, serve_bucket


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An S3 server with a bucket, which this process's stores go to."""
    pytest.importorskip("s3fs", reason="the store of these tests is S3")
    with serve_bucket() as found:
        yield found
