"""The format of torch.save files, read and written."""
