"""Which checkpoint a resume takes, and who loads it; without an engine."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import Limits
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, OutOfReachError, RemoteError, StorageError, UnsupportedError
from deepspeed_ucp.load import tags
from deepspeed_ucp.load.choice import LoaderChoice, choose_loader, find_damage, find_own_differences
from deepspeed_ucp.load.context import LoadArguments, LoadContext, LoadReport
from deepspeed_ucp.load.resume import _load, _resume_tag, resume
from deepspeed_ucp.load.tags import find_folders, find_tag
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.files import SEAL
from deepspeed_ucp.stream.checks import verify_records
from deepspeed_ucp.targets.coverage import UnknownLayoutError
from deepspeed_ucp.targets.guard import mark, release
from tests.load.test_reshard import flip
from tests.support.held import without_collector
from tests.support.ranks import World, run_ranks
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tags, the second is the latest."""
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / STATES).touch()
    (tmp_path / "latest").write_text("global_step2")
    return tmp_path


def test_the_tag_is_the_latest_or_the_given_one(folder: Path) -> None:
    assert find_tag(str(folder), None, Comm()) == "global_step2"
    assert find_tag(str(folder), "global_step1", Comm()) == "global_step1"
    with pytest.raises(CheckpointError, match="no checkpoint with tag '7'"):
        find_tag(str(folder), 7, Comm())


def test_an_empty_folder_has_no_tag(tmp_path: Path) -> None:
    assert find_tag(str(tmp_path), None, Comm()) is None
    assert find_tag(str(tmp_path / "absent"), None, Comm()) is None


def test_a_latest_that_points_nowhere_is_refused(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="no checkpoint with tag 'global_step9'.*global_step1, global_step2"):
        find_tag(str(folder), None, Comm())


