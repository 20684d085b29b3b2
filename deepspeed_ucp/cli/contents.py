"""The contents of a checkpoint that opens, as ``ds_ucp inspect`` shows them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..examine.verify import list_findings
from ..formats.deepspeed.compare import DEEPSPEEDS
from ..formats.deepspeed.ownfiles import read_state_tree
from ..formats.findings import NOTE, WARNING, Finding
from ..formats.open import FolderReport
from ..io.store import list_tree
from ..model import COPY, MASTER, MODULE, Atom, AtomicIndex, ParamKey, count, number_layer
from ..plan.settling import settle_index
from ..secrets import hide_at
from ..tensor_parallel import Pattern, RuleSet, Settled, Unique, list_families, load_family
from ..tensor_parallel.recorded import ORIGIN, read_pattern, record_pattern
from ..torchsave.objects import describe

TRAINED, FROZEN, BUFFER, WEIGHTS = "trained", "frozen", "buffer", "weights"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of a checkpoint.

    Attributes:
        name: as in the model.
        instance: number of the copy, if several pipeline stages hold the parameter.
        kind: ``trained``, ``frozen`` (no optimizer owns it), ``buffer``, or ``weights`` if no optimizer is known.
        shape, numel: logical shape and number of elements; None if no pattern is known for its shards.
        shards: shape on each tensor-parallel rank.
        dtype: of the master, or of the module's tensor.
        copy: dtype of the model's copy of a trained parameter.
        states: state → dtype, masters first, copies left out.
        pattern, origin: how tensor parallelism cuts it (None: not known), and the source of the pattern.
        group: number of its param group, or None.
        scalars: scalars of the optimizer.
        aliases: names that are tied to it.
        fragments: state → number of contiguous pieces in files.
        files: names of the files that hold a part of a state.
        nbytes: of all states as stored, replicas of tensor-parallel ranks included, copies not.
        why: rule to give if the pattern is not known.
    """

    name: str
    instance: int
    kind: str
    shape: tuple[int, ...] | None
    numel: int | None
    shards: tuple[tuple[int, ...], ...]
    dtype: str
    copy: str | None
    states: dict[str, str]
    pattern: str | None
    origin: str
    group: int | None
    scalars: dict[str, Any]
    aliases: tuple[str, ...]
    fragments: dict[str, int]
    files: tuple[str, ...]
    nbytes: int
    why: dict[str, Any] = field(default_factory=dict)

    @property
    def param(self) -> ParamKey:
        """Key in the index."""
        return ParamKey(self.name, self.instance)


def list_contents(report: FolderReport, index: AtomicIndex, rules: Sequence[RuleSet] = ()) -> dict[str, Any]:
    """List the contents of a checkpoint that opens, as data for ``--json``.

    Args:
        rules: the user's, for parameters whose pattern the checkpoint does not record.

    Raises:
        CheckpointError: the state file is damaged.
    """
    settled, topology = settle_index(index, rules), index.topology
    rows, files = list_parameters(index, settled), _list_files(report)
    client, version = _read_client_keys(index)
    findings = [*_find_limits(index, rows, settled, rules), *list_findings(report)]
    described = {field.name: getattr(topology, field.name) for field in fields(topology) if field.name != "flats"}
    optimizer, _, parameters = described.pop("offload").partition("/")
    return {
        "folder": report.folder,
        "written_by": {"deepspeed": version or None, **_find_writer(report, index)},
        "topology": {**described, "offload_optimizer": optimizer, "offload_param": parameters},
        "counters": index.counters,
        "optimizer": {
            "name": index.optimizer,
            "states": sorted({key.state for key in index.atoms} - {MASTER, MODULE, COPY}),
            "groups": [{"parameters": len(group.members), "hyper": group.hyper} for group in index.groups],
            "loss_scaler": index.scaler,
            "clip_grad": index.clip_grad,
        },
        "totals": _count_totals(index, files, rows),
        "parameters": rows,
        "ties": index.aliases,
        "instances": index.instances,
        "client_state": {"file": os.path.basename(index.state_file), "keys": client},
        "files": [{"name": name, "size": size} for name, size in files.items()],
        "findings": findings,
    }


