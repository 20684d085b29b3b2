"""Models under TP × PP × SP × DP × ZeRO on a few ranks: launches, saved and resumed runs, how ranks make up a model."""

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
    """One topology; the data-parallel degree is what the world leaves.

    Attributes:
        method: `partition_method` of a pipeline.
        fp32_grads: gradients are accumulated in fp32, which makes DeepSpeed take BF16_Optimizer at stage 1.
        dual: every pipeline rank holds two stages, one of the way there and one of the way back (DualPipeV).
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
        degrees = [
            f"{key}{degree}" for key, degree in (("tp", self.tp), ("pp", self.pp), ("sp", self.sp)) if degree > 1
        ]
        parts = [*degrees, f"dp{self.dp}", f"zero{self.stage}"]
        parts += [self.precision] * (self.precision != "fp32") + ["fp32grads"] * self.fp32_grads
        parts += (
            ["dual"] * self.dual + ["plain"] * (not self.pipeline) + [self.method] * (self.method != "type:transformer")
        )
        return "-".join(parts)

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
    """What builds a model, and knows its names and how it is cut."""
    families = (each for each in (engine_gpt, engine_llama) if model in each.MODELS)
    return next(families, engine_letters)


def training(model: str, launch: Launch, checkpoint: Mapping[str, Any], seed: int = 2, **options: Any) -> Any:
    """What makes the engine, with this section of its configuration, and trains it."""
    config = {**launch.ds_config, **({"checkpoint": checkpoint} if checkpoint else {})}
    return partial(find_family(model).train, model, launch, config, seed, **options)


@dataclass(frozen=True)
class Route:
    """A resume: a model saved under one launch goes on under another.

    Attributes:
        patterns: of the plugin's options.
        arguments: further ones of `load_checkpoint`.
        part: of what the source saved.
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
        """The same for all routes that one engine can take."""
        return json.dumps([self.model, str(self.target), self.patterns])

    @property
    def checkpoint(self) -> dict[str, Any]:
        return {"universal": {"patterns": self.patterns} if self.patterns else True}

    @property
    def tolerance(self) -> float:
        """Of the losses."""
        return LOSS_TOLERANCE["bf16" if "bf16" in (self.source.precision, self.target.precision) else "fp32"]


class Runs:
    """Runs by what they were made of; an engine of each kind resumes one route after the other.

    Args:
        client_states: what a source saves with, once for each of them: parts of a folder.
        nested: models that save `module` as Megatron-DeepSpeed does without a pipeline.
    """

    def __init__(self, worlds: Any, root: Path, client_states: Any = None, nested: Sequence[tuple[str, Launch]] = ()):
        self.worlds, self.root, self.client_states, self.nested = worlds, root, client_states, nested
        self._saved: dict[tuple[str, Launch], list[Local]] = {}
        self._resumed: dict[str, list[Local]] = {}

    def folder(self, model: str, launch: Launch, part: str = "") -> str:
        """Where a run is saved."""
        return str(self.root / f"{model}-{launch}".replace(":", "_") / part)

    def again(self, route: Route) -> str:
        """Where its target saves right after the load."""
        return str(self.root / f"again-{route}".replace(":", "_"))

    def saved(self, model: str, launch: Launch) -> list[Local]:
        """The ranks of a run that has been saved."""
        if (model, launch) not in self._saved:
            nested = {"nested": True} if (model, launch) in self.nested else {}
            states = self.client_states and self.client_states(model, launch)
            trained, folder = training(model, launch, {}, seed=1, **nested), self.folder(model, launch)
            options = {"after": STEPS[1], "client_states": states, "read": capture_rank}
            self._saved[model, launch] = self.run(launch, save, trained, folder, STEPS[:1], **options)
        return self._saved[model, launch]

    def resumed(self, route: Route, routes: Sequence[Route] = ()) -> list[Local]:
        """The ranks of a run that goes on from a saved one.

        Args:
            routes: those among them that the same engine can take are resumed with it, weights alone at first.
        """
        if route.key not in self._resumed:
            alike = {each.key: each for each in (route, *routes) if each.engine == route.engine}
            found = sorted(
                alike.values(), key=lambda each: (not each.arguments, "load_module_only" not in each.arguments)
            )
            for each in found:
                self.saved(each.model, each.source)
            loads = [
                Load(
                    self.folder(each.model, each.source, each.part),
                    each.arguments,
                    again=self.again(each) if each.saves else "",
                    steps=0 if each.arguments else STEPS[1],
                )
                for each in found
            ]
            trained = training(route.model, route.target, route.checkpoint)
            answers = self.run(route.target, load_each, trained, loads, read=capture_rank)
            self._resumed.update(zip([each.key for each in found], map(list, zip(*answers, strict=True)), strict=True))
        return self._resumed[route.key]

    def check(
        self, route: Route, routes: Sequence[Route] = (), *, losses: bool = True, **options: Any
    ) -> tuple[list[Local], list[Local]]:
        """Resume a route: all of the source's bits are where the target wants them, and the losses go on.

        Args:
            losses: compare these too.
            options: of `check`.

        Returns:
            The ranks of the saved run and those of the resumed one.
        """
        saved, resumed = self.saved(route.model, route.source), self.resumed(route, routes)
        check(route, saved, resumed, **options)
        if losses:
            pairs = list(zip(mean_losses(resumed), mean_losses(saved), strict=True))
            assert all(abs(own - expected) <= route.tolerance * abs(expected) for own, expected in pairs), pairs
        return saved, resumed

    def load(
        self, model: str, launch: Launch, checkpoint: Mapping[str, Any], folder: str, **options: Any
    ) -> list[Local]:
        """Load a folder into one engine, go on."""
        trained = training(model, launch, checkpoint, seed=3)
        loads = [Load(folder, steps=STEPS[1])]
        return [local for (local,) in self.run(launch, load_each, trained, loads, read=capture_rank, **options)]

    def attempt(self, route: Route, *loads: Load) -> list[list[Attempt]]:
        """By load what became of it on every rank; without any the route itself."""
        self.saved(route.model, route.source)
        loads = loads or (Load(self.folder(route.model, route.source, route.part), route.arguments),)
        trained = training(route.model, route.target, route.checkpoint)
        return [list(each) for each in zip(*self.run(route.target, attempt_each, trained, loads), strict=True)]

    def check_refused(self, route: Route, kind: str, *words: str, loads: Sequence[Load] = ()) -> list[list[Attempt]]:
        """Every rank refuses the first load with one message, and its engine is as it was.

        Args:
            kind: of error; "" for any.
            words: in its message.
        """
        attempts = self.attempt(route, *loads)
        ((error, message),) = {(each.error, each.message) for each in attempts[0]}
        assert error and kind in ("", error), f"{error}: {message}"
        for word in words:
            assert word in message
        assert all(each.changed == [] for each in attempts[0])
        return attempts

    def run(self, launch: Launch, fn: Any, *args: Any, **options: Any) -> list[Any]:
        """A call on a world of the launch's size."""
        return list(self.worlds.get(launch.world).run(fn, *args, **options))


