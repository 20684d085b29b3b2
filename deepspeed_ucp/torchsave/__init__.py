"""torch.save's file format, read and written without torch: zips of records around one inert pickle."""
