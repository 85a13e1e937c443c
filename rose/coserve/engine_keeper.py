"""What keeps the rollout engine running while it may run, and ends it where it should not be there.

What it decides: when the engine is started, ended and started again.  Not whether it may run, nor how large it is: the node says that
(:class:`rose.coserve.node.Node`).  Nor how it is started, how often, or what it may hold.

Two jobs of the agent's loop, neither of which ends by itself: :meth:`EngineKeeper.keep` and :meth:`EngineKeeper.end_unwanted`.

Invariant: no start before nothing is left of the engine before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from rose.coserve.engine import RolloutEngine
from rose.coserve.records import Mode
from rose.errors import ConfigError, RoseError
from rose.policy.engine_start import REFUSED_ROLE, EngineSize

logger = logging.getLogger("rose.node")
LOOK_EVERY_S = 0.1
"""How often it is asked whether the engine may, or must not, be there."""
FITS_EVERY_S = 1.0
"""How often an engine is compared with what production could lend."""
REFUSED = f"ConfigError: {REFUSED_ROLE}: "
"""In the last words of a rollout engine that its plugin refuses."""
AGAIN_S = 1.0
"""An engine that is slow to die is ended again after so long."""


class Terms(Protocol):
    """On which the engine is there: the node's word, asked for again at every look."""

    @property
    def mode(self) -> Mode: ...

    @property
    def wants_engine(self) -> bool:
        """By its mode, and no operator stopped it, and the agent is not leaving."""
        ...

    def waits_for(self) -> str | None:
        """Why it may not be started now; None: it may."""
        ...

    def engine_size(self) -> EngineSize | None:
        """What it may take beside production; None: the device is its own.

        Raises:
            ConfigError: It does not fit there.
        """
        ...

    def outgrown(self) -> str | None:
        """Why the one that runs is too small for this production; None: it is not."""
        ...


class EngineKeeper:
    """See the module.

    Args:
        terms: Whether the engine should be there, and how large.
        is_ordered: Has somebody given an order here?  Then wrong settings are an answer to wait behind, and no end of the agent.
        give_back: Waits until the engine holds nothing, or its deadline is over.
        errors: Of the node, by kind; ours is ``engine``.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        terms: Terms,
        *,
        is_ordered: Callable[[], bool],
        give_back: Callable[[], Awaitable[object]],
        errors: dict[str, str],
    ) -> None:
        self._engine, self._terms = engine, terms
        self._is_ordered, self._give_back = is_ordered, give_back
        self._errors = errors

    async def keep(self) -> None:
        """Start the engine when it may be, and again when it ended.

        Raises:
            ConfigError: At its first start, with nobody having ordered anything: the settings are wrong from the beginning.
        """
        engine = self._engine
        while True:
            # Said at once: the pause before a start that will not come may be as long as the window.
            if self._terms.wants_engine and engine.restarts.exhausted(time.monotonic()):
                engine.give_up()
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            if self._terms.waits_for() is not None:
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            first = engine.num_starts == 0
            try:
                await engine.start(self._terms.engine_size())
                await self._while_it_fits()
            except ConfigError as error:
                if first and not self._is_ordered():
                    raise  # wrong from the beginning, and nobody has spoken to us: say so and end
                # An operator waits for an answer, or it ran before, perhaps under an agent that was killed with its engine, which holds its
                # port until it is dead: it may pass.
                engine.error = str(error)
                logger.error("rollout engine: %s", error)
            except RoseError as error:
                logger.error("rollout engine: %s", error)
                if REFUSED in str(error):
                    engine.restarts.refused()
            except Exception as error:
                engine.error = repr(error)
                logger.exception("rollout engine")
            await self._end_all_of_it()
            if self._terms.wants_engine:
                engine.restarts.ended(time.monotonic())

    async def _while_it_fits(self) -> None:
        """Until the engine has ended; one that production has outgrown is ended for it, and one whose operator's stop did not end it."""
        ended = asyncio.ensure_future(self._engine.wait_exit())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=FITS_EVERY_S)
                if ended.done():
                    break
                if self._engine.stop_asked:  # not just unwanted: who leaves takes the loan back first
                    await self._engine.stop()
                elif (reason := self._terms.outgrown()) is not None:
                    logger.warning("the rollout engine is started anew: %s", reason)
                    await self._engine.stop()
            ended.result()
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _end_all_of_it(self) -> None:
        """Until nothing of the engine is left; one that is slow to die has the device governed meanwhile."""
        while True:
            try:
                return await self._engine.stop(grace_s=0.0)
            except RoseError as error:
                self._engine.error = str(error)
                logger.error("%s", error)
            await asyncio.sleep(AGAIN_S)

    async def end_unwanted(self) -> None:
        """Mode observe touches nothing of production's device: what runs there gives its memory back, and ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._terms.mode != Mode.OBSERVE or not self._engine.running:
                self._errors.pop("engine", None)
                continue
            try:
                await self._give_back()
                if self._terms.mode == Mode.OBSERVE:
                    await self._engine.stop()
            except RoseError as error:
                self._errors["engine"] = str(error)
                logger.error("%s", error)
