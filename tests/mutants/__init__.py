"""Mistakes made by hand in the hot code, each of which the tests have to notice (`make mutants`)."""
