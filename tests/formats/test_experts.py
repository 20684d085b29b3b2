"""The files of saves with experts: their names and numbers under tensor and pipeline parallelism, and their headers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.extensions.experts.files import NO_LAYER, ROLES, count_tp_shards, name_unwritten_models
from deepspeed_ucp.extensions.experts.saved import SavedExperts
from deepspeed_ucp.formats.deepspeed.files import sort_roles
from deepspeed_ucp.formats.deepspeed.headers import (
    FileHeader,
    HeaderDelta,
    HeaderTemplate,
    ModelHeader,
    OptimHeader,
    Piece,
    PrefixedTensors,
    TensorStates,
    batch_files,
    encode_header,
    select_files,
)
from deepspeed_ucp.formats.deepspeed.save import Save, name_expected_files
from deepspeed_ucp.formats.deepspeed.zero import GroupShare, assign_group
from deepspeed_ucp.formats.locations import FileTable
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.model.records import Record


def make_optim(kind: str, counts: tuple[int, ...] = ()) -> OptimHeader:
    groups = ({"lr": 0.1}, {"moe": True, "name": "ep_size_2"})
    return OptimHeader(kind, 1, (), (), (0, 1), groups, partition_count=counts)


def make_model(optim: OptimHeader | None) -> FileHeader:
    """Make model states of two tensor-parallel times two data-parallel ranks."""
    counters, facts = {"mp_world_size": 2, "dp_world_size": 2}, {"experts": (2,)}
    model = ModelHeader({}, False, (), None, {}, {}, {}, counters, optim, facts=facts, degrees=(1, 2))
    return FileHeader(MODELS[0], 1, model=model)


def list_files(first: list[FileHeader], *names: str) -> Save:
    save = Save.of(FileTable.of("folder", dict.fromkeys(names, Entry(1, 0.0))))
    save.first, save.extensions = first, [SavedExperts()]
    save.names |= sort_roles(ROLES, {name: name for name in names})
    return save


def expert(number: int, mp: int) -> str:
    return f"layer_0_expert_{number}_mp_rank_{mp:02d}_model_states.pt"


def states(rank: int, mp: int) -> str:
    return f"expp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


MODELS = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
FOLDED = [expert(0, 0), expert(1, 1)]
CUT = [expert(number, mp) for number in (0, 1) for mp in (0, 1)]
ALL_STATES = [states(rank, mp) for rank in (0, 1) for mp in (0, 1)]


def test_file_names_determine_roles() -> None:
    layer, expert = "layer_2_expert_13_mp_rank_01", "expert_3_mp_rank_00"
    optim = "expp_rank_5_mp_rank_01_optim_states.pt"
    names = [f"{layer}_model_states.pt", f"{expert}_model_states.pt", optim]
    found = sort_roles(ROLES, {name: name for name in names})
    assert found == {"expert": {(2, 13, 1): names[0], (NO_LAYER, 3, 0): names[1]}, "expert_optim": {(1, 5): optim}}
    assert {ROLES["expert"].make_name(*key) for key in found["expert"]} == {*names[:2]}


@pytest.mark.parametrize(
    ("files", "counts", "lanes"),
    [
        (FOLDED, (2, 2), 1),  # four ranks of a stage, in pairs of equal content
        (CUT, (2, 1), 2),
        (CUT, (2, 2), 1),  # the groups decide: other files may be leftovers
        (FOLDED, (2, 1), 2),
        ([*FOLDED, states(0, 0), states(1, 1)], None, 1),
        ([*CUT, *ALL_STATES], None, 2),
        (FOLDED, None, 1),  # only weights
        (CUT, None, 2),
    ],
)
def test_list_shards_of_an_experts_parameter(files: list[str], counts: tuple[int, ...] | None, lanes: int) -> None:
    first = [make_model(None if counts else make_optim("torch"))]
    first += [FileHeader("optim", 1, optim=make_optim("zero12", counts))] if counts else []
    save = list_files(first, *MODELS, *files)
    assert count_tp_shards(save, 2) == lanes
    assert count_tp_shards(save, 1) == 1


@pytest.mark.parametrize("files", [FOLDED, CUT])
def test_a_missing_experts_file_is_found(files: list[str]) -> None:
    first = [make_model(make_optim("torch"))]
    everything = [*MODELS, *files, *([states(0, 0), states(1, 1)] if files is FOLDED else ALL_STATES)]
    assert sorted(name_expected_files(list_files(first, *everything))) == sorted(everything)
    lacking = name_expected_files(list_files(first, *[name for name in everything if name != expert(1, 1)]))
    assert {name for name in lacking if name not in everything} == ({expert(1, 0)} if files is FOLDED else set())
    assert len(lacking) == len(everything)


@pytest.mark.parametrize(
    ("degree", "counts", "data_first", "unsaved"),
    [
        (1, (2, 4), False, [MODELS[1]]),
        (2, (2, 2), False, []),
        (2, (2, 2), True, [MODELS[1]]),  # both tensor-parallel ranks hold the first experts
        (4, (2, 1), True, []),
        (2, (2, 1), True, []),  # cut
    ],
)
def test_model_states_of_ranks_without_experts_of_their_own_are_never_written(
    degree: int, counts: tuple[int, ...], data_first: bool, unsaved: list[str]
) -> None:
    groups = ({"lr": 0.1}, {"moe": True, "name": f"ep_size_{degree}"})
    optim = FileHeader("optim", 1, optim=replace(make_optim("zero12", counts), groups=groups))
    first = [replace(make_model(None), config={"use_data_before_expert_parallelism": data_first}), optim]
    assert name_unwritten_models(list_files(first, *MODELS, *FOLDED)) == {*unsaved}
    assert name_unwritten_models(list_files(first[:1], *MODELS, *FOLDED)) == set()


# -- files that contradict each other about the ranks of experts ------------------------------------------------------

FIRST = "body.deepspeed_moe.experts.deepspeed_experts."


def make_save(
    counts: tuple[int, ...],
    groups: list[list[str]],
    experts: int = 0,
    placements: dict[str, Any] | None = None,
    tp: int = 1,
    folded: bool = False,
) -> Any:
    """Make a save of four data-parallel ranks; the first rank's model states name its parameters."""
    shard = SimpleNamespace(name="first", optim=SimpleNamespace(partition_count=counts))
    shapes = [[(name, (2, 3)) for name in group] for group in groups]
    model = SimpleNamespace(param_shapes=shapes, facts={"placements": placements or {}})
    extension = SavedExperts()
    files = {(0, e, 0): SimpleNamespace(layer={f"{FIRST}{e}.w": None}) for e in range(experts)}
    extension.files, extension.tp_shards = files, 1 if folded else tp  # type: ignore[assignment]
    return SimpleNamespace(
        shards=[[shard] * 4] * tp,
        models=[[shard] * 4] * tp,
        path=lambda header: "model states",
        main=SimpleNamespace(config={}),
        extensions=[extension],
        list_ranks=lambda mp: range(4),
        model=lambda mp: model,
        tp=tp,
        dp=4,
    )


