"""Lists the contents of a checkpoint for ``ds_ucp inspect``, as data and as text."""

from __future__ import annotations

import json
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import escape, fold_names, pluralize
from ..examine.verify import list_findings
from ..formats.deepspeed.ownfiles import read_state_tree
from ..formats.deepspeed.save import DEEPSPEEDS
from ..formats.findings import NOTE, WARNING, Finding
from ..formats.open import FolderReport
from ..io.store import list_tree
from ..model.index import AtomicIndex
from ..model.storage import COPY, ITEMSIZE, MASTER, MODULE, Atom, ParamKey, count, number_layer
from ..model.wrappers import Form
from ..plan.settling import settle_index
from ..secrets import hide_at
from ..tensor_parallel.kinds import Pattern, Unique
from ..tensor_parallel.recorded import ORIGIN, read_pattern, record_pattern
from ..tensor_parallel.rules import RuleSet, list_families, load_family
from ..tensor_parallel.settle import Settled
from ..torchsave.objects import describe
from .printing import format_bytes, format_count, format_table, list_fields

TRAINED, FROZEN, BUFFER, WEIGHTS = "trained", "frozen", "buffer", "weights"

_SHOWN = ("vocab", "dim", "parts", "blocks", "grid")
_MOST_NAMES = 12

Parameter: TypeAlias = dict[str, Any]
"""A parameter or buffer, as in the JSON.

* ``instance``: number of the copy, if several pipeline stages hold the parameter
* ``kind``: ``trained``, ``frozen`` (no optimizer owns it), ``buffer``, or ``weights`` if the files do not tell
* ``shape``: logical shape; None if no pattern is known for its ``shards``, the shapes on each tensor-parallel rank
* ``dtype``: of the master, or of the module's tensor; ``copy``: of the model's copy of a trained parameter
* ``states``: state → dtype, masters first, copies left out
* ``pattern``, ``origin``: how tensor parallelism cuts it (None: not known), and the source of the pattern
* ``nbytes``: of all states as stored, replicas of tensor-parallel ranks included; copies only if there is nothing else
* ``why``: rule to give if the pattern is not known
"""


def list_contents(report: FolderReport, index: AtomicIndex, rules: Sequence[RuleSet] = ()) -> dict[str, Any]:
    """List the contents of a checkpoint that opens, as data for ``--json``."""
    settled = settle_index(index, rules)
    rows, files = _list_parameters(index, settled), _list_files(report)
    client, version = _read_client_keys(index)
    topology = {key: value for key, value in list_fields(index.topology).items() if key != "flats"}
    optimizer, _, parameters = topology.pop("offload").partition("/")
    sizes: dict[str, int] = defaultdict(int)
    for key, atom in index.atoms.items():
        sizes[key.state if key.state in (MASTER, COPY, MODULE) else ""] += atom.nbytes
    if index.topology.traits.form is Form.NOTHING and not sizes[MASTER]:
        topology["master"] = None
    shapes = [row["shape"] for row in rows if row["kind"] != BUFFER and not row["instance"]]
    return {
        "folder": report.folder,
        "written_by": {"deepspeed": version or None, **_find_writer(report, index)},
        "topology": {**topology, "offload_optimizer": optimizer, "offload_param": parameters},
        "counters": index.counters,
        "optimizer": {
            "name": index.optimizer,
            "states": sorted({key.state for key in index.atoms} - {MASTER, MODULE, COPY}),
            "groups": [{"parameters": len(group.members), "hyper": group.hyper} for group in index.groups],
            "loss_scaler": index.scaler,
            "clip_grad": index.clip_grad,
        },
        "totals": {  # bytes include replicas of tensor-parallel ranks
            "parameters": len(shapes),
            "elements": None if None in shapes else sum(count(shape) for shape in shapes if shape is not None),
            "masters": sizes[MASTER],
            "states": sizes[""],
            "copies": sizes[COPY],
            "module": sizes[MODULE],
            "files": len(files),
            "file_bytes": sum(files.values()),
        },
        "parameters": rows,
        "ties": index.aliases,
        "instances": index.instances,
        "client_state": {"file": os.path.basename(index.state_file), "keys": client},
        "files": [{"name": name, "size": size} for name, size in files.items()],
        "findings": [*_find_limits(index, rows, settled, rules), *list_findings(report)],
    }


