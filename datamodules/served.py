"""A finished round as Lightning's dataloader takes it."""

from collections.abc import Callable, Sequence

from torch.utils.data import Dataset

from datamodules.types import OptimizerStep


class Served(Dataset[OptimizerStep]):
    """A finished round; a look at what runs beside the training comes before each optimizer step."""

    def __init__(self, steps: Sequence[OptimizerStep], check: Callable[[], None]) -> None:
        self.steps = steps
        self.check = check

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> OptimizerStep:
        self.check()
        return self.steps[index]
