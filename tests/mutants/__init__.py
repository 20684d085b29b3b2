"""Hand-written mutants of the code, which the tests must detect (`make mutants`)."""
