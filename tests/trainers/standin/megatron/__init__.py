"""Stands in for Megatron-DeepSpeed: what its `checkpointing.py` and `training.py` do around an engine's saves, loads.

The order of what happens, the names, and the checks are those of its release of July 2025 (4efb479): the ds_config is
made, the engine is loaded, the arguments are compared, random states are set, and with ``--universal-checkpoint`` at
other degrees the tensor-parallel ranks are seeded anew.
"""