def list_parameters(index: AtomicIndex, settled: Settled) -> list[Parameter]:
    """All parameters and buffers in the model's order: as its files list them, layers of a pipeline by number."""
    atoms: dict[ParamKey, dict[str, Atom]] = defaultdict(dict)
    for key, atom in index.atoms.items():
        atoms[key.param][key.state] = atom
    groups = {param: number for number, group in enumerate(index.groups) for param in group.members}
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, name in index.aliases.items():
        aliases[name].append(alias)
    listed = [key.param for key in index.atoms if key.state in (COPY, MODULE)]
    has_copies = any(COPY in states for states in atoms.values())
    params = list(dict.fromkeys([*listed, *atoms] if has_copies else atoms))
    if index.topology.pp > 1:
        params.sort(key=lambda param: number_layer(param.name))
    return [
        _describe_parameter(index, settled, param, atoms[param], groups.get(param), aliases.get(param.name, ()))
        for param in params
    ]


def _describe_parameter(
    index: AtomicIndex,
    settled: Settled,
    param: ParamKey,
    atoms: Mapping[str, Atom],
    group: int | None,
    aliases: Iterable[str],
) -> Parameter:
    name, copy = param.name, atoms.get(COPY)
    states = {state: atoms[state] for state in sort_states(atoms) if state != COPY} or dict(atoms)
    main = next(iter(states.values()))
    pattern, origin = settled.patterns.get(name), settled.origin.get(name, "")
    if name in index.recorded:  # of an atomic checkpoint: how its source was cut
        pattern, origin = read_pattern(index.recorded[name]), ORIGIN
    elif pattern == Unique():
        origin = ""
    why = settled.open[name].suggest() if name in settled.open else {}
    if name in settled.wrong:
        why = {"error": f"{name}: {settled.wrong[name]}"}
    shape = settled.layouts[name][0].shape if name in settled.layouts else None
    unowned = FROZEN if knows_optimizer(index) else WEIGHTS
    fragments = {
        state: [f for shard in atom.shards for f in shard.list_fragments(state)] for state, atom in states.items()
    }
    used = {f.record for listed in fragments.values() for f in listed}
    return Parameter(
        name=name,
        instance=param.instance,
        kind=TRAINED if MODULE not in states else BUFFER if name in index.buffers else unowned,
        shape=shape,
        numel=None if shape is None else count(shape),
        shards=tuple(shard.shape for shard in main.shards),
        dtype=main.dtype,
        copy=copy.dtype if copy else None,
        states={state: atom.dtype for state, atom in states.items()},
        pattern=None if pattern is None else _name_pattern(pattern),
        origin=origin,
        group=group,
        scalars=dict(index.scalars.get(param, {})),
        aliases=tuple(aliases),
        fragments={state: len(listed) for state, listed in fragments.items()},
        files=tuple(sorted({find_file(index, record) for record in used})),
        nbytes=sum(atom.nbytes for state, atom in states.items() if state != COPY),
        why=why,
    )


def knows_optimizer(index: AtomicIndex) -> bool:
    """Return whether the files name the parameters that an optimizer owns."""
    return any(key.state != MODULE for key in index.atoms)


def sort_states(states: Iterable[str]) -> list[str]:
    """Sort states: masters first, the module's tensors and copies last, the optimizer's by name."""
    ends = {MASTER: 0, MODULE: 2, COPY: 3}
    return sorted(states, key=lambda state: (ends.get(state, 1), state))


def find_file(index: AtomicIndex, record: int) -> str:
    """The file of a record, relative to the checkpoint's folder."""
    path = index.files[index.records[record].file].path
    return path.removeprefix(f"{os.path.dirname(index.state_file)}/")


def _name_pattern(pattern: Pattern) -> str:
    """A pattern as rules write it, without default values: ``shard-h``, ``shard-nc parts=(1,1)``."""
    recorded = record_pattern(pattern)
    kind = recorded.pop("kind")
    plain = {key: value for key, value in recorded.items() if not isinstance(value, dict)}
    return " ".join((kind, *(f"{key}={value}".replace(" ", "") for key, value in plain.items())))


