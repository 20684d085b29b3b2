"""Build atoms from files of ZeRO 1, 2, 3 and BF16_Optimizer."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby

from ...errors import CheckpointError, shorten
from ...model.flat import Cut, FlatBuffer, Shape, cut_parameter, find_gaps
from ...model.index import GroupInfo
from ...model.storage import MASTER, MODULE, ParamKey, PartitionedState, count, strip_compiled
from ...model.topology import drop_labels
from ...model.wrappers import MOMENTUM
from .builder import Builder, SavedRank, create_ranks, fill_param_shapes
from .headers import FileBatch, FileHeader, OptimHeader, Piece, Slices, TensorStates, batch_files, select_files
from .module import add_tensors
from .save import Save, describe_offload

_Files = tuple[list[FileHeader], list[FileBatch]]  # files of some ranks, by rank and by template


def build_zero(builder: Builder) -> None:
    """Add all atoms; the model states name the parameters of each rank.

    ``param_shapes`` give the order and ``param_alignment_paddings`` the padding; the files' ``param_slice_mappings``
    are wrong under ``round_robin_gradients`` (they follow the order before shuffling).
    """
    save = builder.save
    fill_param_shapes(save)
    shares = [
        [assign_group(save, mp, number, group) for number, group in enumerate(save.model(mp).param_shapes or ())]
        for mp in range(len(save.models))
    ]
    names = [[name for share in chain(*groups) for name in share.shapes] for groups in shares]
    builder.ranks, builder.instances = create_ranks(save, names)
    builder.batches = batch_files(chain(*save.shards))
    optimized = set(chain(*names))
    for mp, rank in enumerate(builder.ranks):
        _check_buffers(save, mp, len(shares[mp]))
        _add_rank(builder, rank, shares[mp], save.shards[mp][0].require_optim())
        if save.is_sharded:
            add_frozen_zero3(builder, rank, save.models[mp], optimized)
    add_tensors(builder)


@dataclass(frozen=True)
class GroupShare:
    """Parameters of a group that the same ranks hold: all, or some distributed ones.

    Attributes:
        ranks: of the pipeline stage.
        local: module's name → shape of the ranks' parameters.
        parts: module's name → whole model's parameters in it, with shapes.
        unsharded: tensor-parallel ranks do not cut them, and may be among the ranks.
        named: the flat buffer records these ranks, as others hold other parameters of the group.
    """

    ranks: range
    local: dict[str, Shape]
    parts: dict[str, dict[str, Shape]]
    unsharded: bool = False
    named: bool = False

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the whole model's parameters."""
        return {strip_compiled(name): shape for shapes in self.parts.values() for name, shape in shapes.items()}


def assign_group(save: Save, mp: int, number: int, group: Sequence[tuple[str, Shape]]) -> list[GroupShare]:
    """Determine the ranks that hold each parameter of a group (default: all ranks)."""
    for extension in save.extensions:
        if shares := extension.assign_group(save, mp, number, group):
            return shares
    return [GroupShare(save.list_ranks(mp), dict(group), {name: {name: shape} for name, shape in group})]


