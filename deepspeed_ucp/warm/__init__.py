"""Warm starts: restarted ranks are forked from a process that has imported what they need (docs/restarts.md)."""
