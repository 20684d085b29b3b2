"""The text of ``ds_ucp inspect``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import escape, fold_names, pluralize
from ..formats.findings import Finding
from ..model import COPY, ITEMSIZE, AtomicIndex, Fragment, ParamKey
from .contents import BUFFER, FROZEN, TRAINED, Parameter, find_file, knows_optimizer, sort_states
from .printing import format_bytes, format_count, format_table

_WIDTH = 100
"""Columns of the values in the report's head."""

_SHOWN = ("vocab", "dim", "parts", "blocks", "grid")
"""Fields of a pattern that the table shows."""

_MOST_NAMES = 12
"""Names that a finding lists."""


def write_summary(index: AtomicIndex, data: Mapping[str, Any], *, unfold: bool) -> list[str]:
    """Write the report; the first line is the verdict."""
    findings, ties = data["findings"], sorted(data["ties"].items())
    more = f"; {pluralize(len(findings), 'finding')} at the end" if findings else ""
    lines = [f"{data['folder']}: opens{more}", *_write_head(index, data), ""]
    lines += _write_parameters(data["parameters"], unfold=unfold)
    if ties:
        lines += ["", "tied", *(f"  {alias} = {name}" for alias, name in ties)]
    if findings:
        lines += ["", "findings", *(line for finding in findings for line in _write_finding(finding))]
    return lines


def _write_head(index: AtomicIndex, data: Mapping[str, Any]) -> list[str]:
    totals, optimizer, kinds = data["totals"], data["optimizer"], [row.kind for row in data["parameters"]]
    others = "frozen and buffers" if knows_optimizer(index) else "weights and buffers"
    parts = {"masters": "masters", "optimizer": "states", others: "module", "model copies": "copies"}
    sizes = [f"{name} {format_bytes(totals[part])}" for name, part in parts.items() if totals[part]]
    buffers, instances = kinds.count(BUFFER), len(data["instances"])
    numbers = {
        f"{kinds.count(FROZEN)} frozen": FROZEN in kinds,
        f"{len(data['ties'])} tied": data["ties"],
        pluralize(buffers, "buffer"): buffers,
        f"{instances} held by several pipeline stages": instances,
    }
    elements = "unknown" if totals["elements"] is None else format_count(totals["elements"])
    model = [pluralize(totals["parameters"], "parameter"), f"{elements} elements"]
    states = " ".join(optimizer["states"]) or "no states"
    groups = [
        (f"  group {number}", f"{pluralize(group['parameters'], 'parameter')}: {_write_values(group['hyper'])}")
        for number, group in enumerate(optimizer["groups"])
    ]
    rows = [
        ("written by", _describe_writer(index, data["written_by"])),
        ("step", str(data["counters"].get("global_steps", "not recorded"))),
        ("optimizer", f"{optimizer['name']}: {states}" if optimizer["name"] else states),
        *groups,
        ("model", ", ".join([*model, *(text for text, some in numbers.items() if some)])),
        ("files", f"{format_bytes(totals['file_bytes'])} in {pluralize(totals['files'], 'file')}: {', '.join(sizes)}"),
        ("client state", ", ".join(f"{key} ({kind})" for key, kind in data["client_state"]["keys"].items())),
    ]
    folded = [
        (key if not at else "", line)
        for key, value in rows
        for at, line in enumerate(textwrap.wrap(escape(value), _WIDTH, break_long_words=False, break_on_hyphens=False))
    ]
    return [f"  {line}" for line in format_table(folded)]


def _write_values(hyper: Mapping[str, Any]) -> str:
    """Write hyper-parameters without those that are off or unset (``--json`` has all)."""
    shown = {key: value for key, value in hyper.items() if value is not None and value is not False}
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def _describe_writer(index: AtomicIndex, written: Mapping[str, Any]) -> str:
    topology = index.topology
    if index.format:
        return f"{written['tool']}, {topology.precision}"
    if topology.is_atomic:
        return f"{written['tool']}, an atomic checkpoint"
    version = f"DeepSpeed {written['deepspeed']}: " if written["deepspeed"] else ""
    extra = [f"masters {topology.master}"] + ["elastic"] * topology.elastic
    extra += [f"offload {topology.offload}"] * (topology.offload != "none/none")
    return f"{version}{topology.describe()}, {', '.join(extra)}"


def _write_parameters(rows: Sequence[Parameter], *, unfold: bool) -> list[str]:
    """Write the table; parameters whose names differ only in numbers share a line."""
    header = ["parameter", "shape", "dtype", "states", "pattern", "by", "pieces", "files", "size"]
    named = [(row.name, row) for row in rows]
    folded = [(name, [row]) for name, row in named]
    if not unfold:
        folded = fold_names(named, lambda row: (row.instance, *_describe_form(row)))
    table = [_make_line(name, group) for name, group in folded]
    if not any(line[5] for line in table):
        header, table = [*header[:5], *header[6:]], [[*line[:5], *line[6:]] for line in table]
    return format_table(table, header, right=range(len(header) - 3, len(header)))