def assign(save: Any, mp: int) -> list[list[GroupShare]]:
    return [assign_group(save, mp, number, group) for number, group in enumerate(save.model(mp).param_shapes)]


GROUPS, PLACED, OTHER = [["dense"], [f"{FIRST}0.w"]], [["dense"], ["m.experts.w1"]], ((0, 1), (2, 3))
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"counts": (4, count), "groups": GROUPS, "experts": 4, "tp": 2, "folded": True}, f"in {count} partitions")
      for count in (0, 3, 16)),
    *(({"counts": (4, 2), "groups": GROUPS, "experts": number}, f"but {number} experts of the layer have files")
      for number in (1, 3)),
    *(({"counts": counts, "groups": PLACED, "placements": {"m.experts.": ranks}}, "w1 of shape .2, 3. is spread over")
      for counts, ranks in (((4, 4), OTHER), ((4, 1), OTHER), ((4, 2), ((0, 1, 2), (3,))))),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text"), CONTRADICTIONS)
def test_files_that_contradict_each_other_about_experts_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        assign(make_save(**options), 0)


def test_a_parameter_is_an_expert_only_with_an_experts_file() -> None:
    (shares,) = assign(make_save((4,), [[f"{FIRST}0.w"]], 0), 0)
    assert [list(part.ranks) for part in shares] == [[0, 1, 2, 3]]


