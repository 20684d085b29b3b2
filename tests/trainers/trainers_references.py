"""A scheduler that holds references to param groups, as scripts give it to trainers. Imported on the ranks only."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class MovesBetas(LambdaLR):
    """Decays the learning rates, and sets betas in the param groups that the optimizer had at first."""

    def __init__(self, optimizer: Any) -> None:
        self.groups = list(optimizer.param_groups)
        super().__init__(optimizer, lambda step: 1 / (1 + step))

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.groups:
            group["betas"] = (0.5 + 0.03 * self.last_epoch, 0.95)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "groups"}
