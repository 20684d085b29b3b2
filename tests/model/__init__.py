"""Data model of a checkpoint: keys, storage, flat buffers, wrappers, topology."""
