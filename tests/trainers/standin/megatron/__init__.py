"""Stand-in for Megatron-DeepSpeed's `checkpointing.py` and `training.py`, as of July 2025 (4efb479).

It makes the ds_config, loads the engine, compares the arguments, and sets the random states; with
``--universal-checkpoint`` at other degrees it seeds the tensor-parallel ranks anew.
"""
