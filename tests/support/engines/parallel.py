"""Models under TP × PP × SP × DP × ZeRO on a few ranks: launches, saved and resumed runs, join of all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.testing import LOSS_TOLERANCE
from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter
from deepspeed_ucp.testing.compare import compare
from tests.support.engines import gpt as engine_gpt
from tests.support.engines import letters as engine_letters
from tests.support.engines import llama as engine_llama
from tests.support.engines.cases import enable
from tests.support.engines.ranks import Attempt, Load, Local, attempt_each, capture_rank, load_each, save

BATCH = 8  # samples per step, all data-parallel ranks together
STEPS = (2, 2)


@dataclass(frozen=True)
class Launch:
    """One topology; the world size and the other degrees determine the data-parallel degree.

    Attributes:
        method: `partition_method` of a pipeline.
        fp32_grads: accumulate gradients in fp32, for which DeepSpeed uses BF16_Optimizer at stage 1.
        dual: every pipeline rank holds two stages (DualPipeV).
    """

    tp: int = 1
    pp: int = 1
    stage: int = 1
    precision: str = "fp32"
    pipeline: bool = True
    sp: int = 1
    method: str = "type:transformer"
    fp32_grads: bool = False
    world: int = 4
    dual: bool = False

    def __str__(self) -> str:
        degrees = {"tp": self.tp, "pp": self.pp, "sp": self.sp}
        parts = [*(f"{key}{size}" for key, size in degrees.items() if size > 1), f"dp{self.dp}", f"zero{self.stage}"]
        parts += [self.precision] * (self.precision != "fp32") + ["fp32grads"] * self.fp32_grads
        parts += ["dual"] * self.dual + ["plain"] * (not self.pipeline)
        return "-".join([*parts, *[self.method] * (self.method != "type:transformer")])

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.sp)

    @property
    def loses_copies(self) -> bool:
        """Stage 0 in fp32 has no masters, and DeepSpeed writes no layer file for a tied layer with a forward_fn."""
        return self.pp > 1 and self.stage == 0 and self.precision == "fp32"

    @property
    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1 if self.dual else BATCH // self.dp,
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": 0.0,  # stage 0 with a pipeline clips by another norm than the others
            "steps_per_print": 1 << 30,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
            **enable(self.precision),
        }
        if self.fp32_grads:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config


def find_family(model: str) -> Any:
    """Return the module that builds a model."""
    families = (each for each in (engine_gpt, engine_llama) if model in each.MODELS)
    return next(families, engine_letters)


def find_name(name: str, model: str) -> str:
    """Return the name of a parameter in one of a model's builds."""
    return engine_gpt.find_name(name, model) if model in engine_gpt.MODELS else name


def find_blocks(name: str, model: str) -> Any:
    """Return the dimension and blocks along which a parameter is cut; None: replicated."""
    family = find_family(model)
    return None if family is engine_letters else family.find_blocks(name, model)


def training(model: str, launch: Launch, checkpoint: Mapping[str, Any], seed: int = 2, **options: Any) -> Any:
    """Return the function that makes and trains an engine with this ``checkpoint`` section."""
    config = {**launch.ds_config, **({"checkpoint": checkpoint} if checkpoint else {})}
    return partial(find_family(model).train, model, launch, config, seed, **options)


@dataclass(frozen=True)
class Route:
    """A resume of a model from one launch under another.

    Attributes:
        patterns: option of the plugin.
        arguments: of `load_checkpoint`.
        part: folder inside the source's folder.
        saves: the target saves right after the load.
    """

    model: str
    source: Launch
    target: Launch
    patterns: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    part: str = ""
    saves: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, [self.model, f"{self.source}→{self.target}", *self.arguments, self.part]))

    @property
    def key(self) -> str:
        return f"{self} {json.dumps(self.patterns)}"

    @property
    def engine(self) -> str:
        """Key that is equal for all routes of one engine."""
        return json.dumps([self.model, str(self.target), self.patterns])

    @property
    def checkpoint(self) -> dict[str, Any]:
        return {"universal": {"patterns": self.patterns} if self.patterns else True}

    @property
    def tolerance(self) -> float:
        """Of the losses."""
        return LOSS_TOLERANCE["bf16" if "bf16" in (self.source.precision, self.target.precision) else "fp32"]


