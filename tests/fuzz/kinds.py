"""The kinds of cases: each derives a checkpoint from a number and reads it by several commands and loads."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import pickletools
import random
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.load.client import read_objects
from tests.load import test_reshard, test_reshard_3d, test_reshard_atomic
from tests.properties.samples import (
    FOREIGN,
    SOURCES,
    Foreign,
    Source,
    inspect,
    load_folder,
    open_folder,
    try_to,
    verify,
)
from tests.support import foreign
from tests.support.clients import edit_pickle

Draw = random.Random
Kind = Callable[[Draw, Path], None]

_ZIPS = [source for source in SOURCES if not source.legacy and not source.atomic]
_LEGACY = [source for source in SOURCES if source.legacy]
_ATOMIC = [source for source in SOURCES if source.atomic]
_RESHARDS = [
    test_reshard.test_any_topology_loads_into_any_other,
    test_reshard.test_a_load_and_a_load_back_restore_the_first_state,
    test_reshard.test_weights_load_without_optimizer_states_or_with_the_module_only,
    test_reshard.test_live_optimizer_states_are_overwritten_in_place,
    test_reshard.test_a_flipped_bit_anywhere_in_a_read_record_is_detected,
    test_reshard_3d.test_any_topology_loads_into_any_other,
    test_reshard_atomic.test_any_topology_loads_into_any_other_through_a_conversion,
]


# -- checkpoints to change ---------------------------------------------------------------------------------------------


@cache
def write_once(root: Path, name: str) -> Path:
    source = next(source for source in [*SOURCES, *FOREIGN] if source.name == name)
    return source.write(root / "whole" / name)


def copy(draw: Draw, root: Path, sources: Sequence[Source]) -> tuple[Source, Path]:
    """Copy a checkpoint of one of the sources."""
    source = draw.choice(sources)
    whole = write_once(root, source.name)
    folder = root / "case" / whole.name
    shutil.rmtree(root / "case", ignore_errors=True)
    shutil.copytree(whole, folder)
    return source, folder


def look(draw: Draw, folder: Path, source: Source, *, trusted: bool) -> None:
    """Read a checkpoint by two drawn functions, and read the client state.

    Args:
        trusted: checksums cover the change, so a load is refused or right.
    """

    def load() -> None:
        with suppress(*(() if trusted else (AssertionError,))):  # no checksum covers wrong bits
            load_folder(folder, source)

    ways: list[Callable[[], object]] = [
        lambda: open_folder(folder, source),
        lambda: inspect(folder, source),
        lambda: verify(folder, source, "--headers-only"),
        lambda: verify(folder, source),
        load,
    ]
    for way in draw.sample(ways, 2):
        way()
    for path in folder.glob("*model_states.pt"):
        try_to(lambda path=str(path): read_objects(path, trust_pickle=False))  # type: ignore[misc]


# -- kinds -------------------------------------------------------------------------------------------------------------


def change_file(sources: Sequence[Source], change: Callable[[Draw, Path, Source], bool]) -> Kind:
    """Make a kind of cases: copy one of the sources, change one of its files, and read it.

    Args:
        change: returns True if checksums cover the change.
    """

    def make(draw: Draw, root: Path) -> None:
        source, folder = copy(draw, root, sources)
        path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        trusted = change(draw, path, source)
        look(draw, folder, source, trusted=trusted)

    return make


def spoil(draw: Draw, path: Path, source: Source) -> bool:
    """Change bytes: zip directory, pickles, tensors, gaps, metadata, blocks."""
    path.write_bytes(change_bytes(draw, path.read_bytes()))
    if isinstance(source, Foreign):  # only files of ``torch.save`` and blocks have checksums of every byte
        return not source.format.unchecked and path.suffix in (".distcp", ".bin", ".pt")
    return not source.legacy


def forge_opcodes(draw: Draw, path: Path, _source: Source) -> bool:
    """Change opcodes of a pickle, with a valid checksum."""
    if zipfile.is_zipfile(path):
        edit_pickle(str(path), lambda data: change_opcodes(draw, data))
    elif path.suffix == ".pt":
        path.write_bytes(change_opcodes(draw, path.read_bytes()))
    return False


def forge_values(draw: Draw, path: Path, source: Source) -> bool:
    """Change values of a state file before it is saved, with valid checksums."""
    if path.suffix == ".pt":
        tree = torch.load(path, weights_only=False)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            change_value(draw, tree, odd=_ODD_PLAIN)
        torch.save(tree, path, _use_new_zipfile_serialization=not source.legacy)
    return False


def forge_manifest(draw: Draw, path: Path, _source: Source) -> bool:
    """Change values of a manifest, with a valid or an invalid digest."""
    path = next(parent for parent in path.parents if parent.name == "atomic") / "ucp_manifest.json"
    tree = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        change_value(draw, tree)
    mended = draw.random() < 0.8
    if mended and isinstance(tree, dict):
        tree.pop("digest", None)
        tree["digest"] = hashlib.sha256(dump(tree, (", ", ": ")).encode()).hexdigest()
    path.write_text(dump(tree))
    return not mended


def forge_metadata(draw: Draw, path: Path, _source: Source) -> bool:
    """Change metadata of another library: opcodes of its pickle or values of its JSON; or remove the file."""
    if path.name == ".metadata":
        data = path.read_bytes()
        path.write_bytes(change_opcodes(draw, data) if draw.random() < 0.5 else change_blocks(draw, data))
    elif path.suffix == ".json":
        path.write_text(change_json(draw, path.read_text()), errors="surrogatepass")
    elif path.suffix == ".safetensors":
        data = path.read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        text = change_json(draw, data[8:length].decode()).encode(errors="surrogatepass")
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
    elif zipfile.is_zipfile(path) and path.suffix != ".distcp":
        edit_pickle(str(path), lambda data: change_opcodes(draw, data))
    else:
        path.unlink()
    return False


def change_tree(draw: Draw, root: Path) -> None:
    """Change values of a tree before it is saved as blocks, or as two files, with valid checksums."""
    source, folder = copy(draw, root, [source for source in FOREIGN if source.name == "dcp-nested"])
    shutil.rmtree(folder)
    folder.mkdir()
    tree = foreign.make_tree(source.model, source.state(), flat=draw.random() < 0.5)
    optim = tree["optim"]
    for _ in range(draw.choice((1, 1, 2, 5))):
        part = tree if draw.random() < 0.3 else optim
        change_value(draw, part, odd=_ODD_PLAIN)
    if draw.random() < 0.7:
        foreign.write_dcp(folder, tree, lambda tensor: [draw.randrange(1, 3) for _ in tensor.shape])
    else:
        torch.save(tree.get("model"), folder / "pytorch_model_fsdp.bin")
        torch.save(tree.get("optim"), folder / "optimizer.bin")
    look(draw, folder, source, trusted=False)


def change_blocks(draw: Draw, data: bytes) -> bytes:
    """Change values, and names of keys, in metadata of torch.distributed.checkpoint."""
    tree = pickle.loads(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        change_value(draw, tree, odd=_ODD_BLOCKS)
    with suppress(RuntimeError, AttributeError):  # torch cannot save some values
        return pickle.dumps(tree)
    return data


def change_json(draw: Draw, text: str) -> str:
    """Change values, repeat keys, and write invalid JSON."""
    tree = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        change_value(draw, tree)
    text = dump(tree)
    if draw.random() < 0.2 and text[:2] == '{"':
        text = f"{text[:-1]},{text[1 : text.find(',', 1)]}}}"
    return (
        text.replace("1", draw.choice(("NaN", "1e999", "-1", "1.0", "true", "[1]")), 1) if draw.random() < 0.2 else text
    )


def reshard(draw: Draw, root: Path) -> None:
    """Run a property of tests/load with a drawn model, state, topology and target."""
    test = draw.choice(_RESHARDS)
    test.hypothesis.fuzz_one_input(draw.randbytes(draw.choice((64, 256, 1024, 4096))))  # type: ignore[attr-defined]


KINDS: dict[str, Kind] = {
    "header": change_file(_ZIPS + _ATOMIC, spoil),
    "legacy": change_file(_LEGACY, spoil),
    "pickle": change_file(_ZIPS + _ATOMIC + _LEGACY, forge_opcodes),
    "values": change_file(_ZIPS + _LEGACY, forge_values),
    "manifest": change_file(_ATOMIC, forge_manifest),
    "foreign": change_file(FOREIGN, spoil),
    "foreign_told": change_file(FOREIGN, forge_metadata),
    "foreign_held": change_tree,
    "reshard": reshard,
}


# -- changes -----------------------------------------------------------------------------------------------------------


def change_bytes(draw: Draw, data: bytes) -> bytes:
    """Make one to four changes of some bytes; a zip's directory is at the end, its first pickle at the beginning."""
    found = list(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        ends = draw.choice((draw.randrange(300), len(found) - draw.randrange(300))) % (len(found) + 1)
        at = ends if draw.random() < 0.3 else draw.randrange(len(found) + 1)
        length = draw.choice((1, 1, 2, 4, 8, 64, 700))
        bit, fill, old = 1 << draw.randrange(8), draw.choice((0, 255)), found[at : at + length]
        new = draw.choice(([each ^ bit for each in old], draw.randbytes(len(old)), [fill] * len(old)))
        change_items(draw, found, at, length, new)
    return bytes(found)


def change_items(draw: Draw, items: list[Any], at: int, length: int, new: Sequence[Any]) -> None:
    """Replace, remove, repeat or truncate items."""
    other = draw.randrange(len(items) + 1)
    kind = draw.randrange(7)
    if kind < 3:
        items[at : at + length] = new
    elif kind == 3:
        del items[at : at + length]
    elif kind == 4:
        items[at:at] = items[at : at + length]
    elif kind == 5:
        items[at : at + length] = items[other : other + length]
    else:
        del items[at:]


_SNIPPETS = [
    b"0", b"1", b"2", b"(", b")", b"}", b"]", b"\x8f", b"\x90", b"\x91", b"t", b"u", b"s", b"a", b"e", b"R", b"b", b"Q",
    b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"\x93", b"\x94", b"N", b"\x88", b"\x89", b".",
    b"q\x00", b"h\x00", b"h\xff", b"r\xff\xff\xff\x07", b"j\x00\x00\x00\x08", b"j\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x8b\x00\x01\x00\x00" + b"\x7f" * 256, b"G\x7f\xf8" + bytes(6),
    b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R", b"cos\nsystem\n", b"ccollections\nOrderedDict\n)R", b"I1\n",
    b"X\x05\x00\x00\x00param", b"(lp9\n", b"(dp9\n", b"2\x86" * 40, b"2\x87" * 30, b"2\x862" * 60 + b"\x91",
    b"(" * 500, b"]" + b"]a" * 2000, b"\x95" + b"\xff" * 8, b"\x96\xff\xff\xff\xff\x00\x00\x00\x00", b"\x97", b"\x98",
]  # fmt: skip


