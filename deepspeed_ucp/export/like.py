"""The Hugging Face model that an export is to be like: its configuration and tokenizer, its names and shapes."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, MismatchError, shorten
from ..io.disk import explain_full
from ..patterns.layout import Shape
from ..sources import open_checkpoint
from ..sources.files import scan_folder
from ..sources.foreign.names import find_format
from .output import BESIDE

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


def compare(like: str, written: Mapping[str, Shape]) -> None:
    """Hold names and shapes against the model's own weights, else against what transformers makes of its configuration.

    Args:
        like: folder of the model.
        written: shapes by name; without names that are tied to another one.

    Raises:
        MismatchError: from_pretrained would not find a tensor, or find one too many, or one of another shape.
    """
    index = open_weights(like)
    forms = [{key.name: atom.shape for key, atom in index.stored.atoms.items()}] if index else _list_live(like)
    if not forms:
        logger.warning("%s: has no weights, and transformers makes no model of it: nothing was compared", like)
        return
    wanted = max(forms, key=lambda form: len(form.items() & written.items()))
    missing, extra = sorted(wanted.keys() - written.keys()), sorted(written.keys() - wanted.keys())
    both = sorted(wanted.keys() & written.keys())
    other = [f"{name} {written[name]}, there {wanted[name]}" for name in both if written[name] != wanted[name]]
    told = {"missing here": missing, "not there": extra, "of another shape": other}
    if faults := [f"{what}: {shorten(each)}" for what, each in told.items() if each]:
        raise MismatchError(
            f"The checkpoint is not of the model in {like}: {'; '.join(faults)}. Bring names together by --rename or "
            "--patterns (hf-moe for experts), rows that pad a vocabulary by --patterns, or name the right model."
        )


def open_weights(like: str) -> AtomicIndex | None:
    """The weights in a model's folder; None where it has none.

    Raises:
        UcpError: they cannot be read.
    """
    return open_checkpoint(like, Comm()) if find_format(scan_folder(like)) is not None else None


def _list_live(like: str) -> list[dict[str, Shape]]:
    """Shapes of the models that transformers makes of a configuration, by the names that it saves, and by its own: all
    of these are loaded. Nothing where it makes none.
    """
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(like)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        kinds = [kind._from_config for kind in named if kind is not None]
        auto = (transformers.AutoModelForCausalLM, transformers.AutoModel)
        return [form for make in kinds or [kind.from_config for kind in auto] for form in _list_forms(make, config)]
    except Exception as error:  # noqa: BLE001 - of code that is not here, of a model that needs its own
        logger.info("%s: transformers makes no model of its configuration (%s)", like, error)
        return []


def _list_forms(make: Callable[[Any], Any], config: Any) -> list[dict[str, Shape]]:
    import torch

    try:
        with torch.device("meta"):
            model = make(config)
    except ValueError:  # no model of that kind
        return []
    tied = (getattr(model, "_tied_weights_keys", None) or ()) if getattr(config, "tie_word_embeddings", False) else ()
    live = {name: each for name, each in model.state_dict().items() if name not in tied}
    forms = [live]
    try:
        from transformers.core_model_loading import revert_weight_conversion  # transformers 5
    except ImportError:
        pass
    else:
        forms.append(revert_weight_conversion(model, live))
    return [{name: tuple(each.shape) for name, each in form.items()} for form in forms]
