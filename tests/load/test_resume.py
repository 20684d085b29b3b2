"""A resume with a stand-in engine: the tags that it tries, and the engine after a failed load."""

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
from unittest import mock

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.guard import block_engine, unblock_engine
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, OutOfReachError, RemoteError, StorageError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.load import tags
from deepspeed_ucp.load.context import LoadContext
from deepspeed_ucp.load.resume import _load_directly, _resume_tag, resume
from tests.support.damage import refuse_path
from tests.support.direct import STATES, UpstreamEngine, make_job
from tests.support.held import without_collector
from tests.support.ranks import World
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

RESUME = "deepspeed_ucp.load.resume"


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let DeepSpeed load."""
    choose = mock.Mock(return_value=("of the future", None, None))
    monkeypatch.setattr(f"{RESUME}.choose_loader", choose)
    monkeypatch.setattr(f"{RESUME}.list_unsaved", lambda _engine: [])
    return choose


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True], ids=["load", "refresh"])
def test_a_failure_in_deepspeeds_load_blocks_the_engine(
    after: bool, error: type[BaseException], choose: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, choose.return_value = UpstreamEngine(), ("of the future", SimpleNamespace(), None)
    fail, find = mock.Mock(side_effect=error("its own")), mock.Mock(return_value=("folder/tag", None))
    job, refresh = replace(make_job(engine, Comm()), load_dir="folder"), fail if after else mock.Mock()
    monkeypatch.setattr(f"{RESUME}.refresh_after_own_load", refresh)
    with pytest.raises(error, match="its own"):
        _resume_tag(replace(job, deepspeed_load=find if after else fail), "tag")
    assert after or not refresh.called
    with pytest.raises(CheckpointError, match=r"its own.*must not be used"):
        engine.step()
    monkeypatch.setattr(f"{RESUME}.refresh_after_own_load", mock.Mock())
    _resume_tag(replace(job, deepspeed_load=find), "tag")
    assert engine.step() == "stepped"


class StandIns:
    def __init__(self, end: Callable[[], object] | None = None, **target: Callable[[], object]) -> None:
        self.engine = SimpleNamespace(
            _optimizer_has_ckpt_event_prologue=lambda: False,
            _optimizer_has_ckpt_event_epilogue=lambda: end is not None,
            optimizer=SimpleNamespace(checkpoint_event_epilogue=end),
        )
        self.target = SimpleNamespace(**{"prepare": lambda: None, "discard": lambda: None, **target})
        self.index = SimpleNamespace(state_file="states", unchecked="", is_weights_alone=False)

    def load(self, comm: Comm) -> Any:
        return _load_directly(make_job(self.engine, comm), "", self.index, self.target)  # type: ignore[arg-type]


def test_torch_uses_a_share_of_the_cores_while_a_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(f"{RESUME}.load_direct", lambda *_: torch.get_num_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert StandIns().load(Comm()) == ("states", 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("alone", "ends"), [(None, [0, 1, 2]), (False, [0, 1, 2]), (True, [])])
def test_finish_is_not_called_if_one_rank_failed(
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

    monkeypatch.setattr(f"{RESUME}.load_direct", load)
    found = World(3).run(run)
    kind = {None: type(None), False: RemoteError, True: ZeroDivisionError}[alone]
    assert [type(each) for each in found] == [kind] * 3
    assert (sorted(ended), sorted(discarded)) == (ends, [0, 1, 2])


@pytest.mark.parametrize("arguments", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_a_load_of_weights_does_not_unblock_half_loaded_states(arguments: dict[str, bool], tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / STATES).touch()
    (tmp_path / "latest").write_text("tag")
    engine = SimpleNamespace(load_universal_checkpoint=lambda: False, use_node_local_storage=lambda: False)
    find_state(engine).half_states = True
    with pytest.raises(UnsupportedError, match=r"optimizer states are a mixture.*Load with the optimizer states"):
        resume(engine, str(tmp_path), None, arguments, UniversalConfig(), lambda: (None, None))


LOADING = f"{RESUME}._resume_tag"
CUT = CheckpointError("cut off.")


class FallingBack:
    """A run of three tags and a load with `fallback`, which records the tags that it tries."""

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
            block_engine(job.engine, self.fails[tag], with_states=True)
        if tag in self.fails:
            raise self.fails[tag]
        unblock_engine(job.engine)
        return tag, None

    def load(self, **options: Any) -> str | None:
        self.tried.clear()
        config = UniversalConfig(fallback=True, **options)
        return resume(self.engine, self.folder, None, {}, config, lambda **_: (None, None))[0]


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
def test_errors_recommend_fallback_only_if_it_has_an_effect(
    fault: str, tag: str | None, options: Any, effective: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        resume(UpstreamEngine(), str(tmp_path), tag, {}, UniversalConfig(**options), lambda **_: (None, None))
    assert (ADVICE in str(raised.value)) is effective


@pytest.fixture
def falling_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FallingBack:
    (tmp_path / "run").mkdir()
    return FallingBack(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("options", [{"fallback": True}, {"fallback": True, "seal": True}, {}], ids=str)
@pytest.mark.parametrize("name", [STATES, "ucp_manifest.json"], ids=["normal", "atomic"])
def test_a_tag_folder_given_as_load_dir_is_loaded(
    name: str, options: dict[str, bool], tmp_path: Path, choose: mock.Mock
) -> None:
    """DeepSpeed loads it as a tag of the parent folder. As with `tag=`, `fallback` tries no other tag."""
    tag_folder = tmp_path / "run" / "tag"
    tag_folder.mkdir(parents=True)
    (tag_folder / name).touch()
    (tag_folder / "client").mkdir()
    (tag_folder / "client" / "mp_rank_01_model_states.pt").touch()

    def load(load_dir: str, tag: str | None) -> tuple[str | None, dict[str, Any]]:
        original = partial(lambda load_dir, tag: (os.path.join(load_dir, str(tag)), {}), load_dir=load_dir, tag=tag)
        return resume(UpstreamEngine(), load_dir, tag, {}, UniversalConfig(**options), original)

    for load_dir, tag in ((str(tag_folder), None), (f"{tag_folder}/", None), (str(tag_folder), "tag")):
        assert load(load_dir, tag)[0] == str(tag_folder)
        assert os.path.samefile(choose.call_args.args[1], tag_folder)
    assert choose.call_count == 3
    choose.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        load(str(tag_folder), None)


@pytest.mark.usefixtures("choose")
def test_an_error_is_raised_if_deepspeeds_load_does_not_find_the_tag(tmp_path: Path) -> None:
    """Otherwise the run would restart from scratch."""
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / STATES).touch()
    (tmp_path / "latest_universal").write_text("tag")
    load = partial(resume, UpstreamEngine(), str(tmp_path), None, {}, UniversalConfig())
    assert load(lambda tag=None: (tag, None))[0] == "tag"
    with pytest.raises(CheckpointError, match="tag: DeepSpeed's own load finds no checkpoint.*must not be used"):
        load(lambda tag=None: (None, None))


def test_fallback_skips_tags_without_seal_if_others_have_one(
    falling_back: FallingBack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a save was interrupted. If no tag has a seal, seals were off."""
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
    with pytest.raises(CheckpointError, match=r"none of its 3 .* is complete: .*global_step3: has no seal") as raised:
        falling_back.load(seal=True)
    assert raised.value.shared