class Runs:
    """Saved and resumed runs; an engine of each kind resumes one route after the other.

    Args:
        client_states: returns the client states of a source, which saves once with each into a part of its folder.
        nested: models that save `module` as Megatron-DeepSpeed does without a pipeline.
    """

    def __init__(self, worlds: Any, root: Path, client_states: Any = None, nested: Sequence[tuple[str, Launch]] = ()):
        self.worlds, self.root, self.client_states, self.nested = worlds, root, client_states, nested
        self._saved: dict[tuple[str, Launch], list[Local]] = {}
        self._resumed: dict[str, list[Local]] = {}

    def folder(self, model: str, launch: Launch, part: str = "") -> str:
        """Return the folder of a run."""
        return str(self.root / f"{model}-{launch}".replace(":", "_") / part)

    def again(self, route: Route) -> str:
        """Return the folder of the save right after the load."""
        return str(self.root / f"again-{route}".replace(":", "_"))

    def saved(self, model: str, launch: Launch) -> list[Local]:
        """Train and save a run at the first call. Returns its ranks."""
        if (model, launch) not in self._saved:
            nested = {"nested": True} if (model, launch) in self.nested else {}
            states = self.client_states and self.client_states(model, launch)
            trained, folder = training(model, launch, {}, seed=1, **nested), self.folder(model, launch)
            options = {"after": STEPS[1], "client_states": states, "read": capture_rank}
            self._saved[model, launch] = self.run(launch, save, trained, folder, STEPS[:1], **options)
        return self._saved[model, launch]

    def resumed(self, route: Route, routes: Sequence[Route] = ()) -> list[Local]:
        """Resume a route at the first call. Returns its ranks.

        Args:
            routes: further routes; the same engine resumes all that fit it, weights alone first.
        """
        if route.key not in self._resumed:
            alike = {each.key: each for each in (route, *routes) if each.engine == route.engine}
            weights_first = lambda each: (not each.arguments, "load_module_only" not in each.arguments)  # noqa: E731
            found, loads = sorted(alike.values(), key=weights_first), []
            for each in found:
                self.saved(each.model, each.source)
                again, steps = self.again(each) if each.saves else "", 0 if each.arguments else STEPS[1]
                folder = self.folder(each.model, each.source, each.part)
                loads.append(Load(folder, each.arguments, again=again, steps=steps))
            trained = training(route.model, route.target, route.checkpoint)
            answers = self.run(route.target, load_each, trained, loads, read=capture_rank)
            self._resumed.update(zip([each.key for each in found], map(list, zip(*answers, strict=True)), strict=True))
        return self._resumed[route.key]

    def check(
        self, route: Route, routes: Sequence[Route] = (), *, losses: bool = True, least: int = 80
    ) -> tuple[list[Local], list[Local]]:
        """Resume a route and compare more than `least` tensors, and the losses. Returns the ranks of both runs."""
        saved, resumed = self.saved(route.model, route.source), self.resumed(route, routes)
        assert all(local.direct for local in resumed), resumed[0].reason
        lost = route.source.loses_copies
        count, differences = compare_joined(saved, resumed, route.model, lost_copies=lost)
        assert count > least
        assert not differences, "\n".join(differences[:20])
        if losses:
            pairs = list(zip(mean_losses(resumed), mean_losses(saved), strict=True))
            assert all(abs(own - expected) <= route.tolerance * abs(expected) for own, expected in pairs), pairs
        return saved, resumed

    def load(
        self, model: str, launch: Launch, checkpoint: Mapping[str, Any], folder: str, **options: Any
    ) -> list[Local]:
        """Load a folder into an engine and train on. Returns its ranks."""
        trained = training(model, launch, checkpoint, seed=3)
        loads = [Load(folder, steps=STEPS[1])]
        return [local for (local,) in self.run(launch, load_each, trained, loads, read=capture_rank, **options)]

    def attempt(self, route: Route, *loads: Load) -> list[list[Attempt]]:
        """Try the loads, or the route itself. Returns the attempts of all ranks, by load."""
        self.saved(route.model, route.source)
        loads = loads or (Load(self.folder(route.model, route.source, route.part), route.arguments),)
        trained = training(route.model, route.target, route.checkpoint)
        return [list(each) for each in zip(*self.run(route.target, attempt_each, trained, loads), strict=True)]

    def check_refused(self, route: Route, kind: str, *words: str, loads: Sequence[Load] = ()) -> list[list[Attempt]]:
        """Check that every rank refuses the first load with one message, and that its engine is unchanged.

        Args:
            kind: of error; "" for any.
            words: parts of its message.
        """
        attempts = self.attempt(route, *loads)
        ((error, message),) = {(each.error, each.message) for each in attempts[0]}
        assert error and kind in ("", error), f"{error}: {message}"
        for word in words:
            assert word in message
        assert all(each.changed == [] for each in attempts[0])
        return attempts

    def run(self, launch: Launch, fn: Any, *args: Any, **options: Any) -> list[Any]:
        """Call a function on a world of the launch's size."""
        return list(self.worlds.get(launch.world).run(fn, *args, **options))


def mean_losses(locals_: Sequence[Local]) -> list[float]:
    """Return the losses of each step as means over all ranks."""
    return [sum(step) / len(step) for step in zip(*(local.losses for local in locals_), strict=True)]


# --- join of all ranks


