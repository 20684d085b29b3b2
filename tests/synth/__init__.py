"""Writes normal DeepSpeed checkpoints of any topology from pure data, without an engine or a process group.

Thousands of loader cases become cheap in one process: describe a `Model`, draw a `State`, choose a `Topology`, and
`write_checkpoint`. The files have the names, keys, layouts, paddings and shared storages of DeepSpeed 0.19's own;
`test_synth_against_deepspeed.py` holds them against real saves. `read_state` is the inverse.
"""

from .description import Model, Param, Run, State, Topology, assert_same_state, random_state
from .files import build_files, write_checkpoint, write_files
from .layout import Flat, GroupLayout, Slice, group_layouts, partition_layout
from .reader import read_state

__all__ = [
    "Flat",
    "GroupLayout",
    "Model",
    "Param",
    "Run",
    "Slice",
    "State",
    "Topology",
    "assert_same_state",
    "build_files",
    "group_layouts",
    "partition_layout",
    "random_state",
    "read_state",
    "write_checkpoint",
    "write_files",
]
