"""Write the figures of a benchmark run as JSON and as Markdown tables."""

import json
from pathlib import Path
from typing import Any

F32, BF16, LARGE_VOCABULARY = (
    "135M, vocabulary 49 152, float32",
    "135M, vocabulary 49 152, bfloat16",
    "0.5M, vocabulary 151 936, float32",
)
TEXT = Path(__file__).with_name("report.md")


def headline(raw: dict[str, Any]) -> dict[str, float]:
    """Return the figures that the project is judged by, each a ratio of one run."""

    def speedup(part: str) -> float:
        return raw[part]["trl"]["seconds_per_step"] / raw[part]["ours"]["seconds_per_step"]

    def memory(part: str) -> float:
        return raw[part]["ours"]["activation_bytes"] / raw[part]["trl"]["activation_bytes"]

    return {
        "train_speedup_vs_trl": speedup(F32),
        "train_speedup_vs_trl_bfloat16": speedup(BF16),
        "train_memory_ratio_vs_trl": memory(F32),
        "train_memory_ratio_vs_trl_151k": memory(LARGE_VOCABULARY),
        "loop_speedup_vs_trl": speedup("loop"),
        "rollout_overhead": raw["rollouts"]["0.5M"]["overhead"],
        "mfu": raw[F32]["ours"]["mfu"],
        "mfu_bfloat16": raw[BF16]["ours"]["mfu"],
        "framework_overhead": raw["overhead"]["overhead"],
    }


def write_report(raw: dict[str, Any], measured: dict[str, dict[str, Any]], machine: str, docs: Path) -> None:
    """Write `performance.json` and `performance.md`.

    Args:
        raw: what each part measured.
        measured: when, at which commit and in how many seconds it was.
        machine: in words.
        docs: the directory.
    """
    docs.mkdir(exist_ok=True)
    figures = {key: round(value, 4) for key, value in headline(raw).items()}
    (docs / "performance.json").write_text(
        json.dumps({**figures, "machine": machine, "measured": measured, "raw": raw}, indent=1) + "\n"
    )
    tables = {
        "machine": machine,
        "headline": table(("figure", "value"), figures.items()),
        "training": table(
            ("model", "trainer", "s a step", "peak MB above weights, gradients, optimizer", "forwards a trained token"),
            (
                (
                    part,
                    name,
                    raw[part][name]["seconds_per_step"],
                    raw[part][name]["activation_bytes"] / 2**20,
                    raw[part][name]["forward_tokens"] / raw[part]["trained_tokens"],
                )
                for part in (F32, BF16, LARGE_VOCABULARY)
                for name in ("ours", "trl")
            ),
        ),
        "measured": table(
            ("part", "date", "commit", "seconds"), ((name, *row.values()) for name, row in measured.items())
        ),
        "loop": table(("trainer", "s a step"), ((name, r["seconds_per_step"]) for name, r in raw["loop"].items())),
        **{
            name: table(tuple(raw[name][0]), (row.values() for row in raw[name]))
            for name in ("logprobs", "packing", "growth", "ranks")
        },
        "rollouts": table(
            ("model", *raw["rollouts"]["0.5M"]), ((size, *row.values()) for size, row in raw["rollouts"].items())
        ),
        **{name: table(("figure", "value"), raw[name].items()) for name in ("sync", "overhead", "startup")},
    }
    text = TEXT.read_text()
    for name, value in tables.items():
        text = text.replace("{{" + name + "}}", value)
    (docs / "performance.md").write_text(text)


def table(columns: tuple[str, ...], rows: Any) -> str:
    """Return a Markdown table; floats with three significant digits."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
