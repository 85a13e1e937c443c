"""A relay as a deployment runs it: its own process, killed and started again on the same port and folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rose.auth import Tokens
from tests.engine_launcher import fork_piped


class RelayProcess:
    """A context manager; ``url`` stays the same over restarts.

    Args:
        folder: Made if missing; the objects are in ``relay`` below it.
        tokens: None: of its own.
        options: More of ``rose relay``'s.
        signed: Its own token file names a public key, as one of ``rose tokens`` does: heads that it did not sign are refused.
        port: 0: any.  One below those that the system hands out stays free while the relay is down.
    """

    def __init__(
        self,
        folder: Path,
        tokens: Tokens | None = None,
        *options: str,
        signed: bool = False,
        port: int = 0,
    ) -> None:
        made = Tokens.generate()
        self.tokens = tokens or (made if signed else replace(made, public_key="", publish_key=""))
        self._options, self._port = options, port
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._token_file = folder / "tokens.toml"
        self.tokens.save(self._token_file)

    def __enter__(self) -> RelayProcess:
        self.process, self.url = self._start(self._port)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._reap()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def restart(self) -> None:
        self.process, url = self._start(int(self.url.rsplit(":", 1)[1]))
        assert url == self.url

    def _reap(self) -> None:
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _argv(self, port: int) -> list[str]:
        """Of ``rose relay``."""
        directory = self._folder / "relay"
        return [
            f"--directory={directory}",
            f"--port={port}",
            f"--token-file={self._token_file}",
            *self._options,
        ]

    def _start(self, port: int) -> tuple[Any, str]:
        command = [
            sys.executable, "-c", "from rose.weights.cli import relay_main; relay_main()", *self._argv(port),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[2].rstrip(",")


class ForkedRelay(RelayProcess):
    """The same, forked from an image that has its imports, which are nearly all of what a start costs."""

    def _start(self, port: int) -> tuple[Any, str]:
        process, output = fork_piped("rose.weights", self._argv(port), os.environ, "relay")
        return process, output.readline().split()[2].rstrip(",")