def change_opcodes(draw: Draw, data: bytes) -> bytes:
    """Remove, repeat or replace opcodes, or insert snippets that build unusual or huge objects."""
    starts = list_opcodes(data)
    parts = [data[low:high] for low, high in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(parts) + 1)
        old = b"".join(parts[at : at + 1])
        if draw.random() < 0.4:
            parts.insert(at, draw.choice(_SNIPPETS))
        else:
            change_items(draw, parts, at, 1, [old[:1] + draw.randbytes(max(len(old) - 1, 0))])
    return b"".join(parts)


def list_opcodes(data: bytes) -> list[int]:
    """List the offsets of opcodes in consecutive pickles."""
    stream, found = io.BytesIO(data), [0]
    try:
        while stream.tell() < len(data):
            base = stream.tell()
            starts = [at for _, _, at in pickletools.genops(stream) if at is not None]
            found += [at if at >= base else base + at for at in starts]
    except (ValueError, pickle.UnpicklingError, IndexError):
        pass  # tensors follow
    return sorted(set(found))


_ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1.5, 1e308, "", "x", "../x", "/dev/zero", "\x1b[31m\n",
    "\ud800", "a" * 5000, [], {}, [[]], [None], {"": None}, {"$float": "00"}, {"$float": "7ff8000000000000"},
    {"$tuple": 3}, {"$tuple": [1, 2]}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$bytes": "zz"}, {"$bytes": "00"},
    "(a+)+$", "float32", "fp32", "shard-v", [1] * 1000, [10**9, 10**9],
]  # fmt: skip


