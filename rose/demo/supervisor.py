"""The demo's processes: started in order, watched, restarted where that makes sense, and all ended.

A *program* is one program.  :class:`ProcessSupervisor` starts it, waits until it is ready, and then looks at it twice a
second.  A program that ends on its own is started again with the same command while it has restarts left;
without any, the run ends with one line that names it.  A *task* (``restarts=0, task=True``) is a program that is
supposed to end; its exit code is the caller's business.

Whatever happens, leaving the ``async with`` block ends every process, clients before servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rose.errors import EngineError, RoseError
from rose.proc import Child, Probe, ProcSpec

LOOK_EVERY_S = 0.5
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program of the demo and what to do when it ends."""

    spec: ProcSpec
    ready: Probe | None = None
    """None: it is ready once it runs."""
    timeout_s: float = 240.0
    restarts: int = 0
    task: bool = False


class ProcessSupervisor:
    """Owner of all processes of a run; an async context manager.

    Args:
        report: Called with ``(kind, text)`` when a program died (``kill``) or was started again (``restart``).
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._programs: dict[str, Program] = {}
        self._children: dict[str, Child] = {}
        self._restarts_left: dict[str, int] = {}
        self._stopping: set[str] = set()

    async def __aenter__(self) -> ProcessSupervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        stopping = asyncio.ensure_future(self.stop_all())
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                continue  # a second Ctrl-C while we clean up must not leave an engine behind
            except RoseError:
                break
        stopping.result()

    async def start(self, program: Program, progress: Callable[[float], None] | None = None) -> float:
        """Start ``program`` and wait until it is ready; seconds it took.

        Raises:
            EngineError: It ended, or was not ready in time.
            ConfigError: It could not be started at all.
        """
        name = program.spec.name
        self._stopping.discard(name)
        child = Child.start(program.spec)
        self._programs[name], self._children[name] = program, child
        self._restarts_left.setdefault(name, program.restarts)
        if program.ready is None:
            return 0.0
        return await child.wait_ready_async(program.ready, program.timeout_s, progress)

    def names(self) -> list[str]:
        return list(self._children)

    def returncode(self, name: str) -> int | None:
        return self._children[name].returncode()

    def log_tail(self, name: str, num_lines: int = 5) -> str:
        return self._children[name].log_tail(num_lines)

    async def watch(self) -> None:
        """Runs until a program that cannot be started again has ended.

        Raises:
            EngineError: Names it, its exit code, and the end of its log.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name, child in list(self._children.items()):
                program = self._programs[name]
                code = child.returncode()
                if code is None or program.task or name in self._stopping:
                    continue
                self._report("kill", f"{name} ended with {code}")
                if self._restarts_left[name] <= 0:
                    where = f", see {program.spec.log_path}" if program.spec.log_path else ""
                    raise EngineError(f"ended with {code} and is not started again{where}", field=name)
                self._restarts_left[name] -= 1
                try:
                    await self.start(program)
                except RoseError as error:
                    raise EngineError(f"could not be started again: {error}", field=name) from error
                self._report("restart", f"{name} was started again")

    async def guarded(self, work: Awaitable[None]) -> None:
        """Do ``work`` while :meth:`watch` looks on; the first to fail ends both."""
        working = asyncio.ensure_future(work)
        watching = asyncio.create_task(self.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not working.done():
                await watching
            await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def wait_end(self, name: str, timeout_s: float) -> int:
        """The exit code of a task.

        Raises:
            EngineError: It still runs after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (code := self._children[name].returncode()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)
                return code
        except TimeoutError:
            raise EngineError(f"still runs after {timeout_s:.0f} s", field=name) from None

    async def stop(self, name: str, grace_s: float = GRACE_S) -> None:
        """End one program and everything below it."""
        self._stopping.add(name)
        if (child := self._children.get(name)) is not None:
            await child.terminate_async(grace_s)

    async def stop_all(self) -> None:
        """End all programs: first those that use others (clients and tasks), then the servers, each group at once.

        Every one is tried, then the first failure is raised.
        """
        failures: list[BaseException] = []
        self._stopping.update(self._children)
        clients = [name for name in self._children if self._programs[name].ready is None]
        servers = [name for name in self._children if self._programs[name].ready is not None]
        for group in (clients, servers):
            ends = await asyncio.gather(*(self.stop(name) for name in group), return_exceptions=True)
            failures += [end for end in ends if isinstance(end, BaseException)]
        if failures:
            raise failures[0]
