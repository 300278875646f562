"""Prompts and answers from any JSON Lines file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.prompts.source import PromptSplit, user_turn
from datamodules.seeds import derive_seed
from datamodules.types import Prompt


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each record with its line number; blank lines are skipped.

    Raises:
        ValueError: the file is missing, empty, not UTF-8, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"prompts.path: {path} is not a file")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts.path: {path} is not UTF-8 ({error}); convert it first") from error
    if not any(line.strip() for line in lines):
        raise ValueError(f"prompts.path: {path} is empty; one JSON object a line is expected")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        except ValueError as error:  # not JSON, a number of thousands of digits, half of a surrogate pair
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number} must be a JSON object, got {type(record).__name__}")
        yield number, record


def text_field(record: dict[str, Any], name: str, key: str, where: str) -> str:
    """Return a field as text.

    Raises:
        ValueError: it is missing or empty, naming the line, the config key and the fields that are there.
    """
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{where} has no text in field {name!r} ({key}); its fields are {sorted(record)}; "
            f"set {key} to the right one"
        )
    return value


class JsonLines:
    """A file with one question and answer a line.

    Args:
        path: the file.
        prompt_field: field with the question.
        answer_field: field with the reference answer, text or a number.
        id_field: field with a unique id; null numbers the lines.
        held_out_fraction: share of prompts kept for measuring, chosen by id; in (0, 1).
    """

    def __init__(
        self, path: str, prompt_field: str, answer_field: str, id_field: str | None, held_out_fraction: float
    ) -> None:
        if not 0.0 < held_out_fraction < 1.0:
            raise ValueError(f"prompts.held_out_fraction must be in (0, 1), got {held_out_fraction}")
        self.path = Path(path)
        self.prompt_field = prompt_field
        self.answer_field = answer_field
        self.id_field = id_field
        self.held_out_fraction = held_out_fraction

    def load(self) -> PromptSplit:
        """Return the file's prompts; the same ids are held out wherever and in whatever order they stand."""
        prompts = [self._prompt(number, record) for number, record in read_json_lines(self.path)]
        self._check_ids(prompts)
        if len(prompts) < 2:
            raise ValueError(f"{self.path} has {len(prompts)} prompt; one to train on and one to hold out are needed")
        num_held_out = min(max(1, round(len(prompts) * self.held_out_fraction)), len(prompts) - 1)
        ranked = sorted(prompts, key=lambda p: derive_seed("held-out", p.id))
        held_out = {p.id for p in ranked[:num_held_out]}
        return PromptSplit(
            [p for p in prompts if p.id not in held_out], [p for p in prompts if p.id in held_out]
        ).checked("jsonl")

    def _prompt(self, number: int, record: dict[str, Any]) -> Prompt:
        where = f"{self.path}:{number}"
        question = text_field(record, self.prompt_field, "prompts.prompt_field", where)
        answer = text_field(record, self.answer_field, "prompts.answer_field", where)
        id_ = str(number) if self.id_field is None else text_field(record, self.id_field, "prompts.id_field", where)
        return Prompt(id_, user_turn(question), answer, demonstration=answer, metadata={"line": number})

    def _check_ids(self, prompts: list[Prompt]) -> None:
        lines: dict[str, int] = {}
        for prompt in prompts:
            line = prompt.metadata["line"]
            if prompt.id in lines:
                raise ValueError(
                    f"{self.path}:{line} repeats the id {prompt.id!r} of line {lines[prompt.id]} "
                    "(prompts.id_field); ids must be unique"
                )
            lines[prompt.id] = line
