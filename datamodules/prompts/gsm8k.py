"""GSM8K: grade-school word problems whose answers end in `#### number` (arXiv:2110.14168)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datamodules.prompts.jsonl import read_json_lines, text_field
from datamodules.prompts.source import PromptSplit, user_turn
from datamodules.types import Prompt

MARKER = "####"


def final_answer(solution: str, where: str) -> str:
    """Return the number after the last `####`, without thousands separators.

    Raises:
        ValueError: the solution has no such mark.
    """
    _, mark, answer = solution.rpartition(MARKER)
    if not mark or not answer.strip():
        raise ValueError(f"{where}: the answer has no '{MARKER} number' at its end: {solution[-80:]!r}")
    return answer.strip().replace(",", "")


class GSM8K:
    """The data set from the hub or from a local folder with train.jsonl and test.jsonl.

    Args:
        path: a folder, or a hub id such as "openai/gsm8k" that the `datasets` library loads.
        instruction: appended to each question, separated by a blank line.
        max_train: keep the first so many training problems; null keeps all.
        max_held_out: keep the first so many test problems; null keeps all.
    """

    def __init__(self, path: str, instruction: str, max_train: int | None, max_held_out: int | None) -> None:
        for key, value in (("max_train", max_train), ("max_held_out", max_held_out)):
            if value is not None and value < 1:
                raise ValueError(f"prompts.{key} must be at least 1 or null, got {value}")
        self.path = path
        self.instruction = instruction
        self.max_train = max_train
        self.max_held_out = max_held_out

    def load(self) -> PromptSplit:
        """Return the training split and the test split."""
        return PromptSplit(self._prompts("train", self.max_train), self._prompts("test", self.max_held_out)).checked(
            "gsm8k"
        )

    def _prompts(self, split: str, limit: int | None) -> list[Prompt]:
        records = list(self._records(split))[:limit]
        return [self._prompt(split, number, record) for number, record in records]

    def _records(self, split: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            return read_json_lines(folder / f"{split}.jsonl")
        if self.path.startswith((".", "/", "~")):
            raise ValueError(f"prompts.path: {self.path} is not a folder with train.jsonl and test.jsonl")
        import datasets  # heavy, and only a hub id needs it

        return enumerate(datasets.load_dataset(self.path, "main", split=split), start=1)

    def _prompt(self, split: str, number: int, record: Mapping[str, Any]) -> Prompt:
        where = f"{self.path}/{split}:{number}"
        question = text_field(dict(record), "question", "prompts.path", where)
        solution = text_field(dict(record), "answer", "prompts.path", where)
        text = f"{question}\n\n{self.instruction}" if self.instruction else question
        return Prompt(f"gsm8k/{split}/{number}", user_turn(text), final_answer(solution, where), demonstration=solution)
