"""Pure data of a checkpoint: keys, byte ranges of files, flat buffers, wrappers, topology, and the index of all these.

The atomic checkpoint is the common representation of Lian et al. (ATC'25, section 4).
"""
