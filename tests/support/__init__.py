"""What several rooms of tests share: made checkpoints, ranks in one process, engines and what they train."""
