"""Tables of what `saves.py` has measured: its section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from report import MIB, Target, table

HEADER = ("ours, median (range)", "compared with", "ratio (target)")
COPY, NEW_COPY, OWN = "one copy of the state", "one copy into new memory", "DeepSpeed's own save, durable"
PEERS = {"torch": "torch's `async_save`, by a process", "flash": "DLRover's flash checkpoint"}


class Row(NamedTuple):
    """A figure, beside another one.

    Attributes:
        values, others: by round.
        limit: of the ratio, or of the figure itself where there is no other one; None: none was asked for.
        unit: of the values.
    """

    title: str
    values: Sequence[float]
    other: str = ""
    others: Sequence[float] = ()
    limit: float | None = None
    unit: str = "s"

    @property
    def value(self) -> float:
        """What the limit is for: the median of the rounds' ratios, or of the figures."""
        if not self.others:
            return median(self.values)
        return median(value / other for value, other in zip(self.values, self.others, strict=True))

    def cells(self) -> list[str]:
        ratio = f"{self.value:.2f}" if self.others else ""
        target = "" if self.limit is None else f"(≤ {self.limit:g}{'' if self.others else f' {self.unit}'})"
        own = f"{self.title}: {self._tell(self.values)}"
        other = f"{self.other}: {self._tell(self.others)}" if self.others else ""
        return [own, other, f"{ratio} {target}".strip()]

    def _tell(self, values: Sequence[float]) -> str:
        if not values:
            return ""
        digits = 2 if self.unit == "s" else 0
        middle, low, high = (f"{each:.{digits}f}" for each in (median(values), min(values), max(values)))
        return f"{middle} {self.unit} ({low}-{high})"

    def as_target(self) -> Target:
        """For a row with a limit."""
        unit = "" if self.others else f" {self.unit}"
        title = f"{self.title} ÷ {self.other}" if self.others else self.title
        return Target(title, self.value, self.limit or 0.0, unit=unit)


def list_rows(found: Mapping[str, Any]) -> list[Row]:
    """All that was measured.

    Args:
        found: figures of `saves` by round, `resumes` by target and round, `lost` by round.
    """
    return [*_list_stalls(found["saves"]), *_list_resumes(found), *_list_memory(found["saves"])]


def _list_stalls(rounds: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    own, eager, limits = _take(rounds, "own", "own sync"), _take(rounds, "eager"), {COPY: 1.3, OWN: 0.15}
    beside = {COPY: _take(rounds, "copy"), OWN: own}
    beside |= {title: _take(rounds, key) for key, title in PEERS.items() if key in rounds[0]}
    yield from (Row("stall", eager, other, others, limits.get(other, 1.0)) for other, others in beside.items())
    yield Row("from stall to durable", _take(rounds, "durable"), "`cp` and `sync`", _take(rounds, "cp"), 1.15)


def _list_resumes(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, told in found.get("resumes", {}).items():
        for key, title, limit in (
            ("again", COPY, 2.0),
            ("fresh", NEW_COPY, None),
            ("cold seconds", "from the disk, cache cold", 0.6),
        ):
            yield Row(f"resume from memory, → {name}", _take(told, "seconds"), title, _take(told, key), limit)
    if lost := found.get("lost"):
        title = "resume without one of two nodes (third of the model)"
        yield Row(title, _take(lost, "seconds"), NEW_COPY, _take(lost, "fresh"))
        yield Row(f"{title}, from storage", _take(lost, "storage"), limit=0, unit="bytes")


def _list_memory(rounds: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    for key, title, limit in (
        ("extra", "anonymous memory of a save", 64.0),
        ("writer", "anonymous memory of the writer", None),
    ):
        yield Row(title, [each / MIB for each in _take(rounds, key)], limit=limit, unit="MiB")


def _take(rounds: Sequence[Mapping[str, float]], *names: str) -> list[float]:
    return [sum(each[name] for name in names) for each in rounds]


def make_section(found: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    rows = list_rows(found)
    targets = [row.as_target() for row in rows if row.limit is not None]
    left_out = [
        *(["A lost node was not measured."] if "lost" not in found else []),
        *(["DLRover was left out (`--dlrover`)."] if "flash" not in found["saves"][0] else []),
    ]
    return f"""## Saves that do not stop training

`{found["command"]}` on
{found["machine"]}.
{found["params_m"]:g} M parameters, ZeRO-1 in bf16, {found["ranks"]} ranks, AdamW, {len(found["saves"])} rounds.
{" ".join(left_out)}

*Stall*: until `save_checkpoint` returns on all ranks, with reused memory. torch's `async_save` keeps its shared memory,
which is faster than its default; DLRover 0.6.1 writes nothing to the disk. *Durable*: until the seal is in the folder.

{table(HEADER, _blank_repeated([row.cells() for row in rows]))}

Targets reached: {sum(bool(target.reached) for target in targets)} of {len(targets)}."""


def _blank_repeated(rows: Sequence[list[str]]) -> list[list[str]]:
    """Leave out a first cell that the row above has too."""
    return [["", *row[1:]] if number and rows[number - 1][0] == row[0] else row for number, row in enumerate(rows)]
