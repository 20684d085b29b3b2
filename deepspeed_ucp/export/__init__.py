"""Exporting: weights as safetensors, all state for torch.distributed.checkpoint."""
