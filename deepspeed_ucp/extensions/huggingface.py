"""Map tensors of files to the names and forms of transformers and PEFT in memory.

``from_pretrained`` renames, joins and splits tensors (``transformers/core_model_loading.py``, 5.x), and adds or removes
the base model's prefix; PEFT wraps adapted modules. The libraries' rules are read from the live model and become
:class:`~deepspeed_ucp.plan.derive.DerivedParam`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from math import gcd
from typing import Any

from ..errors import MismatchError, UnsupportedError, shorten
from ..model.flat import Shape
from ..model.index import AtomicIndex
from ..model.storage import MASTER, count, strip_compiled
from ..plan.derive import DerivedParam, Slice, derive
from ..plan.match import Adaptation
from ..plan.settling import list_shapes
from ..tensor_parallel import adapters
from .registry import Extension

logger = logging.getLogger("deepspeed_ucp")


class HuggingFace(Extension):
    """Models of transformers and PEFT."""

    def adapt(self, adaptation: Adaptation) -> None:
        saved, module, view = adaptation.index, adaptation.module, adaptation.view
        mapping = map_checkpoint(saved, module, {*view.shapes, *view.aliases}, adaptation.renamed)
        if mapping.derived or mapping.dropped:
            adaptation.index = derive(saved, mapping.derived, mapping.dropped)
        adaptation.view = replace(view, declared_new=mapping.declared_new)
        adaptation.notes += describe_config(saved, read_config(module) if saved.foreign else {})
        if mapping.declared_new:
            adaptation.notes.append(_ADAPTER.format(shorten(sorted(mapping.declared_new), 2)))
        if adaptation.log and (text := mapping.describe()):
            logger.info("%s", text)


_ADAPTER = "the checkpoint has no adapter; the new model's starts from its initial values: {}"


@dataclass(slots=True)
class TensorMap:
    """Mapping of a checkpoint's tensors to a model's.

    Attributes:
        derived: name in the model → its parts, unless it is the saved tensor of that name.
        dropped: saved names that the library ignores silently.
        declared_new: an adapter's tensors that the checkpoint lacks, which keep their values.
    """

    derived: dict[str, DerivedParam] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    declared_new: frozenset[str] = frozenset()

    def describe(self) -> str:
        texts = [f"{name} is of no use to this model" for name in sorted(self.dropped)]
        for name, derived in self.derived.items():
            first, *others = dict.fromkeys(piece.name for piece in derived.slices)
            texts.append(f"{first}{' and others' if others else ''} → {name}")
        return f"read as Hugging Face's libraries do: {shorten(texts, 3)}" if texts else ""


def map_checkpoint(index: AtomicIndex, module: Any, live: Collection[str], renamed: Collection[str]) -> TensorMap:
    """Map a checkpoint's tensors as the libraries do; empty if nothing is renamed.

    Args:
        module: the live model, or a module with one such model inside.
        live: names of all its tensors on all ranks.
        renamed: saved names that match the user's rules, which are not mapped.

    Raises:
        UcpError: as for :func:`map_file`.
    """
    saved = {param.name for param in index.atoms.storages} - {*renamed}
    wrapping = _find_model(module) if saved - {*live} else None
    if wrapping is None:
        return TensorMap()
    outer, model, is_wrapped = wrapping
    shapes = {name: shapes_by_rank[0] for name, shapes_by_rank in list_shapes(index).items() if name in saved}
    if is_wrapped and any(map(adapters.read_live, shapes)):
        return _rename_adapter(shapes, {*live}, outer)
    memory: dict[str, list[str]] = defaultdict(list)
    layers = (
        strip_compiled(name)
        for name, layer in module.named_modules()
        if any(kind.__module__.startswith("peft.") for kind in type(layer).__mro__)
    )
    added, adapted = set(), {name.removeprefix(outer) for name in layers}
    for name in sorted(live):  # equal order on all ranks
        inner = name.removeprefix(outer)
        if is_wrapped and adapters.is_added(inner):
            added.add(name)
        elif name.startswith(outer):
            memory[adapters.name_in_base(inner, adapted) if is_wrapped else inner].append(name)
    # In a run's own save, and with a wrapped model, names that exist in memory are not renamed.
    fixed = () if index.is_weights_alone and not (outer or is_wrapped) else {*live}
    shapes = {name: shape for name, shape in shapes.items() if name not in fixed}
    mapping = map_file(model, shapes, memory.keys())
    if not index.is_weights_alone:  # saved tensors are not replaced, and trained ones are not dropped
        mapping.derived = {new: parts for new, parts in mapping.derived.items() if new not in saved}
        mapping.dropped = {name for name in mapping.dropped if index.find(name, MASTER) is None}
    missing = memory.keys() - shapes.keys() - mapping.derived.keys()
    sources = find_tied(model, missing, shapes.keys() - memory.keys()) if index.is_weights_alone else {}
    mapping.derived |= {name: DerivedParam.whole(source, shapes[source]) for name, source in sources.items()}
    mapping.dropped -= {*sources.values()}
    if outer or is_wrapped:
        plain = {name: DerivedParam.whole(name, shapes[name]) for name in memory if name in shapes}
        mapping.derived = {
            new: parts
            for name, parts in {**plain, **mapping.derived}.items()
            for new in memory.get(name, [outer + name])
        }
        if index.is_weights_alone:
            _follow_ties(mapping, module, memory)
        mapping.declared_new = frozenset(added) if mapping.derived else frozenset()
    return mapping


def _follow_ties(mapping: TensorMap, module: Any, memory: Mapping[str, Sequence[str]]) -> None:
    """Extend the mapping to other live tensors that share memory with a mapped one.

    Args:
        memory: name in the model without an adapter → names in the live model.
    """
    params = {strip_compiled(name): id(param) for name, param in module.named_parameters(remove_duplicate=False)}
    derived_by_id = {params[name]: derived for name, derived in mapping.derived.items() if name in params}
    for names in memory.values():
        derived = next((derived_by_id[params[name]] for name in names if params.get(name) in derived_by_id), None)
        new = [name for name in names if name not in mapping.derived and params.get(name) not in derived_by_id]
        mapping.derived |= dict.fromkeys(new, derived) if derived is not None else {}


def find_tied(model: Any, missing: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Find saved tensors that models of a family tie to a missing tensor.

    For example, an encoder's embedding may have been saved under the name of the decoder's.

    Args:
        missing: names in the model that the file lacks.
        saved: names in the file that the model lacks.

    Returns:
        Name in the model → saved name, if exactly one is possible.
    """
    if not _is_pretrained(model) or not getattr(model.config, "tie_word_embeddings", True):
        return {}  # an untied head has other values
    family = vars(sys.modules[type(model).__module__]).values()
    config_class = getattr(type(model), "config_class", None)
    kinds = [kind for kind in family if isinstance(kind, type) and getattr(kind, "config_class", None) is config_class]
    tables = [table for kind in kinds if isinstance(table := getattr(kind, "_tied_weights_keys", None), dict)]
    sources = {}
    for name in missing:
        ties = {target for table in tables for target, source in table.items() if source == name}
        if len(candidates := ties & {*saved}) == 1:
            sources[name] = candidates.pop()
    return sources


