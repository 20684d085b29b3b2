"""Special cases of a load, behind :mod:`.registry`: a resume imports only the modules that it needs."""
