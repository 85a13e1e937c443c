"""Clients of production: what it answers, and how long it is silent."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp

ASKED_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 200, 32
BURST_REQUESTS, BURST_TOKENS, BURST_ANSWER_TOKENS = 20, 440, 24
"""A burst takes 80 of 128 blocks."""
ANSWER_S = 120.0


def prompts() -> list[list[int]]:
    return [[5 + (11 * one + 7 * i) % 200 for i in range(PROMPT_TOKENS)] for one in range(ASKED_PROMPTS)]


@dataclass(kw_only=True)
class Answer:
    """One request to production: ``silence_s`` is the longest that its client heard nothing."""

    began_s: float
    ended_s: float = 0.0
    silence_s: float = 0.0
    text: str = ""
    error: str = ""


class Load:
    """Clients of production that stream: some all the time, and bursts when asked for.  Every answer is kept.

    Attributes:
        expected: What each of the prompts is answered with, once :meth:`learn` has asked for it.
        wrong: Answers that were not that.
    """

    def __init__(self, model: str, url: Callable[[], str], rng: random.Random) -> None:
        self._model, self._url, self._rng = model, url, rng
        self.answers: list[Answer] = []
        self.expected: list[str] = []
        self.wrong = 0
        self._open = asyncio.Event()
        self._busy = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        # A connection for each request: one that is kept may be closed by the server, idle for 5 s, in the moment in which it is used again,
        # and that would read as an error of production's.
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
        for end in ends:  # a client that ended by itself asked nothing from then on
            if isinstance(end, Exception):
                raise end

    async def learn(self) -> None:
        """What production says alone, one prompt after the other."""
        for prompt in prompts():
            answer = await self.ask(prompt, ANSWER_TOKENS)
            if answer.error:
                raise RuntimeError(f"production alone: {answer.error}")
            self.expected.append(answer.text)
        self._tasks = [asyncio.create_task(self._for_ever(client)) for client in range(2)]
        self.go_on()

    def go_on(self) -> None:
        self._open.set()

    async def pause(self) -> None:
        """No new requests; returns when none is under way."""
        self._open.clear()
        while self._busy:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _for_ever(self, client: int) -> None:
        number = client
        while True:
            while not self._open.is_set():  # it may be cleared again before who waited for it goes on
                await self._open.wait()
            number = (number + 2) % ASKED_PROMPTS
            answer = await self.ask(prompts()[number], ANSWER_TOKENS)
            if not answer.error and answer.text != self.expected[number]:
                self.wrong += 1
            await asyncio.sleep(0.1)

    async def burst(self) -> list[Answer]:
        """Many long requests at once, each of a prompt that nobody has asked before."""
        fresh = [[self._rng.randrange(5, 200) for _ in range(BURST_TOKENS)] for _ in range(BURST_REQUESTS)]
        return await asyncio.gather(*(self.ask(prompt, BURST_ANSWER_TOKENS) for prompt in fresh))

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        answer = Answer(began_s=time.monotonic())
        self.answers.append(answer)
        self._busy += 1
        try:
            await self._stream(answer, prompt, max_tokens)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            self._busy -= 1
            answer.ended_s = time.monotonic()
        return answer

    async def _stream(self, answer: Answer, prompt: Sequence[int], max_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        heard_s, finished = answer.began_s, ""
        async with self._http.post(f"{self._url()}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                answer.silence_s = max(answer.silence_s, now_s - heard_s)
                heard_s = now_s
                choice = json.loads(line[6:])["choices"][0]
                answer.text += choice["text"]
                finished = choice.get("finish_reason") or finished
        if finished != "length":
            answer.error = f"ended with {finished!r}"
