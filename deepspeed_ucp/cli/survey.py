"""Everything that ``ds_ucp inspect`` tells of a readable checkpoint, as data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, AtomicIndex
from ..patterns import list_families
from .parameters import BUFFER, FROZEN, Parameter, shorten_path

if TYPE_CHECKING:
    from ..sources.findings import Finding
    from ..sources.open import FolderReport

VERSION = 1
"""Of the JSON; it grows when a key changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes in bytes as stored (replicas of tensor-parallel ranks included), and counts.

    Attributes:
        elements: of all parameters, each once; None where a shape is not known.
        padding: bytes of the records that are no tensor's: alignment, partitions' ends, replicas that are not read.
        rest: bytes of the files beyond the records: pickles, zip directories.
    """

    parameters: int
    elements: int | None
    masters: int
    states: int
    copies: int
    module: int
    client: int
    padding: int
    rest: int
    files: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint as ``inspect`` shows it."""

    folder: str
    index: AtomicIndex
    parameters: list[Parameter]
    files: dict[str, int]
    totals: Totals
    client: dict[str, str]
    written_by: dict[str, Any]
    findings: list[Finding]

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        index = self.index
        kinds = {kind: [row.name for row in self.parameters if row.kind == kind] for kind in (FROZEN, BUFFER)}
        return {
            "inspect": VERSION,
            "folder": self.folder,
            "written_by": self.written_by,
            "topology": tell_topology(index),
            "counters": index.run.counters,
            "optimizer": {
                "name": index.run.optimizer,
                "states": list_states(index),
                "scalars": tell_scalars(index),
                "groups": tell_groups(index, self.parameters),
                "loss_scaler": index.run.scaler,
                "clip_grad": index.run.clip_grad,
            },
            "totals": {each.name: getattr(self.totals, each.name) for each in fields(Totals)},
            "parameters": [row.to_data() for row in self.parameters],
            "ties": index.model.aliases,
            "frozen": kinds[FROZEN],
            "buffers": kinds[BUFFER],
            "instances": index.model.instances,
            "client_state": {"file": os.path.basename(index.run.state_file), "keys": self.client},
            "files": [{"name": name, "size": size} for name, size in self.files.items()],
            "findings": [asdict(each) for each in self.findings],
        }


def tell_topology(index: AtomicIndex) -> dict[str, Any]:
    """The topology without its flat buffers."""
    kept = {
        each.name: getattr(index.run.topology, each.name) for each in fields(index.run.topology) if each.name != "flats"
    }
    optimizer, _, parameters = kept.pop("offload").partition("/")
    return {**kept, "offload_optimizer": optimizer, "offload_param": parameters}


def list_states(index: AtomicIndex) -> list[str]:
    """The optimizer's element-wise states by its own names, without masters."""
    return sorted({key.state for key in index.stored.atoms} - {MASTER, MODULE, COPY})


def tell_scalars(index: AtomicIndex) -> dict[str, Any]:
    """Per scalar of the optimizer its value, or the list of its values where parameters differ."""
    found: dict[str, dict[Any, None]] = {}
    for scalars in index.run.scalars.values():
        for name, value in scalars.items():
            found.setdefault(name, {})[value] = None
    return {name: next(iter(values)) if len(values) == 1 else list(values) for name, values in found.items()}


def tell_groups(index: AtomicIndex, rows: Iterable[Parameter]) -> list[dict[str, Any]]:
    """Per param group its hyper-parameters and how many parameters and elements it has."""
    sizes = {row.param: row.numel for row in rows}
    found = []
    for group in index.run.groups:
        numels = [sizes.get(param) for param in group.members]
        known = [numel for numel in numels if numel is not None]
        elements = sum(known) if len(known) == len(numels) else None
        found.append({"parameters": len(group.members), "elements": elements, "hyper": group.hyper})
    return found


def count_totals(index: AtomicIndex, files: Mapping[str, int], rows: Iterable[Parameter]) -> Totals:
    """Counts and sizes."""
    sums = {MASTER: 0, COPY: 0, MODULE: 0, "": 0}
    covered: set[tuple[int, int, int]] = set()
    for key, atom in index.stored.atoms.items():
        sums[key.state if key.state in sums else ""] += atom.nbytes
        width = ITEMSIZE[atom.dtype]
        covered |= {(f.record, f.offset, f.numel * width) for shard in atom.shards for f in shard.fragments}
    parameters = [row for row in rows if row.kind != BUFFER and not row.instance]
    numels = [row.numel for row in parameters]
    client = sum(index.stored.records[record].nbytes for record in index.run.client_records)
    records, file_bytes = sum(r.nbytes for r in index.stored.records), sum(files.values())
    return Totals(
        parameters=len(parameters),
        elements=None if None in numels else sum(numel or 0 for numel in numels),
        masters=sums[MASTER],
        states=sums[""],
        copies=sums[COPY],
        module=sums[MODULE],
        client=client,
        padding=max(0, records - client - sum(nbytes for _, _, nbytes in covered)),
        rest=file_bytes - records,
        files=len(files),
        file_bytes=file_bytes,
    )


