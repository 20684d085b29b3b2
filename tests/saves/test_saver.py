"""The ranks' side of a save without any engine: what goes by way of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.saver import save_into_memory
from tests.convert.conversions import write_source
from tests.saves.saving import TAG, is_whole


class FakeEngine(SimpleNamespace):
    """As much of an engine as a save asks for."""

    def use_node_local_storage(self) -> bool:
        return False


@pytest.fixture
def engine() -> FakeEngine:
    module = SimpleNamespace(parameters=list)
    writer = SimpleNamespace(is_decoupled=lambda: False)
    return FakeEngine(
        local_rank=0, global_steps=3, optimizer=None, module=module, save_non_zero_checkpoint=False,
        checkpoint_engine=writer,
    )  # fmt: skip


@pytest.fixture
def save(engine: FakeEngine, tmp_path: Path) -> Callable[..., tuple[str, bool]]:
    """Saves as an engine does: the folder that DeepSpeed was to write to, and whether that is memory's."""
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=20.0))

    def make(folder: str, tag: str, write: Callable[[str], object] = lambda _: None) -> tuple[str, bool]:
        asked = list[str]()

        def note(given: str) -> None:
            asked.append(given)
            write(given)

        _, in_memory = save_into_memory(engine, config, folder, tag, note, latest=True)
        return asked[0], in_memory

    return make


@pytest.mark.parametrize("tag", ["/elsewhere/tag", "../tag", "./tag", "tag/", "a//b", "", ".", ".."])
def test_tags_that_lead_elsewhere_are_deepspeeds_own(
    tag: str, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a store they would take what lies beside the tag with them."""
    assert save(str(tmp_path / "place"), tag) == (str(tmp_path / "place"), False)
    assert "is no path of a folder" in caplog.text
    with pytest.raises(StorageError, match="is no path of a folder"):
        save("s3://bucket/run", tag)


def test_files_that_come_after_the_save_are_left_to_their_writer(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    engine.checkpoint_engine.is_decoupled = lambda: True
    assert save(str(tmp_path / "place"), TAG) == (str(tmp_path / "place"), False)


def test_a_save_without_room_comes_after_those_that_are_pending(
    save: Callable[..., tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `latest` would go back to them."""
    place = tmp_path / "place"

    def write_first(folder: str) -> None:
        write_source(Path(folder)).rename(Path(folder) / "first")

    def look(_: str) -> None:
        assert (place / "latest").read_text() == "first" and is_whole(str(place / "first"))

    assert save(str(place), "first", write_first)[1]
    monkeypatch.setattr(savers, "_count_free", lambda _: -1)
    assert save(str(place), "second", look) == (str(place), False)
