"""How an operator, or a trainer that lends its device, talks to a node agent: HTTP on a unix socket in the node directory.

The other side is ``rose.coserve.control``, which says what the routes are.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import httpx

from rose.auth import Tokens, bearer
from rose.errors import AgentHangs, EngineError, RequestError, RoseError
from rose.private_dir import own_dir
from rose.wire.errors import read_refusal

CONNECT_S = 2.0
"""The kernel answers, whether the agent does or not."""
ASK_S = 1.0
"""An order that takes longer is asked after so often; the answer is waited for as long, then twice as long: it may be slow."""
SILENT_S = 10.0
"""So long without a word while an order is on its way: it hangs."""
_PEER = struct.Struct("3i")


def by_descriptor(folder: int, name: str) -> str:
    """A socket has no call that takes a directory's descriptor."""
    return f"/proc/self/fd/{folder}/{name}"


class Answer(dict[str, Any]):
    """An agent's word.  What it lacks is named: an agent runs for weeks, and the program that asks may be of a newer build."""

    def __missing__(self, key: str) -> NoReturn:
        raise EngineError(
            f"the node agent's answer has no '{key}': it is of another version of ROSE",
            field="dir",
            fix="restart the agent, or see what it says with `rose node status --json`",
        )


class ControlClient:
    """The operator's side: blocking calls to the agent of ``directory``, which runs as the same user.

    Raises:
        EngineError: No agent answers there.
        AgentHangs: One is there and says nothing.
        LedgerError: The directory is another user's, or others may write there: whoever listens there would get the token.
        RequestError: It refuses.
    """

    def __init__(self, directory: Path, tokens: Tokens) -> None:
        self._path = directory / "agent.sock"
        self._directory = own_dir(directory)  # an emergency stop asks no more of it than it needs
        self._token = tokens.node
        self._client: httpx.Client | None = None

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/status", None, 10.0)

    def set(self, **values: Any) -> dict[str, Any]:
        return self._call("POST", "/set", values, 60.0)

    def off(
        self, wait_s: float, engine: bool = True, told: Callable[[float, int | None], None] | None = None
    ) -> dict[str, Any]:
        """Take everything back, and wait for it.

        Args:
            told: Called while it takes longer, with the seconds so far and the pages that the engine has by the agent's word; None: the
                agent says nothing.

        Raises:
            AgentHangs: It has said nothing for :data:`SILENT_S`.  The order has reached it, and is carried out once it goes on.
        """
        answers: list[dict[str, Any] | RoseError] = []
        body = {"wait_s": wait_s, "engine": engine}

        def order() -> None:
            try:
                answers.append(self._call("POST", "/off", body, wait_s + 60.0))
            except RoseError as error:
                answers.append(error)

        thread = threading.Thread(target=order, daemon=True)
        thread.start()
        begun_s, patience_s = time.monotonic(), ASK_S
        heard_s = begun_s
        while True:
            thread.join(ASK_S)
            if not thread.is_alive():
                (answer,) = answers
                if isinstance(answer, RoseError):
                    raise answer
                return answer
            pages = None
            try:
                pages = self._call("GET", "/status", None, patience_s)["rollout"]["reserved_pages"]
                heard_s, patience_s = time.monotonic(), ASK_S
            except AgentHangs:
                patience_s *= 2
            now_s = time.monotonic()
            if told is not None:
                told(now_s - begun_s, pages)
            if now_s - heard_s >= SILENT_S:
                raise self._hangs()

    def lend(self, seconds: float, wait_s: float = 10.0) -> dict[str, Any]:
        """The device, for so long from now; 0 takes it back.

        Args:
            wait_s: For its memory, which the answer's ``given_back`` is about.
        """
        return self._call("POST", "/lend", {"seconds": seconds, "wait_s": wait_s}, wait_s + 10.0)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connection(self) -> httpx.Client:
        path = by_descriptor(
            self._directory.fd(), self._path.name
        )  # looked at in each call; the number stays
        if self._client is None:
            self._client = httpx.Client(
                transport=httpx.HTTPTransport(uds=path), base_url="http://node", headers=bearer(self._token)
            )
        return self._client

    def _call(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        for name, value in (body or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"must be a number, got {value}", field=name)
        try:
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            response = self._connection().request(method, path, json=body, timeout=timeout)
            answer = response.json(object_hook=Answer)
        except httpx.TimeoutException as error:
            raise self._hangs() from error
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise EngineError(
                f"no node agent answers at {self._path}", field="dir", fix="rose node run --config node.toml"
            ) from error
        if response.status_code >= 400:
            said, status = read_refusal(answer), response.status_code
            raise RequestError(
                said.message or f"HTTP {status}", field=said.field, status=status, code=said.code or "refused"
            )
        return answer

    def _hangs(self) -> AgentHangs:
        who = f" of pid {pid}" if (pid := self._listener()) else ""
        return AgentHangs(
            f"the node agent{who} is there and does not answer",
            field="dir",
            fix=f"`kill -CONT {pid or 'PID'}` where it was stopped; else end it, `kill -9 {pid or 'PID'}`: its engine ends with it",
        )

    def _listener(self) -> int:
        """Who made the socket; 0 where it cannot be told (another pid namespace)."""
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(CONNECT_S)
                peer.connect(by_descriptor(self._directory.fd(), self._path.name))
                return _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        except (OSError, RoseError):
            return 0