def _add_rank(builder: Builder, rank: SavedRank, shares: Sequence[Sequence[GroupShare]], first: OptimHeader) -> None:
    """Add a model-parallel rank's flat buffers: one per param group or sub-group.

    Parameters that tensor-parallel ranks do not cut are the same on all of these, and are added for the first.
    """
    save = builder.save
    flats: list[FlatBuffer] = []
    members: dict[int, list[ParamKey]] = defaultdict(list)
    hypers = list(map(drop_labels, first.groups)) if save.is_sharded else []
    holders: dict[tuple[range, ...], _Files] = {}
    for index, group_shares in enumerate(shares):
        owner = first.owners[index] if index < len(first.owners) else None
        if not save.is_sharded:  # ZeRO rebuilds Adagrad with one group
            hypers.append({} if owner is None else drop_labels(first.groups[owner]))
        if save.is_sharded:
            _check_partitions(save, rank.pp_rank, index, group_shares)
        for sizes, grouped in groupby(group_shares, partial(_measure_partitions, save, rank.pp_rank, index)):
            alike = list(grouped)
            ranks = tuple(share.ranks for share in alike)
            if ranks not in holders:
                shards = [save.shard(rank.pp_rank, holder) for holder in chain(*ranks)]
                holders[ranks] = shards, select_files(builder.batches, shards)
            files = holders[ranks]
            layout, slices = _lay_out(save, files[0][0], index, alike[0].local, owner or 0, *sizes)
            buffers = [layout.split(share.parts) for share in alike]
            for share, buffer in zip(alike, buffers, strict=True):
                rank.shapes.update(share.shapes)
                rank.unsharded.update(share.shapes if share.unsharded else ())
                members[buffer.group] += map(rank.param, share.shapes)
                flats.append(replace(buffer, ranks=share.ranks if share.named else None))
            if not (alike[0].unsharded and rank.tp_rank):
                wholes = [replace(buffer, names=(*share.shapes,)) for share, buffer in zip(alike, buffers, strict=True)]
                _BufferAdder(builder, rank, *files, slices, index, wholes).add()
    rank.flats = tuple(flats)
    rank.groups = tuple(GroupInfo(tuple(members[group]), hyper) for group, hyper in enumerate(hypers))


def _lay_out(
    save: Save, shard: FileHeader, index: int, local: Mapping[str, Shape], owner: int, parts: int, partition: int | None
) -> tuple[FlatBuffer, tuple[Slices, ...]]:
    """Lay out a flat buffer; return it with its partitions' slices below ZeRO 3.

    ZeRO 1/2 and BF16_Optimizer cut one flat buffer per param group into equal partitions.

    Args:
        shard: file of the first of these ranks.
        owner: param group of a sub-group of ZeRO 3.
        parts, partition: as of :func:`_measure_partitions`.
    """
    optim, sharded = shard.require_optim(), partition is None
    gaps = optim.alignment[index] if index < len(optim.alignment) else ()
    if optim.alignment and len(gaps) != len(local):
        raise CheckpointError(
            f"records the padding behind {len(gaps)} parameters of group {index}, the model states list "
            f"{len(local)}. The file belongs to another run; put the right one back.",
            path=save.path(shard),
        )
    group = owner if sharded else index
    (buffer,) = optim.traits.lay_out(group, tuple(local), tuple(local.values()), parts, partition, gaps)
    cuts = () if sharded else map(buffer.cuts, range(buffer.parts))
    return buffer, tuple(tuple((cut.name, cut.offset, cut.numel) for cut in part) for part in cuts)


def _check_buffers(save: Save, mp: int, groups: int) -> None:
    """Verify that each file has a flat buffer for each group of the model states."""
    for shard in save.shards[mp]:
        optim = shard.require_optim()
        fault = f"has {len(optim.masters)} flat buffers"
        if len(optim.masters) == groups:
            if len(optim.owners) >= groups:
                continue
            fault = f"has {len(optim.owners)} flat buffers in its param groups"
        raise CheckpointError(
            f"{fault}, the model states list {groups}. The file belongs to another run; put the right one back.",
            path=save.path(shard),
        )


def _check_partitions(save: Save, stage: int, group: int, shares: Iterable[GroupShare]) -> None:
    """Verify the ranks of a sub-group that ZeRO 3 records in each file."""
    for share in shares:
        ranks = tuple(rank + stage * save.dp * save.tp for rank in share.ranks)
        for rank in share.ranks:
            recorded = save.shard(stage, rank).require_optim().partition_ranks
            if recorded and recorded[group : group + 1] != (ranks,):
                raise CheckpointError(
                    f"sub-group {group} is partitioned over other ranks than {shorten(ranks)}, which the degrees "
                    "require. The file belongs to another run; put the right one back.",
                    path=save.path(save.shard(stage, rank)),
                )


