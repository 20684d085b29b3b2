"""torchrun's agents, which gather by themselves: one leads, and is followed by another one when it is lost."""
