"""The files of a save with experts under tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.formats.deepspeed.headers import FileHeader, ModelHeader, OptimHeader
from deepspeed_ucp.formats.deepspeed.save import (
    Save,
    count_expert_tp_shards,
    name_expected_files,
    name_unwritten_models,
)
from deepspeed_ucp.formats.places import FileTable
from deepspeed_ucp.io.paths import Entry

EXPERTS = (2,)


def make_group(degree: int) -> dict[str, Any]:
    return {"moe": True, "name": f"ep_size_{degree}"}


def make_optim(degree: int, counts: tuple[int, ...] = (), kind: str = "zero12") -> OptimHeader:
    groups = ({"lr": 0.1}, make_group(degree))
    return OptimHeader(kind, 1, (), (), (0, 1), groups, partition_count=counts)


def make_model(name: str, ranks: int, tp: int, dp: int, optim: OptimHeader | None = None, **fields: Any) -> FileHeader:
    counters = {"mp_world_size": ranks, "dp_world_size": dp}
    module: dict[str, Any] = {}
    degrees = (ranks // tp, tp)
    model = ModelHeader(
        module, False, (), None, {}, {}, {}, counters, optim, experts=EXPERTS, degrees=degrees, **fields
    )
    return FileHeader(name, 1, model=model)


def list_files(first: list[FileHeader], *names: str) -> Save:
    save = Save.of(FileTable.of("folder", dict.fromkeys(names, Entry(1, 0.0))))
    save.first = first
    return save


def expert(number: int, mp: int) -> str:
    return f"layer_0_expert_{number}_mp_rank_{mp:02d}_model_states.pt"


def states(rank: int, mp: int) -> str:
    return f"expp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


MODELS = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
FOLDED = [expert(0, 0), expert(1, 1)]
CUT = [expert(number, mp) for number in (0, 1) for mp in (0, 1)]


@pytest.mark.parametrize(
    ("files", "degree", "counts", "lanes"),
    [
        (FOLDED, 2, (2, 2), 1),  # four ranks of a stage, two of them hold the same
        (CUT, 2, (2, 1), 2),
        (CUT, 2, (2, 2), 1),  # the groups decide: other files may be leftovers
        (FOLDED, 2, (2, 1), 2),
    ],
)
def test_lanes_by_the_partitions_of_a_group(files: list[str], degree: int, counts: tuple[int, ...], lanes: int) -> None:
    first = [make_model(MODELS[0], 2, 2, 2), FileHeader("optim", 1, optim=make_optim(degree, counts))]
    save = list_files(first, *MODELS, *files)
    assert count_expert_tp_shards(save, 2) == lanes
    assert count_expert_tp_shards(save, 1) == 1


@pytest.mark.parametrize(
    ("files", "lanes"),
    [
        ([*FOLDED, states(0, 0), states(1, 1)], 1),
        ([*CUT, states(0, 0), states(0, 1), states(1, 0), states(1, 1)], 2),
        (FOLDED, 1),  # weights alone
        (CUT, 2),
    ],
)
def test_lanes_by_the_names_of_files(files: list[str], lanes: int) -> None:
    first = [make_model(MODELS[0], 2, 2, 2, make_optim(2, kind="torch"))]
    assert count_expert_tp_shards(list_files(first, *MODELS, *files), 2) == lanes


@pytest.mark.parametrize("files", [FOLDED, CUT])
def test_a_missing_file_is_expected(files: list[str]) -> None:
    first = [make_model(MODELS[0], 2, 2, 2, make_optim(2, kind="torch"))]
    optims = [states(0, 0), states(1, 1)] if files is FOLDED else [states(r, mp) for r in (0, 1) for mp in (0, 1)]
    everything = [*MODELS, *files, *optims]
    assert sorted(name_expected_files(list_files(first, *everything))) == sorted(everything)
    lacking = name_expected_files(list_files(first, *[name for name in everything if name != expert(1, 1)]))
    assert {name for name in lacking if name not in everything} == ({expert(1, 0)} if files is FOLDED else set())
    assert len(lacking) == len(everything)


def test_every_stage_counts_its_own_layers() -> None:
    first = make_model(MODELS[0], 2, 1, 2)
    optim = FileHeader("zero_pp_rank_0_mp_rank_00_optim_states.pt", 1, optim=make_optim(2, (2, 1)))
    shards = [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for mp in (0, 1) for dp in (0, 1)]
    files = [*MODELS, *shards, *(expert(number, mp) for mp in (0, 1) for number in (0, 1))]
    second = make_model(MODELS[1], 2, 1, 2)
    assert sorted(name_expected_files(list_files([first, optim], *files), [second])) == sorted(files)
    assert expert(0, 1) not in name_expected_files(list_files([first, optim], *files))


@pytest.mark.parametrize(
    ("degree", "counts", "data_first", "unsaved"),
    [
        (1, (2, 4), False, [MODELS[1]]),
        (2, (2, 2), False, []),
        (2, (2, 2), True, [MODELS[1]]),  # both tensor-parallel ranks hold the first experts
        (4, (2, 1), True, []),
        (2, (2, 1), False, []),  # cut
    ],
)
def test_model_states_that_deepspeed_never_writes(
    degree: int, counts: tuple[int, ...], unsaved: list[str], *, data_first: bool
) -> None:
    model = make_model(MODELS[0], 2, 2, 2)
    config = {"use_data_before_expert_parallelism": True} if data_first else {}
    first = [
        FileHeader(model.name, 1, config=config, model=model.model),
        FileHeader("optim", 1, optim=make_optim(degree, counts)),
    ]
    assert name_unwritten_models(list_files(first, *MODELS, *FOLDED)) == set(unsaved)
    assert name_unwritten_models(list_files(first[:1], *MODELS, *FOLDED)) == set()
