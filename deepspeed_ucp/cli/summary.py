"""The text of ``ds_ucp inspect``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from ..atoms import COPY, ITEMSIZE, AtomicIndex, Fragment, ParamKey, Shard, Tiles
from ..errors import count_of, escape, fold_names
from ..sources.findings import Finding
from .parameters import BUFFER, FROZEN, TRAINED, Parameter, find_file, knows_optimizer, sort_states
from .printing import format_bytes, format_count, format_table
from .survey import Survey

_WIDTH = 100
"""Columns of the values in the report's head."""

_SHOWN = ("vocab", "dim", "parts", "blocks", "grid")
"""Of a pattern's fields those that the table shows."""

_OFTEN = 12
"""Names that a finding lists."""


def write_summary(survey: Survey, *, unfold: bool) -> list[str]:
    """The whole report; the first line is the verdict."""
    more = f"; {count_of(len(survey.findings), 'finding')} at the end" if survey.findings else ""
    lines = [
        f"{survey.data['folder']}: opens{more}",
        *_write_head(survey),
        "",
        *_write_parameters(survey.parameters, unfold=unfold),
    ]
    if survey.index.model.aliases:
        lines += ["", "tied", *(f"  {alias} = {name}" for alias, name in sorted(survey.index.model.aliases.items()))]
    if survey.findings:
        lines += ["", "findings", *(line for each in survey.findings for line in _write_finding(each))]
    return lines


def _write_head(survey: Survey) -> list[str]:
    index, totals = survey.index, survey.data["totals"]
    others = "frozen and buffers" if knows_optimizer(index) else "weights and buffers"
    parts = {"masters": "masters", "optimizer": "states", others: "module", "model copies": "copies"}
    sizes = [f"{name} {format_bytes(totals[part])}" for name, part in parts.items() if totals[part]]
    rows = [
        ("written by", _describe_writer(survey)),
        ("step", _describe_step(index)),
        ("optimizer", _describe_optimizer(survey)),
        *_describe_groups(survey.data["optimizer"]["groups"]),
        ("model", _describe_model(survey)),
        ("files", f"{format_bytes(totals['file_bytes'])} in {count_of(totals['files'], 'file')}: {', '.join(sizes)}"),
        ("client state", ", ".join(f"{key} ({kind})" for key, kind in survey.data["client_state"]["keys"].items())),
    ]
    folded = [
        (key if not at else "", line)
        for key, value in rows
        for at, line in enumerate(textwrap.wrap(escape(value), _WIDTH, break_long_words=False, break_on_hyphens=False))
    ]
    return [f"  {line}" for line in format_table(folded)]


def _join(hyper: Mapping[str, Any]) -> str:
    """Without what is off or left to torch, which is most of it (``--json`` has all)."""
    told = {key: value for key, value in hyper.items() if value is not None and value is not False}
    return ", ".join(f"{key} {_write_value(value)}" for key, value in told.items())


def _write_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_writer(survey: Survey) -> str:
    topology, written = survey.index.run.topology, survey.data["written_by"]
    if survey.index.run.format:
        return f"{written['tool']}, {topology.precision}"
    if topology.is_atomic:
        source = _describe_source(written["source"]) if written["source"] else ""
        return f"{written['tool']}, an atomic checkpoint{source}"
    version = f"DeepSpeed {written['deepspeed']}: " if written["deepspeed"] else ""
    extra = [f"masters {topology.master}"] + ["elastic"] * topology.elastic
    extra += [f"offload {topology.offload}"] * (topology.offload != "none/none")
    return f"{version}{topology.describe()}, {', '.join(extra)}"


def _describe_source(source: Mapping[str, Any]) -> str:
    """What an atomic checkpoint was made of, by its manifest."""
    topology, files = source["topology"], source["fingerprint"].get("files", ())
    degrees = " ".join(f"{key}={topology[key]}" for key in ("dp", "tp", "pp", "sp", "ep") if topology.get(key, 1) > 1)
    zero = f"ZeRO-{topology.get('zero_stage', '?')} {degrees or 'dp=1'} {topology.get('precision', '')}"
    size = format_bytes(sum(each["size"] for each in files))
    return f" of {zero} ({topology.get('wrapper', '?')}), {size} in {count_of(len(files), 'file')}"


def _describe_step(index: AtomicIndex) -> str:
    counters = index.run.counters
    more = [f"{counters['global_samples']} samples"] if "global_samples" in counters else []
    more += [f"{counters['skipped_steps']} skipped"] if counters.get("skipped_steps") else []
    step = str(counters.get("global_steps", "not recorded"))
    return f"{step} ({', '.join(more)})" if more else step


def _describe_optimizer(survey: Survey) -> str:
    optimizer = survey.data["optimizer"]
    states, groups = optimizer["states"], optimizer["groups"]
    name = optimizer["name"] or ("without a name" if states or groups else "no states")
    scalars = [f"{key} {_write_range(value)}" for key, value in optimizer["scalars"].items()]
    return ", ".join([f"{name}: {' '.join(states)}" if states else name, *scalars])


def _write_range(value: Any) -> str:
    if not isinstance(value, list):
        return _write_value(value)
    plain = all(isinstance(each, (int, float)) for each in value)
    return f"{min(value):g} to {max(value):g}" if plain else f"{len(value)} values"


