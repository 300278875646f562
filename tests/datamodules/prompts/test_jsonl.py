"""JSON Lines prompts: stable splits, and faults named by line."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts.jsonl import JsonLines, read_json_lines

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: str | bytes) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def source(path: Path, **changes: Any) -> JsonLines:
    options: dict[str, Any] = {
        "prompt_field": "prompt", "answer_field": "answer", "id_field": None, "held_out_fraction": 0.25
    }  # fmt: skip
    return JsonLines(str(path), **options | changes)


def records(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "id": f"q{i}"} for i in range(count)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_questions_answers_and_line_numbers_are_read_from_the_named_fields(write: Write) -> None:
    path = write('{"q": "2+2=", "a": 4, "k": "x"}\n\n{"q": "half?", "a": "0.5", "k": 7}\n')
    split = source(path, prompt_field="q", answer_field="a", id_field="k", held_out_fraction=0.5).load()
    found = {p.id: (p.messages, p.answer, p.demonstration, p.metadata["line"]) for p in (*split.train, *split.held_out)}
    assert found == {
        "x": (({"role": "user", "content": "2+2="},), "4", "4", 1),
        "7": (({"role": "user", "content": "half?"},), "0.5", "0.5", 3),
    }


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.1, 4), (0.25, 10), (0.0001, 1), (0.9999, 39)])
def test_the_asked_share_is_held_out_and_both_parts_together_are_the_file(
    write: Write, fraction: float, num_held_out: int
) -> None:
    split = source(write(lines(records(40))), id_field="id", held_out_fraction=fraction).load()
    assert (len(split.train), len(split.held_out)) == (40 - num_held_out, num_held_out)
    assert {p.id for p in split.train} | {p.id for p in split.held_out} == {f"q{i}" for i in range(40)}


def test_the_same_ids_are_held_out_in_whatever_order_the_lines_stand(write: Write) -> None:
    rows = records(40)
    held_out = {p.id for p in source(write(lines(rows)), id_field="id").load().held_out}
    random.Random(1).shuffle(rows)
    shuffled = source(write(lines(rows)), id_field="id").load()
    assert {p.id for p in shuffled.held_out} == held_out
    assert [p.id for p in shuffled.train] == [row["id"] for row in rows if row["id"] not in held_out]


def test_windows_line_ends_and_a_line_separator_inside_a_text_do_not_cut_a_record(write: Write) -> None:
    content = '{"prompt": "a\u2028b\x85c", "answer": "1"}\r\n{"prompt": "d", "answer": "2"}'
    found = [(number, record["prompt"]) for number, record in read_json_lines(write(content))]
    assert found == [(1, "a\u2028b\x85c"), (2, "d")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; one JSON object a line is expected"),
        (b"\n  \n", "is empty; one JSON object a line is expected"),
        (b'{"prompt": "caf\xe9", "answer": "1"}\n', "is not UTF-8"),
        (b'{"prompt": "a", "answer": "1"}\n\n{"prompt"\n', "prompts.jsonl:3 is not JSON: "),
        (b'{"prompt": "a", "answer": "1"}\n["a"]\n', "prompts.jsonl:2 must be a JSON object, got list"),
        (b'{"prompt": "a", "answer": "1"}\nnull\n', "prompts.jsonl:2 must be a JSON object, got NoneType"),
        (b'{"prompt": "a", "answer": "1"}\n', "has 1 prompt; one to train on and one to hold out are needed"),
    ],
)
def test_an_unusable_file_is_refused_with_the_place(write: Write, content: bytes, message: str) -> None:
    prompts = source(write(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        prompts.load()


def test_a_file_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    prompts = source(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"^prompts\.path: .*none\.jsonl is not a file$"):
        prompts.load()


@pytest.mark.parametrize(
    ("record", "field", "key"),
    [
        ('{"answer": "1", "id": "a"}', "prompt", "prompts.prompt_field"),
        ('{"prompt": "a", "id": "a"}', "answer", "prompts.answer_field"),
        ('{"prompt": "a", "answer": "1"}', "id", "prompts.id_field"),
        ('{"prompt": "  ", "answer": "1", "id": "a"}', "prompt", "prompts.prompt_field"),
        ('{"prompt": "a", "answer": null, "id": "a"}', "answer", "prompts.answer_field"),
        ('{"prompt": "a", "answer": true, "id": "a"}', "answer", "prompts.answer_field"),
        ('{"prompt": ["a"], "answer": "1", "id": "a"}', "prompt", "prompts.prompt_field"),
    ],
)
def test_a_missing_field_is_named_with_line_key_and_the_fields_there_are(
    write: Write, record: str, field: str, key: str
) -> None:
    prompts = source(write(lines(records(2)) + record), id_field="id")
    there = sorted(json.loads(record))
    message = (
        f"prompts.jsonl:3 has no text in field '{field}' ({key}); its fields are {there}; set {key} to the right one"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        prompts.load()


def test_a_repeated_id_is_named_with_both_lines(write: Write) -> None:
    rows = [*records(3), {"prompt": "again", "answer": "1", "id": "q1"}]
    prompts = source(write(lines(rows)), id_field="id")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:4 repeats the id 'q1' of line 2 \(prompts\.id_field\)"):
        prompts.load()


def test_a_number_too_long_to_read_is_named_with_its_line(write: Write) -> None:
    prompts = source(write(lines(records(2)) + '{"prompt": "a", "answer": ' + "1" * 5000 + "}"))
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3"):
        prompts.load()


def test_half_of_a_surrogate_pair_is_named_with_its_line_before_it_breaks_a_run(write: Write) -> None:
    prompts = source(write(lines(records(2)) + '{"prompt": "cut \\ud83d", "answer": "1"}'))
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3"):
        prompts.load()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused_at_construction(fraction: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"prompts.held_out_fraction must be in (0, 1), got {fraction}")):
        source(Path("any"), held_out_fraction=fraction)
