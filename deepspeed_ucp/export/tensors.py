"""What an export holds: which tensors, under which names, in which element type; the same for every format."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, AtomicIndex, AtomKey, count
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, MismatchError, shorten
from ..io.cast import FLOATING
from ..patterns import Rename, RuleSet, rename_names
from ..patterns.layout import Shape
from ..plan.limits import refuse_unreadable
from ..plan.settling import list_weights
from ..stream.progress import WorkOptions
from ..stream.report import OutputReport
from ..stream.samples import stages_agree
from ..stream.wholes import Whole, Wholes, settle_wholes

logger = logging.getLogger("deepspeed_ucp")

WEIGHTS = (MASTER, MODULE, COPY)
"""States that hold a weight or a buffer; the first that a name has counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(WorkOptions):
    """What to export, and how.

    Attributes:
        dtype: element type of floating weights and buffers; None keeps what is stored.
        tied: names that are tied to another one: "drop" them, or write each as a "copy"; None does what the format's
            own libraries do.
        keep_padding: keep the padding rows of vocabularies.
        strip_prefix: cut off names that begin with it, after renaming.
        renames: saved names → names to be written; the first that matches counts.
        overwrite: replace an earlier export at the destination.
    """

    dtype: str | None = "float32"
    tied: str | None = None
    keep_padding: bool = False
    strip_prefix: str = ""
    renames: tuple[Rename, ...] = ()
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be read.

    Attributes:
        name: as written.
        whole: the logical atom; elements are taken from its front, so that rows of padding fall away.
        shape: as written.
        dtype: as written.
        again: its data is written a second time, under a tied name.
    """

    name: str
    whole: Whole
    shape: Shape
    dtype: str
    again: bool = False

    @property
    def numel(self) -> int:
        """Elements that are written."""
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is exported.

    Attributes:
        tensors: weights and buffers, in the order of the state dict as far as the source tells it.
        ties: names that are written as copies, and the names whose data they are.
        names: saved name → written name, of everything.
        wholes: the logical atoms.
    """

    tensors: tuple[Tensor, ...]
    ties: dict[str, str]
    names: dict[str, str]
    wholes: Wholes

    def list_copies(self, name: str) -> list[str]:
        """Names under which a tensor's data is written again."""
        return [alias for alias, owner in self.ties.items() if owner == name]

    def make(self, whole: Whole, *, dtype: str | None, keep_padding: bool) -> Tensor:
        """A tensor of the output.

        Args:
            whole: any state of a parameter.
            dtype: of floating elements; None as stored.
        """
        pattern = self.wholes.patterns.get(whole.name)
        rows = None if keep_padding or pattern is None else pattern.vocab
        shape = whole.shape if rows is None else (min(rows, whole.shape[0]), *whole.shape[1:])
        is_cast = dtype is not None and whole.dtype in FLOATING
        return Tensor(self.names[whole.name], whole, shape, dtype if is_cast and dtype else whole.dtype)


def start_report(
    format: str, index: AtomicIndex, destination: str, selection: Selection, tensors: int, nodes: int
) -> OutputReport:
    """What is known of an export before it has written anything."""
    return OutputReport(
        format=format,
        source=os.path.dirname(index.run.state_file),
        destination=destination,
        tensors=tensors,
        parameters=sum(each.numel for each in selection.tensors if each.whole.name not in index.model.buffers),
        dtypes=tuple(sorted({each.dtype for each in selection.tensors})),
        nodes=nodes,
    )


def select_tensors(
    index: AtomicIndex,
    rules: Sequence[RuleSet],
    options: ExportOptions,
    *,
    tied: str,
    states: Callable[[str], bool] = WEIGHTS.__contains__,
) -> Selection:
    """Choose what is exported.

    Args:
        rules: how tensor parallelism cuts parameters, and their ``rename`` rules, by the user.
        tied: "drop" or "copy", where the options do not say.
        states: which states are wanted.

    Raises:
        ConfigError: unknown element type.
        MismatchError: parameters whose pattern nothing settles; names that become one.
        UnsupportedError: tensors that cannot be read.
    """
    if options.dtype is not None and options.dtype not in FLOATING:
        raise ConfigError(f"dtype: {options.dtype!r} is none of {', '.join(sorted(FLOATING))}.")
    refuse_unreadable(index, states)
    wholes = settle_wholes(index, rules, states=states)
    kept = {key: whole for key, whole in wholes.atoms.items() if not key.instance}
    ties = dict(index.model.aliases)
    renames = (*options.renames, *(rename for one in rules for rename in one.renames))
    names = name_tensors(dict.fromkeys([key.name for key in kept] + list(ties)), renames, options.strip_prefix)
    selection = Selection((), {}, names, wholes)
    weights = {name: atom.key for name, atom in list_weights(index).items() if atom.state in WEIGHTS}
    chosen = [kept[weights[name]] for name in order_names(index, kept) if weights.get(name) in kept]
    make = [selection.make(whole, dtype=options.dtype, keep_padding=options.keep_padding) for whole in chosen]
    if not make:
        raise CheckpointError(f"{index.run.state_file}: there are no weights to export.")
    copies = {names[alias]: names[owner] for alias, owner in ties.items() if owner in names}
    return Selection(tuple(make), copies if (options.tied or tied) == "copy" else {}, names, wholes)


def order_names(index: AtomicIndex, kept: Iterable[AtomKey]) -> list[str]:
    """Names in the order of the model's state dict where its module states tell it, else of the optimizer's groups."""
    has_copies = any(key.state == COPY for key in index.stored.atoms)
    first = [key.name for key in index.stored.atoms if has_copies and key.state in (COPY, MODULE)]
    names = {key.name for key in kept}
    ordered = dict.fromkeys([*first, *(key.name for key in index.stored.atoms)])
    return [name for name in ordered if name in names]


def name_tensors(names: Iterable[str], renames: Sequence[Rename], strip: str) -> dict[str, str]:
    """Saved name → name to be written.

    Raises:
        MismatchError: two names become one.
    """
    renamed = {name: new.removeprefix(strip) for name, new in rename_names(names, renames).items()}
    if len(set(renamed.values())) < len(renamed):
        seen: dict[str, str] = {}
        clashes = [f"{seen[new]} and {name}" for name, new in renamed.items() if seen.setdefault(new, name) != name]
        raise MismatchError(f"--strip-prefix {strip!r}: these become one name: {shorten(clashes)}.")
    return renamed


def warn_losses(index: AtomicIndex, selection: Selection, comm: Comm) -> None:
    """Tell on rank 0 what an export cannot hold, or what the source lacks."""
    if comm.rank:
        return
    if index.limits.dropped:
        logger.warning("%s: %s", index.run.state_file, index.limits.dropped)
    if parted := [name for name in sorted(index.model.instances) if not stages_agree(name, index)]:
        logger.warning(
            "held by several pipeline stages, each with values of its own; the first stage's are written: %s",
            shorten(parted),
        )
    if not any(key.state == MASTER for key in index.stored.atoms) and index.run.topology.precision != "float32":
        logger.warning(
            "this checkpoint has no fp32 weights with names, so the model's own %s are written; where the optimizer "
            "was given model.parameters() at stage 0, --groups module names its fp32 weights",
            index.run.topology.precision,
        )
    if selection.wholes.unused:
        logger.warning("patterns: rules that match no parameter: %s", shorten(selection.wholes.unused))
