"""The door of a vLLM server: asks for the key on every path, and takes snapshots; an ASGI middleware of vLLM's app."""

import asyncio
import hmac
import json
import os
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from datamodules.engines.vllm_arguments import probe_requests
from datamodules.types import Probe

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
KEY = "VLLM_API_KEY"  # the environment variable; without one nothing is asked, which is for loopback alone
SNAPSHOT = "/snapshot"
PROBE = "/probe"
OPEN = ("/health",)  # tells nobody anything


class Front:
    """Stands before vLLM's own routes, whose development endpoints stay off.

    `POST /snapshot {"label": ..., "is_adapter": ..., ...}` drops what is being sampled, takes other weights, and labels
    every token sampled from then on; vLLM returns labels with the tokens. With "path" it reads a directory that it
    sees, of a model, or of low-rank adapters of the model that it was started with, which are asked for by their
    label; with "meeting" and "weights" a `WeightSender` sends a model's.
    `POST /probe {"token_ids": ..., "positions": ..., "temperature": ...}` answers a canary's probe.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] not in OPEN and not _is_allowed(scope, os.environ.get(KEY)):
            await _send(send, 401, {"error": f"the key in {KEY} is missing or wrong"})
        elif scope["path"] in (SNAPSHOT, PROBE):
            await self._answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine, models = scope["app"].state.engine_client, scope["app"].state.openai_serving_models
        try:
            asked = json.loads(await _body(receive))
            async with self._one_at_a_time:
                if scope["path"] == SNAPSHOT:
                    await _load(engine, models, asked)
                    answer: dict[str, Any] = {"label": asked["label"]}
                else:
                    probe = Probe(tuple(asked["token_ids"]), tuple(asked["positions"]), asked["temperature"])
                    answer = {"logprobs": await _score(engine, models, probe)}
        except Exception as error:  # whatever vLLM raises is the client's to see
            await _send(send, 500, {"error": f"{type(error).__name__}: {error}"})
        else:
            await _send(send, 200, answer)


async def _load(engine: Any, models: Any, asked: dict[str, Any]) -> None:
    await engine.pause_generation(mode="abort")
    try:
        await engine.update_weight_version("loading")  # not the old one's any more, whatever happens
        await _drop_adapters(engine, models)
        if asked["is_adapter"]:
            await _take_adapter(models, asked["path"], asked["label"])
        else:
            if "meeting" in asked:
                await _receive(engine, asked["meeting"], asked["weights"])
            else:
                await engine.collective_rpc("reload_weights", kwargs={"weights_path": asked["path"]})
            await engine.collective_rpc("repack_tied_head")
        if not await engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")
        await engine.update_weight_version(asked["label"])
    finally:
        await engine.resume_generation()


async def _receive(engine: Any, meeting: dict[str, Any], weights: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(meeting))
    try:
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(weights))
        await engine.finish_weight_update()
    finally:
        await engine.shutdown_weight_transfer_engine()


async def _drop_adapters(engine: Any, models: Any) -> None:
    while models.lora_requests:
        _, adapter = models.lora_requests.popitem()
        await engine.remove_lora(adapter.lora_int_id)


async def _take_adapter(models: Any, path: str, label: str) -> None:
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    answer = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=label, lora_path=path))
    if not isinstance(answer, str):
        raise RuntimeError(answer.error.message)


async def _score(engine: Any, models: Any, probe: Probe) -> list[float]:
    adapter = next(iter(models.lora_requests.values()), None)
    logprobs = []
    for prompt, parameters, target in zip(*probe_requests(probe), strict=True):
        async for output in engine.generate(prompt, parameters, f"probe-{uuid.uuid4().hex}", lora_request=adapter):
            finished = output.outputs[0]
        logprobs.append(finished.logprobs[0][target].logprob)
    return logprobs


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def _is_allowed(scope: Scope, key: str | None) -> bool:
    given = dict(scope["headers"]).get(b"authorization", b"")
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


async def _send(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