def join(locals_: Sequence[Local], model: str) -> CapturedEngine:
    """Join all ranks to the whole model, under the names of one build.

    A parameter of several stages is there once for each: "name", "name#1", … in the order of the stages.
    """
    by_place: dict[tuple[int, int], Local] = {}
    for local in locals_:  # data- and sequence-parallel ranks hold the same
        twin = by_place.setdefault((local.place.pp_rank, local.place.tp_rank), local)
        differences = compare(twin.state, local.state)[1]
        assert not differences, differences
    parameters: dict[str, CapturedParameter] = {}
    buffers: dict[str, Any] = {}
    for stage in sorted({stage for stage, _ in by_place}):
        shards = [by_place[place].state for place in sorted(by_place) if place[0] == stage]
        for name in shards[0].parameters:
            plain = find_name(name, model)
            whole = _join_parameter([shard.parameters[name] for shard in shards], plain, model)
            parameters[_number(plain, parameters)] = whole
        for name in shards[0].buffers:
            plain = find_name(name, model)
            buffers[_number(plain, buffers)] = join_tensors([shard.buffers[name] for shard in shards], plain, model)
    return replace(by_place[0, 0].state, parameters=parameters, buffers=buffers)


def _number(name: str, found: Mapping[str, Any]) -> str:
    copies = count_copies(name, found)
    return f"{name}#{copies}" if copies else name


def count_copies(name: str, found: Mapping[str, Any]) -> int:
    """Return the number of stages with this parameter."""
    return sum(each.partition("#")[0] == name.partition("#")[0] for each in found)


def _join_parameter(shards: Sequence[CapturedParameter], name: str, model: str) -> CapturedParameter:
    if find_blocks(name, model):
        shards = [shard for shard in shards if shard.value.numel()]  # DeepSpeed does not optimize empty ones
    first = shards[0]
    assert all(shard.scalars == first.scalars and shard.hyper == first.hyper for shard in shards)

    def united(tensors: list[Any]) -> Any:
        return None if tensors[0] is None else join_tensors(tensors, name, model)

    return replace(
        first,
        value=united([shard.value for shard in shards]),
        fp32=united([shard.fp32 for shard in shards]),
        tensors={key: united([shard.tensors[key] for shard in shards]) for key in first.tensors},
    )


def join_tensors(shards: Sequence[Any], name: str, model: str) -> Any:
    """Join the shards of the tensor-parallel ranks."""
    cut = find_blocks(name, model)
    if cut is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"{name}: replicas differ"
        return shards[0]
    dim, blocks = cut
    if not blocks:
        return torch.cat(list(shards), dim)
    parts = [shard.split([width // len(shards) for width in blocks], dim) for shard in shards]
    return torch.cat([torch.cat(block, dim) for block in zip(*parts, strict=True)], dim)


def expect(saved: CapturedEngine, loaded: CapturedEngine) -> CapturedEngine:
    """Return the expected state of an engine with the parameters of `loaded` after a load of `saved`.

    An equal number of stages get their copies back; otherwise the first stage gets the first copy, and the last stage
    the last one. DeepSpeed saves the buffers of the first stage only: layers with a `forward_fn` have no file. A
    vocabulary loses its last padding rows, or gets new ones of zeros.
    """
    parameters = {
        name: _fit_rows(saved.parameters[_pick(name, saved.parameters, loaded.parameters)], len(state.value))
        for name, state in loaded.parameters.items()
    }
    lost = {name: state for name, state in saved.parameters.items() if "#" not in name and name not in parameters}
    buffers = {name: saved.buffers[name.partition("#")[0]] for name in loaded.buffers}
    return replace(saved, parameters={**parameters, **lost}, buffers=buffers)


def _pick(name: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> str:
    """Return the name of the saved copy for a live one."""
    plain, _, number = name.partition("#")
    old, new = count_copies(plain, saved), count_copies(plain, loaded)
    if old == new or not number:
        return name
    assert min(old, new) <= 2, "stages in between have no counterpart"
    return f"{plain}#{old - 1}" if old > 1 else plain


def _fit_rows(state: CapturedParameter, rows: int) -> CapturedParameter:
    def fit(tensor: Any) -> Any:
        if len(tensor) <= rows:
            return torch.cat([tensor, tensor.new_zeros((rows - len(tensor), *tensor.shape[1:]))])
        return tensor[:rows]

    tensors = {key: fit(tensor) for key, tensor in state.tensors.items()}
    return replace(state, value=fit(state.value), fp32=None if state.fp32 is None else fit(state.fp32), tensors=tensors)


def compare_joined(
    saved: Sequence[Local], loaded: Sequence[Local], model: str, *, lost_copies: bool = False
) -> tuple[int, list[str]]:
    """Compare a load with the expected state. Returns the number of compared tensors, and the differences.

    Args:
        lost_copies: the files have only the first stage's copy of tied modules.
    """
    got, source = join(loaded, model), join(saved, model)
    if lost_copies:
        source.parameters = {name: state for name, state in source.parameters.items() if "#" not in name}
    return compare(expect(source, got), got)
