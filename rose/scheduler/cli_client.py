"""How the commands of a terminal ask a running rose-scheduler: ``rose traj``, ``rose top``, ``rose fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from rose.auth import Tokens, bearer
from rose.errors import ConfigError, RequestError
from rose.wire.errors import read_refusal

Url = Annotated[str, typer.Option(help="Of rose-scheduler.", envvar="ROSE_SCHEDULER_URL")]
DEFAULT_URL = "http://127.0.0.1:8800"


class CliClient:
    """Args:
    url: Of the daemon.
    token_file: As :meth:`Tokens.load` takes it.
    role: Whose token to show.
    """

    def __init__(self, url: str, token_file: Path | None, role: str) -> None:
        token = getattr(Tokens.load(token_file, [role]), role)
        self._http = httpx.Client(base_url=url, headers=bearer(token), timeout=30.0, trust_env=False)
        self._url = url

    def get(self, path: str, **query: Any) -> Any:
        """:meth:`ask` by GET; of ``query``, what is not None."""
        return self.ask("GET", path, params={k: v for k, v in query.items() if v is not None})

    def ask(self, method: str, path: str, body: Any = None, params: dict[str, Any] | None = None) -> Any:
        """Raises:
        ConfigError: Nobody answers there.
        RequestError: The daemon refuses.
        """
        try:
            answer = self._http.request(method, path, json=body, params=params)
        except httpx.TransportError as error:
            raise ConfigError(
                f"no rose-scheduler answers at {self._url}: {error}", field="url", fix="name it with --url"
            ) from error
        if answer.status_code != 200:
            said = read_refusal(answer.content)
            raise RequestError(said.message or f"status {answer.status_code}", field=said.field or path)
        return answer.json()