def _describe_groups(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What all groups share on the first line, then what each has of its own."""
    hypers: list[Mapping[str, Any]] = [group["hyper"] for group in groups]
    shared = {k: v for k, v in hypers[0].items() if all(h.get(k) == v for h in hypers)} if len(hypers) > 1 else {}
    rows = [("", _join(shared))] if shared else []
    for number, group in enumerate(groups):
        own = {key: value for key, value in group["hyper"].items() if key not in shared}
        size = "" if group["elements"] is None else f", {format_count(group['elements'])} elements"
        text = f"{count_of(group['parameters'], 'parameter')}{size}"
        rows.append((f"  group {number}", f"{text}: {_join(own)}" if own else text))
    return rows


def _describe_model(survey: Survey) -> str:
    totals, model = survey.data["totals"], survey.index.model
    kinds = [row.kind for row in survey.parameters]
    numbers = {
        f"{kinds.count(FROZEN)} frozen": FROZEN in kinds,
        f"{len(model.aliases)} tied": model.aliases,
        count_of(kinds.count(BUFFER), "buffer"): BUFFER in kinds,
        f"{len(model.instances)} held by several pipeline stages": model.instances,
    }
    size = "unknown number of" if totals["elements"] is None else format_count(totals["elements"])
    parameters = count_of(totals["parameters"], "parameter")
    return ", ".join([parameters, f"{size} elements", *(text for text, some in numbers.items() if some)])


def _write_parameters(rows: Sequence[Parameter], *, unfold: bool) -> list[str]:
    """The table; parameters that differ in numbers of the name only share a line."""
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
    pieces = [max(each.fragments.values(), default=0) for each in group]
    files = [len(each.files) for each in group]
    counts = (str(min(each)) if min(each) == max(each) else f"{min(each)}-{max(each)}" for each in (pieces, files))
    label, size = str(ParamKey(name, group[0].instance)), format_bytes(sum(each.nbytes for each in group))
    return [label, *_describe_form(group[0]), *counts, size]


def _describe_form(row: Parameter) -> tuple[str, ...]:
    """Shape, dtype, states, pattern and what settled it."""
    shapes = dict.fromkeys(row.shards) if row.shape is None else (row.shape,)
    shape = " | ".join(str(list(each)) for each in shapes)
    # A master that stands beside a copy of another dtype shows both, as float32←bfloat16 is how training kept it.
    dtype = f"{row.dtype} + {row.copy}" if row.copy and row.copy != row.dtype else row.dtype
    states = " ".join(state for state in row.states if state not in ("fp32", "module"))
    shown = row.kind if row.kind != TRAINED else states or "no states yet"
    kind, *fields = (row.pattern or "?").split(" ")
    pattern = " ".join((kind, *(each for each in fields if each.split("=")[0] in _SHOWN)))
    return shape, dtype, shown, pattern, "" if row.pattern == "unique" else row.origin


def _write_finding(finding: Finding) -> list[str]:
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


def detail_parameter(survey: Survey, row: Parameter) -> dict[str, Any]:
    """One parameter with every fragment: file, byte offset in it, length in bytes, elements of its shard."""
    index = survey.index
    atoms = {key.state: atom for key, atom in index.stored.atoms.items() if key.param == row.param}
    states = []
    for state in sort_states(atoms):
        atom = atoms[state]
        shards = [
            {"rank": rank, "shape": shard.shape, "fragments": list(_locate_pieces(index, shard, atom.dtype))}
            for rank, shard in enumerate(atom.shards)
        ]
        states.append({"state": state, "dtype": atom.dtype, "bytes": atom.nbytes, "shards": shards})
    hyper = index.run.groups[row.group].hyper if row.group is not None else None
    return {**asdict(row), "hyper": hyper, "layout": states}


def _locate_pieces(index: AtomicIndex, shard: Shard, dtype: str) -> Iterator[dict[str, Any]]:
    tiles = shard.held.tiles if isinstance(shard.held, Tiles) else ()
    for piece, tile in zip_longest(shard.pieces, tiles):
        block = {"block": list(zip(tile.begins, tile.shape, strict=True))} if tile else {}
        yield {**_locate(index, piece, dtype), **block}


def _locate(index: AtomicIndex, fragment: Fragment, dtype: str) -> dict[str, Any]:
    record = index.stored.records[fragment.record]
    return {
        "file": find_file(index, fragment.record),
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
        ("shape", "not known" if shape is None else f"{list(shape)}, {format_count(detail['numel'])} elements"),
        ("pattern", f"{detail['pattern'] or '?'}{' by ' + detail['origin'] if detail['origin'] else ''}"),
        ("rule to give", ", ".join(f"{k}: {v}" for k, v in detail["why"].items())),
        ("tied", ", ".join(detail["aliases"])),
        ("scalars", _join(detail["scalars"])),
        ("param group", "" if detail["group"] is None else f"{detail['group']}: {_join(detail['hyper'] or {})}"),
    ]
    lines = [detail["name"], *(f"  {line}" for line in format_table([f for f in facts if f[1]]))]
    for state in detail["layout"]:
        what = "the model's own copy" if state["state"] == COPY else state["state"]
        lines += ["", f"  {what}: {state['dtype']}, {format_bytes(state['bytes'])}"]
        lines += [f"    {line}" for shard in state["shards"] for line in _write_shard(shard, len(state["shards"]))]
    return lines


def _write_elements(fragment: Mapping[str, Any]) -> str:
    """``[0, 12)``, or of a tile ``[0:4, 6:9]``."""
    if block := fragment.get("block"):
        return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in block)}]"
    return f"[{fragment['start']}, {fragment['start'] + fragment['numel']})"


def _write_shard(shard: Mapping[str, Any], ranks: int) -> list[str]:
    head = [f"tensor-parallel rank {shard['rank']}: {list(shard['shape'])}"] if ranks > 1 else []
    rows = [(_write_elements(f), f["file"], f"byte {f['offset']}", f"{f['bytes']} B") for f in shard["fragments"]]
    if not rows:
        return [*head, "no elements"]
    return [*head, *format_table(rows, ("elements", "file", "from", "length"), right=(2, 3))]
