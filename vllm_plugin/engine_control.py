"""What the routes of a rollout engine do (:mod:`vllm_plugin.endpoints`), on vLLM's ``EngineClient``.

Invariants: at most one commit at a time; the engine is resumed on every way out, save when an undo could
not be proved: then it stays paused, because its tokens would be of no version, and only a restart helps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError, Conflict, RequestError, RoseError

if TYPE_CHECKING:
    from rose.lineage import WeightVersion

logger = logging.getLogger("vllm.rose")

PAUSE_TIMEOUT_S = 30.0
"""A pause ends at the next step boundary; a step that takes longer than this is not worth waiting for."""
ALIVE_EVERY_S = 0.5
"""How often a call looks whether the engine that should answer it is dead."""
POLL_FIRST_S, POLL_LAST_S = 0.005, 0.1
"""Asking how staging goes is a collective call, which waits for the step in progress: ask seldom."""
GENERATE_PREFIX = "generate-tokens-"
"""vLLM puts this before the ``request_id`` of a ``/inference/v1/generate`` body."""


def _label(run: str, version: str) -> str:
    """What every token is stamped with."""
    return f"{run}@{version}" if run else version


class RankError(RoseError):
    """What a worker rank answered instead of doing it; carries the rank's own status and code."""

    def __init__(self, rank: int, error: dict[str, Any]) -> None:
        super().__init__(f"rank {rank}: {error['message']}", field=error["field"])
        self.status = error["status"]
        self.code = error["code"]


