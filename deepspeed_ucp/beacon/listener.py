"""What a listener is told; each does nothing of what it does not care for."""

from __future__ import annotations


class Listener:
    """Is told of a rank's steps and phases, in the thread that trains; may raise whatever it meets."""

    def report_step(self, step: int, total: int | None) -> None:
        """The rank has got as far as ``step``, of ``total`` where that is known."""

    def enter(self, phase: str) -> None:
        """The rank is in a phase from now on, within those that it was in."""

    def leave(self, phase: str) -> None:
        """The phase that it has entered last is over."""

    def end(self) -> None:
        """It is told nothing from now on."""