def _list_parameters(index: AtomicIndex, settled: Settled) -> list[Parameter]:
    atoms: dict[ParamKey, dict[str, Atom]] = defaultdict(dict)
    for key, atom in index.atoms.items():
        atoms[key.param][key.state] = atom
    groups = {param: number for number, group in enumerate(index.groups) for param in group.members}
    has_copies = any(COPY in states for states in atoms.values())
    listed = [key.param for key in index.atoms if has_copies and key.state in (COPY, MODULE)]
    params = list(dict.fromkeys([*listed, *atoms]))
    if index.topology.pp > 1:
        params.sort(key=lambda param: number_layer(param.name))
    return [_describe_parameter(index, settled, param, atoms[param], groups.get(param)) for param in params]


def _describe_parameter(
    index: AtomicIndex, settled: Settled, param: ParamKey, atoms: Mapping[str, Atom], group: int | None
) -> Parameter:
    name, copy = param.name, atoms.get(COPY)
    states = {state: atoms[state] for state in _sort_states(atoms) if state != COPY} or dict(atoms)
    main = next(iter(states.values()))
    pattern, origin = settled.patterns.get(name), settled.origin.get(name, "")
    if name in index.recorded:  # of an atomic checkpoint: how its source was cut
        pattern, origin = read_pattern(index.recorded[name]), ORIGIN
    elif pattern == Unique():
        origin = ""
    why = settled.open[name].suggest() if name in settled.open else {}
    if name in settled.wrong:
        why = {"error": f"{name}: {settled.wrong[name]}"}
    unowned = FROZEN if _knows_frozen(index) else WEIGHTS
    return {
        "name": name,
        "instance": param.instance,
        "kind": TRAINED if MODULE not in states else BUFFER if name in index.buffers else unowned,
        "shape": settled.layouts[name][0].shape if name in settled.layouts else None,
        "shards": [shard.shape for shard in main.shards],
        "dtype": main.dtype,
        "copy": copy.dtype if copy else None,
        "states": {state: atom.dtype for state, atom in states.items()},
        "pattern": None if pattern is None else _name_pattern(pattern),
        "origin": origin,
        "group": group,
        "scalars": dict(index.scalars.get(param, {})),
        "nbytes": sum(atom.nbytes for atom in states.values()),
        "why": why,
    }


def _knows_frozen(index: AtomicIndex) -> bool:
    """Return True if the files distinguish frozen parameters from trained ones."""
    return not index.foreign and any(key.state != MODULE for key in index.atoms)


def _sort_states(states: Mapping[str, Atom]) -> list[str]:
    """Sort states: masters, the optimizer's by name, the module's tensors, copies."""
    ends = {MASTER: 0, MODULE: 2, COPY: 3}
    return sorted(states, key=lambda state: (ends.get(state, 1), state))


def get_key(row: Mapping[str, Any]) -> ParamKey:
    """Return the key of a parameter in the index."""
    return ParamKey(row["name"], row["instance"])


def detail_parameter(index: AtomicIndex, row: Parameter) -> dict[str, Any]:
    """Describe a parameter with every fragment: file, byte offset, bytes, elements."""
    atoms = {key.state: atom for key, atom in index.atoms.items() if key.param == get_key(row)}
    layout = [
        {
            "state": state,
            "dtype": atoms[state].dtype,
            "rank": rank,
            "file": _find_file(index, fragment.record),
            "offset": index.records[fragment.record].offset + fragment.offset,
            "bytes": fragment.numel * ITEMSIZE[atoms[state].dtype],
            "start": fragment.start,
            "numel": fragment.numel,
            "block": [*zip(fragment.find_begins(shard.shape), fragment.block, strict=True)] if fragment.block else None,
        }
        for state in _sort_states(atoms)
        for rank, shard in enumerate(atoms[state].shards)
        for fragment in shard.list_fragments(state)
    ]
    hyper = index.groups[row["group"]].hyper if row["group"] is not None else None
    return {**row, "hyper": hyper, "layout": layout}


