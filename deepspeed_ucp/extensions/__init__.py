"""Special cases of a load; :mod:`.registry` imports only the modules in use."""
