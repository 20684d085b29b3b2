"""Writes DeepSpeed checkpoints of any topology from pure data, without an engine or a process group.

Describe a `Model`, draw a `State`, choose a `Topology`, and call `write_checkpoint`; `read_state` inverts it. For model
parallelism `split` divides the logical state, with shards by the test's `cut`. The files have the names, keys, layouts,
paddings and shared storages of DeepSpeed 0.19, as `test_against_deepspeed.py` verifies.
"""

from .description import ExpertLayer, Layer, Model, Param, Run, State, Topology, random_state
from .experts import own_models, own_state
from .files import build_files, build_local_files, write_checkpoint, write_files
from .layout import Flat, group_layouts, partition_layout
from .parallel import Local, split
from .reader import read_state
from .stages import bidirectional, contiguous, instance_names, interleaved

__all__ = [
    "ExpertLayer",
    "Flat",
    "Layer",
    "Local",
    "Model",
    "Param",
    "Run",
    "State",
    "Topology",
    "bidirectional",
    "build_files",
    "build_local_files",
    "contiguous",
    "group_layouts",
    "instance_names",
    "interleaved",
    "own_models",
    "own_state",
    "partition_layout",
    "random_state",
    "read_state",
    "split",
    "write_checkpoint",
    "write_files",
]
