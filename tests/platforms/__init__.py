"""The recipes of examples/platforms under what starts jobs there, where it can be had: a skip says what is missing."""