class EngineControl:
    """What the routes do, on vLLM's ``EngineClient``.  One event loop; one stage or commit at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._busy = asyncio.Lock()

    async def announce_version(self) -> None:
        """Label generated tokens with what the ranks hold, and tell the core whose it is."""
        reports = await self._ranks("rose_weights_staged")
        held = {(report["run"], report["version"]) for report in reports}
        if len(held) != 1:
            raise ConfigError(f"ranks hold different versions: {sorted(held)}", field="version")
        run, version = held.pop()
        await self._answer(self._client.update_weight_version(_label(run, version)))
        await self._switch(run)
        await self._prefixes({"version": version, "kv": "reset"})

    async def _prefixes(self, argument: dict[str, str] | None) -> Any:
        """Key prefixes by version, in the scheduler; None when this engine's scheduler cannot."""
        try:
            return await self._answer(
                self._client.engine_core.call_utility_async("rose_call", "prefixes", argument)
            )
        except Exception:  # vLLM's own scheduler, or one that is gone: the caller clears the cache instead
            logger.debug("ROSE: prefixes cannot be keyed", exc_info=True)
            return None

    async def _switch(self, run: str | None) -> str:
        """Tell the core whose weights are, or are about to be, in place; None asks it."""
        call = self._client.engine_core.call_utility_async("rose_call", "run", run)
        return (await self._answer(call))["run"]

    async def status(self) -> dict[str, Any]:
        reports = await self._ranks("rose_weights_staged")
        for report in reports:
            report.pop("partial")
        held = sorted({(report["run"], report["version"]) for report in reports})
        run, version = held[0] if len(held) == 1 else (None, None)
        return {
            "role": "rollout",
            "run": run,
            "version": version,
            "paused": await self._answer(self._client.is_paused()),
            "vocab_size": self._client.model_config.get_vocab_size(),
            "max_num_seqs": self._client.vllm_config.scheduler_config.max_num_seqs,
            "logprobs_mode": self._client.model_config.logprobs_mode,
            "ranks": reports,
            "scheduler": await self._scheduler(),
        }

    async def _scheduler(self) -> Any:
        """The scheduler's own status; None when this engine's scheduler has none."""
        try:
            return await self._answer(self._client.engine_core.call_utility_async("rose_call", "status", {}))
        except Exception:  # a status route answers with what it has
            logger.debug("ROSE: the scheduler gives no status", exc_info=True)
            return None

    async def stage(self, path: str, target: WeightVersion, run: str, wait_s: float) -> dict[str, Any]:
        """Start staging on all ranks and wait for the slowest, at most ``wait_s``."""
        async with self._exclusive():
            until_s = time.monotonic() + wait_s
            await self._ranks("rose_weights_prefetch", path, target.attempt, target.version, run)
            pause_s = POLL_FIRST_S
            while True:
                reports = await self._ranks("rose_weights_staged")
                for rank, report in enumerate(reports):
                    if report["phase"] == "failed":
                        raise RankError(rank, report["error"])
                if all(report["phase"] == "staged" for report in reports):
                    return {
                        "state": "staged",
                        "version": str(target),
                        "num_changed": sum(report["num_changed"] for report in reports),
                        "stage_s": max(report["stage_s"] for report in reports),
                    }
                if time.monotonic() + pause_s > until_s:
                    return {"state": "staging", "version": str(target)}
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, POLL_LAST_S)

    async def discard(self) -> dict[str, Any]:
        async with self._exclusive():
            await self._ranks("rose_weights_discard")
            return {}

    async def hashes(self) -> dict[str, Any]:
        async with self._exclusive():
            answers = await self._ranks("rose_weights_hash")
            names = ("run", "version", "hashes")
            return {"ranks": [{name: each[name] for name in names} for each in answers]}

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; an id that nobody has is no error."""
        names = set(request_ids) | {
            GENERATE_PREFIX + name for name in request_ids if not name.startswith(GENERATE_PREFIX)
        }
        await self._client.abort(sorted(names))

    async def commit(self, target: WeightVersion, kv: str, run: str = "") -> dict[str, Any]:
        """Change every rank to ``target`` of ``run`` (empty: of the one in place), or none; see the module.

        Runs to its end even when the caller hangs up: a cancelled commit would leave the engine paused.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(target, kv, run)))

    async def _commit(self, target: WeightVersion, kv: str, run: str) -> dict[str, Any]:
        from vllm_plugin.weight_vote import judge

        async with self._exclusive():
            reports = await self._ranks("rose_weights_staged")
            before = reports[0]["run"]
            if all(report["version"] == str(target) and run in ("", report["run"]) for report in reports):
                return {
                    "version": str(target), "run": before, "pause_s": 0.0, "commit_s": 0.0, "kv": kv, "repeated": True,
                }  # fmt: skip
            judge(reports, target)
            staged = reports[0]["target_run"]
            if staged != (run or before or staged):
                raise Conflict(f"what is staged is of run {staged}", field="run")
            run = staged
            if any(report["session"] for report in reports):
                raise Conflict("another weight update is in progress", field="version")
            was_paused = await self._answer(self._client.is_paused())
            began_s = time.monotonic()
            resume = not was_paused
            if run != before or (kv == "salt" and await self._prefixes(None) is None):
                kv = "reset"
            try:
                await self._pause(clear_cache=kv == "reset")
                if run != before:
                    await self._switch(run)
                commit_s = await self._swap(target, run)
                keyed = await self._prefixes({"version": str(target), "kv": kv})
                if kv == "salt" and keyed is None:
                    kv = "reset"
                    await self._pause(clear_cache=True)
            except _Broken as broken:
                resume = False
                raise broken.error from broken
            finally:
                if resume:
                    if run != before:
                        await self._name_run()
                    await self._answer(self._client.resume_generation())
            return {
                "version": str(target),
                "run": run,
                "pause_s": time.monotonic() - began_s,
                "commit_s": commit_s,
                "kv": kv,
                "repeated": False,
            }

    async def _name_run(self) -> None:
        """Before the engine samples again: its core admits for the run that the ranks hold, however the change went."""
        (run,) = {report["run"] for report in await self._ranks("rose_weights_staged")}
        await self._switch(run)

    async def _pause(self, *, clear_cache: bool) -> None:
        try:
            await asyncio.wait_for(
                self._answer(self._client.pause_generation(mode="keep", clear_cache=clear_cache)),
                PAUSE_TIMEOUT_S,
            )
        except TimeoutError:
            raise RequestError(
                f"no step boundary within {PAUSE_TIMEOUT_S:.0f} s; nothing was changed",
                status=504,
                code="pause_timeout",
            ) from None

    async def _swap(self, target: WeightVersion, run: str) -> float:
        """While paused: write on all ranks, read all outcomes, then keep or undo on all; returns seconds."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(
            update_info={"attempt": target.attempt, "version": target.version}
        )
        try:
            await self._answer(self._client.start_weight_update())
            more = True
            while more:  # a version that streams comes in slices
                await self._answer(self._client.update_weights(request))
                outcomes = await self._ranks("rose_weights_outcome")
                more = any(each["more"] for each in outcomes) and not any(each["failed"] for each in outcomes)
        except Exception as error:
            # Not a refusal (those come as outcomes): the executor itself failed.  Leave nothing half done.
            if not await self._undone():
                broken = f"the executor failed ({type(error).__name__}), and so did the undo"
                raise _Broken(RequestError(broken, status=500, code="weights_broken")) from error
            raise
        failed = [
            (rank, each["failed"] or {"message": "did not commit", "field": None, "status": 500, "code":
            "weights"}) for rank, each in enumerate(outcomes) if not each["committed"]
        ]  # fmt: skip
        if not failed:
            await self._answer(self._client.finish_weight_update(_label(run, str(target))))
            return max(each["commit_s"] for each in outcomes)
        error = RankError(*failed[0])
        if not await self._undone():
            error.status, error.code = 500, "weights_broken"
            raise _Broken(error)
        raise error

    async def _undone(self) -> bool:
        """Take the change back on all ranks and close vLLM's session; False when the old weights are not proved."""
        try:
            await self._ranks("rose_weights_undo", check=False)
            await self._answer(self._client.finish_weight_update())
            reports = await self._ranks("rose_weights_staged")
        except Exception:
            logger.exception("ROSE: an update could not be taken back")
            return False
        return not any(report["phase"] == "broken" for report in reports)

    async def _ranks(self, method: str, *args: Any, check: bool = True) -> list[dict[str, Any]]:
        """One collective call; raises the first rank's error after all ranks have answered."""
        answers = await self._answer(self._client.collective_rpc(method, args=args))
        for rank, answer in enumerate(answers):
            if check and not answer["ok"]:
                raise RankError(rank, answer["error"])
        return answers

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """What vLLM answers; its own error once the engine is dead.

        A utility call that was under way when the engine died may never be answered: the caller would wait, and with it the
        server, which ends only when its connections are closed.
        """
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=ALIVE_EVERY_S)
                if not task.done() and self._client.errored:
                    raise self._client.dead_error
            return task.result()
        finally:
            task.cancel()

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)


class _Broken(Exception):
    """Carries the error of a rank whose undo could not be proved past the resume."""

    def __init__(self, error: RoseError) -> None:
        super().__init__(str(error))
        self.error = error


class _Exclusive:
    """The lock, without a queue: whoever finds it taken is told so."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        if self._lock.locked():
            raise Conflict("another weight call is in progress", code="busy")
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