def _find_file(index: AtomicIndex, record: int) -> str:
    """Return the file of a record, relative to the checkpoint's folder."""
    path = index.files[index.records.files[record]].path
    return path.removeprefix(f"{os.path.dirname(index.state_file)}/")


def _name_pattern(pattern: Pattern) -> str:
    """Return a pattern as rules write it: ``shard-h``, ``shard-nc parts=(1,1)``."""
    recorded = record_pattern(pattern)
    kind = recorded.pop("kind")
    plain = {key: value for key, value in recorded.items() if not isinstance(value, dict)}
    return " ".join((kind, *(f"{key}={value}".replace(" ", "") for key, value in plain.items())))


def _list_files(report: FolderReport) -> dict[str, int]:
    """Return the files' sizes by name relative to the checkpoint's folder."""
    if report.atomic:
        return {name: entry.size for name, entry in sorted(list_tree(report.folder).items()) if not entry.is_folder}
    old = {finding.file for finding in report.findings if finding.kind == "leftover"}
    return {name: size for name, size in sorted(report.files.sizes.items()) if size >= 0 and name not in old}


def _read_client_keys(index: AtomicIndex) -> tuple[dict[str, str], str]:
    """Return key → kind of value of the client state, and DeepSpeed's version."""
    tree = read_state_tree(index)  # no code of the file is run
    if not isinstance(tree, Mapping):
        return {}, ""
    scheduler = {"lr_scheduler": tree["lr_scheduler"]} if tree.get("lr_scheduler") is not None else {}
    kept = {**scheduler, **{key: value for key, value in tree.items() if key not in DEEPSPEEDS}}
    kinds = {str(key): hide_at(str(key), describe(value)) for key, value in kept.items()}
    return kinds, str(tree.get("ds_version") or "")


def _find_writer(report: FolderReport, index: AtomicIndex) -> dict[str, Any]:
    """Return the program that wrote the checkpoint, and the source of an atomic one."""
    if index.format or not index.topology.is_atomic:
        return {"tool": index.format or "deepspeed", "source": None}
    if report.manifest is None:
        return {"tool": "ds_to_universal", "source": None}
    source = {"topology": report.manifest.source, "fingerprint": report.manifest.fingerprint}
    return {"tool": f"deepspeed_ucp {report.manifest.seal.package}", "source": source}


def _find_limits(
    index: AtomicIndex, rows: Sequence[Parameter], settled: Settled, rules: Sequence[RuleSet]
) -> Iterator[Finding]:
    """Find tensors that other topologies cannot take, and files without checksums."""
    if unsettled := [row for row in rows if row["why"]]:
        known = list_families()
        fit = [name for name in known if settle_index(index, [*rules, load_family(name)]).is_complete]
        advice = f"a family ({', '.join(known)}) or rules"
        if fit:
            advice = f"families with rules for all of them: {'; '.join(fit)} (choose the model's), or rules"
        text = (
            "the pattern of tensor parallelism is not known for these; to convert, or to resume with another degree, "
            f"give --patterns: {advice}"
        )
        whys = {row["why"].get("match", row["name"]): row["why"] for row in unsettled}
        yield Finding("unsettled", "", text, WARNING, tuple(row["name"] for row in unsettled), tuple(whys.values()))
    irregular = "optimizer states that are not element-wise, which other topologies cannot take"
    for kind, problem, faults in (
        ("irregular", irregular, index.irregular),
        ("unreadable", "bytes that cannot be cut", index.unreadable),
    ):
        for text in dict.fromkeys(faults.values()):
            names = tuple(f"{key.param} ({key.state})" for key, fault in faults.items() if fault == text)
            yield Finding(kind, "", f"{problem}: {text}", WARNING, names)
    yield from (Finding("rules", "", text, WARNING) for text in settled.unused)
    if files := {_find_file(index, at) for at, record in enumerate(index.records) if record.crc is None}:
        text = "files without checksums; damage to them cannot be found"
        yield Finding("checksums", "", text, NOTE, tuple(sorted(files)))


