"""How an operator, or a trainer that lends its device, talks to a node agent: HTTP on a unix socket in the node directory.

The other side is ``rose.coserve.control``, which says what the routes are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from rose.auth import Tokens, bearer
from rose.errors import EngineError, RequestError
from rose.private_dir import private_dir
from rose.wire.errors import read_refusal


def by_descriptor(folder: int, name: str) -> str:
    """A socket has no call that takes a directory's descriptor."""
    return f"/proc/self/fd/{folder}/{name}"


class ControlClient:
    """The operator's side: blocking calls to the agent of ``directory``, which runs as the same user.

    Raises:
        EngineError: No agent answers there.
        LedgerError: The directory is not this user's alone: whoever listens there would get the token.
        RequestError: It refuses.
    """

    def __init__(self, directory: Path, tokens: Tokens) -> None:
        self._path = directory / "agent.sock"
        self._directory = private_dir(directory)
        self._token = tokens.node
        self._client: httpx.Client | None = None

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/status", None, 10.0)

    def set(self, **values: Any) -> dict[str, Any]:
        return self._call("POST", "/set", values, 60.0)

    def off(self, wait_s: float, engine: bool = True) -> dict[str, Any]:
        return self._call("POST", "/off", {"wait_s": wait_s, "engine": engine}, wait_s + 60.0)

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
        socket = by_descriptor(
            self._directory.fd(), self._path.name
        )  # looked at in each call; the number stays
        if self._client is None:
            self._client = httpx.Client(
                transport=httpx.HTTPTransport(uds=socket), base_url="http://node", headers=bearer(self._token)
            )
        return self._client

    def _call(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        try:
            response = self._connection().request(method, path, json=body, timeout=timeout_s)
            answer = response.json()
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
