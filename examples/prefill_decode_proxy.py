"""Prefill on one vLLM server, decode on another: a proxy for both, and lmkv between them in a folder that they share.

    python examples/prefill_decode_proxy.py --prefill http://localhost:8100 --decode http://localhost:8200

Each completion goes to a prefill server first, for one token that nobody reads. Its answer says how many tokens of
the prompt it stores, and the decode server, which is told that number, loads them and computes the rest. When a
prefill server fails, the decode server computes the prompt. All else goes to a decode server. docs/prefill-decode.md
says how to start both. Needs aiohttp, which vLLM has installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

GENERATING = ("/v1/completions", "/v1/chat/completions")
WITHOUT = {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "echo"}
"""Fields of a client's request that the one to a prefill server leaves out."""

OF_ONE_CONNECTION = {"host", "connection", "keep-alive", "content-length", "transfer-encoding"}
LARGEST_BODY = 256 << 20

logger = logging.getLogger("proxy")


class Proxy:
    """Takes the servers of each kind in turn."""

    def __init__(self, prefill: list[str], decode: list[str], timeout: float) -> None:
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)
        self.timeout = ClientTimeout(total=timeout, sock_connect=2)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.cleanup_ctx.append(self.connected)
        for path in GENERATING:
            app.router.add_post(path, self.generate)
        app.router.add_route("*", "/{path:.*}", self.pass_on)
        return app

    async def connected(self, app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(auto_decompress=False, timeout=ClientTimeout(total=None)) as self.session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            params = body.get("kv_transfer_params") or {}
        except (ValueError, AttributeError):
            return await self.pass_on(request)  # The decode server says what is wrong with it.
        stored = await self.prefilled(request, {**body, "kv_transfer_params": {**params, "do_remote_decode": True}})
        return await self.answer(request, json.dumps({**body, "kv_transfer_params": {**params, **stored}}).encode())

    async def prefilled(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        """A prefill server's parameters for the decode server; none if it fails."""
        url = next(self.prefill) + request.path_qs
        first = {name: value for name, value in body.items() if name not in WITHOUT}
        try:
            data = json.dumps({**first, "max_tokens": 1}).encode()
            headers = {**passed(request.headers), "Accept-Encoding": "identity"}
            async with self.session.post(url, data=data, headers=headers, timeout=self.timeout) as answer:
                answer.raise_for_status()
                return (await answer.json()).get("kv_transfer_params") or {}
        except (ClientError, TimeoutError, ValueError, AttributeError) as error:
            logger.warning("%s: %r: the decode server computes the prompt", url, error)
            return {}

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, await request.read())

    async def answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """A decode server's answer, each part as it comes."""
        url = next(self.decode) + request.path_qs
        try:
            upstream = await self.session.request(request.method, url, data=body, headers=passed(request.headers))
        except ClientError as error:
            raise web.HTTPBadGateway(text=f"{url}: {error!r}") from error
        async with upstream:
            response = web.StreamResponse(status=upstream.status, headers=passed(upstream.headers))
            await response.prepare(request)
            async for part in upstream.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def passed(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="servers with kv_role kv_producer")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="servers with kv_role kv_consumer")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout", type=float, default=60.0, help="seconds; then the decode server computes")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    app = Proxy(args.prefill, args.decode, args.prefill_timeout).app()
    # A client that goes away ends its requests to the servers, too.
    web.run_app(app, host=args.host, port=args.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
