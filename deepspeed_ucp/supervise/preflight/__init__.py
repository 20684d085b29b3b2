"""Nodes are tested before a start: what each measures of itself and of the way to others, and which fail."""