@dataclass
class _BufferAdder:
    """Add the storages of flat buffers with one layout, from the files of their ranks.

    Partitions are numbered over all buffers, in their order: partition p belongs to buffer p // buffers[0].parts.

    Attributes:
        shards, batches: see :data:`_Files`; ``shards[p]`` has partition p.
        expected: the slices that each partition of a buffer has below ZeRO 3.
        index: number of the flat buffer in each file.
        buffers: under the whole model's names.
        columns: state → dtype, record of each partition, and byte in the record at which the partition begins.
    """

    builder: Builder
    rank: SavedRank
    shards: list[FileHeader]
    batches: list[FileBatch]
    expected: tuple[Slices, ...]
    index: int
    buffers: list[FlatBuffer]
    columns: dict[str, tuple[str, array[int], array[int]]] = field(default_factory=dict)

    def add(self) -> None:
        builder, shards, layout = self.builder, self.shards, self.buffers[0]
        apart = bool(builder.save.swaps) or _keeps_whole_momentum(builder.save, shards[0].require_optim(), self.index)
        for files in self.batches:
            for batch in files.split_by_file() if apart else (files,):
                self._add_batch(batch)
        for number, buffer in enumerate(self.buffers):
            partitions = slice(number * layout.parts, (number + 1) * layout.parts)
            if not layout.by_parameter:
                self._add_empty(buffer, shards[partitions.start])
            states = {
                state: PartitionedState(buffer, dtype, records[partitions], begins[partitions])
                for state, (dtype, records, begins) in self.columns.items()
                if max(records[partitions]) >= 0
            }
            for index, (name, shape) in enumerate(zip(buffer.names, buffer.shapes, strict=True)):
                if states and count(shape):
                    builder.add_storage(self.rank, name, shape, index, states, shards[partitions.start])

    def _add_empty(self, buffer: FlatBuffer, shard: FileHeader) -> None:
        """Add parameters without elements, which older releases keep in the groups."""
        for name, shape in zip(buffer.names, buffer.shapes, strict=True):
            if not count(shape):
                empty = replace(shard.require_optim().masters[self.index], shape=shape)
                self.builder.add(self.rank, name, MASTER, shard, empty)

    def _list_cuts(self, part: int) -> list[Cut]:
        """Return the cuts of a partition, by its number over all buffers."""
        number, part = divmod(part, self.buffers[0].parts)
        return self.buffers[number].cuts(part)

    def _add_batch(self, batch: FileBatch) -> None:
        """Add the masters and the optimizer's states.

        A swapped sub-group only takes from the state file what no swap file holds, such as the step.
        """
        first = batch.headers[0]
        swaps = self.builder.save.swaps.get((first.name, self.index), {})
        for state, header in swaps.items():
            if header.swap is not None:
                record = self.builder.number_record(header, header.swap.record)
                self._set_columns(
                    state, header.swap, batch.parts, array("q", [record]), array("q", [header.swap.offset])
                )
        if not swaps:
            self._check_masters(batch)
            self._record_pieces(MASTER, self.index, batch)
        if self.index < len(batch.template.starts) - 1:
            for alike in self._split_by_sizes(batch):
                self._add_states(alike, swaps)

    def _split_by_sizes(self, batch: FileBatch) -> Iterable[FileBatch]:
        """Separate the files if their states have different sizes."""
        template = batch.template
        pieces = [*([self.index] if template.optim.elastic else []), *template.list_states(self.index)]
        sizes = set(zip(*(batch.pick(piece, "numel") for piece in pieces), strict=True))
        return batch.split_by_file() if len(sizes) > 1 else (batch,)

    def _check_masters(self, batch: FileBatch) -> None:
        partition = self.buffers[0].partition
        sizes = zip(batch.pick(self.index, "numel"), batch.pick_padding(self.index), strict=True)
        totals = [size + padding for size, padding in sizes]
        for header, size in zip(batch.headers, totals, strict=True) if totals.count(partition) < len(totals) else ():
            if size != partition:
                kind = "sub-group" if self.buffers[0].by_parameter else "partition"
                raise CheckpointError(
                    f"{kind} {self.index} has {size} elements, {partition} are expected. "
                    "The file belongs to another run or world size; put the right one back.",
                    path=self.builder.save.path(header),
                )
        if not self.buffers[0].by_parameter:
            self._check_slices(batch)

    def _check_slices(self, batch: FileBatch) -> None:
        """Refuse files of another rank or run by their ``param_slice_mappings``."""
        zero, headers = batch.headers[0].config.get("zero_optimization") or {}, batch.headers
        expected = tuple([self.expected[part % len(self.expected)] for part in batch.parts])
        recorded = batch.slices[self.index] if self.index < len(batch.slices) else ((),) * len(headers)
        if recorded != expected and not zero.get("round_robin_gradients"):
            for header, actual, wanted in zip(headers, recorded, expected, strict=True):
                self._refuse_other_slices(header, actual, wanted)
        ends = [slices[-1][1] + slices[-1][2] if slices else 0 for slices in self.expected]
        sizes = batch.pick(self.index, "numel")
        for part, header, numel in zip(batch.parts, headers, sizes, strict=True):
            if ends[part % len(ends)] > numel:
                cut = next(cut for cut in self._list_cuts(part) if cut.offset + cut.numel > numel)
                raise CheckpointError(
                    f"{cut.name} ends beyond the fp32 partition of group {self.index} "
                    f"({cut.offset + cut.numel} > {numel} elements). The file belongs to another rank or run.",
                    path=self.builder.save.path(header),
                )

    def _refuse_other_slices(self, shard: FileHeader, recorded: Slices, expected: Slices) -> None:
        actual, wanted = (
            sorted((strip_compiled(name), start, numel) for name, start, numel in slices)
            for slices in (recorded, expected)
        )
        if actual != wanted:
            name, start, numel = sorted(set(actual) ^ set(wanted))[0]
            raise CheckpointError(
                f"holds other parts of group {self.index} than expected for this rank (first difference: {name}, "
                f"elements [{start}, {start + numel}) of its partition). The file belongs to another rank, run "
                "or world size; put the right one back.",
                path=self.builder.save.path(shard),
            )

    def _add_states(self, batch: FileBatch, swapped: Container[str]) -> None:
        """Add the optimizer's states of files that have them in the same sizes."""
        shard = batch.headers[0]
        optim, template = shard.require_optim(), batch.template
        recorded = optim.tensors[self.index]
        pieces = dict(zip(recorded.states, template.list_states(self.index), strict=False))
        states = replace(
            recorded,
            states={state: piece for state, piece in recorded.states.items() if state not in swapped},
        )
        if _keeps_whole_momentum(self.builder.save, optim, self.index):
            states = self._add_momentum(shard, batch.parts[0], states)
        stored = optim.masters[self.index].numel if optim.elastic else self.buffers[0].partition
        params = list(map(self.rank.param, self._list_names(batch)))
        for state in self.builder.classify_states(params, states, stored, shard):
            self._record_pieces(state, pieces[state], batch)

    def _list_names(self, batch: FileBatch) -> Iterable[str]:
        """Return the parameters with elements in some files."""
        if len(batch.parts) == len(self.shards):
            pairs = (zip(buffer.names, buffer.shapes, strict=True) for buffer in self.buffers)
            return [name for name, shape in chain(*pairs) if count(shape)]
        return dict.fromkeys(cut.name for part in batch.parts for cut in self._list_cuts(part))

    def _record_pieces(self, state: str, piece: int, batch: FileBatch) -> None:
        first = batch.make_first_piece(piece)
        if first.fault:
            self.builder.note_unreadable(self.rank, self._list_names(batch), state, first.fault)
            return
        records = self.builder.number_records(batch, piece)
        self._set_columns(state, first, batch.parts, records, batch.pick(piece, "start"))

    def _set_columns(
        self, state: str, piece: Piece, parts: Sequence[int], records: array[int], offsets: array[int]
    ) -> None:
        """Set the record and first byte of some partitions of a state."""
        missing = array("q", [-1]) * len(self.shards)
        dtype, record_numbers, begins = self.columns.setdefault(state, (piece.dtype, missing, missing[:]))
        if dtype != piece.dtype:
            name, shard = self._list_cuts(parts[0])[0].name, self.shards[parts[0]]
            shape = self.rank.shapes[name]
            self.builder.refuse_mismatch(shard, self.rank.param(name), state, (piece.dtype, shape), (dtype, shape))
        if len(parts) == len(self.shards):  # all, in order
            record_numbers[:], begins[:] = records, offsets
            return
        for part, record, offset in zip(parts, records, offsets, strict=True):
            record_numbers[part], begins[part] = record, offset

    def _add_momentum(self, shard: FileHeader, part: int, tensor_states: TensorStates) -> TensorStates:
        """Add momentum of parameters that a partition touches; return the other states.

        The rank's own elements form the atom; those beyond its partition repeat elements of other ranks.
        """
        number, partition = divmod(part, self.buffers[0].parts)
        states, touched = dict(tensor_states.states), self.buffers[number].join_touched(partition)
        piece = states.pop(MOMENTUM, None)
        if piece is None or piece.fault:
            return tensor_states
        if piece.numel != touched.partition:
            fault = f"{piece.numel} elements where the parameters of a rank have {touched.partition}"
            return replace(tensor_states, states=states, other={**tensor_states.other, MOMENTUM: fault})
        inside, beyond = [], []
        cuts = {cut.name: cut for cut in self._list_cuts(part)}
        for name, offset, numel in zip(touched.names, touched.offsets, touched.numels, strict=True):
            cut = cuts.get(name, Cut(name, 0, 0, 0))  # in one tensor with parameters of this partition
            if cut.numel:
                inside.append(replace(cut, offset=offset + cut.start))
            rest = find_gaps([(cut.start, cut.start + cut.numel)], numel)
            beyond += [Cut(name, low, high - low, offset + low) for low, high in rest]
        self.builder.add_cuts(self.rank, MOMENTUM, inside, shard, piece)
        self.builder.add_repeated(self.rank, MOMENTUM, beyond, shard, piece)
        return replace(tensor_states, states=states)


