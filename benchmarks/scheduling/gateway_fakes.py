"""What stands around the gateways that ``benchmarks.gateway`` compares: the upstream and the plain proxies.

``python -m benchmarks.scheduling.gateway_fakes upstream CHUNKS``
``python -m benchmarks.scheduling.gateway_fakes proxy URL [--uvloop] [--journal DIR]``

Each prints ``ready URL`` and serves until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.wire import Upstream, answer

NUM_PROMPT, NUM_NEW = 1000, 64
MODEL = "policy"
TEXT = "word " * NUM_NEW


def new_ids(count: int) -> list[int]:
    """The tokens that the upstream always answers."""
    return [100 + at % 50 for at in range(count)]


# --- the upstream ---------------------------------------------------------------------------------------


def _choice(count: int, finish: str | None) -> dict[str, Any]:
    ids = new_ids(count)
    entries = [{"token_id": t, "logprob": -0.5 - t / 1000, "rank": 1, "top_logprobs": []} for t in ids]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": entries},
        "finish_reason": finish,
        "stop_reason": None,
        "weight_versions": [{"version": "0.1", "start": 0, "end": count}] if finish else None,
    }


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def upstream(num_chunks: int, period_s: float) -> None:
    usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": NUM_NEW, "total_tokens": NUM_PROMPT + NUM_NEW}
    message = {"role": "assistant", "content": TEXT}
    chat = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
    chat["choices"] = [{"index": 0, "message": message, "finish_reason": "length", "logprobs": None}]
    rendered = {
        "request_id": "r",
        "token_ids": [7 + at % 300 for at in range(NUM_PROMPT)],
        "sampling_params": {"n": 1, "temperature": 1.0, "max_tokens": 1, "logprobs": None},
        "model": MODEL,
    }
    piece = {"index": 0, "delta": {"content": "word word "}, "finish_reason": None, "logprobs": None}
    state = {"prev_tokens": ["a"] * 6, "prefix_offset": 0, "read_offset": 6, "role_sent": True}
    answers: dict[str, Any] = {
        "*": {},
        "/v1/models": {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "max_model_len": 100_000}],
        },
        "/inference/v1/generate": {
            "request_id": "g",
            "choices": [_choice(NUM_NEW, "length")],
            "usage": usage,
        },
        "/v1/chat/completions": chat,
        "/v1/chat/completions/render": rendered,
        "/v1/chat/completions/derender": chat,
        "/v1/chat/completions/derender?stream": {
            "chunk": {"id": "x", "choices": [piece]},
            "stream_state": state,
        },
    }
    Upstream.answers = {path: answer(json.dumps(body).encode()) for path, body in answers.items()}
    # No plug-in of ours: texts are asked for by vLLM's own route, as the plain proxy does.
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    Upstream.answers |= dict.fromkeys(("/rose/parse", "/rose/parse/whole", "/rose/parse/close"), missing)
    Upstream.chunks = [_event({"request_id": "g", "choices": [_choice(2, None)]})] * (num_chunks - 1)
    last = _choice(2, "length")
    last["weight_versions"] = [{"version": "0.1", "start": 0, "end": 2 * num_chunks}]
    Upstream.chunks.append(_event({"request_id": "g", "choices": [last]}) + b"data: [DONE]\n\n")
    Upstream.period_s, Upstream.delay_s = period_s, 0.0
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=2048)
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


# --- the proxies ----------------------------------------------------------------------------------------


async def proxy(target: str, journal: Path | None) -> None:
    """``bare`` without a journal folder, ``chat_proxy`` with one."""
    import aiohttp
    import msgspec
    from aiohttp import web

    from rose.scheduler.ids import pack_ids, pack_logprobs
    from rose.scheduler.journal import Journal
    from rose.scheduler.records import TurnRecord

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    headers = {"Content-Type": "application/json"}

    async def post(path: str, body: bytes) -> bytes:
        async with session.post(target + path, data=body, headers=headers) as response:
            return await response.read()

    async def copy(incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        async with session.post(target + incoming.path, data=body, headers=headers) as response:
            if response.content_type == "text/event-stream":
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await out.prepare(incoming)
                async for part in response.content.iter_any():
                    await out.write(part)
                return out
            return web.Response(body=await response.read(), content_type="application/json")

    book = None if journal is None else Journal(journal)
    if book is not None:
        list(book.recover())
    encode, decode = msgspec.json.encode, msgspec.json.decode

    async def chat(incoming: web.Request) -> web.StreamResponse:
        assert book is not None
        body = decode(await incoming.read())
        rendered = decode(await post("/v1/chat/completions/render", encode({**body, "max_tokens": 1})))
        params = {**rendered["sampling_params"], "max_tokens": body["max_tokens"], "logprobs": 0}
        ask = {
            "request_id": "r",
            "token_ids": rendered["token_ids"],
            "sampling_params": params,
            "stream": False,
        }
        generated = decode(await post("/inference/v1/generate", encode(ask)))
        choice = generated["choices"][0]
        parsed = decode(
            await post(
                "/v1/chat/completions/derender",
                encode(
                    {
                        "model": MODEL,
                        "generate_response": {**generated, "prompt_token_ids": rendered["token_ids"]},
                        "prompt_tokens": len(rendered["token_ids"]),
                        "chat_request": body,
                    }
                ),
            )
        )
        out = encode({**parsed, "usage": generated["usage"]})
        book.append(
            TurnRecord(
                trajectory_id="t",
                turn=0,
                kind="chat",
                suffix_ids=pack_ids(rendered["token_ids"]),
                token_ids=pack_ids(choice["token_ids"]),
                logprobs=pack_logprobs([entry["logprob"] for entry in choice["logprobs"]["content"]]),
                finish_reason=choice["finish_reason"],
                versions=[("0.1", 0, NUM_NEW)],
                segments=[],
                usage={},
                timing={},
                sampling={},
            )
        )
        return web.Response(body=out, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", copy if book is None else chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("upstream", help="answers from memory; streams one event every 200 ms")
    one.add_argument("chunks", type=int, help="events per stream")
    one = roles.add_parser("proxy", help="an aiohttp proxy; with a journal, one that does what chat does")
    one.add_argument("target")
    one.add_argument("--uvloop", action="store_true")
    one.add_argument("--journal", type=Path)
    args = parser.parse_args()
    if args.role == "upstream":
        asyncio.run(upstream(args.chunks, 0.2))
    else:
        run = uvloop.run if args.uvloop else asyncio.run
        run(proxy(args.target, args.journal))


if __name__ == "__main__":
    main()