# -- text -------------------------------------------------------------------------------------------------------------


def format_summary(index: AtomicIndex, data: Mapping[str, Any], *, unfold: bool) -> list[str]:
    """Return the report, verdict first; ``unfold`` gives each parameter a line."""
    findings, named = data["findings"], [(row["name"], row) for row in data["parameters"]]
    more = f"; {pluralize(len(findings), 'finding')} at the end" if findings else ""
    lines = [f"{data['folder']}: opens{more}", *_format_head(index, data), ""]
    folded = [(name, [row]) for name, row in named]
    if not unfold:
        folded = fold_names(named, lambda row: (row["instance"], *_make_cells(row)))
    rows = [
        (
            str(ParamKey(name, group[0]["instance"])),
            *_make_cells(group[0]),
            format_bytes(sum(row["nbytes"] for row in group)),
        )
        for name, group in folded
    ]
    lines += format_table(rows, ("parameter", "shape", "dtype", "states", "pattern", "size"), right=(5,))
    if ties := sorted(data["ties"].items()):
        lines += ["", "tied", *(f"  {alias} = {name}" for alias, name in ties)]
    if findings:
        lines += ["", "findings", *(line for finding in findings for line in _format_finding(finding))]
    return lines


def _format_head(index: AtomicIndex, data: Mapping[str, Any]) -> list[str]:
    totals, optimizer, kinds = data["totals"], data["optimizer"], [row["kind"] for row in data["parameters"]]
    others = "frozen and buffers" if _knows_frozen(index) else "weights and buffers"
    parts = {"masters": "masters", "optimizer": "states", others: "module", "model copies": "copies"}
    sizes = [f"{name} {format_bytes(totals[part])}" for name, part in parts.items() if totals[part]]
    elements = "unknown" if totals["elements"] is None else format_count(totals["elements"])
    counts = {
        "frozen": kinds.count(FROZEN),
        "tied": len(data["ties"]),
        "buffer": kinds.count(BUFFER),
        "held by several pipeline stages": len(data["instances"]),
    }
    model = [pluralize(totals["parameters"], "parameter"), f"{elements} elements"]
    model += [
        pluralize(number, kind) if kind == "buffer" else f"{number} {kind}" for kind, number in counts.items() if number
    ]
    is_unnamed = any(finding.kind == "unnamed" for finding in data["findings"])
    states = " ".join(optimizer["states"]) or ("states without names" if is_unnamed else "no states")
    rows = [
        ("written by", _describe_writer(index, data)),
        ("step", str(data["counters"].get("global_steps", "not recorded"))),
        ("optimizer", f"{optimizer['name']}: {states}" if optimizer["name"] else states),
        *(
            (f"  group {number}", f"{pluralize(group['parameters'], 'parameter')}: {_format_values(group['hyper'])}")
            for number, group in enumerate(optimizer["groups"])
        ),
        ("model", ", ".join(model)),
        ("files", f"{format_bytes(totals['file_bytes'])} in {pluralize(totals['files'], 'file')}: {', '.join(sizes)}"),
        ("client state", ", ".join(f"{key} ({kind})" for key, kind in data["client_state"]["keys"].items())),
    ]
    return [f"  {line}" for line in format_table([row for row in rows if row[1]])]


