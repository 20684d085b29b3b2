"""What ranks do in the tests of real engines; most of it is imported on the ranks only."""
