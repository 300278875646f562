"""One vLLM server over HTTP: takes a snapshot, answers requests; no answer is used before it was checked."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import aiohttp

from datamodules.canary import Canary
from datamodules.engines.server_faults import ServerFault, ServerLost
from datamodules.engines.snapshot_transfer import SnapshotTransfer
from datamodules.engines.vllm_front import PROBE, SNAPSHOT
from datamodules.snapshots import Snapshot, SnapshotStore
from datamodules.types import Completion, Probe, Sampling

REFUSALS = {400, 404, 405, 413, 422}  # of a request itself, which would be refused again
LOWEST_LOGPROB = -9999.0  # vLLM's word over HTTP for a log-prob that is no finite number
CONNECT_SECONDS = 10.0


def label(snapshot: Snapshot) -> str:
    """Return what tells a snapshot from every other, of other runs too."""
    manifest = (snapshot.path / SnapshotStore.MANIFEST).read_bytes()
    digest = hashlib.sha256(str(snapshot.path).encode() + manifest).hexdigest()
    return f"{snapshot.version}-{digest[:16]}"


class Server:
    """Client of one server.

    Args:
        url: "http://HOST:PORT", without a key in it.
        session: made for all servers; has the key.
        transfer: brings it the weights.
        tolerance: largest probe difference to the trainer's log-probs.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, transfer: SnapshotTransfer, tolerance: float) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._transfer = transfer
        self._canary = Canary(self.url, tolerance)
        self._label = ""  # of the snapshot that it proved to hold
        self._model: dict[str, str] = {}  # names the adapter in a request, where there is one

    async def is_up(self) -> bool:
        """Whether it answers at all."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(CONNECT_SECONDS)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def load(self, snapshot: Snapshot, seconds: float) -> None:
        """Have it take a snapshot, and prove that it did.

        Args:
            snapshot: whose weights it is to sample from.
            seconds: longest wait.

        Raises:
            ServerFault: it could not.
            CanaryError: it did, and samples from other weights.
        """
        self._label = ""
        wanted = label(snapshot)
        is_adapter = snapshot.base is not None
        self._model = {"model": wanted} if is_adapter else {}

        async def ask(where: dict[str, Any]) -> dict[str, Any]:
            return await self._post(SNAPSHOT, {"label": wanted, "is_adapter": is_adapter, **where}, seconds)

        if (await self._transfer(snapshot, self.url, seconds, ask)).get("label") != wanted:
            raise ServerFault(f"{self.url} does not say that it took snapshot {snapshot.version}")
        self._canary.check(snapshot, await self.score(snapshot.probe, seconds))
        self._label = wanted

    async def score(self, probe: Probe, seconds: float) -> list[float]:
        """Return the log-prob of the token at each probe position.

        Raises:
            ServerFault: it has no such answer.
        """
        asked = {"token_ids": probe.token_ids, "positions": probe.positions, "temperature": probe.temperature}
        logprobs = (await self._post(PROBE, asked, seconds)).get("logprobs")
        if not _are_numbers(logprobs, len(probe.positions)):
            raise ServerFault(f"{self.url} answers the probe with {_short(logprobs)}")
        return list(logprobs)  # type: ignore[arg-type]

    async def complete(
        self, prompt: Sequence[int], seed: int, sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Completion:
        """Return one completion, sampled from the snapshot that was loaded last; waits as long as it takes.

        Raises:
            ServerFault: the server failed, or answered something else.
        """
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "logprobs": 0,
            "detokenize": False,
        }
        body = {"token_ids": list(prompt), "sampling_params": parameters, **self._model}
        return self._completion(await self._post("/inference/v1/generate", body, None), seed, sampling.max_tokens)

    def _completion(self, answer: dict[str, Any], seed: int, max_tokens: int) -> Completion:
        try:
            (choice,) = answer["choices"]
            token_ids = choice["token_ids"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            named = [entry["token_id"] for entry in choice["logprobs"]["content"]]
            spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"{self.url} answers nonsense: {_short(answer)}") from error
        if any(version != self._label for version, *_ in spans):
            raise ServerFault(f"{self.url} samples from weights {spans[0][0]!r}, not {self._label!r}")
        is_whole = [span[1:] for span in spans] == [(0, len(token_ids))]
        are_ids = all(type(token) is int and token >= 0 for token in token_ids)
        if not (is_whole and are_ids and named == token_ids and _are_numbers(logprobs, len(token_ids))):
            raise ServerFault(f"{self.url} answers nonsense: {_short(answer)}")
        if reason not in ("stop", "length") or not 0 < len(token_ids) <= max_tokens:
            raise ServerFault(f"{self.url} ended a request with {reason!r} after {len(token_ids)} tokens")
        if min(logprobs) <= LOWEST_LOGPROB:
            return Completion((), (), "error", seed, failure="missing or non-finite log-prob")
        return Completion(tuple(token_ids), tuple(logprobs), reason, seed)

    async def _post(self, path: str, body: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(self.url + path, json=body, timeout=timeout) as reply:
                if reply.status in (401, 403):
                    raise ServerLost(f"{self.url} refuses the key ({reply.status}); see engine.api_key_variable")
                if reply.status != 200:
                    kind = ServerLost if reply.status in REFUSALS else ServerFault
                    raise kind(f"{self.url} answers {reply.status} to {path}: {_short(await reply.text())}")
                answer = await reply.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ServerFault(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if not isinstance(answer, dict):
            raise ServerFault(f"{self.url} answers nonsense: {_short(answer)}")
        return answer


def _are_numbers(values: Any, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