def mean_losses(locals_: Sequence[Local]) -> list[float]:
    """Over all ranks, step by step."""
    return [sum(step) / len(step) for step in zip(*(local.losses for local in locals_), strict=True)]


# --- what all ranks hold together


def join(locals_: Sequence[Local], model: str) -> CapturedEngine:
    """The whole model of what all ranks hold, under one build's names.

    A parameter that several stages hold is once there for each: "name", "name#1", … in the order of the stages.
    """
    by_place: dict[tuple[int, int], Local] = {}
    for local in locals_:  # data- and sequence-parallel ranks hold the same
        twin = by_place.setdefault((local.place.pp_rank, local.place.tp_rank), local)
        differences = compare(twin.state, local.state)[1]
        assert not differences, differences
    parameters: dict[str, CapturedParameter] = {}
    buffers: dict[str, Any] = {}
    family = find_family(model)
    for stage in sorted({stage for stage, _ in by_place}):
        shards = [by_place[place].state for place in sorted(by_place) if place[0] == stage]
        for name in shards[0].parameters:
            plain = family.find_name(name, model)
            whole = _join_parameter([shard.parameters[name] for shard in shards], plain, model)
            parameters[_number(plain, parameters)] = whole
        for name in shards[0].buffers:
            plain = family.find_name(name, model)
            buffers[_number(plain, buffers)] = join_tensors([shard.buffers[name] for shard in shards], plain, model)
    return replace(by_place[0, 0].state, parameters=parameters, buffers=buffers)


def _number(name: str, found: Mapping[str, Any]) -> str:
    copies = count_copies(name, found)
    return f"{name}#{copies}" if copies else name


def count_copies(name: str, found: Mapping[str, Any]) -> int:
    """How many stages hold what has this name."""
    return sum(each.partition("#")[0] == name.partition("#")[0] for each in found)


def _join_parameter(shards: Sequence[CapturedParameter], name: str, model: str) -> CapturedParameter:
    if find_family(model).find_blocks(name, model):
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
    """The whole tensor of what the tensor-parallel ranks hold."""
    cut = find_family(model).find_blocks(name, model)
    if cut is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"{name}: replicas differ"
        return shards[0]
    dim, blocks = cut
    if not blocks:
        return torch.cat(list(shards), dim)
    parts = [shard.split([width // len(shards) for width in blocks], dim) for shard in shards]
    return torch.cat([torch.cat(block, dim) for block in zip(*parts, strict=True)], dim)


def expect(saved: CapturedEngine, loaded: CapturedEngine) -> CapturedEngine:
    """What a load of `saved` should make of an engine that holds what `loaded` names.

    Stages take their own copy back where there are as many as were saved, else the first stage the first one and the
    last stage the last one. Of buffers DeepSpeed saves the first stage's only: layers with a `forward_fn` have no file.
    A vocabulary loses its last padding rows, or gets new ones of zeros.
    """
    parameters = {
        name: _fit_rows(saved.parameters[_pick(name, saved.parameters, loaded.parameters)], len(state.value))
        for name, state in loaded.parameters.items()
    }
    lost = {name: state for name, state in saved.parameters.items() if "#" not in name and name not in parameters}
    buffers = {name: saved.buffers[name.partition("#")[0]] for name in loaded.buffers}
    return replace(saved, parameters={**parameters, **lost}, buffers=buffers)


def _pick(name: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> str:
    """The saved copy that a live one takes."""
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
    saved: Sequence[Local], loaded: Sequence[Local], model: str, *, lost_copies: bool = False, **options: Any
) -> tuple[int, list[str]]:
    """How many tensors were compared, and what differs from what the load should have made.

    Args:
        lost_copies: the files hold only the first stage's copy of tied modules.
        options: of `compare`.
    """
    got, source = join(loaded, model), join(saved, model)
    if lost_copies:
        source.parameters = {name: state for name, state in source.parameters.items() if "#" not in name}
    return compare(expect(source, got), got, **options)


def check(route: Route, saved: Sequence[Local], resumed: Sequence[Local], least: int = 80, **options: Any) -> None:
    """All of the source's bits are where the target wants them."""
    assert all(local.direct for local in resumed), resumed[0].reason
    lost = route.source.loses_copies
    count, differences = compare_joined(saved, resumed, route.model, lost_copies=lost, **options)
    assert count > least
    assert not differences, "\n".join(differences[:20])