def _count_totals(index: AtomicIndex, files: Mapping[str, int], rows: Iterable[Parameter]) -> dict[str, int | None]:
    """Bytes on disk, replicas of tensor-parallel ranks included, and counts.

    Returns:
        parameters, elements: each counted once; no elements if a shape is unknown.
        masters, states, copies: bytes of the masters, of the optimizer's states, and of the model's copies.
        module: bytes of frozen parameters and buffers.
        files, file_bytes: number of files, and their bytes.
    """
    sums: dict[str, int] = defaultdict(int)
    for key, atom in index.atoms.items():
        sums[key.state if key.state in (MASTER, COPY, MODULE) else ""] += atom.nbytes
    numels = [row.numel for row in rows if row.kind != BUFFER and not row.instance]
    return {
        "parameters": len(numels),
        "elements": None if None in numels else sum(filter(None, numels)),
        "masters": sums[MASTER],
        "states": sums[""],
        "copies": sums[COPY],
        "module": sums[MODULE],
        "files": len(files),
        "file_bytes": sum(files.values()),
    }


def _list_files(report: FolderReport) -> dict[str, int]:
    """The checkpoint's files with their sizes, by name relative to its folder."""
    if report.atomic:
        return {name: entry.size for name, entry in sorted(list_tree(report.folder).items()) if not entry.is_folder}
    old = {finding.file for finding in report.findings if finding.kind == "leftover"}
    sizes = report.files.sizes
    return {name: size for name, size in sorted(sizes.items()) if size >= 0 and name not in old}


def _read_client_keys(index: AtomicIndex) -> tuple[dict[str, str], str]:
    """The client state's keys with the kinds of their values, and DeepSpeed's version; no code of the file is run.

    Raises:
        CheckpointError: the file is damaged.
    """
    tree = read_state_tree(index)
    if not isinstance(tree, Mapping):
        return {}, ""
    scheduler = {"lr_scheduler": tree["lr_scheduler"]} if tree.get("lr_scheduler") is not None else {}
    kept = {**scheduler, **{key: value for key, value in tree.items() if key not in DEEPSPEEDS}}
    kinds = {str(key): hide_at(str(key), describe(value)) for key, value in kept.items()}
    return kinds, str(tree.get("ds_version") or "")


def _find_writer(report: FolderReport, index: AtomicIndex) -> dict[str, Any]:
    """The program that wrote the checkpoint (``tool``), and the source of an atomic one from its manifest."""
    if index.format or not index.topology.is_atomic:
        return {"tool": index.format or "deepspeed", "source": None}
    if report.manifest is None:
        return {"tool": "ds_to_universal", "source": None}
    source = {"topology": report.manifest.source, "fingerprint": report.manifest.fingerprint}
    return {"tool": f"deepspeed_ucp {report.manifest.seal.package}", "source": source}


def _find_limits(
    index: AtomicIndex, rows: Iterable[Parameter], settled: Settled, rules: Sequence[RuleSet]
) -> Iterator[Finding]:
    """Find tensors that other topologies cannot take, or not without rules, and files without checksums."""
    if unsettled := [row for row in rows if row.why]:
        advice = {row.why.get("match", row.name): row.why for row in unsettled}
        text = (
            "the pattern of tensor parallelism is not known for these; to convert, or to resume with another degree, "
            f"give --patterns: {_advise(index, rules)}"
        )
        yield Finding("unsettled", "", text, WARNING, tuple(row.name for row in unsettled), tuple(advice.values()))
    irregular = {f"{key.param}.{key.state}": text for key, text in index.irregular.items()}
    unreadable = {f"{key.param} ({key.state})": text for key, text in index.unreadable.items()}
    for kind, problem, faults in (
        ("irregular", "optimizer states that are not element-wise, which other topologies cannot take", irregular),
        ("unreadable", "bytes that cannot be cut", unreadable),
    ):
        for text in dict.fromkeys(faults.values()):
            names = tuple(name for name in faults if faults[name] == text)
            yield Finding(kind, "", f"{problem}: {text}", WARNING, names)
    yield from (Finding("rules", "", text, WARNING) for text in settled.unused)
    if files := {find_file(index, at) for at, record in enumerate(index.records) if record.crc is None}:
        text = "files without checksums; damage to them cannot be found"
        yield Finding("checksums", "", text, NOTE, tuple(sorted(files)))


def _advise(index: AtomicIndex, rules: Sequence[RuleSet]) -> str:
    """Name the package's families whose rules would settle all parameters."""
    known = list_families()
    if fit := "; ".join(name for name in known if settle_index(index, [*rules, load_family(name)]).is_complete):
        return f"families with rules for all of them: {fit} (choose the model's), or rules"
    return f"a family ({', '.join(known)}) or rules"
