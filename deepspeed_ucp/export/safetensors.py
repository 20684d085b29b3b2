"""Writes weights as safetensors, sharded and indexed as Hugging Face loads them, straight from the fragments.

The layout is computed first; then threads fill byte ranges of files of known size. The bytes are those that the
safetensors library's own ``save_file`` writes for the same tensors. (The library needs them whole in memory.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..atoms import ITEMSIZE, AtomicIndex
from ..comm import Comm
from ..errors import UnsupportedError, shorten
from ..io.cast import cast
from ..io.disk import explain_full, write_at
from ..io.memory import Scratch
from ..patterns import RuleSet
from ..plan.conversion import Output, Range, plan_conversion
from ..stream.batches import ReadBatch, Source, stream
from ..stream.checks import Checks
from ..stream.progress import divide_window
from ..stream.reader import Reader
from ..stream.report import OutputReport
from ..stream.samples import check_samples
from .output import copy_beside, list_sizes, stage_output
from .tensors import ExportOptions, Selection, Tensor, select_tensors, start_report, warn_losses

MAX_SHARD = 5 * 10**9
"""Bytes of one file's tensors, as Hugging Face's libraries have it."""

INDEX = "model.safetensors.index.json"

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The format's names of element types, in its order: tensors of the last ones come first in a file."""

_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's data goes: byte ``offset`` of file number ``file``."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class SafeFile:
    """One file: name, size in bytes, and everything in front of the data."""

    name: str
    size: int
    header: bytes


@dataclass(frozen=True, slots=True)
class SafeLayout:
    """All files, the names in each, and where each name's data goes; ``nbytes`` of all data."""

    files: tuple[SafeFile, ...]
    names: tuple[tuple[str, ...], ...]
    places: dict[str, Place]
    nbytes: int

    def index(self) -> bytes:
        """Content of the index file."""
        weights = {name: file.name for file, names in zip(self.files, self.names, strict=True) for name in names}
        told = {"metadata": {"total_size": self.nbytes}, "weight_map": weights}
        return (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], max_shard: int = MAX_SHARD) -> SafeLayout:
    """Place tensors in files.

    Args:
        tensors: by name, in the order of the state dict: element type, shape, bytes.
        max_shard: bytes of data per file; a tensor that is larger has a file of its own.

    Raises:
        UnsupportedError: an element type that the format does not know, or a name that is no Unicode text.
    """
    if odd := [name for name in tensors if any("\ud800" <= each <= "\udfff" for each in name)]:
        raise UnsupportedError(f"safetensors has no names such as {shorten(odd)}; --rename or --format dcp has them.")
    unknown = sorted({dtype for dtype, _, _ in tensors.values()} - set(DTYPES))
    if unknown:
        raise UnsupportedError(f"safetensors has no element type for {', '.join(unknown)}; --format dcp has.")
    shards = split_shards({name: nbytes for name, (_, _, nbytes) in tensors.items()}, max_shard)
    files, places = [], {}
    for number, names in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        file, offsets = _lay_file(name, {each: tensors[each] for each in names})
        files.append(file)
        places.update({each: Place(number, offset) for each, offset in offsets.items()})
    return SafeLayout(tuple(files), tuple(map(tuple, shards)), places, sum(size for _, _, size in tensors.values()))


def split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names per file, by the rule of huggingface_hub's ``split_state_dict_into_shards_factory``."""
    shards: list[list[str]] = []
    current: list[str] = []
    held = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if held + size > limit:
            shards.append(current)
            current, held = [], 0
        current.append(name)
        held += size
    return [*shards, current] if current else shards


