"""Non-blocking saves through the nodes' memory.

DeepSpeed writes its files into memory. A writer process copies them to their destinations:

* On the ranks: :mod:`.saver` with :mod:`.files`, :mod:`.sizes` and :mod:`.neighbours`; :mod:`.launch`
  starts the writer process. :mod:`.search` finds saves for loads, :mod:`.keeping` postpones trainers' removals.
* In the writer process, which imports neither torch nor deepspeed: :mod:`.writer`, which copies to destinations
  (:mod:`.destinations`, :mod:`.publishing`) and to another node's memory (:mod:`.copies`).
* In both: the folders in memory (:mod:`.memory`), and which saves are kept there (:mod:`.budget`).
"""
