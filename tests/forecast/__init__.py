"""What a resume would do, foretold without an engine."""