def _lay_file(name: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[SafeFile, dict[str, int]]:
    """The library's order, wide elements first, keeps every tensor aligned to its own elements."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    for each in sorted(tensors, key=lambda each: (-_ORDER[tensors[each][0]], each)):
        dtype, shape, nbytes = tensors[each]
        end = position + nbytes
        header[each] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        offsets[each], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return SafeFile(name, len(head) + position, head), {each: len(head) + at for each, at in offsets.items()}


@dataclass(frozen=True, slots=True)
class _Export:
    """One export under way."""

    folder: str
    layout: SafeLayout
    tensors: Sequence[Tensor]
    places: Sequence[tuple[Place, ...]]


def export_safetensors(
    index: AtomicIndex,
    destination: str,
    comm: Comm | None = None,
    options: ExportOptions | None = None,
    *,
    rules: Sequence[RuleSet] = (),
    max_shard: int = MAX_SHARD,
    hf_dir: str | None = None,
) -> OutputReport:
    """Write a checkpoint's weights as safetensors; collective.

    Args:
        index: the checkpoint.
        destination: folder to be made.
        comm: the nodes that share the work; alone without it.
        rules: how tensor parallelism cuts parameters, by the user.
        max_shard: bytes of data per file.
        hf_dir: folder whose ``config.json`` and tokenizer files are copied beside the weights.

    Raises:
        UcpError: the same on every rank; the destination is as it was.
    """
    comm, options = comm or Comm(), options or ExportOptions()

    def plan() -> tuple[Selection, SafeLayout]:
        selection = select_tensors(index, rules, options, tied="drop")
        return selection, lay_out(_list_entries(selection), max_shard)

    selection, layout = comm.run(plan)
    warn_losses(index, selection, comm)
    report = start_report("safetensors", index, destination, selection, len(layout.places), comm.size)
    nbytes = sum(file.size for file in layout.files)
    with report.timed(), stage_output(index, destination, nbytes, options.overwrite, comm) as folder:
        comm.once(lambda: _prepare(folder, layout, hf_dir))
        _fill(index, _make_work(folder, selection, layout), comm, options, report)
        report.files = list_sizes(folder)
    report.bytes_written = sum(report.files.values())
    return report


def _list_entries(selection: Selection) -> dict[str, tuple[str, tuple[int, ...], int]]:
    entries = {tensor.name: (tensor.dtype, tensor.shape, tensor.nbytes) for tensor in selection.tensors}
    return {**entries, **{alias: entries[name] for alias, name in selection.ties.items() if name in entries}}


def _make_work(folder: str, selection: Selection, layout: SafeLayout) -> _Export:
    names: dict[str, list[str]] = {tensor.name: [tensor.name] for tensor in selection.tensors}
    for alias, name in selection.ties.items():
        if name in names:
            names[name].append(alias)
    places = [tuple(layout.places[each] for each in names[tensor.name]) for tensor in selection.tensors]
    return _Export(folder, layout, selection.tensors, places)


def _prepare(folder: str, layout: SafeLayout, hf_dir: str | None) -> None:
    """Files of their final size with their headers; the index; what lies beside."""
    if hf_dir is not None:
        copy_beside(hf_dir, folder)
    for file in layout.files:
        path = os.path.join(folder, file.name)
        with explain_full(path), open(path, "xb", buffering=0) as stream:
            stream.truncate(file.size)
            write_at(stream.fileno(), file.header, 0)
    if len(layout.files) > 1:
        path = os.path.join(folder, INDEX)
        with explain_full(path), open(path, "xb") as stream:
            stream.write(layout.index())


def _fill(index: AtomicIndex, work: _Export, comm: Comm, options: ExportOptions, report: OutputReport) -> None:
    """Read, cast and write this node's batches, and hold the source against its checksums; collective."""
    report.workers, most = divide_window(options.workers, options.window)
    outputs = [Output(tensor.numel, tensor.whole.itemsize, tensor.whole.place) for tensor in work.tensors]
    plan = plan_conversion(outputs, comm.size, most=most)
    checks = Checks()

    def consume(read: ReadBatch) -> None:
        checks.add(read.checks)
        for item, each in zip(read.sides[0], read.batch.ranges, strict=True):
            _write_range(work, each, item.into, read.scratch)

    def write_share() -> None:
        with Reader(index) as reader, options.bar(plan.shares[comm.rank]) as bar:
            source = Source(reader, [tensor.whole for tensor in work.tensors])
            stream([source], plan.nodes[comm.rank], consume, threads=report.workers, progress=bar.add)

    comm.run(write_share)
    nbytes = checks.nbytes + checks.verify(index, comm, threads=report.workers)
    check_samples(index, [tensor.whole.atom for tensor in work.tensors], comm)
    report.bytes_read = sum(comm.gather(nbytes))


def _write_range(work: _Export, each: Range, data: memoryview, scratch: Scratch) -> None:
    tensor = work.tensors[each.output]
    if tensor.dtype != tensor.whole.dtype:
        into = scratch.take(each.numel * ITEMSIZE[tensor.dtype])
        cast(data, tensor.whole.dtype, into, tensor.dtype)
        data = into
    for place in work.places[each.output]:
        fd = os.open(os.path.join(work.folder, work.layout.files[place.file].name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_at(fd, data, place.offset + each.start * ITEMSIZE[tensor.dtype])
        finally:
            os.close(fd)
