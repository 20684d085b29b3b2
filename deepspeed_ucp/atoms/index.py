"""A checkpoint as a view: the places of its bytes, its run and model, and the parts that are missing or unusable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..flat import FlatBuffer
from ..topology import Topology
from .atom import Atom, Atoms
from .held import FileRef, Fragment, Record, Records
from .keys import AtomKey, ParamKey

if TYPE_CHECKING:  # numpy takes long to import
    from ..access import ReadAccess


def _read_all() -> ReadAccess:
    from ..access import READ_ALL

    return READ_ALL


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A param group of the source: its parameters and the hyper-parameters that the optimizer kept for them."""

    members: tuple[ParamKey, ...]
    hyper: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, each once."""
        return tuple(dict.fromkeys(member.name for member in self.members))


@dataclass(frozen=True, slots=True)
class StoredAtoms:
    """Where a checkpoint's bytes lie.

    Attributes:
        files, records: that atoms' fragments refer to by number.
        atoms: by parameter, state and instance.
        repeated: elements that lie in the files a second time, as ``tp_shard`` and fragment; they have to be the same.
        access: which ranks can read which files.
        failed: paths among the files' places that this rank passes over, since something there has failed.
    """

    files: tuple[FileRef, ...]
    records: Records
    atoms: Atoms
    repeated: dict[AtomKey, tuple[tuple[int, Fragment], ...]] = field(default_factory=dict)
    access: ReadAccess = field(default_factory=_read_all)
    failed: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, files: Iterable[FileRef], records: Sequence[Record], atoms: Iterable[Atom]) -> StoredAtoms:
        """From plain sequences."""
        return cls(tuple(files), Records.of(records), Atoms.of(atoms))


def to_integer(value: Any) -> Any:
    """Convert a whole number that is stored as a float (6.0) to an int; return other values unchanged.

    With sequence parallelism DeepSpeed divides with ``/``, so its batch sizes and counters of samples may be floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of a ds_config: samples of a step over all ranks, of a micro batch, and micro batches of a step."""

ASKED = "ucp_asked_batch"
"""Key of a ds_config: a rank's samples of a step by the script, where a trainer has kept a saved total batch."""

BEGUN = ("ucp_begun_ranks", "ucp_begun_accumulation")
"""Keys of a ds_config: ranks and micro batches of a step where the run began, if a resume has changed them."""


