"""Read and write ``torch.save`` files without torch and without executing pickles."""
