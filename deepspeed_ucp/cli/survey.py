"""Everything that ``ds_ucp inspect`` tells of a readable checkpoint, as data."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..atoms import COPY, MASTER, MODULE, AtomicIndex
from ..examine.verify import list_findings
from ..io.paths import is_url
from ..io.store import list_tree
from ..patterns import RuleSet, Settled, list_families, load_family
from ..plan.settling import settle_index
from ..secrets import hide_at
from ..sources.compare import DEEPSPEEDS
from ..sources.findings import NOTE, WARNING, Finding
from ..sources.open import FolderReport
from ..sources.ownfiles import read_state_tree
from ..torchsave.objects import describe
from .parameters import BUFFER, FROZEN, Parameter, find_file, list_parameters


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint as ``inspect`` shows it.

    Attributes:
        findings: what is odd, or cannot be had.
        data: all of it, as the JSON has it.
    """

    index: AtomicIndex
    parameters: list[Parameter]
    findings: list[Finding]
    data: dict[str, Any]


def make_survey(report: FolderReport, rules: Sequence[RuleSet] = ()) -> Survey:
    """All that there is to tell about a checkpoint that opens.

    Args:
        report: of its folder.
        rules: the user's, for parameters that the checkpoint does not settle.

    Raises:
        CheckpointError: the state file, or the manifest, is damaged.
    """
    index = report.index or report.require()
    run, settled = index.run, settle_index(index, rules)
    rows, files = list_parameters(index, settled), _list_files(report)
    client, version = _read_client_keys(index)
    findings = [*_find_limits(index, rows, settled, rules), *list_findings(report)]
    topology = {each.name: getattr(run.topology, each.name) for each in fields(run.topology) if each.name != "flats"}
    optimizer, _, parameters = topology.pop("offload").partition("/")
    data = {
        "folder": report.folder,
        "written_by": {"deepspeed": version or None, **_find_writer(index, report.folder)},
        "topology": {**topology, "offload_optimizer": optimizer, "offload_param": parameters},
        "counters": run.counters,
        "optimizer": {
            "name": run.optimizer,
            "states": sorted({key.state for key in index.stored.atoms} - {MASTER, MODULE, COPY}),
            "scalars": _join_scalars(index),
            "groups": _describe_groups(index, rows),
            "loss_scaler": run.scaler,
            "clip_grad": run.clip_grad,
        },
        "totals": _count_totals(index, files, rows),
        "parameters": rows,
        "ties": index.model.aliases,
        "frozen": [row.name for row in rows if row.kind == FROZEN],
        "buffers": [row.name for row in rows if row.kind == BUFFER],
        "instances": index.model.instances,
        "client_state": {"file": os.path.basename(run.state_file), "keys": client},
        "files": [{"name": name, "size": size} for name, size in files.items()],
        "findings": findings,
    }
    return Survey(index, rows, findings, data)


def _join_scalars(index: AtomicIndex) -> dict[str, Any]:
    """Per scalar of the optimizer its value, or the list of its values where parameters differ."""
    found: dict[str, dict[Any, None]] = defaultdict(dict)
    for scalars in index.run.scalars.values():
        for name, value in scalars.items():
            found[name][value] = None
    return {name: next(iter(values)) if len(values) == 1 else list(values) for name, values in found.items()}


def _describe_groups(index: AtomicIndex, rows: Iterable[Parameter]) -> list[dict[str, Any]]:
    """Per param group its hyper-parameters and how many parameters and elements it has."""
    sizes = {row.param: row.numel for row in rows}
    numels = [[sizes.get(param) for param in group.members] for group in index.run.groups]
    return [
        {"parameters": len(each), "elements": _sum_known(each), "hyper": group.hyper}
        for group, each in zip(index.run.groups, numels, strict=True)
    ]


def _sum_known(numels: Sequence[int | None]) -> int | None:
    known = [numel for numel in numels if numel is not None]
    return sum(known) if len(known) == len(numels) else None


def _count_totals(index: AtomicIndex, files: Mapping[str, int], rows: Iterable[Parameter]) -> dict[str, int | None]:
    """Bytes on disk, replicas of tensor-parallel ranks included, and counts.

    Returns:
        parameters, elements: each counted once; no elements if a shape is unknown.
        masters, states, copies: bytes of the masters, of the optimizer's states, and of the model's copies.
        module: bytes of frozen parameters and buffers.
        files, file_bytes: number of files, and their bytes.
    """
    sums: dict[str, int] = defaultdict(int)
    for key, atom in index.stored.atoms.items():
        sums[key.state if key.state in (MASTER, COPY, MODULE) else ""] += atom.nbytes
    parameters = [row for row in rows if row.kind != BUFFER and not row.instance]
    return {
        "parameters": len(parameters),
        "elements": _sum_known([row.numel for row in parameters]),
        "masters": sums[MASTER],
        "states": sums[""],
        "copies": sums[COPY],
        "module": sums[MODULE],
        "files": len(files),
        "file_bytes": sum(files.values()),
    }


