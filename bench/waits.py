"""Waits that are longer than the process group's collectives may take: a late rank, a store of 1 MB/s, slow own reads.

``python bench/waits.py`` takes about six minutes, most of them asleep. Real engines on gloo; what is printed is by part
the seconds of each rank.
"""

from __future__ import annotations

import argparse
import http.server
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS, WIDTH, LAYERS = 2, 1024, 4
LONGEST = 1800.0
"""Seconds that a part may take."""


class Slow(http.server.SimpleHTTPRequestHandler):
    """Answers ranges, all requests together at a rate.

    Attributes:
        rate: bytes a second; 0 is as fast as it goes.
    """

    rate = 0.0
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def send_head(self) -> Any:
        path, span = Path(self.translate_path(self.path)), self.headers.get("Range")
        if span is None or not path.is_file():
            return super().send_head()
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        high = min(high, path.stat().st_size - 1)
        self.send_response(206)
        self.send_header("Content-Length", str(high + 1 - low))
        self.send_header("Content-Range", f"bytes {low}-{high}/{path.stat().st_size}")
        self.end_headers()
        stream = path.open("rb")
        stream.seek(low)
        self.left = high + 1 - low
        return stream

    def copyfile(self, source: Any, outputfile: Any) -> None:
        left = getattr(self, "left", None)
        while data := source.read(1 << 14 if left is None else min(1 << 14, left)):
            left = None if left is None else left - len(data)
            with self.lock:
                time.sleep(len(data) / self.rate if self.rate else 0)
            outputfile.write(data)


@contextmanager
def serve(folder: str, rate: float) -> Iterator[str]:
    """The folder's URL while the block runs."""
    handler = type("Rated", (Slow,), {"rate": rate})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# -- on the ranks -----------------------------------------------------------------------------------------------------


def make_engine(stage: int) -> Any:
    import deepspeed
    import torch

    import deepspeed_ucp  # noqa: F401 - the plugin

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_batch_size": int(os.environ.get("WORLD_SIZE", RANKS)),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def save(folder: str) -> float:
    import torch

    engine = make_engine(1)
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    return 0.0


def measure(work: Callable[[], Any]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def load(folder: str, stage: int, late: float = 0.0, slow_read: float = 0.0) -> float:
    """Seconds of a load, for which the last rank comes late, or in which its own reads take long."""
    engine = make_engine(stage)
    is_last = int(os.environ["RANK"]) == RANKS - 1
    reader, read = engine.checkpoint_engine, engine.checkpoint_engine.load

    def take_long(*args: Any, **more: Any) -> Any:
        reader.load = read
        time.sleep(slow_read)
        return read(*args, **more)

    if is_last and slow_read:
        reader.load = take_long
    time.sleep(late if is_last else 0.0)
    return measure(lambda: engine.load_checkpoint(folder))


def convert(source: str, destination: str) -> float:
    from deepspeed_ucp.comm import connect
    from deepspeed_ucp.convert import convert_checkpoint

    with connect() as comm:
        return measure(lambda: convert_checkpoint(source, destination, comm=comm))


# -- ------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a collective may take (20)")
    parser.add_argument("--late", type=float, default=60.0, help="seconds that one rank is late (60)")
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second of the store (1e6)")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    import waits  # by the name that the ranks import

    from deepspeed_ucp.testing.world import World

    with tempfile.TemporaryDirectory() as root, World(RANKS, timeout=options.timeout) as world:
        run = f"{root}/run"
        world.run(waits.save, run, timeout=LONGEST)
        with serve(root, options.rate) as url:
            parts: dict[str, Callable[[], list[float]]] = {
                "a rank that comes late": lambda: world.run(waits.load, run, 2, options.late, timeout=LONGEST),
                "own reads of a rank": lambda: world.run(waits.load, run, 1, 0.0, options.late, timeout=LONGEST),
                "a load from the store": lambda: world.run(waits.load, f"{url}/run", 3, timeout=LONGEST),
                "a conversion from it": lambda: world.run(waits.convert, f"{url}/run", f"{root}/out", timeout=LONGEST),
            }
            for name, work in parts.items():
                print(f"{name:24}", " ".join(f"{seconds:7.1f} s" for seconds in work()), flush=True)


if __name__ == "__main__":
    main()