# -- a layer of experts with a second name --------------------------------------------------------------------------

LAYERS = {layer: f"{layer}.deepspeed_moe.experts.deepspeed_experts." for layer in ("a", "b", "again")}
EQUAL = {"a": (1, 9), "b": (1, 9), "again": (1, 9)}


def find_ties(
    crcs: dict[str, tuple[int, int]], shared: dict[str, str] | None = None, optimized: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the ties of a layer's second name.

    Args:
        crcs: layer → CRC32 of the weight and the bias of its expert.
        shared: recorded ties.
        optimized: names of parameters that the optimizer has.
    """

    def make(layer: str) -> dict[str, Piece]:
        ends = zip(("w", "b"), crcs[layer], strict=True)
        pieces = {end: Piece(Record(64, 24, crc), 0, (2, 3), "float32") for end, crc in ends}
        return {f"{LAYERS[layer]}0.{end}": piece for end, piece in pieces.items()}

    extension = SavedExperts()
    extension.files = {(number, 0, 0): make_expert(make(layer)) for number, layer in enumerate("ab")}
    shapes = [[(name, (2, 3)) for name in optimized]]
    model = SimpleNamespace(shared=shared or {}, facts={}, module={}, param_shapes=shapes)
    save = SimpleNamespace(model=lambda _: model, path=str)
    header = SimpleNamespace(model=None)
    return extension.find_ties(save, header, make("again"))  # type: ignore[arg-type]


def name_ties(layer: str) -> dict[str, str]:
    return {f"{LAYERS['again']}0.{end}": f"{LAYERS[layer]}0.{end}" for end in ("w", "b")}


def test_equal_biases_do_not_make_a_tie() -> None:
    """Two layers have biases of zero. The second name is tied to the layer with which all its tensors are equal."""
    assert find_ties({"a": (1, 9), "b": (2, 9), "again": (2, 9)}) == name_ties("b")
    assert find_ties(EQUAL, shared=name_ties("b")) == {}  # the tie is recorded


@pytest.mark.parametrize(
    ("crcs", "optimized", "text"),
    [
        ({"a": (1, 9), "b": (2, 8), "again": (2, 9)}, (), "no layer of experts has the same bytes"),
        ({"a": (1, 9), "b": (2, 9), "again": (2, 9)}, (f"{LAYERS['again']}0.b",), "the optimizer has it under this"),
        (EQUAL, (), r"the experts of a\..*, b\..* have the same bytes"),
    ],
    ids=["some tensors equal", "trained", "ambiguous"],
)
def test_layers_that_may_have_no_second_name_are_refused(crcs: Any, optimized: tuple[str, ...], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        find_ties(crcs, optimized=optimized)


def test_a_trained_router_is_no_tie() -> None:
    """Two parameters of the optimizer are not tied, even if their values are equal."""
    piece = Piece(Record(0, 24, 1), 0, (2, 3), "float32")
    module = {"m.router.gate.weight": piece, "m.gate.gate.weight": piece}
    for names in (["m.router.gate.weight"], [*module]):
        shapes = [[(f"_orig_mod.{name}", (2, 3)) for name in names]]
        model = SimpleNamespace(shared={}, facts={"placements": {"m.experts.": ()}}, module=module, param_shapes=shapes)
        save: Any = SimpleNamespace(model=lambda _, model=model: model, path=str)
        ties = SavedExperts().find_ties(save, SimpleNamespace(model=None), module)  # type: ignore[arg-type]
        assert ties == ({"m.gate.gate.weight": "m.router.gate.weight"} if len(names) == 1 else {})


# -- compact headers of files that differ only in offsets -------------------------------------------------------------

LAYER = "body.{}.deepspeed_moe.experts.deepspeed_experts."


def make_tensors(layer: int, number: str, at: int = 64, crc: int | None = 7) -> dict[str, Piece]:
    """Make two tensors; the second begins inside its record."""
    first = Piece(Record(at, 24, crc), 0, (2, 3), "float32")
    second = Piece(Record(at + 64, 20, crc), 8, (3,), "float32")
    return {f"{LAYER.format(layer)}{number}.{end}": piece for end, piece in (("w", first), ("b", second))}


def make_expert(tensors: dict[str, Piece], name: str = "expert", size: int = 1) -> FileHeader:
    return FileHeader(name, size, layer=tensors)


def encode(headers: list[FileHeader], first: FileHeader) -> tuple[list[FileHeader | HeaderDelta], list[FileHeader]]:
    """Encode headers on a rank that has also read `first`; return the encoded headers and a peer's decoded ones."""
    template, known = HeaderTemplate(first), dict[HeaderTemplate, bytes]()
    short = [encode_header(header, template, known) for header in headers]
    received, templates = pickle.loads(pickle.dumps(short)), {b"": template}
    return short, [each.decode(templates) if isinstance(each, HeaderDelta) else each for each in received]


def test_decoded_headers_equal_the_originals_and_share_a_template() -> None:
    files = [make_tensors(0, "0"), make_tensors(1, "12", at=640, crc=None)]
    headers = [make_expert(tensors, f"file{number}", number) for number, tensors in enumerate(files)]
    short, again = encode(headers, FileHeader("first", 1))
    assert all(isinstance(each, HeaderDelta) for each in short)
    alone = [encode([header], FileHeader("first", 1))[0][0] for header in headers]  # by two ranks
    assert len({each.template for each in alone if isinstance(each, HeaderDelta)}) == 1
    assert [replace(each, layer=dict(each.layer or {})) for each in again] == headers
    tensors = [each.layer for each in again if isinstance(each.layer, PrefixedTensors)]
    assert tensors[0].template is tensors[1].template
    assert LAYER.format(0) + "0.other" not in tensors[0]


def change(tensors: dict[str, Piece], **fields: object) -> dict[str, Piece]:
    """Return the tensors with changed fields of the second one."""
    second = list(tensors)[1]
    return {**tensors, second: replace(tensors[second], **fields)}  # type: ignore[arg-type]


PLAIN = make_tensors(0, "0")


@pytest.mark.parametrize(
    "tensors",
    [
        {**PLAIN, "dense": next(iter(PLAIN.values()))},
        change(PLAIN, shape=(0,)),
        change(PLAIN, fault="permuted"),
        {},
    ],
    ids=["no common prefix", "empty", "faulty", "nothing"],
)
def test_headers_that_differ_in_more_than_offsets_are_not_encoded(tensors: dict[str, Piece]) -> None:
    header = make_expert(tensors)
    assert encode([header], FileHeader("first", 1))[0][0] is header


def make_shard(rank: int, numel: int, dtype: str = "float32") -> FileHeader:
    """Make the header of a rank's file with one flat buffer, whose master and state share a record."""
    record = Record(64 * rank, 8 * numel, None if rank else 7)
    master, state = (Piece(record, at * 4 * numel, (numel,), dtype) for at in range(2))
    tensors = (TensorStates({"exp_avg": state}, {"step": 3}),)
    slices, paddings = ((("w", rank, numel),),), (rank,)
    optim = OptimHeader("zero12", 1, (master,), tensors, (0,), ({"lr": 0.1},), slices, paddings=paddings)
    return FileHeader(f"rank{rank}", 1000 + rank, rank, optim=optim)


def unfold(header: FileHeader) -> FileHeader:
    optim = header.optim
    return replace(header, optim=optim and replace(optim, masters=(*optim.masters,), tensors=(*optim.tensors,)))


def test_decoded_optimizer_headers_equal_the_originals_and_form_a_table() -> None:
    first, *others = [make_shard(rank, numel) for rank, numel in enumerate((8, 5, 8))]
    odd = make_shard(3, 8, "bfloat16")
    _, again = encode([*others, odd], first)
    assert list(map(unfold, again)) == [*others, odd]
    alike, apart = select_files(batch_files([first, *again]), [*again, first])
    assert (alike.parts, apart.parts, alike.headers) == ([0, 1, 3], [2], [*again[:2], first])
    assert ([*alike.pick(0, "offset")], [*alike.pick(1, "start")]) == ([64, 128, 0], [20, 32, 32])
    assert (alike.pick_padding(0), alike.template.firsts) == ((1, 2, 0), [0, 0])
