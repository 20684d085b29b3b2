"""The text of ``ds_ucp inspect``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..atoms import COPY, ITEMSIZE, AtomicIndex, ParamKey
from ..errors import escape, fold_names
from .figures import count_of, format_bytes, format_count, format_table
from .parameters import (
    BUFFER,
    FROZEN,
    TRAINED,
    UNSETTLED,
    Parameter,
    fold_rows,
    knows_optimizer,
    shorten_path,
    sort_states,
)
from .survey import Survey, list_states, tell_groups, tell_scalars

if TYPE_CHECKING:
    from ..sources.findings import Finding

_WIDTH = 100
"""Columns of the values in the report's head."""

_SHOWN = ("vocab", "dim", "parts", "blocks", "grid")
"""Of a pattern's fields those that the table shows."""

_OFTEN = 12
"""Names that a finding lists."""


def write_summary(survey: Survey, *, unfold: bool) -> list[str]:
    """The whole report."""
    lines = [survey.folder, *_tell_head(survey), "", *_tell_parameters(survey.parameters, unfold=unfold)]
    if survey.index.model.aliases:
        lines += ["", "tied", *(f"  {alias} = {name}" for alias, name in sorted(survey.index.model.aliases.items()))]
    if survey.findings:
        lines += ["", "findings", *(line for each in survey.findings for line in tell_finding(each))]
    return lines


def _tell_head(survey: Survey) -> list[str]:
    index, totals = survey.index, survey.totals
    rows = [
        ("written by", _tell_origin(survey)),
        ("step", _tell_step(index)),
        ("optimizer", _tell_optimizer(index)),
        *_tell_groups(survey),
        ("loss scale", _tell_scaler(index)),
        ("model", _tell_model(survey)),
        ("state", f"{format_bytes(totals.masters + totals.states + totals.module)}: {_tell_parts(survey)}"),
        ("files", _tell_files(survey)),
        ("client state", ", ".join(f"{key} ({kind})" for key, kind in survey.client.items())),
        ("resume", tell_resume(index)),
    ]
    folded = [
        (key if not at else "", line)
        for key, value in rows
        for at, line in enumerate(textwrap.wrap(escape(value), _WIDTH, break_long_words=False, break_on_hyphens=False))
    ]
    return [f"  {line}" for line in format_table(folded)]


def _tell_origin(survey: Survey) -> str:
    topology, written = survey.index.run.topology, survey.written_by
    if topology.wrapper == "atomic":
        made = f"{written['tool']}, an atomic checkpoint"
        return f"{made}{_tell_source(written['source'])}" if written["source"] else made
    version = f"DeepSpeed {written['deepspeed']}: " if written.get("deepspeed") else ""
    extra = [f"masters {topology.master}"] + ["elastic"] * topology.elastic
    extra += [f"offload {topology.offload}"] * (topology.offload != "none/none")
    return f"{version}{topology.describe()}, {', '.join(extra)}"


def _tell_source(source: Mapping[str, Any]) -> str:
    """What an atomic checkpoint was made of, by its manifest."""
    topology, files = source["topology"], source["fingerprint"].get("files", ())
    degrees = " ".join(f"{key}={topology[key]}" for key in ("dp", "tp", "pp", "sp", "ep") if topology.get(key, 1) > 1)
    size = format_bytes(sum(each["size"] for each in files))
    told = f"ZeRO-{topology.get('zero_stage', '?')} {degrees or 'dp=1'} {topology.get('precision', '')}"
    return f" of {told} ({topology.get('wrapper', '?')}), {size} in {count_of(len(files), 'file')}"


def _tell_step(index: AtomicIndex) -> str:
    counters = index.run.counters
    text = str(counters.get("global_steps", "not recorded"))
    more = [f"{counters['global_samples']} samples"] if "global_samples" in counters else []
    more += [f"{counters['skipped_steps']} skipped"] if counters.get("skipped_steps") else []
    return f"{text} ({', '.join(more)})" if more else text


def _tell_optimizer(index: AtomicIndex) -> str:
    states = list_states(index)
    text = index.run.optimizer or ("a client optimizer" if states or index.run.groups else "no states")
    scalars = [f"{name} {_tell_values(value)}" for name, value in tell_scalars(index).items()]
    return ", ".join([f"{text}: {' '.join(states)}" if states else text, *scalars])