def list_files(report: FolderReport) -> dict[str, int]:
    """The checkpoint's files by their names in its folder, with sizes; scalars and manifest too, hard links once."""
    from ..sources.files import list_sizes

    if report.atomic:
        paths = (os.path.join(where, name) for where, _, names in os.walk(report.folder) for name in sorted(names))
        found = {(stat.st_dev, stat.st_ino): (path, stat.st_size) for path in paths if (stat := os.stat(path))}
        return {os.path.relpath(path, report.folder): size for path, size in sorted(found.values())}
    old = {finding.file for finding in report.findings if finding.kind == "leftover"}
    sizes = list_sizes(report.folder)
    return {name: size for name, size in sorted(sizes.items()) if size >= 0 and name not in old}


def read_client_keys(index: AtomicIndex) -> tuple[dict[str, str], str]:
    """What the client put into the state file: key → what kind of value; and DeepSpeed's version. Runs no code of it.

    Raises:
        CheckpointError: the file is damaged.
    """
    from ..sources.marks import DEEPSPEEDS
    from ..torchsave.torchfile import read_header

    tree = read_header(index.run.state_file).tree
    if not isinstance(tree, Mapping):
        return {}, ""
    kept = {str(key): _tell_kind(value) for key, value in tree.items() if key not in DEEPSPEEDS}
    scheduler = {"lr_scheduler": _tell_kind(tree["lr_scheduler"])} if tree.get("lr_scheduler") is not None else {}
    return {**scheduler, **kept}, str(tree.get("ds_version") or "")


def _tell_kind(value: Any) -> str:
    """A value in a few words: its type, a number itself, a tensor's dtype and shape."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}…")
    if isinstance(value, (Mapping, list, tuple, set)):
        return f"{type(value).__name__} of {len(value)}"
    if hasattr(value, "dtype"):
        return f"{value.dtype} tensor{list(getattr(value, 'shape', ()))}"
    return str(getattr(value, "kind", type(value).__name__))


def tell_origin(index: AtomicIndex, folder: str, version: str) -> dict[str, Any]:
    """What wrote the checkpoint: ``tool``, DeepSpeed's version, and the source of an atomic one as its manifest says.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    if index.run.topology.wrapper != "atomic":
        return {"tool": "deepspeed", "deepspeed": version or None, "source": None}
    from ..sources.atomic.manifest import read_manifest

    manifest = read_manifest(folder)
    if manifest is None:
        return {"tool": "ds_to_universal", "deepspeed": version or None, "source": None}
    source = {"topology": manifest.source, "fingerprint": manifest.fingerprint}
    return {"tool": f"deepspeed_ucp {manifest.package}", "deepspeed": version or None, "source": source}


def _advise(families: Sequence[str]) -> str:
    """Which patterns to give."""
    if families:
        known = "; ".join(families)
        return f"families with rules for all of them: {known} (which one is the model's is for you to say), or rules"
    return f"a family ({', '.join(list_families())}) or rules"


def find_findings(
    report: FolderReport,
    index: AtomicIndex,
    rows: Iterable[Parameter],
    families: Sequence[str] = (),
    idle: Iterable[str] = (),
) -> list[Finding]:
    """What is missing, odd or to be decided.

    Args:
        families: of patterns, that would settle what nothing settles.
        idle: rules of the user's that match nothing.
    """
    from ..sources.findings import WARNING, Finding

    found: list[Finding] = []
    unsettled = [row for row in rows if row.why]
    if unsettled:
        text = (
            "nothing tells how tensor parallelism cuts these; to convert, or to resume with another degree, give "
            f"--patterns: {_advise(families)}"
        )
        rules = {row.why.get("match", row.name): row.why for row in unsettled}
        names = tuple(row.name for row in unsettled)
        found.append(Finding("unsettled", "", text, WARNING, names, tuple(rules.values())))
    for kind, faults in (("irregular", index.limits.irregular), ("unreadable", index.limits.unreadable)):
        by_text: dict[str, list[str]] = {}
        for name, text in faults.items():
            by_text.setdefault(text, []).append(name)
        found += [Finding(kind, "", f"{_FAULTS[kind]}: {t}", WARNING, tuple(held)) for t, held in by_text.items()]
    if index.limits.dropped:
        found.append(Finding("dropped", "", index.limits.dropped, WARNING))
    found += [Finding("rules", "", text, WARNING) for text in idle]
    return [*found, *_look_around(report, index)]


def _look_around(report: FolderReport, index: AtomicIndex) -> list[Finding]:
    """Files without checksums, what opening the folder has found, ``latest`` beside it."""
    from ..sources.findings import NOTE, WARNING, Finding
    from ..sources.latest import check_latest

    found: list[Finding] = []
    unchecked = {index.stored.records[r].file for r, record in enumerate(index.stored.records) if record.crc is None}
    if unchecked:
        names = tuple(shorten_path(index, index.stored.files[file].path) for file in sorted(unchecked))
        text = "files without checksums; damage to them cannot be found"
        found.append(Finding("checksums", "", text, NOTE, names))
    if left := tuple(finding.file for finding in report.findings if finding.kind == "leftover"):
        found.append(
            Finding("leftover", "", "files of an earlier save, which are not read; remove them", WARNING, left)
        )
    found += [each for each in report.findings if each.kind not in ("leftover", "dropped", "unnamed")]
    return [*found, *check_latest(report.folder, atomic=report.atomic)]


_FAULTS = {
    "irregular": "optimizer states that are not element-wise, which other topologies cannot take",
    "unreadable": "bytes that cannot be cut",
}