def _list_files(report: FolderReport) -> dict[str, int]:
    """The checkpoint's files by their names in its folder, with sizes; scalars and manifest too, hard links once."""
    if report.atomic and is_url(report.folder):
        return {name: entry.size for name, entry in sorted(list_tree(report.folder).items())}
    if report.atomic:
        paths = (os.path.join(where, name) for where, _, names in os.walk(report.folder) for name in sorted(names))
        found = {(stat.st_dev, stat.st_ino): (path, stat.st_size) for path in paths if (stat := os.stat(path))}
        return {os.path.relpath(path, report.folder): size for path, size in sorted(found.values())}
    old = {finding.file for finding in report.findings if finding.kind == "leftover"}
    sizes = report.files.sizes
    return {name: size for name, size in sorted(sizes.items()) if size >= 0 and name not in old}


def _read_client_keys(index: AtomicIndex) -> tuple[dict[str, str], str]:
    """What the client put into the state file: key → what kind of value; and DeepSpeed's version. Runs no code of it.

    Raises:
        CheckpointError: the file is damaged.
    """
    tree = read_state_tree(index)
    if not isinstance(tree, Mapping):
        return {}, ""
    scheduler = {"lr_scheduler": tree["lr_scheduler"]} if tree.get("lr_scheduler") is not None else {}
    kept = {**scheduler, **{key: value for key, value in tree.items() if key not in DEEPSPEEDS}}
    return {str(key): hide_at(str(key), describe(value)) for key, value in kept.items()}, str(
        tree.get("ds_version") or ""
    )


def _find_writer(index: AtomicIndex, folder: str) -> dict[str, Any]:
    """What wrote the checkpoint: ``tool``, and the source of an atomic one as its manifest says.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    if index.run.format:
        return {"tool": index.run.format, "source": None}
    if not index.run.topology.is_atomic:
        return {"tool": "deepspeed", "source": None}
    from ..sources.atomic.manifest import read_manifest

    manifest = read_manifest(folder)
    if manifest is None:
        return {"tool": "ds_to_universal", "source": None}
    source = {"topology": manifest.source, "fingerprint": manifest.fingerprint}
    return {"tool": f"deepspeed_ucp {manifest.package}", "source": source}


def _find_limits(
    index: AtomicIndex, rows: Iterable[Parameter], settled: Settled, rules: Sequence[RuleSet]
) -> Iterator[Finding]:
    """What other topologies cannot take, or not before somebody says how; what cannot be checked."""
    if unsettled := [row for row in rows if row.why]:
        advice = {row.why.get("match", row.name): row.why for row in unsettled}
        text = (
            "nothing tells how tensor parallelism cuts these; to convert, or to resume with another degree, give "
            f"--patterns: {_advise(index, rules)}"
        )
        yield Finding("unsettled", "", text, WARNING, tuple(row.name for row in unsettled), tuple(advice.values()))
    irregular = {f"{key.param}.{key.state}": text for key, text in index.limits.irregular.items()}
    unreadable = {f"{key.param} ({key.state})": text for key, text in index.limits.unreadable.items()}
    for kind, what, faults in (
        ("irregular", "optimizer states that are not element-wise, which other topologies cannot take", irregular),
        ("unreadable", "bytes that cannot be cut", unreadable),
    ):
        for text in dict.fromkeys(faults.values()):
            yield Finding(kind, "", f"{what}: {text}", WARNING, tuple(name for name in faults if faults[name] == text))
    yield from (Finding("rules", "", text, WARNING) for text in settled.unused)
    if names := {find_file(index, at) for at, record in enumerate(index.stored.records) if record.crc is None}:
        text = "files without checksums; damage to them cannot be found"
        yield Finding("checksums", "", text, NOTE, tuple(sorted(names)))


def _advise(index: AtomicIndex, rules: Sequence[RuleSet]) -> str:
    """Which patterns to give: the package's families that would settle what is open."""
    known = list_families()
    if fit := "; ".join(name for name in known if settle_index(index, [*rules, load_family(name)]).is_complete):
        return f"families with rules for all of them: {fit} (which one is the model's is for you to say), or rules"
    return f"a family ({', '.join(known)}) or rules"
