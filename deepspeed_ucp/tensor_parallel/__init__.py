"""Tensor-parallel layouts of parameters: geometry of shards, patterns, and rules that assign patterns."""

from .facts import Facts
from .kinds import (
    Partial,
    Pattern,
    Replicate,
    SameShards,
    ShardH,
    ShardHy,
    ShardNC,
    ShardV,
    Unique,
    advise_vocabulary,
)
from .layout import Layout, Run, copy_runs, restrict_source, whole
from .metadata import from_universal_info
from .recorded import from_recorded, read_pattern, record_pattern
from .rename import Rename, find_idle, parse_renames, rename_names
from .resize import Resized, advise_resize, pad_vocabulary
from .rules import (
    RuleSet,
    advise_family,
    find_renamed,
    find_resize,
    from_arguments,
    from_attributes,
    from_config,
    list_families,
    list_renames,
    load_family,
)
from .settle import Settled, settle

__all__ = [
    "Facts",
    "Layout",
    "Partial",
    "Pattern",
    "Rename",
    "Replicate",
    "Resized",
    "RuleSet",
    "Run",
    "SameShards",
    "Settled",
    "ShardH",
    "ShardHy",
    "ShardNC",
    "ShardV",
    "Unique",
    "advise_family",
    "advise_resize",
    "advise_vocabulary",
    "copy_runs",
    "find_idle",
    "find_renamed",
    "find_resize",
    "from_arguments",
    "from_attributes",
    "from_config",
    "from_recorded",
    "from_universal_info",
    "list_families",
    "list_renames",
    "load_family",
    "pad_vocabulary",
    "parse_renames",
    "read_pattern",
    "record_pattern",
    "rename_names",
    "restrict_source",
    "settle",
    "whole",
]