_ODD_PLAIN: list[Any] = [
    None, True, 0, -1, 3, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "0", "\x1b[31m\n", "\ud800", b"x",
    [], {}, [[1]], (1, (2, 3)), {"a": 1}, {1: {2: 3}}, [None], ["a.weight"], 1j, torch.float32, int, Counter(),
    torch.tensor(3), torch.tensor([1.5, 2.5]), torch.zeros(0), torch.tensor(float("nan")), torch.tensor(True),
    torch.tensor(1j), torch.ones(30, 17).t(), torch.zeros(30, 17, dtype=torch.bfloat16),
    torch.zeros(3, 5, dtype=torch.int32),
]  # fmt: skip


_ODD_BLOCKS: list[Any] = [
    -1, 0, 1, 2, 7, 2**31, 2**63, 10**30, None, (9,), (0, 0, 0), torch.Size([2, 2]), torch.int8, torch.float64,
    torch.quint8, "float32", "/dev/zero", "../x", ".metadata", "x.distcp", "", "\0",
]  # fmt: skip
_NAMES = ["", "x", "a.b", "7", "state", "fp32", "module", "params", "a.b\n\x1b[2J", "optim.param_groups.x.lr", "\ud800"]


def change_value(draw: Draw, tree: Any, odd: Sequence[Any] = _ODD) -> None:
    """Replace one value by an unusual one, remove it, swap it with another one, or rename its key."""
    places = list_places(tree)
    if not places:
        return
    holder, key = draw.choice(places)
    kind = draw.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, place = draw.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            holder[key], other[place] = deepcopy(other[place]), deepcopy(holder[key])
    elif kind == 2 and isinstance(holder[key], int):
        holder[key] += draw.choice((-1, 1, 1000, 2**40))
    elif kind == 3 and odd is _ODD:
        holder[key] = f"@nest{draw.choice((3, 50, 3000))}"  # nested brackets, deeper than Python's encoder supports
    elif kind == 4 and isinstance(holder, dict):
        holder[draw.choice(_NAMES)] = holder.pop(key)
    else:
        holder[key] = deepcopy(draw.choice(odd))


def list_places(tree: Any) -> list[tuple[Any, Any]]:
    """List every key of every dict and list, and every field of a loss scaler or of metadata."""
    tree = vars(tree) if type(tree).__name__.endswith(("LossScaler", "Metadata", "Properties", "Info")) else tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in list(items):
        found += [(tree, key), *list_places(value)]
    return found


def dump(tree: Any, separators: tuple[str, str] = (",", ":")) -> str:
    """Dump JSON in the form of manifests, or of the text for their digest."""
    text = json.dumps(tree, sort_keys=True, separators=separators)
    return re.sub('"@nest([0-9]+)"', lambda found: "[" * int(found[1]) + "1" + "]" * int(found[1]), text)