def _make_line(name: str, group: Sequence[Parameter]) -> list[str]:
    pieces = [max(storage.fragments.values(), default=0) for storage in group]
    files = [len(storage.files) for storage in group]
    counts = (
        str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"
        for numbers in (pieces, files)
    )
    label, size = str(ParamKey(name, group[0].instance)), format_bytes(sum(storage.nbytes for storage in group))
    return [label, *_describe_form(group[0]), *counts, size]


def _describe_form(row: Parameter) -> tuple[str, ...]:
    """Shape, dtype, states, pattern and its source."""
    shapes = dict.fromkeys(row.shards) if row.shape is None else (row.shape,)
    shape = " | ".join(str(list(shape)) for shape in shapes)
    dtype = f"{row.dtype} + {row.copy}" if row.copy and row.copy != row.dtype else row.dtype
    states = " ".join(state for state in row.states if state not in ("fp32", "module"))
    shown = row.kind if row.kind != TRAINED else states or "no states yet"
    kind, *fields = (row.pattern or "?").split(" ")
    pattern = " ".join((kind, *(field for field in fields if field.split("=")[0] in _SHOWN)))
    return shape, dtype, shown, pattern, "" if row.pattern == "unique" else row.origin


def _write_finding(finding: Finding) -> list[str]:
    """Write a finding with the names that it is about, and rules to paste."""
    names = [f"      {name}" for name, _ in fold_names(((name, None) for name in finding.names), bool)]
    if len(names) > _MOST_NAMES:
        names = [*names[:_MOST_NAMES], f"      … {len(finding.names)} in all (--json lists them)"]
    rules = [f"      {json.dumps(rule)}" for rule in finding.rules if "match" in rule]
    rules = ["    rules to be checked and pasted (docs/patterns.md):", *rules] if rules else []
    faults = [f"      {rule['error']}" for rule in finding.rules if "error" in rule]
    text = escape(f"{finding.kind}: {finding.text}")
    lines = textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="    ")
    return [*lines, *names, *faults, *rules]


# -- one parameter ----------------------------------------------------------------------------------------------------


def detail_parameter(index: AtomicIndex, row: Parameter) -> dict[str, Any]:
    """Describe a parameter with every fragment: file, byte offset, length in bytes, elements of its shard."""
    atoms = {key.state: atom for key, atom in index.atoms.items() if key.param == row.param}
    states = []
    for state in sort_states(atoms):
        atom = atoms[state]
        shards = [
            {
                "rank": rank,
                "shape": shard.shape,
                "fragments": [_locate(index, f, shard.shape, atom.dtype) for f in shard.list_fragments(state)],
            }
            for rank, shard in enumerate(atom.shards)
        ]
        states.append({"state": state, "dtype": atom.dtype, "bytes": atom.nbytes, "shards": shards})
    hyper = index.groups[row.group].hyper if row.group is not None else None
    return {**asdict(row), "hyper": hyper, "layout": states}


def _locate(index: AtomicIndex, fragment: Fragment, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Describe a fragment of a shard of a shape."""
    block = list(zip(fragment.find_begins(shape), fragment.block, strict=True)) if fragment.block else None
    return {
        "file": find_file(index, fragment.record),
        "offset": index.records[fragment.record].offset + fragment.offset,
        "bytes": fragment.numel * ITEMSIZE[dtype],
        "start": fragment.start,
        "numel": fragment.numel,
        **({"block": block} if block else {}),
    }


def write_detail(detail: Mapping[str, Any]) -> list[str]:
    """Write the text of ``--param``."""
    shape = detail["shape"]
    facts = [
        ("kind", detail["kind"]),
        ("shape", "not known" if shape is None else f"{list(shape)}, {format_count(detail['numel'])} elements"),
        ("pattern", f"{detail['pattern'] or '?'}{' by ' + detail['origin'] if detail['origin'] else ''}"),
        ("rule to give", ", ".join(f"{k}: {v}" for k, v in detail["why"].items())),
        ("tied", ", ".join(detail["aliases"])),
        ("scalars", _write_values(detail["scalars"])),
        (
            "param group",
            "" if detail["group"] is None else f"{detail['group']}: {_write_values(detail['hyper'] or {})}",
        ),
    ]
    lines = [detail["name"], *(f"  {line}" for line in format_table([f for f in facts if f[1]]))]
    for state in detail["layout"]:
        title = "the model's own copy" if state["state"] == COPY else state["state"]
        lines += ["", f"  {title}: {state['dtype']}, {format_bytes(state['bytes'])}"]
        for shard in state["shards"]:
            if len(state["shards"]) > 1:
                lines.append(f"    tensor-parallel rank {shard['rank']}: {list(shard['shape'])}")
            rows = [
                (_write_elements(f), f["file"], f"byte {f['offset']}", f"{f['bytes']} B") for f in shard["fragments"]
            ]
            table = (
                format_table(rows, ("elements", "file", "from", "length"), right=(2, 3)) if rows else ["no elements"]
            )
            lines += [f"    {line}" for line in table]
    return lines


def _write_elements(fragment: Mapping[str, Any]) -> str:
    """``[0, 12)``, or of a block ``[0:4, 6:9]``."""
    if block := fragment.get("block"):
        return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in block)}]"
    return f"[{fragment['start']}, {fragment['start'] + fragment['numel']})"
