"""Fits an export to a Hugging Face model: names, shapes, configuration, tokenizer."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..comm import Comm
from ..errors import ConfigError, MismatchError, UnsupportedError, shorten
from ..extensions.huggingface import invert, map_file
from ..formats import open_checkpoint
from ..formats.deepspeed.files import scan_folder
from ..formats.foreign.names import ADAPTER_CONFIG, CONFIG, QUANTIZED, find_format
from ..hub import find_cached
from ..io.disk import create_file, explain_full
from ..io.jsonfile import read_json
from ..model.index import AtomicIndex
from ..model.storage import count
from ..plan.derive import derive, recast
from ..plan.match import are_same
from ..plan.settling import list_shapes
from ..tensor_parallel.adapters import is_added
from ..tensor_parallel.layout import Shape
from ..tensor_parallel.rename import Rename
from ..tensor_parallel.rules import advise_family
from .output import BESIDE, TEMPLATES
from .tensors import Selection

logger = logging.getLogger("deepspeed_ucp")

_NAMES = (
    "Bring names together by --rename or --patterns, rows that pad a vocabulary by --patterns, or name the right model."
)

_CONFIG = "Name a folder with a model that from_pretrained loads."

_ADAPTER = (
    "It holds an adapter: write it with --adapter, without --like. PEFT's PeftModel.from_pretrained(BASE, OUT)"
    ".merge_and_unload() merges it."
)


def find_model(like: str) -> str:
    """Return the folder of a model, given as a folder or as the id of a cached model."""
    folder = like
    if not os.path.isdir(like):
        try:
            folder = find_cached(like)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"--like {like}: neither a folder nor a model in the local cache of the hub ({error}). Download it, or "
                "name a folder."
            ) from None
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        raise ConfigError(f"--like {like}: holds no config.json, so it is no Hugging Face model.")
    return folder


@dataclass
class LikeModel:
    """A model in a folder with a ``config.json``."""

    folder: str

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = read_json(os.path.join(self.folder, CONFIG), advice=_CONFIG)
        return config

    @cached_property
    def weights(self) -> AtomicIndex | None:
        """Index of the folder's weights; None without weights or with quantized ones."""
        has_weights = find_format(scan_folder(self.folder)) is not None and not self.config.get(QUANTIZED)
        return open_checkpoint(self.folder, Comm()) if has_weights else None

    @cached_property
    def models(self) -> list[Any]:
        """Models of the configuration on the meta device; several if its kind is unknown."""
        try:
            import torch
            import transformers

            config = transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False)  # no prompt
            named = [getattr(transformers, name, None) for name in config.architectures or ()]
            kinds = [kind._from_config for kind in named if kind is not None]
            auto = (transformers.AutoModelForCausalLM, transformers.AutoModel)
            models = []
            for make in kinds or [kind.from_config for kind in auto]:
                with suppress(ValueError), torch.device("meta"):  # not a model of that kind
                    models.append(make(config))
            return models
        except Exception as error:  # noqa: BLE001 - missing packages, or a model that needs remote code
            logger.info("%s: transformers makes no model of its configuration (%s)", self.folder, error)
            return []

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the weights by name in the files; empty without weights."""
        return {name: shapes[0] for name, shapes in list_shapes(self.weights).items()} if self.weights else {}

    def rename_like_files(self, index: AtomicIndex, renames: Collection[Rename]) -> AtomicIndex:
        """Return the index with names and shapes of files, where no ``renames`` apply."""
        saved = {param.name for param in index.atoms.storages}
        known = {name for name in saved if not any(rule.match(name) for rule in renames)}
        for model in self.models if known - self.shapes.keys() else ():
            files, weights = self.shapes or _list_file_shapes(model), model.state_dict()
            index = recast(index, {name: (tuple(weight.shape),) for name, weight in weights.items()})
            known |= {param.name for param in index.atoms.storages} - saved
            try:
                mapping = map_file(model, files, weights)
            except UnsupportedError:  # from_pretrained also accepts the names in memory
                continue
            made = {
                name: renamed
                for name, renamed in invert(mapping, files).items()
                if name not in known and all(piece.name in known for piece in renamed.slices)
            }
            if made:
                return derive(index, made)
        return index

    def compare(self, selection: Selection) -> list[str]:
        """Return tied names to omit; MismatchError if the tensors do not fit the model.

        The model ties these names to others, which have equal elements (FSDP saves both).
        """
        written = {tensor.names[0]: tensor.shape for tensor in selection.weights}
        readings = [_simulate_load(model, written) for model in self.models]
        if not readings and self.shapes:
            readings = [_LoadableTensors(self.shapes, written, self.shapes.keys() - written.keys())]
        if not readings:
            text = "%s: transformers creates no model from it, and it has no weights: nothing was compared"
            logger.warning(text, self.folder)
            return []
        best = min(readings, key=lambda reading: len(reading.list_faults()))
        atoms = {tensor.names[0]: tensor.full.atom for tensor in selection.weights}
        same = {alias: are_same(selection.index, atoms[alias], atoms[name]) for alias, name in best.tied.items()}
        faults = best.list_faults()
        if untied := [f"{alias} to {best.tied[alias]}" for alias, is_same in same.items() if is_same is False]:
            faults.append(f"tied there, with other values here: {shorten(untied)}")
        if faults:
            family = advise_family(written.keys(), best.wanted.keys()).strip().replace('"patterns":', "--patterns")
            advice = _ADAPTER if any(map(is_added, written)) else family or _NAMES
            raise MismatchError(f"The checkpoint is not of the model in {self.folder}: {'; '.join(faults)}. {advice}")
        return [alias for alias, is_same in same.items() if is_same]

    def copy_metadata(self, folder: str, dtypes: Collection[str]) -> None:
        """Copy configurations, tokenizer and similar files; set the written element type."""
        for name in filter(BESIDE.fullmatch, sorted(os.listdir(self.folder))):
            path = os.path.join(self.folder, name)
            with explain_full(folder):
                if name == CONFIG:
                    create_file(os.path.join(folder, name), self._dump_config(dtypes).encode())
                elif name == TEMPLATES and os.path.isdir(path):
                    shutil.copytree(
                        path,
                        os.path.join(folder, name),
                        ignore=lambda _, files: [file for file in files if not file.endswith(".jinja")],
                    )
                elif name != ADAPTER_CONFIG and os.path.isfile(path):  # from_pretrained would load an adapter
                    shutil.copyfile(path, os.path.join(folder, name))

    def _dump_config(self, dtypes: Collection[str]) -> str:
        """Return the configuration with the element type of the written weights."""
        config = {key: value for key, value in self.config.items() if key != QUANTIZED}
        floating = [dtype for dtype in dtypes if dtype in ("float64", "float32", "float16", "bfloat16")]
        if len(floating) == 1:
            known = [name for name in ("dtype", "torch_dtype") if name in config]
            config |= dict.fromkeys(known or ["torch_dtype"], floating[0])
        return json.dumps(config, indent=2) + "\n"


def _list_file_shapes(model: Any) -> dict[str, Shape]:
    """Return the model's shapes by the names that ``save_pretrained`` writes."""
    try:
        from transformers.core_model_loading import revert_weight_conversion  # transformers 5
    except ImportError:
        return {}
    weights = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(weight.shape) for name, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class _LoadableTensors:
    """The tensors that ``from_pretrained`` finds in a file.

    Attributes:
        wanted: shapes of the model's tensors.
        made: shapes of the tensors that the load makes of the file.
        tied: name in the file → other name there to which the model ties it.
    """

    wanted: Mapping[str, Shape]
    made: Mapping[str, Shape]
    missing: Collection[str]
    tied: Mapping[str, str] = field(default_factory=dict)

    def list_faults(self) -> list[str]:
        """Describe the tensors that do not fit, by kind of fault."""
        both = sorted(self.wanted.keys() & self.made.keys())
        shapes = [(name, self.made[name], self.wanted[name]) for name in both]
        faults = {
            "missing here": sorted(self.missing),
            "not there": sorted(self.made.keys() - self.wanted.keys()),
            "of another shape": [f"{name} {here}, there {there}" for name, here, there in shapes if here != there],
        }
        return [f"{kind}: {shorten(names)}" for kind, names in faults.items() if names]


def _simulate_load(model: Any, written: Mapping[str, Shape]) -> _LoadableTensors:
    live = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    mapping = map_file(model, written, live)
    used = {piece.name for made in mapping.derived.values() for piece in made.slices} | mapping.dropped
    shapes = {name: shape for name, shape in written.items() if name not in used}
    for name, made in mapping.derived.items():
        numel = sum(count(written[piece.name]) // piece.count for piece in made.slices)
        shapes[name] = made.find_shape(numel, written[made.slices[0].name])
    first: dict[int, str] = {}
    tensors = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    ties = {name: first[tensors[name]] for name in tensors if first.setdefault(tensors[name], name) != name}
    tied = {alias: name for alias, name in ties.items() if {alias, name} <= written.keys()}
    filled = {tensors[name] for name in shapes if name in tensors}
    missing = {name for name in live.keys() - shapes.keys() if tensors.get(name) not in filled}
    return _LoadableTensors(live, shapes, missing, tied)
