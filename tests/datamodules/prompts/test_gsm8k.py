"""GSM8K: final answers, limits, faults by line, and the real files where they are at hand."""

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts.gsm8k import GSM8K, final_answer

REAL = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
needs_real_files = pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason=f"no GSM8K files in {REAL}")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(**splits: list[dict[str, Any]]) -> Path:
        for split, rows in splits.items():
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return make


def problem(number: int) -> dict[str, str]:
    return {"question": f"What is {number}?", "answer": f"It is <<{number}>>{number}.\n#### {number}"}


def source(path: Path | str, **changes: Any) -> GSM8K:
    options: dict[str, Any] = {"instruction": "Think.", "max_train": None, "max_held_out": None}
    return GSM8K(str(path), **options | changes)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### 1,234,567 ", "1234567"),
        ("#### -5", "-5"),
        ("#### 10\nNo:\n#### 12", "12"),
        ("####0.5", "0.5"),
    ],
)
def test_the_final_answer_follows_the_last_mark_without_thousands_separators(solution: str, answer: str) -> None:
    assert final_answer(solution, "here") == answer


@pytest.mark.parametrize("solution", ["It is 72.", "It is 72.\n#### ", ""])
def test_a_solution_without_a_final_answer_is_named_with_its_place(solution: str) -> None:
    with pytest.raises(ValueError, match=r"^data/train:7: the answer has no '#### number' at its end"):
        final_answer(solution, "data/train:7")


def test_a_problem_keeps_its_line_question_instruction_and_worked_solution(folder: Callable[..., Path]) -> None:
    split = source(folder(train=[problem(3)], test=[problem(1234)])).load()
    (train,), (held_out,) = split
    assert (train.id, held_out.id) == ("gsm8k/train/1", "gsm8k/test/1")
    assert train.messages == ({"role": "user", "content": "What is 3?\n\nThink."},)
    assert (train.answer, train.demonstration) == ("3", "It is <<3>>3.\n#### 3")


def test_without_an_instruction_the_question_stands_alone(folder: Callable[..., Path]) -> None:
    split = source(folder(train=[problem(3)], test=[problem(4)]), instruction="").load()
    assert split.train[0].messages[0]["content"] == "What is 3?"


def test_limits_keep_the_first_problems_of_each_split(folder: Callable[..., Path]) -> None:
    path = folder(train=[problem(n) for n in range(5)], test=[problem(n) for n in range(10, 15)])
    split = source(path, max_train=2, max_held_out=3).load()
    assert ([p.answer for p in split.train], [p.answer for p in split.held_out]) == (["0", "1"], ["10", "11", "12"])


@pytest.mark.parametrize("field", ["question", "answer"])
def test_a_missing_field_is_named_with_split_and_line(folder: Callable[..., Path], field: str) -> None:
    broken = {key: value for key, value in problem(2).items() if key != field}
    prompts = source(folder(train=[problem(1), broken], test=[problem(3)]))
    with pytest.raises(ValueError, match=rf"/train:2 has no text in field '{field}' \(prompts\.path\)"):
        prompts.load()


def test_a_folder_without_the_test_split_names_the_file(folder: Callable[..., Path]) -> None:
    prompts = source(folder(train=[problem(1)]))
    with pytest.raises(ValueError, match=r"prompts\.path: .*test\.jsonl is not a file"):
        prompts.load()


@pytest.mark.parametrize("path", ["/no/such/folder", "./no/such/folder", "~/no/such/folder"])
def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(path: str) -> None:
    prompts = source(path)
    with pytest.raises(ValueError, match=re.escape(f"prompts.path: {path} is not a folder with train.jsonl")):
        prompts.load()


def test_a_hub_id_is_loaded_by_split_and_numbered_from_1(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str, *, split: str) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return [problem(len(asked))]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    split = source("openai/gsm8k").load()
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [(p.id, p.answer) for p in (*split.train, *split.held_out)] == [
        ("gsm8k/train/1", "1"),
        ("gsm8k/test/1", "2"),
    ]


@pytest.mark.parametrize("key", ["max_train", "max_held_out"])
def test_a_limit_below_1_is_refused_at_construction(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompts.{key} must be at least 1 or null, got 0$"):
        source("openai/gsm8k", **{key: 0})


@needs_real_files
def test_the_real_files_give_7473_training_and_1319_test_problems() -> None:
    split = source(REAL).load()
    assert (len(split.train), len(split.held_out)) == (7473, 1319)
    assert (split.train[0].answer, split.train[-1].answer) == ("72", "50")
    assert not {p.messages[0]["content"] for p in split.train} & {p.messages[0]["content"] for p in split.held_out}


@needs_real_files
def test_every_real_answer_is_a_plain_number_that_its_solution_ends_in() -> None:
    split = source(REAL).load()
    for prompt in (*split.train, *split.held_out):
        assert re.fullmatch(r"-?\d*\.?\d+", prompt.answer), prompt.id
        assert prompt.demonstration.replace(",", "").endswith(f"#### {prompt.answer}"), prompt.id
    assert sum("," in p.demonstration.rpartition("####")[2] for p in split.train) > 0
