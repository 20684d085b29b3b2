"""Data of a checkpoint: keys, byte ranges, flat buffers, wrappers and the index.

The atomic checkpoint is the common representation of Lian et al. (ATC'25, section 4).
"""
