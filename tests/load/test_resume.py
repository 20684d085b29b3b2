"""Which checkpoint a resume takes, and which loader; without an engine."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.coverage import UnknownLayoutError
from deepspeed_ucp.engine.guard import mark, release
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, OutOfReachError, RemoteError, StorageError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.load import tags
from deepspeed_ucp.load.choice import Choice, choose_loader, find_damage, find_own_differences
from deepspeed_ucp.load.context import LoadArguments, LoadContext, LoadReport
from deepspeed_ucp.load.resume import _load, _resume_tag, resume
from deepspeed_ucp.load.tags import find_folders, find_tag
from tests.load.test_reshard import flip
from tests.support.held import without_collector
from tests.support.ranks import World, run_ranks
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a run with two tags, the latest of which is older, and further places."""
    for tag, time in (("run/global_step1", 20), ("run/global_step2", 10), ("mirror/global_step3", 30)):
        (tmp_path / tag).mkdir(parents=True)
        (tmp_path / tag / STATES).touch()
        os.utime(tmp_path / tag / STATES, (time, time))
    for copy in ("bare", "there", "untagged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    for lost in ("there/global_step2", "untagged/global_step2"):
        shutil.rmtree(tmp_path / lost)
    for place in ("empty", "pointer"):
        (tmp_path / place).mkdir()
    for place, tag in (("run", "global_step2"), ("mirror", "global_step3"), ("there", "global_step1")):
        (tmp_path / place / "latest").write_text(tag)
    (tmp_path / "pointer" / "latest").write_text("global_step2")
    return tmp_path / "run"


class Refused(str):
    """The pattern of an error message."""


@contextmanager
def expect_refusal(expected: object) -> Iterator[None]:
    """Check that an error is raised if one is expected."""
    with pytest.raises(CheckpointError, match=expected) if isinstance(expected, Refused) else nullcontext():
        yield


NO_TAG_7 = Refused("no checkpoint with tag '7'")
ONE_RANK: list[tuple[str | None, list[str], Any, bool, str | None]] = [
    ("global_step2", ["run"], None, False, "global_step2"),
    ("global_step2", ["run"], "global_step1", False, "global_step1"),
    ("global_step2", ["run"], 7, False, NO_TAG_7),
    ("global_step2", ["run"], 7, True, NO_TAG_7),
    ("global_step2", ["empty"], None, False, None),
    ("global_step2", ["empty"], None, True, None),
    ("global_step2", ["absent"], None, False, None),
    ("global_step9", ["run"], None, False, Refused("tag 'global_step9'.*global_step1, global_step2")),
    ("global_step9", ["run"], None, True, "global_step1"),
    ("", ["run"], None, False, Refused("latest is empty")),
    ("", ["run"], None, True, "global_step1"),
    (None, ["run"], None, False, Refused("latest is missing")),
    (None, ["run"], None, True, "global_step1"),
    ("global_step2", ["run", "mirror"], None, False, "global_step2"),
    ("global_step2", ["run", "mirror"], "global_step3", False, "global_step3"),
    ("global_step2", ["absent", "mirror", "run"], None, False, "global_step3"),
    # an unreadable `latest` does not yield to that of the next place, which may be older
    ("", ["run", "absent", "pointer"], None, False, Refused("latest is empty.*global_step1, global_step2")),
    (None, ["run", "absent", "pointer"], None, False, Refused("latest is missing.*global_step1, global_step2")),
    ("", ["run", "absent", "pointer"], "global_step1", False, "global_step1"),
    ("", ["run", "absent", "pointer"], None, True, "global_step1"),
    (None, ["run", "absent", "pointer"], None, True, "global_step1"),
]
"""Content of `latest`, places, tag, `fallback`, and the tag that is found."""


@pytest.mark.parametrize(("latest", "places", "tag", "fallback", "expected"), ONE_RANK)
def test_the_tag_that_one_rank_finds(
    latest: str | None,
    places: list[str],
    tag: Any,
    fallback: bool,
    expected: str | None,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    first, *also = [str(folder.parent / place) for place in places]
    with expect_refusal(expected):
        assert find_tag(first, tag, Comm(), also=also, fallback=fallback) == expected
    assert ("Falling back" in caplog.text) is (fallback and tag is None and expected is not None)


SEVERAL_RANKS: list[tuple[list[str], list[str | None], str]] = [
    (
        ["there", "run"],
        [None] * 2,
        Refused("ranks see different .*rank 0: global_step1, rank 1: global_step2.*name the tag"),
    ),
    (
        ["run"] * 3,
        ["global_step2", "global_step1", "global_step1"],
        Refused(r"different tags \(rank 0: global_step2, ranks 1-2: global_step1\)((?!name the tag).)*same tag"),
    ),
    (
        ["run"] * 3,
        [None, "global_step2", None],
        Refused(r"different tags \(ranks 0,2: none \(that of `latest`\), rank 1: global_step2\).*same tag on every"),
    ),
    (["absent", "untagged", "run"], [None] * 3, "global_step2"),
    (["pointer", "bare"], [None] * 2, "global_step2"),
    (["absent", "run"], ["global_step1"] * 2, "global_step1"),
    (["absent", "run"], ["global_step7"] * 2, Refused(r"^(?!\[rank ).*absent.global_step7: no checkpoint with tag")),
]
"""The folder that each rank sees, the tag that it is asked for, and the tag that all find."""


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(("places", "asked", "expected"), SEVERAL_RANKS)
def test_the_tag_that_several_ranks_find(
    places: list[str], asked: list[str | None], expected: str, fallback: bool, folder: Path
) -> None:
    def look(rank: int, comm: Comm) -> str | None:
        return find_tag(str(folder.parent / places[rank]), asked[rank], comm, fallback=fallback)

    with expect_refusal(expected):
        assert run_ranks(len(places), look) == [expected] * len(places)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tags_folder_given_as_load_dir_is_found_below_further_places(ranks: int, folder: Path) -> None:
    """Also by a rank that does not see it."""
    there = folder.parent / "there"
    places = [[str((folder, there / "absent")[rank] / "global_step1"), str(there)] for rank in range(ranks)]

    def look(rank: int, comm: Comm) -> tuple[str | None, list[str]]:
        tag = find_tag(places[rank][0], None, comm, also=places[rank][1:])
        return tag, find_folders(places[rank], str(tag), comm)

    for rank, found in enumerate(run_ranks(ranks, look)):
        assert found == ("global_step1", [places[rank][0], str(there / "global_step1")])


@pytest.mark.parametrize("fallback", [False, True])
def test_a_node_that_cannot_list_the_folder_takes_the_tag_of_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    closed = str(folder.parent / "closed")
    for function, path in (("scandir", closed), ("stat", f"{closed}/latest")):
        monkeypatch.setattr(os, function, partial(refuse_path, getattr(os, function), path))
    folders = [closed, str(folder)]
    found = run_ranks(2, lambda rank, comm: find_tag(folders[rank], None, comm, fallback=fallback))
    assert found == ["global_step2"] * 2
    with pytest.raises(CheckpointError, match=r"latest: cannot be read .Permission denied"):
        find_tag(closed, None, Comm(), fallback=fallback)


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
    """Another rank may lack a module for the store, and its error would leave the others in a collective."""
    (folder / "latest").write_text("global_step7")
    look, asked = tags._look, list[str]()

    def ask(path: str) -> bool:
        asked.append(path)
        if "://" in path and len(asked) > 3:
            raise UnsupportedError("no module named obstore")
        return False

    monkeypatch.setattr(tags, "is_folder", ask)
    monkeypatch.setattr(
        tags,
        "_look",
        lambda place, *rest, **how: (None, None, "", None) if "://" in place else look(place, *rest, **how),
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
    """The part of an engine that is used before its buffers are."""

    optimizer = lr_scheduler = None

    def load_universal_checkpoint(self) -> bool:
        return False

    use_node_local_storage = load_universal_checkpoint


def make_job(engine: object, comm: Comm, **options: Any) -> LoadContext:
    return LoadContext(engine, comm, UniversalConfig(**options), LoadArguments(), LoadReport(False, ""))


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the layout of every engine unknown."""

    def refuse(_engine: object) -> None:
        raise UnknownLayoutError("the engine is of the future")

    monkeypatch.setattr("deepspeed_ucp.load.choice.open_target", refuse)


@pytest.mark.usefixtures("uncovered")
def test_deepspeed_loads_an_atomic_checkpoint_into_an_uncovered_engine_with_load_universal(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    engine = UpstreamEngine()
    engine.load_universal_checkpoint = lambda: True  # type: ignore[method-assign]
    reason, target, index = choose_loader(make_job(engine, Comm()), str(tmp_path))
    assert index is target is None
    assert "load_universal is on" in reason and "of the future" in reason


def test_deepspeed_loads_each_nodes_own_files_if_nothing_speaks_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder, target = make_job(NodeLocalEngine(), Comm()), str(tmp_path), object()
    unknown, known = ["Muon's momentum"], "DeepSpeed's own load is not known to be right with: "
    monkeypatch.setattr("deepspeed_ucp.load.choice.list_unknown", lambda _target, _index: unknown)
    assert "is missing" in find_own_differences(job, folder, target)[-1]  # type: ignore[arg-type]
    torch.save(EMPTY_STATES, tmp_path / STATES)
    assert find_own_differences(job, folder, target) == [f"{known}Muon's momentum"]  # type: ignore[arg-type]
    unknown.clear()
    live = make_job(NodeLocalEngine(), Comm(), param_groups="live")
    weights = replace(live, arguments=LoadArguments(load_module_only=True))
    for each, held, doubts in (
        (live, target, [f'{known}"param_groups" is "live"']),
        (live, None, [f'{known}"param_groups" is "live"']),
        (weights, target, [f"{known}load_module_only"]),
        (weights, None, []),
    ):
        assert find_own_differences(each, folder, held) == doubts  # type: ignore[arg-type]
    os.truncate(tmp_path / STATES, 100)
    assert "truncated or damaged" in find_own_differences(job, folder, target)[0]  # type: ignore[arg-type]
    torch.save(EMPTY_STATES, tmp_path / STATES)
    monkeypatch.setattr("deepspeed_ucp.load.choice.inspect_engine", lambda _job: (target, None))
    assert choose_loader(make_job(NodeLocalEngine(), Comm()), str(tmp_path))[1:] == (target, None)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True], ids=["load", "refresh"])
def test_an_engine_is_marked_if_deepspeeds_own_load_or_the_refresh_after_it_fails(
    after: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine(SimpleNamespace):
        load_universal_checkpoint = staticmethod(lambda: False)

        def step(self) -> str:
            return "stepped"

    def fail(*_: object, **__: object) -> tuple[None, None]:
        raise error("its own")

    engine = Engine(optimizer=None, lr_scheduler=None)
    job = replace(make_job(engine, Comm()), load_dir="folder")
    refreshed: list[object] = []
    choice = "of the future", SimpleNamespace(), None
    refresh = fail if after else lambda target, **_: refreshed.append(target)
    for name, stand_in in (
        ("choose_loader", lambda *_, **__: choice),
        ("list_unsaved", lambda _engine: []),
        ("refresh_after_own_load", refresh),
    ):
        monkeypatch.setattr(f"deepspeed_ucp.load.resume.{name}", stand_in)
    with pytest.raises(error, match="its own"):
        _resume_tag(replace(job, deepspeed_load=(lambda: (None, None)) if after else fail), "tag")
    assert refreshed == []
    with pytest.raises(CheckpointError, match=r"its own.*must not be used"):
        engine.step()
    monkeypatch.setattr("deepspeed_ucp.load.resume.refresh_after_own_load", lambda *_, **__: None)
    _resume_tag(job, "tag")
    assert engine.step() == "stepped"


class StandIns:
    """An engine, a target and an index with the attributes that `_load` uses."""

    def __init__(self, end: Callable[[], object] | None = None, **target: Callable[[], object]) -> None:
        self.engine = SimpleNamespace(
            _optimizer_has_ckpt_event_prologue=lambda: False,
            _optimizer_has_ckpt_event_epilogue=lambda: end is not None,
            optimizer=SimpleNamespace(checkpoint_event_epilogue=end),
        )
        self.target = SimpleNamespace(**{"prepare": lambda: None, "discard": lambda: None, **target})
        self.index = SimpleNamespace(state_file="states", unchecked="", is_weights_alone=False)

    def load(self, comm: Comm) -> Any:
        return _load(make_job(self.engine, comm), "", self.index, self.target)  # type: ignore[arg-type]


def test_torch_uses_a_share_of_the_cores_while_a_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("deepspeed_ucp.load.resume.load_direct", lambda *_: torch.get_num_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert StandIns().load(Comm()) == ("states", 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("alone", "ends"), [(None, [0, 1, 2]), (False, [0, 1, 2]), (True, [])])
def test_the_collective_end_of_a_load_does_not_wait_for_a_rank_that_failed_alone(
    alone: bool | None, ends: list[int], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in another collective, or have exited; swap files are discarded in any case."""
    ended, discarded = list[int](), list[int]()

    def load(job: LoadContext, *_: Any) -> None:
        if alone is not None:
            (job.comm.run if alone is False else lambda work: work())(lambda: 1 // 0)

    def run(rank: int, comm: Comm) -> None:
        prepare = (lambda: 1 // rank) if before and alone is False else lambda: None
        StandIns(lambda: ended.append(rank), prepare=prepare, discard=lambda: discarded.append(rank)).load(comm)

    monkeypatch.setattr("deepspeed_ucp.load.resume.load_direct", load)
    found = World(3).run(run)
    kind = {None: type(None), False: RemoteError, True: ZeroDivisionError}[alone]
    assert [type(each) for each in found] == [kind] * 3
    assert (sorted(ended), sorted(discarded)) == (ends, [0, 1, 2])


@pytest.mark.parametrize("number", [0, -1])
def test_damage_is_looked_for_in_the_files_that_deepspeed_reads(number: int, tmp_path: Path) -> None:
    """These are the first place's, even if another place is nearer. torch.load does not look at checksums."""
    model = Model((Param("a", (3, 5)),))
    for name in ("first", "near"):
        write_checkpoint(tmp_path / name, model, random_state(model, 0), Topology(1, 2), tag="tag")
    index = open_checkpoint(str(tmp_path / "first/tag"), Comm())
    record = index.records[number]
    path = Path(index.files[record.file].path)
    near = str(tmp_path / "near/tag" / path.name)
    files = [replace(file, places=(near, file.path)) if file.path == str(path) else file for file in index.files]
    index = replace(index, files=tuple(files))
    flip(Path(near), record.offset, 3)
    assert run_ranks(2, lambda _, comm: find_damage(index, comm, others=True)) == [[], []]
    flip(path, record.offset, 3)
    for (text,) in run_ranks(2, lambda _, comm: find_damage(index, comm, others=True)):
        assert f"{path}: the" in text
    with pytest.raises(CheckpointError, match="the file is damaged"):
        run_ranks(2, lambda _, comm: find_damage(index, comm, others=False))


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
    """A run of three tags, a load with `fallback`, and the tags that it tries; some fail, some mark the engine."""

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

    def _resume_tag(self, job: LoadContext, tag: str) -> tuple[str, None]:
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
    """DeepSpeed loads it as a tag below the parent folder; no other tag replaces it, as with `tag=`."""
    own, looked = tmp_path / "run" / "tag", list[str]()
    own.mkdir(parents=True)
    (own / name).touch()
    (own / "client").mkdir()
    (own / "client" / "mp_rank_01_model_states.pt").touch()

    def choose(_job: LoadContext, folder: str, _also: list[str], **_: object) -> Choice:
        looked.append(folder)
        return "of the future", None, None

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
    """Its save was cut off; if no tag has a seal, seals were off."""
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


def test_older_tags_are_tried_on_an_engine_that_an_earlier_load_has_marked(falling_back: FallingBack) -> None:
    falling_back.fails, falling_back.marks = {"global_step3": CUT}, {"global_step3"}
    for _ in range(2):  # each load marks the engine again, with the same message
        with pytest.raises(CheckpointError, match=r"^cut off\.$"):
            falling_back.load()
        assert falling_back.tried == ["global_step3"]
    falling_back.marks.clear()
    assert falling_back.load() == "global_step2"


def test_a_failed_load_releases_its_memory_before_an_older_tag_is_loaded(
    falling_back: FallingBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_collector() as failing:

        def load(_job: LoadContext, tag: str) -> tuple[str, None]:
            assert failing.held == 0
            return (tag, None) if tag == "global_step1" else failing.fail(CheckpointError("cut off."))

        monkeypatch.setattr(LOADING, load)
        assert falling_back.load() == "global_step1"


@pytest.mark.parametrize("kind", [UnsupportedError, StorageError, OutOfReachError])
def test_an_error_that_is_no_fault_of_the_files_is_raised(kind: type[Exception], falling_back: FallingBack) -> None:
    falling_back.fails = {"global_step3": kind("no fault of the files.")}
    with pytest.raises(kind, match="no fault of the files."):
        falling_back.load()
    assert falling_back.tried == ["global_step3"]


def test_a_further_place_out_of_reach_is_an_error_only_if_older_tags_are_needed(
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
    assert open_checkpoint(folder, Comm(), also=[other]).atoms


def refuse_path(work: Callable[..., Any], refused: str, path: Any, *rest: Any, **how: Any) -> Any:
    if str(path) == refused.rstrip("/"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return work(path, *rest, **how)


class Harmful:
    """A class without consent, whose unpickling runs code."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("code of a checkpoint ran")


class NodeLocalEngine:
    """The part of a stage-0 engine with node-local storage that is compared with its files."""

    optimizer = None
    has_moe_layers = False
    mp_world_size = 1
    num_experts: tuple[int, ...] = ()
    use_node_local_storage = staticmethod(lambda: True)
    bfloat16_enabled = fp16_enabled = zero_elastic_checkpoint = staticmethod(lambda: False)
    zero_optimization_stage = staticmethod(lambda: 0)

    def __init__(self, upstream: bool = False) -> None:
        self.load_universal_checkpoint = lambda: upstream
        self.module = torch.nn.Linear(2, 2)
        self._config = SimpleNamespace(
            _param_dict={}, zero_config=SimpleNamespace(offload_optimizer=None, offload_param=None)
        )

    def _get_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/{STATES}"


EMPTY_STATES = {"ds_config": {}, "mp_world_size": 1}


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        (STATES, False),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", False),
        (STATES, True),
        ("zero/optimizer_state.pt", True),
        ("zero/layer.weight/fp32.pt", True),
    ],
)
def test_code_in_files_that_only_deepspeed_reads_is_refused_on_every_rank(
    name: str, upstream: bool, tmp_path: Path
) -> None:
    """Also in files of an atomic checkpoint (upstream)."""
    (tmp_path / "zero" / "layer.weight").mkdir(parents=True)
    torch.save(EMPTY_STATES, tmp_path / STATES)
    torch.save({**EMPTY_STATES, "client": Harmful()}, tmp_path / name)
    torch.save({"client": Harmful()}, tmp_path / "of_the_user.pt")

    def choose(comm: Comm, **options: bool) -> str:
        job = make_job(NodeLocalEngine(upstream), comm, **options)
        return choose_loader(job, str(tmp_path))[0]

    reason = "load_universal" if upstream else "own files"
    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"{name}: holds objects that are not unpickled.*Harmful"):
            run_ranks(ranks, lambda _, comm: choose(comm))
    assert reason in choose(Comm(), trust_pickle=True)
    torch.save(EMPTY_STATES, tmp_path / name)
    assert reason in choose(Comm())


@pytest.mark.usefixtures("uncovered")
def test_the_files_of_every_node_are_searched_for_code(tmp_path: Path) -> None:
    """Two containers of one machine with separate folders."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        torch.save(EMPTY_STATES, tmp_path / str(rank) / STATES)
    torch.save({}, tmp_path / "0" / "layer_1_expert_0_mp_rank_00_model_states.pt")
    torch.save({**EMPTY_STATES, "client": Harmful()}, tmp_path / "0" / STATES)
    with pytest.raises(UnsupportedError, match=f"{STATES}.*Harmful"):
        run_ranks(2, lambda rank, comm: choose_loader(make_job(NodeLocalEngine(), comm), str(tmp_path / str(rank))))
