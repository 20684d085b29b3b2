"""Saves that do not stop training: DeepSpeed writes its own files into memory, a process of its own takes them on.

On the ranks: :mod:`.saving`, :mod:`.saver`, :mod:`.finding`. In the writer's process, which imports neither torch nor
deepspeed: :mod:`.writer`, :mod:`.places`, :mod:`.copies`. Between them lies what :mod:`.memory` describes.
"""