@pytest.mark.parametrize("latest", ["global_step9", "", None], ids=["nowhere", "empty", "missing"])
def test_with_fallback_the_newest_by_time_is_taken_then(
    latest: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.utime(folder / "global_step2" / STATES, (10, 10))
    os.utime(folder / "global_step1" / STATES, (20, 20))
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    with pytest.raises(CheckpointError):
        find_tag(str(folder), None, Comm())
    assert find_tag(str(folder), None, Comm(), fallback=True) == "global_step1"
    assert "latest" in caplog.text or "global_step9" in caplog.text
    with pytest.raises(CheckpointError, match="no checkpoint with tag '7'"):
        find_tag(str(folder), 7, Comm(), fallback=True)


def test_with_fallback_an_empty_folder_has_no_tag(tmp_path: Path) -> None:
    assert find_tag(str(tmp_path), None, Comm(), fallback=True) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tags_own_folder_is_looked_for_below_it_in_further_places(ranks: int, folder: Path, tmp_path: Path) -> None:
    """And by a rank that does not see it."""
    own, there = folder / "global_step1", tmp_path / "there"
    (there / "global_step1").mkdir(parents=True)
    places = [[str(own if rank == 0 else tmp_path / "absent" / "global_step1"), str(there)] for rank in range(ranks)]

    def look(rank: int, comm: Comm) -> tuple[str | None, list[str]]:
        tag = find_tag(places[rank][0], None, comm, also=places[rank][1:])
        return tag, find_folders(places[rank], str(tag), comm)

    for rank, found in enumerate(run_ranks(ranks, look)):
        assert found == ("global_step1", [places[rank][0], str(there / "global_step1")])


def test_ranks_that_see_different_tags_are_refused(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "global_step1").mkdir(parents=True)
    (there / "latest").write_text("global_step1")
    folders = [str(there), str(folder)]
    text = "ranks see different checkpoints .rank 0: global_step1, rank 1: global_step2.*name the tag"
    with pytest.raises(CheckpointError, match=text):
        run_ranks(2, lambda rank, comm: find_tag(folders[rank], None, comm))


def test_ranks_that_ask_for_different_tags_are_refused(folder: Path) -> None:
    """Of a store one rank looks for all, so that the others' tags would not be seen."""
    for asked, text in (
        (["global_step2", "global_step1", "global_step1"], r"\(rank 0: global_step2, ranks 1-2: global_step1\)"),
        ([None, "global_step2", None], r"\(ranks 0,2: none, so that of `latest`, rank 1: global_step2\)"),
    ):
        with pytest.raises(CheckpointError, match=f"asked for different tags {text}.*same tag on every rank") as error:
            run_ranks(3, lambda rank, comm, asked=asked: find_tag(str(folder), asked[rank], comm))
        assert "name the tag" not in str(error.value)


@pytest.mark.parametrize("fallback", [False, True])
def test_latest_counts_wherever_it_lies(folder: Path, tmp_path: Path, fallback: bool) -> None:
    """A node lacks the folder, another `latest`, which DeepSpeed writes on the first rank's node alone."""
    there = tmp_path / "there"
    (there / "global_step1").mkdir(parents=True)
    (there / "global_step1" / STATES).touch()
    folders = [str(tmp_path / "absent"), str(there), str(folder)]
    found = run_ranks(3, lambda rank, comm: find_tag(folders[rank], None, comm, fallback=fallback))
    assert found == ["global_step2"] * 3


def test_a_tag_that_is_asked_for_is_looked_for_on_every_node(folder: Path, tmp_path: Path) -> None:
    folders = [str(tmp_path / "absent"), str(folder)]
    assert run_ranks(2, lambda rank, comm: find_tag(folders[rank], "global_step1", comm)) == ["global_step1"] * 2
    with pytest.raises(CheckpointError, match=r"^(?!\[rank ).*absent.global_step7: no checkpoint with tag"):
        run_ranks(2, lambda rank, comm: find_tag(folders[rank], "global_step7", comm))


def test_latest_may_name_a_tag_that_another_node_has(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "latest").write_text("global_step2")
    (folder / "latest").unlink()
    folders = [str(there), str(folder)]
    assert run_ranks(2, lambda rank, comm: find_tag(folders[rank], None, comm)) == ["global_step2"] * 2


@pytest.mark.parametrize("fallback", [False, True])
def test_a_node_that_cannot_list_the_folder_goes_by_what_others_see(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    closed = str(tmp_path / "closed")
    for function, path in (("scandir", closed), ("stat", f"{closed}/latest")):
        monkeypatch.setattr(os, function, partial(refuse_path, getattr(os, function), path))
    folders = [closed, str(folder)]
    found = run_ranks(2, lambda rank, comm: find_tag(folders[rank], None, comm, fallback=fallback))
    assert found == ["global_step2"] * 2
    with pytest.raises(CheckpointError, match=r"latest: cannot be read .Permission denied"):
        find_tag(closed, None, Comm(), fallback=fallback)


def test_latest_of_the_first_place_that_has_it_counts(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "global_step3").mkdir(parents=True)
    (there / "latest").write_text("global_step3")
    assert find_tag(str(folder), None, Comm(), also=[str(there)]) == "global_step2"
    assert find_tag(str(tmp_path / "absent"), None, Comm(), also=[str(there), str(folder)]) == "global_step3"
    assert find_tag(str(folder), "global_step3", Comm(), also=[str(there)]) == "global_step3"


@pytest.mark.parametrize("latest", ["", None], ids=["empty", "missing"])
def test_a_place_whose_latest_cannot_be_read_does_not_yield_to_an_older_one(
    latest: str | None, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = tmp_path / "mirror"
    (mirror / "global_step1").mkdir(parents=True)
    (mirror / "latest").write_text("global_step1")
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    os.utime(folder / "global_step1" / STATES, (10, 10))
    places: dict[str, Any] = {"also": [str(tmp_path / "absent"), str(mirror)]}
    with pytest.raises(CheckpointError, match=r"latest is (empty|missing).*global_step1, global_step2"):
        find_tag(str(folder), None, Comm(), **places)
    assert find_tag(str(folder), "global_step1", Comm(), **places) == "global_step1"
    assert find_tag(str(folder), None, Comm(), fallback=True, **places) == "global_step2"
    assert "Falling back" in caplog.text


def test_places_behind_the_one_that_has_the_tag_are_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    look = tags._look
    monkeypatch.setattr(tags, "_look", lambda place, *rest, **how: asked.append(place) or look(place, *rest, **how))
    assert find_tag(str(folder), None, Comm(), also=["s3://out-of-reach/run"]) == "global_step2"
    assert asked == [str(folder)]


@pytest.mark.parametrize("fallback", [False, True])
def test_one_rank_asks_a_store_whether_it_has_the_tag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    """Another rank may lack what asking takes: whoever stands in a collective would wait for it for ever."""
    (folder / "latest").write_text("global_step7")
    look, asked = tags._look, list[str]()

    def ask(path: str) -> bool:
        asked.append(path)
        if "://" in path and len(asked) > 3:
            raise UnsupportedError("no module named obstore")
        return False

    monkeypatch.setattr(tags, "is_folder", ask)
    monkeypatch.setattr(
        tags, "_look", lambda place, *rest, **how: tags.Look(None) if "://" in place else look(place, *rest, **how)
    )
    more: dict[str, Any] = {"fallback": fallback, "also": ["s3://bucket/run"]}
    found = World(2).run(lambda _rank, comm: find_tag(str(folder), None, comm, **more))
    assert [type(each) for each in found] == ([str] * 2 if fallback else [CheckpointError] * 2)


def test_a_tag_that_is_removed_while_one_rank_looks_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "latest").write_text("global_step7")
    turns = iter([str(folder), str(folder / "gone")])
    monkeypatch.setattr(tags, "find_newest", lambda _place: os.listdir(next(turns))[0])
    found = World(2).run(lambda _rank, comm: find_tag(str(folder), None, comm, fallback=True))
    assert [type(each) for each in found] == [StorageError] * 2


def test_load_universal_looks_at_its_own_latest_first(folder: Path) -> None:
    (folder / "global_step1_universal").mkdir()
    (folder / "latest_universal").write_text("global_step1_universal")
    assert find_tag(str(folder), None, Comm()) == "global_step2"
    assert find_tag(str(folder), None, Comm(), universal=True) == "global_step1_universal"


class UpstreamEngine:
    """As much of an engine as is looked at before its buffers are."""

    optimizer = lr_scheduler = None

    def load_universal_checkpoint(self) -> bool:
        return False

    use_node_local_storage = load_universal_checkpoint


def make_job(engine: object, comm: Comm, **options: Any) -> LoadContext:
    return LoadContext(engine, comm, UniversalConfig(**options), LoadArguments(), LoadReport(False, ""))


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no engine the layout is known."""

    def refuse(_engine: object) -> None:
        raise UnknownLayoutError("the engine is of the future")

    monkeypatch.setattr("deepspeed_ucp.load.choice.open_target", refuse)


@pytest.mark.usefixtures("uncovered")
def test_an_atomic_checkpoint_is_deepspeeds_where_load_universal_is_on_and_the_engine_is_not_covered(
    tmp_path: Path,
) -> None:
    (tmp_path / "zero").mkdir()
    decision = choose_loader(make_job(UpstreamEngine(), Comm()), str(tmp_path), upstream=True)
    assert decision.index is decision.target is None
    assert "load_universal is on" in decision.reason
    assert "of the future" in decision.reason


def test_each_nodes_own_files_are_deepspeeds_where_they_are_there_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = make_job(NodeLocalEngine(), Comm()), str(tmp_path)
    target: Any = object()
    unknown = ["Muon's momentum"]
    monkeypatch.setattr("deepspeed_ucp.load.choice.list_unknown", lambda _target, _index: unknown)
    assert "is missing" in find_own_differences(job, folder, target)[-1]
    torch.save({"ds_config": {}, "mp_world_size": 1}, tmp_path / STATES)
    known = "DeepSpeed's own load is not known to be right with: "
    assert find_own_differences(job, folder, target) == [f"{known}Muon's momentum"]
    unknown.clear()
    live = make_job(NodeLocalEngine(), Comm(), param_groups="live")
    for held in (target, None):
        assert find_own_differences(live, folder, held) == [f'{known}"param_groups" is "live"']
    weights = replace(live, arguments=LoadArguments(load_module_only=True))
    assert find_own_differences(weights, folder, target) == [f"{known}load_module_only"]
    assert find_own_differences(weights, folder) == []
    os.truncate(tmp_path / STATES, 100)
    assert "truncated or damaged" in find_own_differences(job, folder, target)[0]
    torch.save({"ds_config": {}, "mp_world_size": 1}, tmp_path / STATES)
    monkeypatch.setattr("deepspeed_ucp.load.choice.look_at_engine", lambda _job: SimpleNamespace(target=target))
    decision = choose_loader(make_job(NodeLocalEngine(), Comm()), str(tmp_path))
    assert (decision.target, decision.index) == (target, None)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
def test_an_engine_is_not_used_that_deepspeeds_own_load_has_failed_on(
    after: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what is refreshed after it."""

    class Engine(SimpleNamespace):
        def step(self) -> str:
            return "stepped"

    def fail(*_: object, **__: object) -> tuple[None, None]:
        raise error("its own")

    engine, more = Engine(optimizer=None, lr_scheduler=None), {"upstream": False, "unknown": ()}
    refreshed: list[object] = []
    refresh = fail if after else lambda target, **_: refreshed.append(target)
    target: Any = SimpleNamespace()
    choice = LoaderChoice("of the future", target=target)
    monkeypatch.setattr("deepspeed_ucp.load.resume.choose_loader", lambda *_, **__: choice)
    monkeypatch.setattr("deepspeed_ucp.load.resume.list_unsaved", lambda _engine: [])
    monkeypatch.setattr("deepspeed_ucp.load.resume.refresh_after_own_load", refresh)
    with pytest.raises(error, match="its own"):
        _resume_tag(make_job(engine, Comm()), "folder", "tag", (lambda: (None, None)) if after else fail, **more)
    assert refreshed == []
    with pytest.raises(CheckpointError, match=r"its own.*must not be used"):
        engine.step()
    monkeypatch.setattr("deepspeed_ucp.load.resume.refresh_after_own_load", lambda *_, **__: None)
    _resume_tag(make_job(engine, Comm()), "folder", "tag", lambda: (None, None), **more)
    assert engine.step() == "stepped"


def test_torch_works_with_a_share_of_the_cores_while_a_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("deepspeed_ucp.load.resume.load_direct", lambda *_: torch.get_num_threads())
    engine = SimpleNamespace(
        _optimizer_has_ckpt_event_prologue=lambda: False, _optimizer_has_ckpt_event_epilogue=lambda: False
    )
    target: Any = SimpleNamespace(prepare=lambda: None, swaps=SimpleNamespace(discard=lambda: None))
    index: Any = SimpleNamespace(run=SimpleNamespace(state_file="states"), limits=Limits(), is_weights_alone=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert _load(make_job(engine, Comm()), "", index, target) == ("states", 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("alone", "ends"), [(None, [0, 1, 2]), (False, [0, 1, 2]), (True, [])])
def test_what_is_collective_at_the_end_waits_for_no_rank_that_failed_alone(
    alone: bool | None, ends: list[int], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in another collective, or gone; the swap files go whatever happens."""
    ended, discarded = list[int](), list[int]()

    def load(job: LoadContext, *_: Any) -> None:
        if alone is not None:
            (job.comm.run if alone is False else lambda work: work())(lambda: 1 // 0)

    def run(rank: int, comm: Comm) -> None:
        engine = SimpleNamespace(
            _optimizer_has_ckpt_event_prologue=lambda: False,
            _optimizer_has_ckpt_event_epilogue=lambda: True,
            optimizer=SimpleNamespace(checkpoint_event_epilogue=lambda: ended.append(rank)),
        )
        swaps = SimpleNamespace(discard=lambda: discarded.append(rank))
        prepare = (lambda: 1 // rank) if before and alone is False else lambda: None
        target: Any = SimpleNamespace(prepare=prepare, swaps=swaps)
        index: Any = SimpleNamespace(run=SimpleNamespace(state_file="states"), limits=Limits(), is_weights_alone=False)
        _load(make_job(engine, comm), "", index, target)

    monkeypatch.setattr("deepspeed_ucp.load.resume.load_direct", load)
    found = World(3).run(run)
    kind = {None: type(None), False: RemoteError, True: ZeroDivisionError}[alone]
    assert [type(each) for each in found] == [kind] * 3
    assert sorted(ended) == ends
    assert sorted(discarded) == [0, 1, 2]


def test_damage_in_any_record_is_found(tmp_path: Path) -> None:
    """At which torch.load does not look."""
    model = Model((Param("a", (3, 5)),))
    write_checkpoint(tmp_path, model, random_state(model, 0), Topology(1, 2), tag="tag")
    index = open_checkpoint(str(tmp_path / "tag"), Comm())
    run_ranks(2, lambda _, comm: verify_records(index, range(len(index.stored.records)), comm))
    for record in (index.stored.records[0], index.stored.records[-1]):
        flip(Path(index.stored.files[record.file].path), record.offset, 3)
        with pytest.raises(CheckpointError, match="damaged"):
            run_ranks(2, lambda _, comm: verify_records(index, range(len(index.stored.records)), comm))
        flip(Path(index.stored.files[record.file].path), record.offset, 3)
    run_ranks(2, lambda _, comm: verify_records(index, range(len(index.stored.records)), comm))


def test_damage_is_looked_for_where_deepspeed_reads(tmp_path: Path) -> None:
    """In the first place, whatever is nearer."""
    model = Model((Param("a", (3, 5)),))
    for name in ("first", "near"):
        write_checkpoint(tmp_path / name, model, random_state(model, 0), Topology(1, 2), tag="tag")
    index = open_checkpoint(str(tmp_path / "first/tag"), Comm())
    record = index.stored.records[-1]
    path = Path(index.stored.files[record.file].path)
    near = str(tmp_path / "near/tag" / path.name)
    files = [replace(file, places=(near, file.path)) if file.path == str(path) else file for file in index.stored.files]
    index = index.change(files=tuple(files))
    flip(Path(near), record.offset, 3)
    assert find_damage(index, Comm(), others=True) == []
    flip(path, record.offset, 3)
    (told,) = find_damage(index, Comm(), others=True)
    assert f"{path}: the" in told
    with pytest.raises(CheckpointError, match="the file is damaged"):
        find_damage(index, Comm(), others=False)


@pytest.mark.parametrize("arguments", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_alone_do_not_mend_an_engine_whose_optimizer_is_half_loaded(
    arguments: dict[str, bool], folder: Path
) -> None:
    engine = SimpleNamespace(load_universal_checkpoint=lambda: False, use_node_local_storage=lambda: False)
    find_state(engine).half_states = True
    with pytest.raises(UnsupportedError, match=r"optimizer states are a mixture.*Load with the optimizer states"):
        resume(engine, str(folder), None, LoadArguments(**arguments), UniversalConfig(), lambda: (None, None))


LOADING = "deepspeed_ucp.load.resume._resume_tag"
CUT = CheckpointError("cut off.")


class FallingBack:
    """What a load with `fallback` takes of tags that are loaded, or that fail in given ways."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.tried, self.engine = str(folder), list[str](), UpstreamEngine()
        self.fails: dict[str, Exception] = {}
        self.marks: set[str] = set()
        monkeypatch.setattr(LOADING, self._resume_tag)
        for time, tag in enumerate(("global_step1", "global_step2", "global_step3"), 10):
            (folder / tag).mkdir(exist_ok=True)
            (folder / tag / STATES).touch()
            os.utime(folder / tag / STATES, (time, time))
        (folder / "latest").write_text("global_step3")

    def _resume_tag(self, job: LoadContext, _folder: str, tag: str, *_: Any, **__: Any) -> tuple[str, None]:
        self.tried.append(tag)
        if tag in self.marks:
            mark(job.engine, self.fails[tag], with_states=True)
        if tag in self.fails:
            raise self.fails[tag]
        release(job.engine)
        return tag, None

    def load(self, **options: Any) -> str | None:
        self.tried.clear()
        config = UniversalConfig(fallback=True, **options)
        return resume(self.engine, self.folder, None, LoadArguments(), config, lambda **_: (None, None))[0]


ADVICE = '"fallback": true loads the newest checkpoint that is complete.'


@pytest.mark.parametrize(
    ("fault", "tag", "options", "effective"),
    [
        ("damaged", None, {}, True),
        ("damaged", "global_step3", {}, False),
        ("damaged", None, {"fallback": True}, False),
        ("alone", None, {}, False),
        ("latest-empty", None, {}, True),
        ("latest-missing", None, {}, True),
        ("unknown-tag", "global_step4", {}, False),
    ],
)
def test_fallback_is_recommended_only_if_it_has_an_effect(
    fault: str,
    tag: str | None,
    options: dict[str, bool],
    effective: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = FallingBack(tmp_path, monkeypatch)
    folder.fails = {f"global_step{step}": CheckpointError("cut off.") for step in (1, 2, 3)}
    if fault == "alone":
        for older in ("global_step1", "global_step2"):
            shutil.rmtree(tmp_path / older)
    elif fault == "latest-empty":
        (tmp_path / "latest").write_text("")
    elif fault == "latest-missing":
        (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError) as raised:
        resume(
            UpstreamEngine(), str(tmp_path), tag, LoadArguments(), UniversalConfig(**options), lambda **_: (None, None)
        )
    assert (ADVICE in str(raised.value)) is effective


@pytest.fixture
def falling_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FallingBack:
    (tmp_path / "run").mkdir()
    return FallingBack(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("options", [{"fallback": True}, {"fallback": True, "seal": True}, {}], ids=str)
@pytest.mark.parametrize("name", [STATES, "ucp_manifest.json"], ids=["normal", "atomic"])
def test_a_checkpoints_own_folder_is_loaded(
    name: str, options: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DeepSpeed as a tag below the folder above; no other tag takes its place, as with `tag=`."""
    own, looked = tmp_path / "run" / "tag", list[str]()
    own.mkdir(parents=True)
    (own / name).touch()
    (own / "client").mkdir()
    (own / "client" / "mp_rank_01_model_states.pt").touch()

    def choose(_job: LoadContext, folder: str, _also: list[str], **_: object) -> LoaderChoice:
        looked.append(folder)
        return LoaderChoice("of the future")

    monkeypatch.setattr("deepspeed_ucp.load.resume.choose_loader", choose)
    monkeypatch.setattr("deepspeed_ucp.load.resume.list_unsaved", lambda _engine: [])

    def load(load_dir: str, tag: str | None) -> tuple[str | None, dict[str, Any]]:
        theirs = partial(lambda load_dir, tag: (os.path.join(load_dir, str(tag)), {}), load_dir=load_dir, tag=tag)
        return resume(UpstreamEngine(), load_dir, tag, LoadArguments(), UniversalConfig(**options), theirs)

    for load_dir, tag in ((str(own), None), (f"{own}/", None), (str(own), "tag")):
        assert load(load_dir, tag)[0] == str(own)
        assert os.path.samefile(looked.pop(), own)
    monkeypatch.setattr("deepspeed_ucp.load.resume.choose_loader", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        load(str(own), None)


def test_a_tag_without_a_seal_is_passed_over_by_name(
    falling_back: FallingBack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a save left that was cut off; where no tag has one, none had to be sealed."""
    assert falling_back.load(seal=True) == "global_step3"
    for tag in ("global_step1", "global_step2"):
        (tmp_path / "run" / tag / SEAL).touch()
    assert falling_back.load(seal=False) == "global_step3"
    assert not caplog.records
    assert falling_back.load(seal=True) == "global_step2" and falling_back.tried == ["global_step2"]
    (warning,) = caplog.records
    assert "resumed from global_step2" in warning.getMessage()
    assert f"{tmp_path}/run/global_step3: has no seal" in warning.getMessage()
    assert "global_step1" not in warning.getMessage()
    falling_back.fails = dict.fromkeys(("global_step1", "global_step2"), CUT)
    with pytest.raises(CheckpointError, match=r"none of its 3 checkpoints is whole: .*global_step3: has no seal"):
        falling_back.load(seal=True)


def test_seals_and_older_tags_are_looked_for_in_every_place(falling_back: FallingBack, tmp_path: Path) -> None:
    there = tmp_path / "there"
    for tag in ("global_step2", "global_step3"):
        (there / tag).mkdir(parents=True)
        (there / tag / SEAL).touch()
    (tmp_path / "run" / "global_step2" / SEAL).touch()
    assert falling_back.load(seal=True, also=[str(there)]) == "global_step3"
    (tmp_path / "run" / "global_step2").rename(tmp_path / "aside")
    (there / "global_step2" / STATES).touch()
    os.utime(there / "global_step2" / STATES, (11, 11))
    falling_back.fails = {"global_step3": CUT}
    assert falling_back.load(also=[str(there), str(tmp_path / "absent")]) == "global_step2"


def test_older_tags_are_tried_on_an_engine_that_an_earlier_load_has_left_half_changed(
    falling_back: FallingBack,
) -> None:
    falling_back.fails, falling_back.marks = {"global_step3": CUT}, {"global_step3"}
    for _ in range(2):  # marked anew, in the same words, by what this very load has done
        with pytest.raises(CheckpointError, match=r"^cut off\.$"):
            falling_back.load()
        assert falling_back.tried == ["global_step3"]
    falling_back.marks.clear()
    assert falling_back.load() == "global_step2"


def test_what_a_load_held_is_given_back_before_an_older_tag_is_loaded(
    falling_back: FallingBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_collector() as failing:

        def load(_job: LoadContext, _folder: str, tag: str, *_: Any, **__: Any) -> tuple[str, None]:
            assert failing.held == 0
            return (tag, None) if tag == "global_step1" else failing.fail(CheckpointError("cut off."))

        monkeypatch.setattr(LOADING, load)
        assert falling_back.load() == "global_step1"


def test_what_is_no_fault_of_the_files_is_told_and_no_older_tag_taken(falling_back: FallingBack) -> None:
    errors = UnsupportedError("needs your consent."), StorageError("is under way."), OutOfReachError("is out of reach.")
    for error in errors:
        falling_back.fails = {"global_step3": error}
        with pytest.raises(type(error), match=str(error)):
            falling_back.load()
        assert falling_back.tried == ["global_step3"]


def test_a_further_place_that_is_out_of_reach_counts_where_older_tags_are_wanted(
    falling_back: FallingBack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold the newest of them."""
    there, scan = str(tmp_path / "there"), os.scandir

    def look(path: str) -> Any:
        if path.startswith(there):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", look)
    (tmp_path / "run" / "global_step3" / SEAL).touch()
    assert falling_back.load(seal=True, also=[there]) == "global_step3"
    falling_back.fails = {"global_step3": CUT}
    with pytest.raises(OutOfReachError, match="there.*cannot be listed"):
        falling_back.load(seal=True, also=[there])
    assert falling_back.tried == ["global_step3"]


@pytest.mark.parametrize("name", ["", STATES], ids=["folder", "file"])
def test_files_out_of_reach_keep_their_kind_up_to_the_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model((Param("a", (3, 5)),))
    for place in ("first", "other"):
        write_checkpoint(tmp_path / place, model, random_state(model, 0), Topology(1, 2), tag="tag")
    folder, other = str(tmp_path / "first/tag"), str(tmp_path / "other/tag")
    for function in ("open", "scandir"):
        monkeypatch.setattr(os, function, partial(refuse_path, getattr(os, function), os.path.join(folder, name)))
    with pytest.raises(OutOfReachError, match="Permission denied"):
        open_checkpoint(folder, Comm())
    assert open_checkpoint(folder, Comm(), also=[other]).stored.atoms


def refuse_path(work: Callable[..., Any], refused: str, path: Any, *rest: Any, **how: Any) -> Any:
    if str(path) == refused.rstrip("/"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return work(path, *rest, **how)


class Harmful:
    """A class that nobody has allowed, and that has something run when it is made."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("code of a checkpoint ran")


class NodeLocalEngine:
    """As much of a stage-0 engine as its own files are held against, where every node keeps its own."""

    optimizer = None
    has_moe_layers = False
    mp_world_size = 1
    num_experts: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 2)
        self._config = SimpleNamespace(use_data_before_expert_parallel_=False)

    def use_node_local_storage(self) -> bool:
        return True

    def bfloat16_enabled(self) -> bool:
        return False

    fp16_enabled = bfloat16_enabled

    zero_elastic_checkpoint = bfloat16_enabled

    def zero_optimization_stage(self) -> int:
        return 0

    def _get_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/{STATES}"


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("name", [STATES, "layer_0_expert_3_mp_rank_00_model_states.pt"])
def test_code_in_files_that_only_deepspeed_reads_is_refused_on_every_rank(name: str, tmp_path: Path) -> None:
    torch.save({"ds_config": {}, "mp_world_size": 1}, tmp_path / STATES)
    torch.save({"ds_config": {}, "mp_world_size": 1, "client": Harmful()}, tmp_path / name)
    torch.save({"client": Harmful()}, tmp_path / "of_the_user.pt")

    def choose(comm: Comm, **options: bool) -> str:
        return choose_loader(make_job(NodeLocalEngine(), comm, **options), str(tmp_path)).reason

    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"{name}: holds objects that are not unpickled.*Harmful"):
            run_ranks(ranks, lambda _, comm: choose(comm))
    assert "own files" in choose(Comm(), trust_pickle=True)
    torch.save({"ds_config": {}, "mp_world_size": 1}, tmp_path / name)
    assert "own files" in choose(Comm())


@pytest.mark.usefixtures("uncovered")
def test_every_nodes_own_files_are_looked_at(tmp_path: Path) -> None:
    """Two containers of one machine, each with a folder of its own."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        torch.save({"ds_config": {}, "mp_world_size": 1}, tmp_path / str(rank) / STATES)
    torch.save({}, tmp_path / "0" / "layer_1_expert_0_mp_rank_00_model_states.pt")
    torch.save({"ds_config": {}, "mp_world_size": 1, "client": Harmful()}, tmp_path / "0" / STATES)
    with pytest.raises(UnsupportedError, match=f"{STATES}.*Harmful"):
        run_ranks(2, lambda rank, comm: choose_loader(make_job(NodeLocalEngine(), comm), str(tmp_path / str(rank))))


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("name", [STATES, "zero/optimizer_state.pt", "zero/layer.weight/fp32.pt"])
def test_code_in_an_atomic_checkpoint_is_refused_before_deepspeed_loads_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "zero" / "layer.weight").mkdir(parents=True)
    torch.save({"client": Harmful()}, tmp_path / name)

    def choose(comm: Comm, **options: bool) -> str:
        return choose_loader(make_job(NodeLocalEngine(), comm, **options), str(tmp_path), upstream=True).reason

    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"{name}: holds objects that are not unpickled.*Harmful"):
            run_ranks(ranks, lambda _, comm: choose(comm))
    assert "load_universal" in choose(Comm(), trust_pickle=True)
    torch.save({}, tmp_path / name)
    assert "load_universal" in choose(Comm())