def _format_values(hyper: Mapping[str, Any]) -> str:
    """Format hyper-parameters except those that are off or unset (``--json`` has all)."""
    shown = {key: value for key, value in hyper.items() if value is not None and value is not False}
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def _describe_writer(index: AtomicIndex, data: Mapping[str, Any]) -> str:
    topology, written = index.topology, data["written_by"]
    if index.format:
        return f"{written['tool']}, {topology.precision}"
    if topology.is_atomic:
        return f"{written['tool']}, an atomic checkpoint"
    version = f"DeepSpeed {written['deepspeed']}: " if written["deepspeed"] else ""
    extra = [f"masters {data['topology']['master']}" if data["topology"]["master"] else "no masters"]
    extra += ["elastic"] * topology.elastic
    extra += [f"offload {topology.offload}"] * (topology.offload != "none/none")
    return f"{version}{topology.describe()}, {', '.join(extra)}"


def _make_cells(row: Parameter) -> tuple[str, ...]:
    shapes = dict.fromkeys(row["shards"]) if row["shape"] is None else (row["shape"],)
    shape = " | ".join(str(list(shape)) for shape in shapes)
    dtype = f"{row['dtype']} + {row['copy']}" if row["copy"] not in (None, row["dtype"]) else row["dtype"]
    states = " ".join(state for state in row["states"] if state not in (MASTER, MODULE))
    kind, *fields = (row["pattern"] or "?").split(" ")
    pattern = " ".join((kind, *(field for field in fields if field.split("=")[0] in _SHOWN)))
    if row["origin"] and row["pattern"] != "unique":
        pattern += f" ({row['origin']})"
    return shape, dtype, row["kind"] if row["kind"] != TRAINED else states or "no states yet", pattern


def _format_finding(finding: Finding) -> list[str]:
    """Return a finding's lines, with the names that it is about and rules to paste."""
    names = [f"      {name}" for name, _ in fold_names(((name, None) for name in finding.names), bool)]
    if len(names) > _MOST_NAMES:
        names = [*names[:_MOST_NAMES], f"      … {len(finding.names)} in all (--json lists them)"]
    rules = [f"      {json.dumps(rule)}" for rule in finding.rules if "match" in rule]
    rules = ["    rules to be checked and pasted (docs/patterns.md):", *rules] if rules else []
    faults = [f"      {rule['error']}" for rule in finding.rules if "error" in rule]
    text = escape(f"{finding.kind}: {finding.text}")
    lines = textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="    ")
    return [*lines, *names, *faults, *rules]


def format_detail(detail: Mapping[str, Any]) -> list[str]:
    """Return the lines of ``--param``."""
    shape = detail["shape"]
    group = "" if detail["group"] is None else f"{detail['group']}: {_format_values(detail['hyper'])}"
    facts = [
        ("kind", detail["kind"]),
        ("shape", "not known" if shape is None else f"{list(shape)}, {format_count(count(shape))} elements"),
        ("pattern", f"{detail['pattern'] or '?'}{' by ' + detail['origin'] if detail['origin'] else ''}"),
        ("rule to give", ", ".join(f"{key}: {value}" for key, value in detail["why"].items())),
        ("scalars", _format_values(detail["scalars"])),
        ("param group", group),
    ]
    rows = [
        (part["state"], part["dtype"], part["rank"], _format_range(part), part["file"], part["offset"], part["bytes"])
        for part in detail["layout"]
    ]
    header = ("state", "dtype", "tp rank", "elements", "file", "from byte", "bytes")
    table = format_table(rows, header, right=(2, 5, 6))
    return [
        str(get_key(detail)),
        *(f"  {line}" for line in format_table([fact for fact in facts if fact[1]])),
        "",
        *table,
    ]


def _format_range(part: Mapping[str, Any]) -> str:
    """Format a fragment's elements: ``[0, 12)``, or of a block ``[0:4, 6:9]``."""
    if part["block"]:
        return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in part['block'])}]"
    return f"[{part['start']}, {part['start'] + part['numel']})"
