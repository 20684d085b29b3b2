"""Exports weights as safetensors with Hugging Face's shards and index.

The layout is computed first; then threads fill byte ranges of files of known size. The bytes equal those of the
library's ``save_file``, which needs all tensors in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..comm import Comm
from ..errors import UnsupportedError, shorten
from ..formats.foreign.names import ADAPTER_CONFIG, ADAPTER_STEM, WEIGHTS_INDEX
from ..formats.foreign.weights import DTYPES
from ..io.disk import create_file, explain_full, open_to_write, write_at
from ..io.memory import Scratch
from ..io.read import Checked
from ..model.index import AtomicIndex
from ..model.storage import ITEMSIZE
from ..plan.conversion import Batch, Output, plan_conversion
from ..stream.full_tensors import stream
from ..stream.reader import AtomReader
from ..stream.report import OutputReport
from ..tensor_parallel.rules import RuleSet, list_renames
from .like import LikeModel
from .output import Export, stage_export
from .tensors import ExportOptions, Tensor, select_tensors

MAX_SHARD = 5 * 10**9
"""Default bytes of the tensors of a file, as in Hugging Face's libraries."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


@dataclass(frozen=True, slots=True)
class SafeLayout:
    """Layout of the output.

    Attributes:
        heads: file → bytes before the data.
        sizes: file → total bytes.
        places: tensor → file, and offset of its data.
    """

    heads: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, tuple[str, int]]


def lay_out(tensors: Mapping[str, Tensor], max_shard: int = MAX_SHARD, stem: str = "model") -> SafeLayout:
    """Place tensors in files of up to ``max_shard`` bytes, or with one larger tensor."""
    if invalid := [name for name in tensors if any("\ud800" <= char <= "\udfff" for char in name)]:
        raise UnsupportedError(f"safetensors has no names such as {shorten(invalid)}; --rename or --to dcp has them.")
    if unknown := sorted({tensor.dtype for tensor in tensors.values()} - set(_NAMES)):
        raise UnsupportedError(f"safetensors has no element type for {', '.join(unknown)}; --to dcp has.")
    shards = split_shards({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard)
    layout = SafeLayout({}, {}, {})
    for number, names in enumerate(shards):
        file = f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else f"{stem}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, position = {}, 0
        for name in sorted(names, key=lambda name: (-_ORDER[tensors[name].dtype], name)):  # wide first: all aligned
            tensor = tensors[name]
            offsets[name], position = position, position + tensor.nbytes
            place = [offsets[name], position]
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        layout.heads[file], layout.sizes[file] = head, len(head) + position
        layout.places.update({name: (file, len(head) + offset) for name, offset in offsets.items()})
    return layout


def split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names by file, like ``split_state_dict_into_shards_factory``."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current else shards


def export_safetensors(
    index: AtomicIndex,
    destination: str,
    comm: Comm | None = None,
    options: ExportOptions | None = None,
    *,
    rules: Sequence[RuleSet] = (),
    max_shard: int = MAX_SHARD,
    like: str | None = None,
) -> OutputReport:
    """Write a checkpoint's weights as safetensors; collective.

    Args:
        like: folder of a Hugging Face model with the required names and shapes; its configuration and tokenizer files
            are copied.

    Raises:
        UcpError: equal on all ranks; the destination is unchanged.
    """
    comm, options = comm or Comm(), options or ExportOptions()
    # PEFT loads an adapter from one file.
    most, stem = (sys.maxsize, ADAPTER_STEM) if options.adapter else (max_shard, "model")
    model = None if like is None else LikeModel(like)

    if model is not None and not options.adapter:
        live = index
        index = comm.run(lambda: model.rename_like_files(live, (*options.renames, *list_renames(rules))))
    selection = comm.run(lambda: select_tensors(index, rules, options, tied="drop"))
    if model is not None:
        tied = comm.once(lambda: model.compare(selection))
        kept = [tensor for tensor in selection.weights if tensor.names[0] not in tied]
        selection = replace(selection, weights=tuple(kept))
    layout = comm.run(lambda: lay_out(selection.by_name, most, stem))
    sizes = {"tensors": len(layout.places), "nbytes": sum(layout.sizes.values())}
    with stage_export("safetensors", destination, selection, options, comm, **sizes) as export:
        comm.once(lambda: _prepare_files(export.folder, layout, model, export.report.dtypes))
        if options.adapter:
            config = {**options.adapter_config, "inference_mode": True}  # as PEFT writes it
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            comm.once(lambda: create_file(os.path.join(export.folder, ADAPTER_CONFIG), text.encode()))
        export.verify(selection.weights, _write_tensors(export, selection.weights, layout))
    return export.report


def _prepare_files(folder: str, layout: SafeLayout, like: LikeModel | None, dtypes: Collection[str]) -> None:
    """Create files with final sizes and headers, the index, and the copied files."""
    if like is not None:
        like.copy_metadata(folder, dtypes)
    for file, head in layout.heads.items():
        path = os.path.join(folder, file)
        with explain_full(path), open(path, "xb", buffering=0) as stream:
            stream.truncate(layout.sizes[file])
            write_at(stream.fileno(), head, 0)
    if len(layout.heads) > 1:
        nbytes = sum(layout.sizes.values()) - sum(map(len, layout.heads.values()))
        weights = {name: file for name, (file, _) in layout.places.items()}
        index = {"metadata": {"total_size": nbytes}, "weight_map": weights}
        text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        create_file(os.path.join(folder, WEIGHTS_INDEX), text.encode())


def _write_tensors(export: Export, tensors: Sequence[Tensor], layout: SafeLayout) -> list[Checked]:
    """Read, cast and write this node's batches; return the checks (collective)."""
    comm, report = export.comm, export.report
    report.workers, most = export.options.split_window(report.source)
    outputs = [Output(tensor.numel, tensor.full.itemsize, tensor.full.place) for tensor in tensors]
    plan = plan_conversion(outputs, comm.size, most=most)
    checks = list[Checked]()

    def consume(batch: Batch, sides: Sequence[list[memoryview]], checked: list[Checked], scratch: Scratch) -> None:
        checks.extend(checked)
        for span, stored in zip(batch.ranges, sides[0], strict=True):
            tensor = tensors[span.output]
            data = tensor.convert(stored, scratch, export.selection.overflowed)
            for file, offset in map(layout.places.__getitem__, tensor.names):
                with open_to_write(os.path.join(export.folder, file)) as fd:
                    write_at(fd, data, offset + span.start * ITEMSIZE[tensor.dtype])

    def write_share() -> None:
        with AtomReader(export.selection.index) as reader:
            source = (reader, [tensor.full for tensor in tensors])
            stream([source], plan[comm.rank], consume, threads=report.workers, bar=export.options.bar)

    comm.run(write_share)
    return checks
