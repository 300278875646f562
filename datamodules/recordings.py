"""Read rollouts that were recorded before: by this framework, or elsewhere with a prompt, a completion and a reward."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from datamodules.codec import Codec
from datamodules.prompts.jsonl import read_json_lines
from datamodules.prompts.source import user_turn
from datamodules.store import read_origin, read_rollouts
from datamodules.types import Prompt, Rollout, Verdict


def recording_files(pattern: str) -> list[Path]:
    """Return the files of a path or pattern, in the order of their names.

    Raises:
        ValueError: there is none, or one is neither Parquet nor JSON Lines.
    """
    path = Path(pattern).expanduser()
    folder = Path(path.anchor or ".")
    files = [path] if path.is_file() else sorted(folder.glob(str(path.relative_to(folder))))
    if not files:
        raise ValueError(f"datamodule.path: nothing matches {pattern}; expected .parquet or .jsonl files")
    for file in files:
        if file.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"datamodule.path: {file} is neither .parquet nor .jsonl")
    return files


def read_recording(path: Path, round_: int, codec: Codec, temperature: float) -> list[Rollout]:
    """Return a file's rollouts; consecutive ones with the same prompt are siblings.

    Args:
        path: Parquet as `RolloutStore` writes it, or Parquet or JSON Lines with the columns `prompt` (text or chat
            messages), `completion` and `reward` in [0, 1], and, if there are any, `prompt_ids` and `completion_ids`,
            `sampling_logprobs` (one for each of `completion_ids`), `temperature`, `answer`.
        round_: recorded with rollouts made elsewhere.
        codec: tokenizes what has no ids.
        temperature: of rollouts that do not state theirs.

    Raises:
        ValueError: a field is missing or makes no sense, with file and row.
    """
    if path.suffix == ".parquet" and read_origin(path) is not None:
        return read_rollouts(path)
    rollouts: list[Rollout] = []
    last: Any = None
    group_id, sibling = -1, 0
    for where, row in _rows(path):
        if row.get("prompt") != last or not rollouts:
            group_id, sibling, last = group_id + 1, 0, row.get("prompt")
        rollouts.append(_rollout(row, where, codec, temperature, (round_, group_id, sibling)))
        sibling += 1
    if not rollouts:
        raise ValueError(f"datamodule.path: {path} holds no rollout")
    return rollouts


def is_renormalised(path: Path) -> bool:
    """Whether a recording of this framework says that its log-probs come from a part of the vocabulary."""
    origin = read_origin(path) if path.suffix == ".parquet" else None
    return bool(origin and origin.get("is_renormalised"))


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".jsonl":
        for number, record in read_json_lines(path):
            yield f"{path}:{number}", record
    else:
        for number, record in enumerate(pq.read_table(path).to_pylist()):
            yield f"{path}, row {number}", record


def _rollout(
    row: Mapping[str, Any], where: str, codec: Codec, temperature: float, place: tuple[int, int, int]
) -> Rollout:
    for name, kinds in (("prompt", (str, list)), ("completion", (str,)), ("reward", (int, float))):
        if not isinstance(row.get(name), kinds):
            raise ValueError(
                f"{where}: {name!r} must be {' or '.join(k.__name__ for k in kinds)}, got {row.get(name)!r}"
            )
    if not 0.0 <= row["reward"] <= 1.0:
        raise ValueError(
            f"{where}: reward must be in [0, 1], got {row['reward']}; map it, objectives rescale it themselves"
        )
    messages = user_turn(row["prompt"]) if isinstance(row["prompt"], str) else tuple(row["prompt"])
    round_, group_id, sibling = place
    (encoded,) = codec.encode_prompts([Prompt(f"{where}", messages, "")])
    prompt_ids = tuple(row.get("prompt_ids") or encoded.token_ids)
    completion_ids = tuple(row.get("completion_ids") or codec.encode_completion(row["completion"]))
    logprobs = row.get("sampling_logprobs")
    if logprobs is not None and (len(logprobs) != len(completion_ids) or row.get("completion_ids") is None):
        raise ValueError(
            f"{where}: {len(logprobs)} sampling_logprobs need as many completion_ids, got {row.get('completion_ids')}: "
            "text does not say which tokens were sampled"
        )
    if len(prompt_ids) + len(completion_ids) > codec.window:
        raise ValueError(
            f"{where}: {len(prompt_ids)} + {len(completion_ids)} tokens do not fit the window of {codec.window}; leave "
            "the row out"
        )
    score = float(row["reward"])
    return Rollout(
        prompt_id=json.dumps(row["prompt"]),
        group_id=group_id,
        sibling=sibling,
        prompt_text=messages[-1]["content"],
        answer=str(row.get("answer") or ""),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        sampling_logprobs=None if logprobs is None else tuple(map(float, logprobs)),
        text=row["completion"],
        finish_reason="stop" if completion_ids[-1] in codec.stop_token_ids else "length",
        temperature=float(row.get("temperature") or temperature),
        seed=0,
        round=round_,
        snapshot=0,
        snapshot_step=0,
        verdict=Verdict("correct" if score > 0.5 else "incorrect", score, detail="recorded"),
    )
