"""`http://`: index pages with links to files, of servers that answer ranged requests, and of those that do not."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from deepspeed_ucp.cli import main
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.io import store
from deepspeed_ucp.sources.latest import find_checkpoint
from tests.reshard import check_content, load, make_targets, open_everywhere
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (30, 20)), Param("b", (20,)), Param("frozen", (5,), frozen=True)))


class Plain(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server` has it: a range that is asked for is passed over."""

    def log_message(self, *_: Any) -> None:
        pass


class Ranged(Plain):
    """As usual servers have it."""

    def send_head(self) -> Any:
        path, span = Path(self.translate_path(self.path)), self.headers.get("Range")
        if span is None or not path.is_file():
            return super().send_head()
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[low : high + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {low}-{low + len(data) - 1}/{path.stat().st_size}")
        self.end_headers()
        return io.BytesIO(data)


@contextmanager
def serve(folder: Path, handler: type[Plain]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_load_from_an_index_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state(MODEL, 5)
    write_checkpoint(tmp_path / "run", MODEL, state, Topology(1, 3))
    with serve(tmp_path, Ranged) as url:
        targets = make_targets(MODEL, Topology(3, 2))
        check_content(load(open_everywhere(find_checkpoint(url), targets), targets), state)
        assert main(["verify", url]) == 0
        assert "whole" in capsys.readouterr().out
        assert main(["verify", url, "--seal"]) == 2
        assert "read only" in capsys.readouterr().err


def test_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", MODEL, random_state(MODEL, 5), Topology(1, 3))
    with serve(tmp_path, Plain) as url:
        folder = find_checkpoint(url)
        name = next(name for name in store.list_folder(folder) if "optim" in name)
        with (
            pytest.raises(UnsupportedError, match=r"answers with the whole file where a part is asked for"),
            store.open_stored(f"{folder}/{name}") as file,
        ):
            file.read([memoryview(bytearray(10))], 5)
