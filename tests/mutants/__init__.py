"""Hand-written mistakes in the code, all of which the tests must detect (`make mutants`)."""