def test_fallback_finds_seals_and_older_tags_in_every_place(falling_back: FallingBack, tmp_path: Path) -> None:
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


def test_a_place_that_is_named_twice_is_searched_once(
    falling_back: FallingBack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destination of saves is often the folder of the load, too."""
    also = [f"{falling_back.folder}/", "s3://bucket/run/", str(tmp_path / "other"), "s3://bucket/run"]
    job = replace(make_job(None, Comm(), also=also), load_dir=falling_back.folder)
    assert job.places == (falling_back.folder, also[1], also[2])
    searched: list[str] = []
    look = tags._look
    monkeypatch.setattr(tags, "_look", lambda place, **how: searched.append(place) or look(place, **how))
    (Path(falling_back.folder) / "latest").write_text("absent")
    assert falling_back.load(also=[falling_back.folder]) == "global_step3" and searched == [falling_back.folder]


def test_fallback_tries_older_tags_on_a_blocked_engine(falling_back: FallingBack) -> None:
    falling_back.fails, falling_back.marks = {"global_step3": CUT}, {"global_step3"}
    for _ in range(2):  # each load blocks the engine again, with the same message
        with pytest.raises(CheckpointError, match=r"^cut off\.$"):
            falling_back.load()
        assert falling_back.tried == ["global_step3"]
    falling_back.marks.clear()
    assert falling_back.load() == "global_step2"


def test_a_failed_load_releases_its_memory(falling_back: FallingBack, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_collector() as failing:

        def load(_job: LoadContext, tag: str) -> tuple[str, None]:
            assert failing.held == 0
            return (tag, None) if tag == "global_step1" else failing.fail(CheckpointError("cut off."))

        monkeypatch.setattr(LOADING, load)
        assert falling_back.load() == "global_step1"


@pytest.mark.parametrize("kind", [UnsupportedError, StorageError, OutOfReachError, CheckpointError])
def test_fallback_raises_errors_of_one_rank_and_those_that_files_do_not_cause(
    kind: type[Exception], falling_back: FallingBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of one rank the others continue with the newest tag."""
    if kind is CheckpointError:
        monkeypatch.setattr(Comm, "size", 2)
    falling_back.fails = {"global_step3": kind("no fault of the files.")}
    with pytest.raises(kind, match=r"^no fault of the files\.$"):
        falling_back.load()
    assert falling_back.tried == ["global_step3"]


def test_an_unreachable_place_is_an_error_only_if_older_tags_are_needed(
    falling_back: FallingBack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may contain the newest of them."""
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
def test_unreachable_files_keep_their_error_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model((Param("a", (3, 5)),))
    for place in ("first", "other"):
        write_checkpoint(tmp_path / place, model, random_state(model, 0), Topology(1, 2), tag="tag")
    folder, other = str(tmp_path / "first/tag"), str(tmp_path / "other/tag")
    for function in ("open", "scandir"):
        monkeypatch.setattr(os, function, partial(refuse_path, getattr(os, function), os.path.join(folder, name)))
    with pytest.raises(OutOfReachError, match="Permission denied"):
        open_checkpoint(folder, Comm())
    assert open_checkpoint(folder, Comm(), also=[other]).atoms
