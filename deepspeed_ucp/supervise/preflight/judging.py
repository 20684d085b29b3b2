"""Which nodes fail a test before a start, and why: from what all of them have measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Any

from ...errors import UcpError, count_of

_MAJORITY = 3
"""Figures of one kind from which on a median or most of them say what is usual."""


class UnfitError(UcpError):
    """This node fails its test."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that nodes measure; more of it is better.

    Attributes:
        unit: of its figures.
        slow: times that a figure may be below the median of its kind; None: it is shown alone.
        is_own: the node has it to itself, and the same at any time.
    """

    unit: str
    slow: float | None
    is_own: bool = False


MEASURES = {
    "memory": Measure("MB/s", 3.0, is_own=True),
    "free memory": Measure("MB", 4.0),
    "product": Measure("GFLOP/s", 3.0, is_own=True),
    # Storage that is shared, and links that others use too, differ much from one moment to the next.
    "disk write": Measure("MB/s", 10.0),
    "disk read": Measure("MB/s", 10.0),
    "free disk": Measure("MB", None),
    "network": Measure("MB/s", 5.0),
    "round trips": Measure("/s", 10.0),
    "device product": Measure("GFLOP/s", 2.0, is_own=True),
    "device memory": Measure("MB/s", 2.0, is_own=True),
    "free device memory": Measure("MB", 1.5),
    "host to device": Measure("MB/s", 3.0, is_own=True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One result.

    Attributes:
        what: of :data:`MEASURES`.
        value: in its unit.
        kind: hardware and library; figures of one kind alone are compared.
        where: the device; empty for the node itself.
        bits: a checksum of what came out, the same on all of a kind.
    """

    what: str
    value: float
    kind: str = ""
    where: str = ""
    bits: str | None = None

    @property
    def name(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def describe(self) -> str:
        """In words: ``cuda:3: device product 210 GFLOP/s``."""
        return f"{self.name} {self.value:.4g} {MEASURES[self.what].unit}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a node tells of itself.

    Attributes:
        faults: what is wrong whatever the others have, in words.
        links: by node that it was to reach why it could not; None where it could.
        devices: accelerators.
        seconds: that all tests took.
    """

    figures: tuple[Figure, ...] = ()
    faults: tuple[str, ...] = ()
    links: Mapping[str, str | None] = field(default_factory=dict)
    devices: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Report:
        """Of what :func:`dataclasses.asdict` makes of one.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it is none.
        """
        figures = [
            Figure(str(each["what"]), float(each["value"]), str(each["kind"]), str(each["where"]), each["bits"])
            for each in told["figures"]
        ]
        if unknown := [each.what for each in figures if each.what not in MEASURES]:
            raise ValueError(f"unknown figures: {', '.join(unknown)}")
        return cls(
            figures=tuple(figures),
            faults=tuple(map(str, told["faults"])),
            links={str(peer): why if why is None else str(why) for peer, why in told["links"].items()},
            devices=int(told["devices"]),
            seconds=float(told["seconds"]),
        )


def merge(first: Report, second: Report) -> Report:
    """Of two tests of one node: the better of each figure and link, and all that was wrong in either."""
    figures, faults = list[Figure](), [*first.faults, *second.faults]
    for figure in first.figures:
        again = find_like(second, figure) or figure
        figures.append(max(figure, again, key=lambda each: each.value))
        if figure.bits != again.bits:
            faults.append(f"{figure.name}: other bits the second time")
    figures += [figure for figure in second.figures if find_like(first, figure) is None]
    links = {**first.links, **{peer: why for peer, why in second.links.items() if first.links.get(peer, why)}}
    return replace(second, figures=tuple(figures), faults=tuple(dict.fromkeys(faults)), links=links)


def find_like(report: Report, figure: Figure) -> Figure | None:
    """The figure of the same thing in another report."""
    key = (figure.what, figure.where, figure.kind)
    return next((each for each in report.figures if (each.what, each.where, each.kind) == key), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who fails.

    Attributes:
        faults: by node that fails what is wrong with it.
        notes: what differs, or cannot be, without telling whose fault it is.
    """

    faults: Mapping[str, list[str]]
    notes: list[str]


def judge(
    reports: Mapping[str, Report | str], slots: Mapping[str, int], former: Mapping[str, Report] | None = None
) -> Verdict:
    """Who fails, by what is wrong whatever the others have, and by what differs from most of the others.

    Where there are no three of a kind there is no majority: a node's own figures of an earlier time take its place for
    what is the node's alone, and results that differ are a note.

    Args:
        reports: by node, in an order in which later ones go first where two are equally at fault; words say why a node
            has told nothing.
        slots: ranks by node.
        former: earlier reports by node.
    """
    heard = {node: report for node, report in reports.items() if isinstance(report, Report)}
    notes: list[str] = []
    faults: dict[str, list[str]] = {node: [report] for node, report in reports.items() if isinstance(report, str)}
    found = chain(
        ((node, fault) for node, report in heard.items() for fault in report.faults),
        _find_missing_devices(heard, slots),
        _compare(heard, former or {}, notes),
    )
    for node, fault in found:
        faults.setdefault(node, []).append(fault)
    for node, fault in _find_cut_off({node: heard[node] for node in heard if node not in faults}, notes):
        faults.setdefault(node, []).append(fault)
    return Verdict(faults, notes)


def _find_missing_devices(heard: Mapping[str, Report], slots: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Nodes with fewer accelerators than ranks, where another has enough: elsewhere ranks may share them."""
    lacking = [node for node, report in heard.items() if report.devices < slots.get(node, 0)]
    if any(report.devices and node not in lacking for node, report in heard.items()):
        yield from ((node, f"{heard[node].devices} of {slots[node]} accelerators are there") for node in lacking)


def _compare(heard: Mapping[str, Report], former: Mapping[str, Report], notes: list[str]) -> Iterator[tuple[str, str]]:
    groups: dict[tuple[str, str], list[tuple[str, Figure]]] = {}
    for node, report in heard.items():
        for figure in report.figures:
            groups.setdefault((figure.what, figure.kind), []).append((node, figure))
    for (what, _), group in groups.items():
        yield from _compare_bits(group, notes)
        slow, is_own = MEASURES[what].slow, MEASURES[what].is_own
        if slow is None:
            continue
        usual = median(figure.value for _, figure in group)
        for node, figure in group:
            if len(group) >= _MAJORITY:
                if figure.value < usual / slow:
                    yield node, f"{figure.describe()}; the median of {len(group)} is {usual:.4g}"
                continue
            before = find_like(former[node], figure) if is_own and node in former else None
            if before is not None and figure.value < before.value / slow:
                yield node, f"{figure.describe()}; at first it had {before.value:.4g}"


def _compare_bits(group: list[tuple[str, Figure]], notes: list[str]) -> Iterator[tuple[str, str]]:
    """Results that are not those of most of a kind."""
    counts = Counter(figure.bits for _, figure in group if figure.bits is not None)
    if len(counts) < 2:
        return
    (usual, many), total = counts.most_common(1)[0], counts.total()
    if total < _MAJORITY or 2 * many <= total:
        what, nodes = group[0][1].what, ", ".join(dict.fromkeys(node for node, _ in group))
        notes.append(f"{what}: bits differ among {nodes}, and no result is that of most of them")
        return
    for node, figure in group:
        if figure.bits not in (None, usual):
            yield node, f"{figure.name}: other bits than {many} of {total} of its kind have"


def _find_cut_off(heard: Mapping[str, Report], notes: list[str]) -> Iterator[tuple[str, str]]:
    """The fewest nodes, as far as that is easily found, without which all links are there; none where these would not
    be the smaller part: then the network between may be at fault, or what was tried."""
    broken = {
        frozenset((node, peer)): why
        for node, report in heard.items()
        for peer, why in report.links.items()
        if why is not None and peer in heard and peer != node
    }
    left, out = dict(broken), list[tuple[str, str]]()
    while left:
        counts = Counter(chain.from_iterable(left))
        worst = max(reversed(list(heard)), key=lambda node: counts[node])
        first = next(pair for pair in left if worst in pair)
        (other,) = first - {worst}
        tried = sum(worst != peer and (peer in heard[worst].links or worst in heard[peer].links) for peer in heard)
        out.append((worst, f"network: no way between it and {counts[worst]} of {tried} others: {other}: {left[first]}"))
        left = {pair: why for pair, why in left.items() if worst not in pair}
    if 2 * len(out) < len(heard):
        yield from out
    elif out:
        pairs = "; ".join(f"{' and '.join(sorted(pair))}: {why}" for pair, why in list(broken.items())[:5])
        count = count_of(len(broken), "pair")
        notes.append(f"network: no way between {count} of nodes, and no larger part is whole: {pairs}")
