"""The Hugging Face model that an export is to be like: its configuration and tokenizer, its names and shapes."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, MismatchError, shorten
from ..io.disk import explain_full
from ..patterns.layout import Shape
from ..plan.ties import are_same
from ..sources import open_checkpoint
from ..sources.files import scan_folder
from ..sources.foreign.names import find_format
from .output import BESIDE
from .tensors import Selection

logger = logging.getLogger("deepspeed_ucp")

_CONFIG = "config.json"


def find_model(like: str) -> str:
    """The folder of a model: itself, or that of a hub's id in the local cache.

    Raises:
        ConfigError: there is none, or it has no configuration.
    """
    folder = like
    if not os.path.isdir(like):
        try:
            from huggingface_hub import snapshot_download

            folder = snapshot_download(like, local_files_only=True)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"--like {like}: neither a folder nor a model in the local cache of the hub ({error}). Download it, or "
                "name a folder."
            ) from None
    if not os.path.isfile(os.path.join(folder, _CONFIG)):
        raise ConfigError(f"--like {like}: holds no config.json, so it is no Hugging Face model.")
    return folder


def copy_beside(source: str, folder: str, dtypes: Collection[str]) -> None:
    """Copy a model's configurations, tokenizer and the like; the configuration tells the element type that is written.

    Args:
        dtypes: of the tensors that are written.
    """
    for name in filter(BESIDE.fullmatch, sorted(os.listdir(source))):
        path = os.path.join(source, name)
        if name == _CONFIG:
            with explain_full(folder), open(os.path.join(folder, name), "x", encoding="utf-8") as stream:
                stream.write(_tell_dtype(path, dtypes))
        elif os.path.isfile(path):
            with explain_full(folder):
                shutil.copyfile(path, os.path.join(folder, name))


def _tell_dtype(path: str, dtypes: Collection[str]) -> str:
    """The configuration, by which from_pretrained chooses the element type that it loads in.

    Raises:
        CheckpointError: it is no JSON object.
    """
    with open(path, encoding="utf-8") as stream:
        text = stream.read()
    try:
        told = dict(json.loads(text))
    except ValueError as error:
        raise CheckpointError(f"is no configuration ({error}).", path=path) from None
    floating = [each for each in dtypes if each.startswith(("float", "bfloat"))]
    known = [name for name in ("dtype", "torch_dtype") if name in told]
    if len(floating) != 1 or (known and all(told[name] == floating[0] for name in known)):
        return text
    return json.dumps({**told, **dict.fromkeys(known or ["torch_dtype"], floating[0])}, indent=2) + "\n"


def compare(like: str, selection: Selection) -> list[str]:
    """Hold names and shapes against the model's own weights, else against what transformers makes of its configuration.

    Args:
        like: folder of the model.
        selection: what is to be written.

    Returns:
        Names to be left out: the model ties them to others that have the same elements, as FSDP saves them.

    Raises:
        MismatchError: from_pretrained would not find a tensor, or find one too many, or one of another shape.
    """
    tensors = {tensor.names[0]: tensor for tensor in selection.weights}
    written = {name: tensor.shape for name, tensor in tensors.items()}
    index = open_weights(like)
    live = [] if index else _list_live(like)
    held = {key.name: atom.shape for key, atom in index.stored.atoms.items()} if index else {}
    forms = [held] if held else [form for model in live for form in model.forms]
    if not forms:
        logger.warning("%s: has no weights, and transformers makes no model of it: nothing was compared", like)
        return []
    wanted = max(forms, key=lambda form: len(form.items() & written.items()))
    missing, extra = sorted(wanted.keys() - written.keys()), sorted(written.keys() - wanted.keys())
    ties = {alias: name for model in live or (_list_live(like) if extra else ()) for alias, name in model.ties.items()}
    ties = {alias: ties[alias] for alias in extra if ties.get(alias) in written}
    atoms = {name: tensor.full.atom for name, tensor in tensors.items()}
    same = {alias: are_same(selection.index, atoms[alias], atoms[name]) for alias, name in ties.items()}
    extra = [name for name in extra if not same.get(name)]
    both = sorted(wanted.keys() & written.keys())
    other = [f"{name} {written[name]}, there {wanted[name]}" for name in both if written[name] != wanted[name]]
    told = {
        "missing here": missing,
        "not there": [name for name in extra if same.get(name) is not False],
        "tied there, with other values here": [f"{name} to {ties[name]}" for name in extra if same.get(name) is False],
        "of another shape": other,
    }
    if faults := [f"{what}: {shorten(each)}" for what, each in told.items() if each]:
        raise MismatchError(
            f"The checkpoint is not of the model in {like}: {'; '.join(faults)}. Bring names together by --rename or "
            "--patterns (hf-moe for experts), rows that pad a vocabulary by --patterns, or name the right model."
        )
    return [alias for alias, is_same in same.items() if is_same]


def open_weights(like: str) -> AtomicIndex | None:
    """The weights in a model's folder; None where it has none.

    Raises:
        UcpError: they cannot be read.
    """
    return open_checkpoint(like, Comm()) if find_format(scan_folder(like)) is not None else None


class _Live(NamedTuple):
    """A model that transformers makes.

    Attributes:
        forms: shapes by the names that it is saved under, and by its own: all of these are loaded.
        ties: second names of tensors that it has under two → the first ones.
    """

    forms: list[dict[str, Shape]]
    ties: dict[str, str]


def _list_live(like: str) -> list[_Live]:
    """The models that transformers makes of a configuration. Nothing where it makes none."""
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(like)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        kinds = [kind._from_config for kind in named if kind is not None]
        auto = (transformers.AutoModelForCausalLM, transformers.AutoModel)
        return [live for make in kinds or [kind.from_config for kind in auto] for live in _make_live(make, config)]
    except Exception as error:  # noqa: BLE001 - of code that is not here, of a model that needs its own
        logger.info("%s: transformers makes no model of its configuration (%s)", like, error)
        return []


def _make_live(make: Callable[[Any], Any], config: Any) -> list[_Live]:
    import torch

    try:
        with torch.device("meta"):
            model = make(config)
    except ValueError:  # no model of that kind
        return []
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            ties[name] = first[id(param)]
    live = {name: each for name, each in model.state_dict().items() if name not in ties}
    forms = [live]
    try:
        from transformers.core_model_loading import revert_weight_conversion  # transformers 5
    except ImportError:
        pass
    else:
        forms.append(revert_weight_conversion(model, live))
    return [_Live([{name: tuple(each.shape) for name, each in form.items()} for form in forms], ties)]
