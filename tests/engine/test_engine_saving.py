"""Saves with the plugin: unchanged files, saves after a resume, and skipped damaged saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.formats.deepspeed.files import SEAL
from tests.support.covering import params
from tests.support.engines.cases import MIXED, Case
from tests.support.engines.driver import Engines
from tests.support.engines.kinds import SUMS_IN_FP32, Kind
from tests.support.engines.parallel import join, pipe, plain, resume
from tests.support.engines.ranks import Load, Local, files_that_differ

PAIRS = [
    (Case(1, 3, "bf16"), Case(3, 2, "bf16")),
    (Case(3, 3), Case(1, 2)),
    (Case(0, 3), Case(2, 2)),
    (Case(2, 2, "fp16"), Case(0, 3, "fp16")),
    (Case(3, 2, "bf16"), Case(3, 3, "bf16").on(seal=True)),
    (Case(1, 2), Case(1, 3).on(seal=True)),
    (Case(3, 2), Case(0, 3)),
    (Case(0, 2, "bf16"), Case(1, 3, "bf16", config=SUMS_IN_FP32)),
]
BF16_3D = pipe(2, 2, precision="bf16", fp32_grads=True)
PAIRS_3D = [
    resume(plain(2, 2, world=2), pipe(1, 2, world=2)),
    resume(pipe(2, 2), pipe(1, 2)),
    resume(BF16_3D, pipe(4)),
    resume(pipe(), BF16_3D),
    resume(plain(2, 2, model="llama"), plain(1, 3, sp=2)),
    resume(plain(2, 2, model="llama"), plain(4)),
]
CHOSEN = [PAIRS[0], PAIRS[3], PAIRS[5], PAIRS_3D[0]]


@pytest.mark.parametrize(
    ("source", "target"), params(CHOSEN, [*PAIRS, *PAIRS_3D], lambda pair: "->".join(map(str, pair)))
)
def test_a_save_after_a_resume_loads_in_deepspeed_and_in_the_source(
    source: Kind, target: Kind, engines: Engines, tmp_path: Path
) -> None:
    """DeepSpeed without the plugin loads the source's state, a resume back restores it, and files equal DeepSpeed's."""
    is_case = isinstance(source, Case)
    options = MIXED if is_case else {}
    saved = engines.saved(source, **options)
    (first,) = engines.load(target, Load(str(saved.folder), again=str(tmp_path), steps=2), **options)
    if is_case:
        assert not first.errors and all(local.direct for local in first.ranks)
    else:
        first.check(saved, direct=True, least=81)
    without_plugin = target.but(config={key: value for key, value in target.config.items() if key != "checkpoint"})
    (alone,) = engines.load(without_plugin, tmp_path, plugin=False, **options)
    assert all(local.direct is None for local in alone.ranks)
    if not is_case:
        alone.state = join([mend_copies(local) for local in alone.ranks], target.model)
    found = (
        target.compare(saved.state, alone.state)[1] if is_case else without_plugin.compare(first.state, alone.state)[1]
    )
    assert not found, "\n".join(found[:20])
    assert alone.losses == pytest.approx(first.losses, rel=target.find_tolerance(source))
    if is_case:
        assert describe_files(tmp_path) == describe_files(engines.saved(without_plugin, **options).folder)
        assert any(tmp_path.rglob(SEAL)) == (target != without_plugin)
        (back,) = engines.load(source, tmp_path, **options)
        back.check(saved, direct=True, losses=False)


def mend_copies(local: Local) -> Local:
    """Restore copies that DeepSpeed restores only in the next step: a tied layer with a forward_fn has no file."""
    for name, state in local.state.parameters.items():
        if local.place.pp_rank and name.startswith("tied_modules.") and state.fp32 is not None:
            state.value = state.fp32.to(state.value.dtype)
    return local


def describe_files(folder: Path) -> dict[str, Any]:
    """Return the keys, types, shapes and dtypes in each file of states."""
    paths = sorted(folder.rglob("*_states.pt"))
    return {str(path.relative_to(folder)): describe_value(torch.load(path, weights_only=False)) for path in paths}


def describe_value(value: Any) -> Any:
    if torch.is_tensor(value):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return {str(key): describe_value(item) for key, item in value.items() if key != "ds_config"}
    if isinstance(value, list | tuple):
        return [describe_value(item) for item in value]
    return type(value).__name__


# On one rank stage 3 has no padding, which DeepSpeed saves uninitialised.
@pytest.mark.parametrize("case", [Case(stage, 1 + (stage < 3), "bf16").on() for stage in (0, 1, 2, 3)], ids=str)
def test_plugin_does_not_change_a_save(case: Case, engines: Engines) -> None:
    """Equal trainings with and without the plugin write equal files."""
    ours, theirs = (engines.save(case, plugin=plugin, **MIXED).folder for plugin in (True, False))
    assert files_that_differ(ours, theirs) == []
    assert any(ours.rglob("*_states.pt"))


NEWEST = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("target", params([Case(2, 2)], [Case(1, 3)], str))
def test_fallback_loads_the_newest_complete_checkpoint(target: Case, engines: Engines) -> None:
    """Also in the same topology. Without a complete one all are listed."""
    folder = engines.save(Case(1, 3), steps=(2, 1), after=0, **MIXED).folder
    (folder / NEWEST).unlink()
    (refused,) = engines.load(target, folder, **MIXED)
    refused.check_refused("CheckpointError")
    (outcome,) = engines.load(target.on(fallback=True), folder, **MIXED)
    for rank, local in enumerate(outcome.ranks):
        assert local.state.counters["global_steps"] == 2
        warnings = local.list_messages("WARNING", "skipped")
        assert len(warnings) == (rank == 0) and all(Path(NEWEST).name in text for text in warnings)
    (folder / NEWEST.replace("step3", "step2")).unlink()
    (refused,) = engines.load(target.on(fallback=True), folder, **MIXED)
    refused.check_refused("CheckpointError", "none of its 2 checkpoints", "global_step2", "global_step3")
