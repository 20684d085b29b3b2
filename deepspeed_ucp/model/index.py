"""The index of a checkpoint: locations of its bytes, its run, and its faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .flat import FlatBuffer
from .records import FileRef, Records
from .storage import Atom, AtomKey, Atoms, Fragment, ParamKey
from .topology import Topology

if TYPE_CHECKING:  # numpy takes long to import
    from .access import ReadAccess


def _read_all() -> ReadAccess:
    from .access import READ_ALL

    return READ_ALL


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A param group of the source: its parameters and hyper-parameters."""

    members: tuple[ParamKey, ...]
    hyper: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.name for member in self.members))


def to_integer(value: Any) -> Any:
    """Convert a whole number stored as a float (6.0) to int, else return the value.

    With sequence parallelism DeepSpeed divides with ``/``, so its batch sizes and counters of samples may be floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of a ds_config: samples of a step over all ranks, of a micro batch, and micro batches of a step."""

SCRIPT_BATCH = "ucp_asked_batch"
"""Key of a ds_config: samples per rank and step that the script asked for, if a trainer kept the saved total batch."""

INITIAL_SIZES = ("ucp_begun_ranks", "ucp_begun_accumulation")
"""Keys of a ds_config: ranks and micro batches per step at the start of the run, if a resume has changed them."""

SHUFFLED = "ucp_shuffled"
"""Key of a ds_config: 1 + seed of the order of samples, if Accelerate shuffles them."""


HELPERS = ("lr_scheduler", "random_ltd", "data_sampler")
"""Keys of a state file: states of the learning-rate scheduler, the random-LTD scheduler and the data sampler."""