def read_config(module: Any) -> dict[str, Any]:
    """Return the configuration of a module's single transformers model, or empty."""
    wrapping = _find_model(module)
    to_dict = getattr(getattr(wrapping[1], "config", None), "to_dict", None) if wrapping else None
    return to_dict() if to_dict else {}


def describe_config(index: AtomicIndex, config: Mapping[str, Any]) -> list[str]:
    """Describe differences between a live model's configuration and the saved one."""
    saved, live = (_flatten_rope(values) for values in (index.hints.get("config", {}), config))
    differing = [
        f"{key} {saved[key]!r:.40} (here {live[key]!r:.40})" for key in saved if key in live and saved[key] != live[key]
    ]
    if not differing:
        return []
    return [f"config.json of the weights has {shorten(differing)}: this model computes other results with them"]


def _flatten_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's numbers and strings, with those in ``rope_parameters``."""
    rope = config.get("rope_parameters")
    values = {**config, **(rope if isinstance(rope, dict) else {})}
    return {key: value for key, value in values.items() if isinstance(value, (int, float, str))}


def _find_model(module: Any) -> tuple[str, Any, bool] | None:
    """Find a module's single model: its prefix, itself, and whether PEFT wraps it."""
    peft, models = sys.modules.get("peft.peft_model"), list[tuple[str, Any, bool]]()
    for name, child in module.named_modules():
        outer = strip_compiled(f"{name}.") if name else ""
        if any(outer.startswith(prefix) for prefix, *_ in models):
            continue
        if peft is not None and isinstance(child, peft.PeftModel):
            model = child.get_base_model()  # prompt learning wraps no modules
            models.append((outer, model, getattr(child.base_model, "model", None) is model))
        elif _is_pretrained(child):
            models.append((outer, child, False))
    return models[0] if len(models) == 1 else None


def _rename_adapter(saved: Mapping[str, Shape], live: Set[str], outer: str) -> TensorMap:
    """Map a checkpoint's single adapter to a model's single adapter of another name."""
    before, after = ({tensor.adapter for tensor in map(adapters.read_live, names) if tensor} for names in (saved, live))
    mapping = TensorMap()
    for name in sorted(saved.keys() - live):
        tensor, new = adapters.read_live(name), name
        if tensor is not None and len(before) == len(after) == 1:
            new = replace(tensor, adapter=next(iter(after))).live
        new = next((live_name for live_name in (new, outer + new) if live_name in live), name)
        if new != name:
            mapping.derived[new] = DerivedParam.whole(name, saved[name])
    return mapping