def _tell_values(value: Any) -> str:
    if isinstance(value, list):
        plain = all(isinstance(each, (int, float)) for each in value)
        return f"{min(value):g} to {max(value):g}" if plain else f"{len(value)} values"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tell_groups(survey: Survey) -> list[tuple[str, str]]:
    """What all groups share on the first line, then what each has of its own."""
    groups = tell_groups(survey.index, survey.parameters)
    hypers: list[Mapping[str, Any]] = [group["hyper"] for group in groups]
    everywhere = {k: v for k, v in hypers[0].items() if all(h.get(k) == v for h in hypers)} if hypers else {}
    rows = [("", _join(everywhere))] if everywhere and len(groups) > 1 else []
    for number, group in enumerate(groups):
        own = {k: v for k, v in group["hyper"].items() if len(groups) == 1 or k not in everywhere}
        size = "" if group["elements"] is None else f", {format_count(group['elements'])} elements"
        told = f"{count_of(group['parameters'], 'parameter')}{size}"
        rows.append((f"  group {number}", f"{told}: {_join(own)}" if own else told))
    return rows


def _join(hyper: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in hyper.items()
    )


def _tell_scaler(index: AtomicIndex) -> str:
    if not index.run.scaler or index.run.topology.precision != "float16":
        return ""
    kind = "dynamic" if index.run.scaler.get("dynamic") else "static"
    return f"{_tell_values(index.run.scaler.get('cur_scale'))} ({kind})"


def _tell_model(survey: Survey) -> str:
    rows, totals = survey.parameters, survey.totals
    elements = "unknown number of" if totals.elements is None else format_count(totals.elements)
    parts = [f"{count_of(totals.parameters, 'parameter')}, {elements} elements"]
    frozen = sum(row.kind == FROZEN for row in rows)
    buffers = sum(row.kind == BUFFER for row in rows)
    parts += [f"{frozen} frozen"] * bool(frozen)
    parts += [f"{len(survey.index.model.aliases)} tied"] * bool(survey.index.model.aliases)
    parts += [count_of(buffers, "buffer")] * bool(buffers)
    parts += [f"{len(survey.index.model.instances)} held by several pipeline stages"] * bool(
        survey.index.model.instances
    )
    return ", ".join(parts)


def _tell_parts(survey: Survey) -> str:
    totals = survey.totals
    parts = {
        "masters": totals.masters,
        "optimizer": totals.states,
        name_others(survey.index): totals.module,
    }
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)


def name_others(index: AtomicIndex) -> str:
    """What the tensors are that no optimizer is known to own."""
    return "frozen and buffers" if knows_optimizer(index) else "weights and buffers"


def _tell_files(survey: Survey) -> str:
    totals = survey.totals
    rest = {"model copies": totals.copies, "client": totals.client, "padding": totals.padding, "headers": totals.rest}
    beside = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in rest.items() if nbytes)
    text = f"{format_bytes(totals.file_bytes)} in {count_of(totals.files, 'file')}"
    return f"{text}; beside the state {beside}" if beside else text


def tell_resume(index: AtomicIndex) -> str:
    """Who can resume it where."""
    topology = index.run.topology
    if topology.wrapper == "atomic":
        return "by deepspeed_ucp on any topology; by DeepSpeed with load_universal where that can"
    if not any(key.state not in ("module", COPY) for key in index.stored.atoms):
        return "weights only (load_optimizer_states=False): optimizer states are missing or have no names"
    degrees = f"tp {topology.tp} pp {topology.pp}"
    where = f"ZeRO-{topology.zero_stage} dp {topology.dp} {degrees}" if topology.zero_stage else f"stage 0 {degrees}"
    return f"by DeepSpeed itself with {where} only, by deepspeed_ucp on any topology"


def _tell_parameters(rows: Sequence[Parameter], *, unfold: bool) -> list[str]:
    folded = [(row.name, [row]) for row in rows] if unfold else fold_rows(rows)
    folded = [(str(ParamKey(name, group[0].instance)), group) for name, group in folded]
    header = ("parameter", "shape", "dtype", "states", "pattern", "by", "pieces", "files", "size")
    table = [(name, *_tell_row(group)) for name, group in folded]
    keep = [at for at in range(len(header)) if at != 5 or any(line[5] for line in table)]
    picked = [[line[at] for at in keep] for line in table]
    heads = [header[at] for at in keep]
    return format_table(picked, heads, right=[heads.index(name) for name in ("pieces", "files", "size")])


