"""How the commands of a terminal ask a running rose-scheduler: ``rose traj``, ``rose top``, ``rose fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from rose.auth import Tokens, bearer
from rose.errors import ConfigError, NotFound, RequestError
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
        ConfigError: Nobody answers there, or some other program does.
        NotFound: It has no such thing.
        RequestError: It refuses.
        """
        try:
            answer = self._http.request(method, path, json=body, params=params)
        except httpx.TransportError as error:
            raise ConfigError(
                f"no rose-scheduler answers at {self._url}: {error}", field="url", fix="name it with --url"
            ) from error
        status = answer.status_code
        if status != 200:
            said = read_refusal(answer.content)
            if said.code is None and (status < 400 or status in (404, 405, 501)):
                raise self._another()
            if status == 404 and said.message.lower() == "not found" and said.field is None:  # no such route
                raise self._another(f" that knows {path}")
            kind = NotFound if status == 404 else RequestError
            raise kind(said.message or f"status {status}", field=said.field or path)
        try:
            told = answer.json()
        except (ValueError, RecursionError) as error:
            raise self._another() from error
        if not isinstance(told, dict):
            raise self._another()
        return told

    def _another(self, more: str = "") -> ConfigError:
        return ConfigError(
            f"{self._url} answers, but is no rose-scheduler{more}", field="url", fix="name it with --url"
        )