def _keeps_whole_momentum(save: Save, optim: OptimHeader, index: int) -> bool:
    offloaded = not describe_offload(save.zero).startswith("none/")
    hyper = optim.groups[optim.owners[index]] if index < len(optim.owners) else {}
    return MOMENTUM in optim.traits.list_whole(hyper, offloaded=offloaded)


def _measure_partitions(save: Save, stage: int, index: int, share: GroupShare) -> tuple[int, int | None]:
    """Return a flat buffer's number of partitions, and their size (ZeRO 3: None).

    The size includes padding, which ZeRO 1/2 strip from the masters.
    """
    optim = save.shard(stage, share.ranks[0]).require_optim()
    padding = optim.paddings[index] if optim.traits.strips_padding and index < len(optim.paddings) else 0
    return len(share.ranks), None if save.is_sharded else optim.masters[index].numel + padding


def add_frozen_zero3(builder: Builder, rank: SavedRank, models: Sequence[FileHeader], optimized: set[str]) -> None:
    """Add frozen parameters of ZeRO 3; each rank holds ``ceil(numel / dp)`` elements.

    ``optimized`` parameters are trained on some tensor-parallel rank, and are empty on ranks that list them as frozen.
    """
    zero = builder.save.zero
    if zero.get("zero_quantized_nontrainable_weights"):
        frozen = models[0].require_model().frozen
        builder.note_unreadable(rank, frozen, MODULE, "a frozen parameter saved quantized, without its scales")
        return
    on_nvme = describe_offload(zero).endswith("/nvme")
    for part, header in enumerate(models):
        model = header.require_model()
        for name, piece in model.frozen.items():
            if name in optimized:
                continue
            shape = model.frozen_shapes[name]
            start, numel = cut_parameter(count(shape), part, len(models))
            # DeepSpeed saves one element of 1.0 instead of a frozen parameter on NVMe.
            if piece.numel < numel or (on_nvme and piece.numel == 1):
                fault = "a frozen parameter on NVMe, which the save replaced by a placeholder"
                builder.note_unreadable(rank, [name], MODULE, fault)
            else:
                builder.add_cuts(rank, MODULE, (Cut(name, start, numel, 0),), header, piece, {name: shape})
