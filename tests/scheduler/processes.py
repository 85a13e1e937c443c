"""Processes of a deployment, for tests that kill them: the daemon, fake engines with their nodes, and wires to cut."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from rose.proc import free_port


class Daemon:
    """``rose-scheduler`` as its own process, on one port across restarts.

    Args:
        name: Of its log in ``folder``; others there have their own.
        stands_by: For one that has the same journal.
        policy: Of routing.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        name: str = "scheduler",
        stands_by: bool = False,
        policy: str = "sticky_least_loaded",
    ) -> None:
        self.folder, self.policy = folder, policy
        self.settings = ("timeouts.tick_s=0.05", *settings)
        self.log = folder / f"{name}.log"
        self.stands_by = stands_by
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Until it answers, or stands by."""
        port = self.url.rsplit(":", 1)[-1] or str(free_port())  # one that it finds free when it comes back
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rose.scheduler.cli",
                "--port",
                port,
                "--token-file",
                str(self.folder / "tokens.toml"),
                "--journal",
                str(self.folder / "journal"),
                *(["--standby"] if self.stands_by else []),
                *(part for setting in self.settings for part in ("--set", setting)),
                "--policy",
                self.policy,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        await self._say("ready at", *(["stands by at"] if self.stands_by else []))
        return self.url

    async def is_active(self) -> None:
        """Until a stand-by has taken over."""
        await self._say("ready at")

    async def _say(self, *expected: str) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        said, _, url = line.strip().removeprefix("rose-scheduler ").rpartition(" ")
        assert said in expected, (line, self.log.read_text()[-2000:])
        self.url = url

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.send(number)
        return await self.process.wait()


class Wire:
    """A TCP connection's way to a port of this machine, which can be held up or torn."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """Nothing gets through, in either direction, and nobody is told."""
        self._open.clear()

    def let_go(self) -> None:
        """What was held up gets through now."""
        self._open.set()

    def tear(self) -> None:
        """Every connection is reset; new ones may be made."""
        for end in self._ends:
            end.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.tear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._ends.add(far_writer)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._ends.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass  # refused or reset: the same for whoever is at the other end
        finally:
            self._ends.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class FakeHost:
    """A fake engine with its node, in a process of its own, behind wires; comes back under its name after a kill."""

    def __init__(self, folder: Path, name: str, tier: str, *, token_s: float) -> None:
        self.folder, self.name, self.tier, self.token_s = folder, name, tier, token_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        """Of the engine, around the wire."""
        self.process: asyncio.subprocess.Process | None = None
        self.wires: tuple[Wire, Wire] | None = None

    async def start(self, scheduler: str) -> None:
        if self.wires is None:
            port = urlsplit(scheduler).port
            assert port is not None
            self.wires = self.down, self.up = Wire(self.port), Wire(port)
            self._advertise, self._scheduler = await self.down.start(), await self.up.start()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rose.testing.fake_node", "--port", str(self.port)),
            *("--scheduler", self._scheduler, "--advertise", self._advertise),
            *("--token-file", str(self.folder / "tokens.toml"), "--worker-id", self.name),
            *("--tier", self.tier, "--token-s", str(self.token_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("fake engine ready at "), line

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            await self.process.wait()

    async def end(self) -> None:
        await self.kill()
        for wire in self.wires or ():
            wire.let_go()
            await wire.close()