def _is_pretrained(model: Any) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def map_file(model: Any, saved: Mapping[str, Shape], memory: Collection[str]) -> TensorMap:
    """Map a file's tensors as ``from_pretrained`` does; empty if nothing is renamed.

    Args:
        saved: shapes of the tensors in the file.
        memory: names in the model.

    Raises:
        UnsupportedError: a conversion moves elements within a tensor.
        MismatchError: inputs of a conversion are missing.
    """
    tensor_map = TensorMap()
    if not _is_pretrained(model):
        return tensor_map
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # before 5.0 names in memory equal those in files
        return tensor_map
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    in_memory, ignored = dict.fromkeys(memory, True), _find_ignored(model)
    joined: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(saved, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, in_memory)
        if new == name or (name in in_memory and new not in in_memory):
            new, pattern = name, None
        if pattern is not None:
            joined[new][pattern].append(name)
        elif new != name:
            tensor_map.derived[new] = DerivedParam.whole(name, saved[name])
        if new not in in_memory and pattern is None and ignored is not None and ignored.search(new):
            tensor_map.derived.pop(new, None)
            tensor_map.dropped.add(name)
    for new, inputs in joined.items():
        converter = next(rule for rule in converters if next(iter(inputs)) in rule.source_patterns)
        ordered = [inputs[pattern] for pattern in converter.source_patterns]
        tensor_map.derived |= _apply_converter(converter, new, ordered, saved)
    return tensor_map


def invert(mapping: TensorMap, shapes: Mapping[str, Shape]) -> dict[str, DerivedParam]:
    """Invert the mapping of a file's tensors: name in the file → parts of the model's."""
    parts: dict[str, dict[int, Slice]] = defaultdict(dict)
    for new, derived in mapping.derived.items():
        sizes = [count(shapes[piece.name]) // piece.count for piece in derived.slices]
        unit = gcd(*sizes) or 1
        total, position = sum(sizes) // unit, 0
        for piece, width in zip(derived.slices, (size // unit for size in sizes), strict=True):
            parts[piece.name][piece.number] = Slice(new, position, total, width)
            position += width
    return {
        name: DerivedParam(tuple(slices[number] for number in sorted(slices)), len(shapes[name]))
        for name, slices in parts.items()
    }


def _find_ignored(model: Any) -> re.Pattern[str] | None:
    """Return a pattern of tensors that are ignored if the model lacks them, or None."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [name for name, _ in model.named_buffers()]
    for end, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        patterns += [pattern] * any(name.endswith(end) for name in buffers)
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _apply_converter(
    converter: Any, new: str, inputs: Sequence[Sequence[str]], saved: Mapping[str, Shape]
) -> dict[str, DerivedParam]:
    """Return the parts of a converter's outputs, by name.

    Args:
        new: name of its first output.
        inputs: names of its inputs, by its patterns.
    """
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    names, experts = [*chain.from_iterable(inputs)], len(inputs[0])
    inner, targets = len(saved[names[0]]), converter.target_patterns
    if len(inputs) > 1 and len({*map(len, inputs)}) > 1:
        raise MismatchError(
            f"{new} is made of {shorten(converter.source_patterns)}: only {shorten(names, 2)} are there."
        )
    if steps == [("MergeModulelist", 0)] and len(inputs) == 1:
        return {new: DerivedParam(tuple(map(Slice, names)), inner + 1, (experts,))}
    if steps == [("MergeModulelist", 0), ("Concatenate", 1)]:
        ordered = chain.from_iterable(zip(*inputs, strict=True))
        return {new: DerivedParam(tuple(map(Slice, ordered)), inner + 1, (experts,))}
    if steps == [("Concatenate", 0)]:
        return {new: DerivedParam(tuple(map(Slice, names)), inner)}
    if steps == [("Chunk", 0)] and len(names) == 1 and targets[0] in new:
        parts = {new.replace(targets[0], target): index for index, target in enumerate(targets)}
        return {part: DerivedParam((Slice(names[0], index, len(parts)),), inner) for part, index in parts.items()}
    how = ", ".join(type(step).__name__ for step in converter.operations)
    raise UnsupportedError(
        f"{shorten(names, 2)} → {new}: transformers converts this as it reads ({how}), which is not done here. Load "
        "the folder with from_pretrained before deepspeed.initialize; or save that model by save_pretrained(…, "
        "save_original_format=False), and load that folder."
    )
