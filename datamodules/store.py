"""One Parquet file a round: a schema that a person reads with pandas and that trains again."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.atomic import atomic_file, explained, replacing_file
from datamodules.clock import Clock
from datamodules.types import Rollout, Verdict

KEY = "offbeat"  # of the file's metadata
ROWS_AT_ONCE = 1024  # a row group of the file; a fixed number, so that row groups do not depend on timing
SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("prompt_id", pa.string()),
        ("group_id", pa.int32()),
        ("sibling", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),  # null where there is no score
        ("verdict", pa.string()),
        ("verdict_detail", pa.string()),
        ("verifier_seconds", pa.float64()),
        ("finish_reason", pa.string()),
        ("failure", pa.string()),
        ("lag", pa.int32()),  # rounds between sampling weights and the round
        ("snapshot", pa.int32()),
        ("snapshot_step", pa.int64()),
        ("temperature", pa.float64()),
        ("seed", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("sampling_logprobs", pa.list_(pa.float64())),  # null where nothing sampled it
    ]
)


class RolloutStore:
    """The rounds of one run, `round-000012.parquet` and so on, each written atomically."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def path(self, round_: int) -> Path:
        """Return where a round is, whether or not it is there yet."""
        return self.directory / f"round-{round_:06d}.parquet"

    @contextmanager
    def writing(
        self, round_: int, origin: Mapping[str, Any], clock: Clock
    ) -> Iterator[Callable[[Sequence[Rollout]], None]]:
        """Yield what takes a round's judged rollouts as they come; all are stored when the block ends without error.

        Args:
            round_: its number.
            origin: what determined the rollouts, in plain values; `read` asks for the same.
            clock: told the seconds of storing.
        """
        schema = SCHEMA.with_metadata({KEY: json.dumps({"format": 1, "round": round_, "origin": origin})})
        rows: list[dict[str, Any]] = []

        def write(rollouts: Sequence[Rollout]) -> None:
            with clock.measure("storing"), explained(self.path(round_)):
                rows.extend(map(_to_row, rollouts))
                while len(rows) >= ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(rows[:ROWS_AT_ONCE], schema=schema))
                    del rows[:ROWS_AT_ONCE]

        with ExitStack() as stack:
            temporary = stack.enter_context(replacing_file(self.path(round_)))
            writer = stack.enter_context(pq.ParquetWriter(temporary, schema, compression="zstd"))
            yield write  # a full disk that an engine speaks of need not be this one
            with clock.measure("storing"), explained(self.path(round_)):
                if rows:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                stack.close()

    def read(self, round_: int, origin: Mapping[str, Any]) -> list[Rollout] | None:
        """Return a stored round, or None when there is none that was made in just this way."""
        path = self.path(round_)
        if not path.is_file():
            return None
        return read_rollouts(path) if read_origin(path) == json.loads(json.dumps(origin)) else None

    def read_round(self, round_: int) -> list[Rollout]:
        """Return a round that this run has stored.

        Raises:
            FileNotFoundError: its file is gone.
        """
        if not self.path(round_).is_file():
            raise FileNotFoundError(f"replay needs round {round_}, but {self.path(round_)} is gone")
        return read_rollouts(self.path(round_))

    def adopt(self, source: Path, rounds: Iterable[int]) -> None:
        """Take over rounds that another run stored.

        Raises:
            FileNotFoundError: the other run no longer has one of them.
        """
        if source.absolute() == self.directory.absolute():
            return
        for round_ in rounds:
            other = RolloutStore(source).path(round_)
            if not other.is_file():
                raise FileNotFoundError(f"replay needs round {round_}, but {other} is gone")
            with atomic_file(self.path(round_)) as temporary:
                shutil.copyfile(other, temporary)


def read_origin(path: Path) -> dict[str, Any] | None:
    """Return what determined a stored round, or None for a file made elsewhere."""
    metadata = (pq.read_schema(path).metadata or {}).get(KEY.encode())
    return None if metadata is None else json.loads(metadata).get("origin", {})


def read_rollouts(path: Path | str) -> list[Rollout]:
    """Return the rollouts of a stored round, equal to those that were written."""
    return [_from_row(row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]


def _to_row(rollout: Rollout) -> dict[str, Any]:
    verdict = rollout.verdict
    return {
        "round": rollout.round,
        "prompt_id": rollout.prompt_id,
        "group_id": rollout.group_id,
        "sibling": rollout.sibling,
        "prompt": rollout.prompt_text,
        "completion": rollout.text,
        "answer": rollout.answer,
        "reward": rollout.reward,
        "verdict": None if verdict is None else verdict.status,
        "verdict_detail": None if verdict is None else verdict.detail,
        "verifier_seconds": None if verdict is None else verdict.seconds,
        "finish_reason": rollout.finish_reason,
        "failure": rollout.failure,
        "lag": rollout.round - rollout.snapshot,
        "snapshot": rollout.snapshot,
        "snapshot_step": rollout.snapshot_step,
        "temperature": rollout.temperature,
        "seed": rollout.seed,
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "sampling_logprobs": rollout.sampling_logprobs,
    }


def _from_row(row: dict[str, Any]) -> Rollout:
    logprobs = row["sampling_logprobs"]
    verdict = None
    if row["verdict"] is not None:
        verdict = Verdict(row["verdict"], row["reward"], row["verifier_seconds"], row["verdict_detail"])
    return Rollout(
        prompt_id=row["prompt_id"],
        group_id=row["group_id"],
        sibling=row["sibling"],
        prompt_text=row["prompt"],
        answer=row["answer"],
        prompt_ids=tuple(row["prompt_ids"]),
        completion_ids=tuple(row["completion_ids"]),
        sampling_logprobs=None if logprobs is None else tuple(logprobs),
        text=row["completion"],
        finish_reason=row["finish_reason"],
        temperature=row["temperature"],
        seed=row["seed"],
        round=row["round"],
        snapshot=row["snapshot"],
        snapshot_step=row["snapshot_step"],
        failure=row["failure"],
        verdict=verdict,
    )
