"""A server that stands before a real one and spoils what it is told to."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import ClientSession, web

Fault = Callable[["FaultyProxy", web.Request, bytes], Any]


class FaultyProxy:
    """Pass everything on to `target`, but let `fault` spoil answers after the first few requests for completions.

    Args:
        target: address of a real server.
        fault: gets the proxy, the request and the real answer; returns another answer, or None to leave it.
        spared: requests for completions before it starts.
    """

    def __init__(self, target: str, fault: Fault, spared: int = 3) -> None:
        self.target = target
        self.fault = fault
        self.spared = spared
        self.asked = 0
        self.spoiled = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._session = ClientSession()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type")}
        body = await request.read()
        async with self._session.request(request.method, self.target + request.path, data=body, headers=headers) as got:
            answer, status = await got.read(), got.status
        self.asked += request.path.endswith("/generate")
        if self.asked > self.spared:
            spoiled = self.fault(self, request, answer)
            if asyncio.iscoroutine(spoiled):
                spoiled = await spoiled
            if spoiled is not None:
                self.spoiled += 1
                return spoiled
        return web.Response(body=answer, status=status, content_type="application/json")

    def close(self) -> None:
        """End it."""

        async def end() -> None:
            await self._session.close()
            await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)


def for_completions(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """Return a fault that changes the content of completions."""

    def fault(_: FaultyProxy, request: web.Request, answer: bytes) -> Any:
        if not request.path.endswith("/generate"):
            return None
        return web.json_response(change(json.loads(answer)))

    return fault


def change_choice(**changes: Any) -> Any:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0].update(changes)
        return answer

    return for_completions(change)


async def wait_long(proxy: FaultyProxy, request: web.Request, answer: bytes) -> web.Response:
    await asyncio.sleep(30.0)
    return web.Response(body=answer)


async def answer_slowly(proxy: FaultyProxy, request: web.Request, answer: bytes) -> web.Response | None:
    await asyncio.sleep(4.0)
    return None


def hang_up(proxy: FaultyProxy, request: web.Request, answer: bytes) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


OLD = [{"version": "0-of-yesterday", "start": 0, "end": 12}]
FAULTS: dict[str, tuple[Any, str]] = {
    "an error": (lambda *_: web.Response(status=500, text="out of memory"), "answers 500 to .*: out of memory"),
    "no JSON": (lambda *_: web.Response(text="<html>", content_type="text/html"), "ContentTypeError"),
    "a list": (for_completions(lambda _: []), "answers nonsense: "),
    "another form": (for_completions(lambda _: {"choices": [{"text": "7"}]}), "answers nonsense: "),
    "no log-probs": (change_choice(logprobs=None), "answers nonsense: "),
    "words": (change_choice(token_ids=["a"] * 12), "answers nonsense: "),
    "other tokens": (change_choice(token_ids=[7] * 12), "answers nonsense: "),
    "no end": (change_choice(finish_reason="abort"), "ended a request with 'abort'"),
    "an old snapshot": (change_choice(weight_versions=OLD), "samples from weights '0-of-yesterday', not '1-"),
    "two snapshots": (change_choice(weight_versions=[*OLD, *OLD]), "samples from weights '0-of-yesterday', not '1-"),
    "nobody's weights": (change_choice(weight_versions=[]), "answers nonsense: "),
    "a cut connection": (hang_up, "ServerDisconnectedError"),
}