@dataclass(frozen=True, slots=True)
class SavedJob:
    """The job around a saved engine.

    Attributes:
        model_ranks: number of processes that hold one replica of the model.
        total_batch: samples per step over all ranks; None if unknown.
        accumulation: micro batches per step; None if unknown.
        script_batch: value of :data:`SCRIPT_BATCH`; None if the job trained on the script's own batch.
        initial_sizes: values of :data:`INITIAL_SIZES`; None if no resume has changed them.
        shuffled: value of :data:`SHUFFLED`; None if unknown.
        micro: samples in a micro batch; None if unknown.
        format: name of a foreign format, which records neither ranks nor batch; empty for a DeepSpeed save.
        weights_alone: the checkpoint has no optimizer states.
    """

    ranks: int
    model_ranks: int
    steps: int
    total_batch: int | None
    accumulation: int | None
    script_batch: int | None = None
    initial_sizes: tuple[int, int] | None = None
    format: str = ""
    weights_alone: bool = False
    shuffled: int | None = None
    micro: int | None = None

    @property
    def replicas(self) -> int:
        """Data-parallel ranks with different samples; ranks may divide a sequence."""
        if self.total_batch and self.micro and self.accumulation:
            return self.total_batch // (self.micro * self.accumulation)
        return self.ranks // self.model_ranks

    @classmethod
    def read(cls, counters: Mapping[str, Any]) -> SavedJob:
        """Read the job from a save's counters; a missing total batch is samples / steps."""
        numbers = {key: to_integer(value) for key, value in counters.items()}
        model_ranks = numbers.get("mp_world_size") or 1
        steps, samples = numbers.get("global_steps") or 0, numbers.get("global_samples") or 0
        total = numbers.get(BATCH_SIZES[0]) or (samples // steps if steps and not samples % steps else None)
        ranks = (numbers.get("dp_world_size") or 1) * model_ranks
        first_ranks, first_accumulation = map(numbers.get, INITIAL_SIZES)
        initial = (first_ranks, first_accumulation) if first_ranks and first_accumulation else None
        batch = (total or None, numbers.get(BATCH_SIZES[2]), numbers.get(SCRIPT_BATCH), initial)
        return cls(ranks, model_ranks, steps, *batch, shuffled=numbers.get(SHUFFLED), micro=numbers.get(BATCH_SIZES[1]))


@dataclass(frozen=True, slots=True)
class Use:
    """A class or function that a pickle names, and its use in the pickle.

    Attributes:
        value: the pickle only makes plain values of it: empty instances (for a few classes of the standard library
            also a call with numbers or text) that receive attributes. It is no argument of a call, and no instance is
            called, filled, hashed or passed to a call.
        states: types of the attributes that its instances receive (``dict``, ``list``, ``tuple``…).
        called: the pickle calls it with arguments.
        custom_methods: the file chooses the code that setting the attributes runs: instances change after they received
            attributes, or may have an entry ``__setstate__``. No known writer does so.
        member: for ``builtins.getattr``: it only looks up names of classes; for other names: it was looked up in this
            way, as Python 3.11.0 to 3.11.3 writes members of enums.
    """

    kind: str
    value: bool = False
    states: frozenset[str] = frozenset()
    called: bool = False
    custom_methods: bool = False
    member: bool = False


@dataclass(frozen=True, slots=True)
class AtomicIndex:
    """A checkpoint: the locations of its bytes, its run and model, and its faults.

    Attributes:
        files, records: numbered; fragments refer to them by number.
        state_file: the file with scheduler, counters and client state.
        repeated: further copies of elements in the files, as (``tp_shard``, fragment); a load verifies that they agree.
        failed: paths of copies that this rank skips after a failure.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, and batch sizes.
        scalars: parameter → the optimizer's scalars (``step``) as Python numbers.
        scaler: fields of the loss scaler (``cur_scale``, ``dynamic``, …); empty without one.
        clip_grad: gradient clipping that the optimizer stored, or None.
        optimizer: name of the optimizer in the saved ds_config, or None.
        optimizer_params: ``lr`` and ``adam_w_mode`` of the saved ds_config if they are plain values.
        scalar_dtypes: scalar name → dtype, for scalars that the optimizer keeps as 0-dim tensors.
        helpers: those of :data:`HELPERS` whose state the state file has; None if unknown.
        client_records: records of the state file that hold the client's tensors.
        globals: uncommon classes and functions that pickles name, each with the path of one such file.
        flats: model-parallel rank ``pp_rank * tp + tp_rank`` → its flat buffers, with local names and sizes.
        degrees: tensor- and pipeline-parallel degrees of the ranks that wrote client states, if the topology has
            others (as that of an atomic checkpoint).
        format: name of a foreign format, which has no state file, scheduler or client state.
        foreign: name of the foreign format that it has or was converted from: it distinguishes no buffers from frozen
            parameters, and records no job.
        aliases: tied parameter name → name that holds the data.
        buffers: names of the module's persistent buffers.
        instances: name → number of pipeline stages that hold the parameter with own values, numbered in stage order.
        hints: plain data about the model from the client state: ``universal_checkpoint_info``, ``args``,
            ``checkpoint_version``, ``iteration``.
        recorded: parameter → pattern in the manifest of an atomic checkpoint, as plain data.
        fused: name → number of atoms (``name.0``, ``name.1``, …), for parameters that DeepSpeed's universal checkpoints
            stack along a new first dimension.
        irregular: optimizer states that cannot be resharded → their description.
        unreadable: tensors whose bytes cannot be resharded → the reason.
        dropped: reason why buffers and frozen parameters may be missing (upstream's converter omits them), or empty.
        unnoticed: parts that DeepSpeed's own load would miss or misread in the same topology.
        stateless: reason why there are no optimizer states, with a remedy; empty if there are.
        unchecked: parts of a foreign checkpoint without checksum.
        ambiguous: further names of parameters whose owner no file records.
    """

    files: tuple[FileRef, ...]
    records: Records
    atoms: Atoms
    topology: Topology
    state_file: str
    repeated: dict[AtomKey, tuple[tuple[int, Fragment], ...]] = field(default_factory=dict)
    access: ReadAccess = field(default_factory=_read_all)
    failed: set[str] = field(default_factory=set, compare=False)
    counters: dict[str, Any] = field(default_factory=dict)
    scalars: dict[ParamKey, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()
    scaler: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None
    optimizer: str | None = None
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    scalar_dtypes: dict[str, str] = field(default_factory=dict)
    helpers: tuple[str, ...] | None = None
    client_records: tuple[int, ...] = ()
    globals: dict[Use, str] = field(default_factory=dict)
    flats: dict[int, tuple[FlatBuffer, ...]] = field(default_factory=dict)
    degrees: tuple[int, int] | None = None
    format: str = ""
    foreign: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    instances: dict[str, int] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    irregular: dict[AtomKey, str] = field(default_factory=dict)
    unreadable: dict[AtomKey, str] = field(default_factory=dict)
    dropped: str = ""
    unnoticed: tuple[str, ...] = ()
    stateless: str = ""
    unchecked: str = ""
    ambiguous: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        files: Iterable[FileRef],
        records: Records,
        atoms: Iterable[Atom],
        topology: Topology,
        state_file: str,
        **fields: Any,
    ) -> AtomicIndex:
        return cls(tuple(files), records, Atoms.of(atoms), topology, state_file, **fields)

    def find(self, name: str, state: str, instance: int = 0) -> Atom | None:
        return self.atoms.get(AtomKey(name, state, instance))

    def resolve(self, name: str) -> str:
        """Return the name under which a parameter, perhaps a tied one, is saved."""
        return self.aliases.get(name, name)

    @property
    def origin(self) -> str:
        """The topology that wrote it, or its foreign format, in words."""
        return self.format or self.topology.describe()

    @property
    def written_degrees(self) -> tuple[int, int]:
        """Degrees (TP, PP) of the ranks that wrote client states, before any conversion."""
        return self.degrees or (self.topology.tp, self.topology.pp)

    @property
    def configured(self) -> dict[str, Any]:
        """The kept ``optimizer`` section of the saved ds_config; empty without one."""
        return {"type": self.optimizer, "params": self.optimizer_params} if self.optimizer else {}

    @property
    def job(self) -> SavedJob:
        return replace(SavedJob.read(self.counters), format=self.foreign)

    @property
    def is_weights_alone(self) -> bool:
        """True if it is or was foreign and has no states: a load restores weights alone."""
        return bool(self.foreign) and not (self.stateless or self.groups or self.scalars)
