"""Non-blocking saves: DeepSpeed writes its files into memory, and a writer process copies them to their destinations.

On the ranks: :mod:`.saver`, which starts the writer process by :mod:`.launch`. In that process, which imports neither
torch nor deepspeed: :mod:`.writer`, :mod:`.places`, :mod:`.copies`. They share the folders that :mod:`.memory`
describes. :mod:`.room` decides which saves are kept there, :mod:`.search` finds them.
"""