def _tell_row(group: Sequence[Parameter]) -> tuple[str, ...]:
    row = group[0]
    shape = tell_shape(row.shape) if row.shape is not None else " | ".join(map(tell_shape, dict.fromkeys(row.shards)))
    # A master that stands beside a copy of another dtype shows both, as float32←bfloat16 is how training kept it.
    dtype = f"{row.dtype} + {row.copy}" if row.copy and row.copy != row.dtype else row.dtype
    states = " ".join(state for state in row.states if state not in ("fp32", "module"))
    shown = row.kind if row.kind != TRAINED else states or "no states yet"
    pieces = [max(each.fragments.values(), default=0) for each in group]
    files = [len(each.files) for each in group]
    size = sum(each.nbytes for each in group)
    origin = "" if row.pattern == "unique" else row.origin
    kind, *told = row.pattern.split(" ")
    pattern = " ".join((kind, *(each for each in told if each.split("=")[0] in _SHOWN)))
    return shape, dtype, shown, pattern, origin, _tell_range(pieces), _tell_range(files), format_bytes(size)


def tell_shape(shape: Sequence[int]) -> str:
    """``[768, 768]``; a scalar is ``[]``."""
    return f"[{', '.join(map(str, shape))}]"


def _tell_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def tell_finding(finding: Finding) -> list[str]:
    """One finding with the names that it is about, and rules to paste."""
    names = [f"      {name}" for name, _ in fold_names(((name, None) for name in finding.names), bool)]
    if len(names) > _OFTEN:
        names = [*names[:_OFTEN], f"      … {len(finding.names)} in all (--json lists them)"]
    rules = [f"      {json.dumps(rule)}" for rule in finding.rules if "match" in rule]
    rules = ["    rules to be checked and pasted (docs/patterns.md):", *rules] if rules else []
    faults = [f"      {rule['error']}" for rule in finding.rules if "error" in rule]
    text = escape(f"{finding.kind}: {finding.text}")
    lines = textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="    ")
    return [*lines, *names, *faults, *rules]


# -- one parameter ----------------------------------------------------------------------------------------------------


def detail_parameter(index: AtomicIndex, row: Parameter) -> dict[str, Any]:
    """One parameter with every fragment: file, byte offset in it, length in bytes, elements of its shard."""
    states = []
    atoms = {key.state: atom for key, atom in index.stored.atoms.items() if key.param == row.param}
    for state in sort_states(atoms):
        atom = atoms[state]
        shards = [
            {
                "rank": rank,
                "shape": shard.shape,
                "fragments": [_locate(index, f, atom.dtype) for f in shard.fragments],
            }
            for rank, shard in enumerate(atom.shards)
        ]
        states.append({"state": state, "dtype": atom.dtype, "bytes": atom.nbytes, "shards": shards})
    hyper = index.run.groups[row.group].hyper if row.group is not None else None
    return {**row.to_data(), "hyper": hyper, "layout": states}


def _locate(index: AtomicIndex, fragment: Any, dtype: str) -> dict[str, Any]:
    record = index.stored.records[fragment.record]
    return {
        "file": shorten_path(index, index.stored.files[record.file].path),
        "offset": record.offset + fragment.offset,
        "bytes": fragment.numel * ITEMSIZE[dtype],
        "start": fragment.start,
        "numel": fragment.numel,
    }


def write_detail(detail: Mapping[str, Any]) -> list[str]:
    """The text of ``--param``."""
    shape = detail["shape"]
    facts = [
        ("kind", detail["kind"]),
        ("shape", "not known" if shape is None else f"{tell_shape(shape)}, {format_count(detail['numel'])} elements"),
        ("pattern", f"{detail['pattern'] or UNSETTLED}{' by ' + detail['origin'] if detail['origin'] else ''}"),
        ("rule to give", ", ".join(f"{k}: {v}" for k, v in detail["why"].items())),
        ("tied", ", ".join(detail["aliases"])),
        ("scalars", _join(detail["scalars"])),
        ("param group", "" if detail["group"] is None else f"{detail['group']}: {_join(detail['hyper'] or {})}"),
    ]
    lines = [detail["name"], *(f"  {line}" for line in format_table([f for f in facts if f[1]]))]
    for state in detail["layout"]:
        what = "the model's own copy" if state["state"] == COPY else state["state"]
        lines += ["", f"  {what}: {state['dtype']}, {format_bytes(state['bytes'])}"]
        lines += [f"    {line}" for shard in state["shards"] for line in _tell_shard(shard, len(state["shards"]))]
    return lines


def _tell_shard(shard: Mapping[str, Any], ranks: int) -> list[str]:
    head = [f"tensor-parallel rank {shard['rank']}: {tell_shape(shard['shape'])}"] if ranks > 1 else []
    rows = [
        (f"[{f['start']}, {f['start'] + f['numel']})", f["file"], f"byte {f['offset']}", f"{f['bytes']} B")
        for f in shard["fragments"]
    ]
    if not rows:
        return [*head, "no elements"]
    return [*head, *format_table(rows, ("elements", "file", "from", "length"), right=(2, 3))]