@dataclass(frozen=True, slots=True)
class SavedJob:
    """The job around a saved engine.

    Attributes:
        ranks: its processes.
        model_ranks: of these, those that hold one replica of the model.
        steps: optimizer steps.
        total_batch: samples of a step, over all ranks; None where nothing tells.
        accumulation: micro batches of a step; None where the ds_config does not tell.
        asked: see :data:`ASKED`; None where the script's own batch was trained on.
        begun: see :data:`BEGUN`; None where these are still the job's own.
        format: name of a foreign format, which records neither the ranks nor the batch; empty for a DeepSpeed save.
        weights_alone: the checkpoint is of a format without optimizer states, or has none of them.
    """

    ranks: int
    model_ranks: int
    steps: int
    total_batch: int | None
    accumulation: int | None
    asked: int | None = None
    begun: tuple[int, int] | None = None
    format: str = ""
    weights_alone: bool = False

    @classmethod
    def read(cls, counters: Mapping[str, Any]) -> SavedJob:
        """Read the job from a save's counters. A missing total batch is derived from samples and steps."""
        held = {key: to_integer(value) for key, value in counters.items()}
        model_ranks = held.get("mp_world_size") or 1
        steps, samples = held.get("global_steps") or 0, held.get("global_samples") or 0
        total = held.get(BATCH_SIZES[0]) or (samples // steps if steps and not samples % steps else None)
        ranks = (held.get("dp_world_size") or 1) * model_ranks
        ours, micro = map(held.get, BEGUN)
        begun = (ours, micro) if ours and micro else None
        return cls(ranks, model_ranks, steps, total or None, held.get(BATCH_SIZES[2]), held.get(ASKED), begun)


@dataclass(frozen=True, slots=True)
class Use:
    """A class or function that a pickle names, and what becomes of it there.

    Attributes:
        kind: its dotted name.
        value: it makes plain values and nothing else: instances that are made empty (of a few classes of the standard
            library also by a call with numbers or text) and given attributes. It is never given to a call, and no
            instance is called, filled, hashed or given to a call.
        states: types of what its instances are given as their attributes (``dict``, ``list``, ``tuple``…).
        called: with arguments.
        steered: instances are changed once they have their attributes, or may have an entry ``__setstate__``: the file
            chooses what giving them attributes calls. No writer does so.
        member: of ``builtins.getattr``: it looks up names of classes and does nothing else; of any other name: it is
            looked up so, as Python 3.11.0 to 3.11.3 writes an enum's members.
    """

    kind: str
    value: bool = False
    states: frozenset[str] = frozenset()
    called: bool = False
    steered: bool = False
    member: bool = False


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint tells of the run that saved it, besides tensors.

    Attributes:
        topology: what wrote it.
        state_file: the file that carries scheduler, counters and client state.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, and batch sizes.
        scalars: per parameter, the optimizer's scalars (``step``), Python numbers.
        groups: param groups with hyper-parameters.
        scaler: loss scaler fields (``cur_scale``, ``dynamic``, …), empty without one.
        clip_grad: gradient clipping stored with the optimizer, or None.
        optimizer: name of the optimizer in the saved ds_config, or None.
        optimizer_params: its ``lr`` and ``adam_w_mode`` there, where they are plain.
        scalar_dtypes: dtypes of those scalars that the optimizer keeps as 0-dim tensors, by the scalar's name.
        client_records: records of the state file that hold the client's tensors.
        globals: classes and functions that the files' pickles name, beyond those of every checkpoint, each with the
            path of a file that does.
        flats: flat buffers of every model-parallel rank ``pp_rank * tp + tp_rank``, with local names and sizes.
        degrees: tensor- and pipeline-parallel degrees of the ranks whose client states there are, where these are not
            the topology's (an atomic checkpoint has none).
        format: of a foreign checkpoint, in words; it has no state file, scheduler or client state.
    """

    topology: Topology
    state_file: str
    counters: dict[str, Any] = field(default_factory=dict)
    scalars: dict[ParamKey, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()
    scaler: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None
    optimizer: str | None = None
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    scalar_dtypes: dict[str, str] = field(default_factory=dict)
    client_records: tuple[int, ...] = ()
    flats: dict[int, tuple[FlatBuffer, ...]] = field(default_factory=dict)
    globals: dict[Use, str] = field(default_factory=dict)
    degrees: tuple[int, int] | None = None
    format: str = ""

    @property
    def written(self) -> str:
        """What wrote it, in words: its topology, or a foreign format."""
        return self.format or self.topology.describe()

    @property
    def configured(self) -> dict[str, Any]:
        """The ``optimizer`` section of the saved ds_config, as far as it is kept; empty without one."""
        return {"type": self.optimizer, "params": self.optimizer_params} if self.optimizer else {}

    @property
    def job(self) -> SavedJob:
        """What ran around the engine."""
        return replace(SavedJob.read(self.counters), format=self.format)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint tells of the model.

    Attributes:
        aliases: tied parameter names → the name that holds the data.
        buffers: names of the module's persistent buffers.
        instances: parameters that several pipeline stages hold, each stage with values of its own: name → how many;
            instances are numbered in stage order.
        hints: what the client state tells about the model, plain data: ``universal_checkpoint_info``, ``args``,
            ``checkpoint_version``, ``iteration``.
        recorded: patterns that an atomic checkpoint's manifest tells, as data, by parameter.
        fused: parameters that hold all experts of a layer in DeepSpeed's universal checkpoints (AutoEP's), which have
            an atom for each: name → how many.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    instances: dict[str, int] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a checkpoint cannot be had.

    Attributes:
        irregular: optimizer states that cannot be cut for another topology, with what they are.
        unreadable: tensors whose bytes cannot be cut, with the reason.
        dropped: why buffers and frozen parameters may be missing (upstream's converter leaves them out), or empty.
        unnoticed: what DeepSpeed's own load would not see, or take for something else, in the same topology, in words.
        stateless: why there are no optimizer states, and what to do, in words; empty where there are.
        unchecked: what of a foreign checkpoint has no checksum, in words.
        untold: further names of parameters, of which nothing records whose they are.
    """

    irregular: dict[AtomKey, str] = field(default_factory=dict)
    unreadable: dict[AtomKey, str] = field(default_factory=dict)
    dropped: str = ""
    unnoticed: tuple[str, ...] = ()
    stateless: str = ""
    unchecked: str = ""
    untold: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AtomicIndex:
    """A whole checkpoint as a view: its bytes, what it tells of run and model, and what of it cannot be had."""

    stored: StoredAtoms
    run: RunState
    model: ModelInfo = field(default_factory=ModelInfo)
    limits: Limits = field(default_factory=Limits)

    def change(self, **fields: Any) -> AtomicIndex:
        """The same with other values of some fields, whichever part they are of."""
        parts = {}
        for name in ("stored", "run", "model", "limits"):
            part = getattr(self, name)
            known = {each: fields.pop(each) for each in part.__dataclass_fields__ if each in fields}
            parts[name] = replace(part, **known)
        return replace(self, **parts, **fields)

    def find(self, name: str, state: str, instance: int = 0) -> Atom | None:
        """An atom; None where there is none."""
        return self.stored.atoms.get(AtomKey(name, state, instance))

    @property
    def is_weights_alone(self) -> bool:
        """Whether it is of a format without optimizer states, or holds none of them, so that none are wanted."""
        return bool(self.run.format) and not (self.limits.stateless or self.run.groups or self.run.scalars)

    def resolve(self, name: str) -> str:
        """The name under which a parameter's data is held: itself, or what it is tied to."""
        return self.model.aliases.get(name, name)
