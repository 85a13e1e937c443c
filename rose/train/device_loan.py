"""The trainer's device, left to a rollout engine while the trainer waits for rollouts.

The node agent of that engine (``borrowed = true`` in its settings) runs on this machine and is asked through its directory.
A loan is for ``lend.hold_s`` and is renewed after a third of it; a run that dies lends nothing any more after that.  Before
the trainer goes on the device is taken back, which waits for the engine's memory, for ``lend.wait_s`` at most.

An agent that does not answer costs the run nothing but the help: it is said in the log, and asked again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.auth import Tokens
from rose.errors import ConfigError, RoseError
from rose.node_client import ControlClient
from rose.train.train_config import LendSettings

logger = logging.getLogger(__name__)


class DeviceLoan:
    """Attributes:
    lent_s: For how long the device was lent, all in all; not while nobody answered for it.
    """

    def __init__(self, settings: LendSettings, tokens: Tokens) -> None:
        self._settings = settings
        self._client = None if settings.node_dir is None else ControlClient(settings.node_dir, tokens)
        self._error = ""
        self.lent_s = 0.0
        self._lent_at_s: float | None = None

    def check(self) -> None:
        """Raises:
        ConfigError: There is no node agent to lend to, or its device is not borrowed.
        """
        if self._client is None:
            return
        try:
            tier = self._client.status()["tier"]
        except RoseError as error:
            raise ConfigError(str(error), field="lend.node_dir") from error
        if tier != "borrowed":
            raise ConfigError(
                f"the node there has its device to itself (tier {tier})",
                field="lend.node_dir",
                fix="borrowed = true in its node.toml",
            )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """The device is the engine's while the block runs, and the trainer's afterwards."""
        client = self._client
        if client is None:
            yield
            return
        renewing = asyncio.create_task(self._renew(client))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await self._take_back(client)
            self._count(is_lent=False)

    async def _renew(self, client: ControlClient) -> None:
        while True:
            self._count(is_lent=await self._ask(client, self._settings.hold_s) is not None)
            await asyncio.sleep(self._settings.hold_s / 3)

    def _count(self, *, is_lent: bool) -> None:
        now_s = time.monotonic()
        if self._lent_at_s is not None:
            self.lent_s += now_s - self._lent_at_s
        self._lent_at_s = now_s if is_lent else None

    async def _take_back(self, client: ControlClient) -> None:
        answer = await self._ask(client, 0.0)
        if answer is False:
            logger.warning("the engine still holds memory of the trainer's device; training goes on")

    async def _ask(self, client: ControlClient, seconds: float) -> bool | None:
        """Whether the device is all ours; None: nobody said."""
        # In a thread that is waited for even when we are cancelled: two at once would share one connection.
        asked = asyncio.ensure_future(asyncio.to_thread(client.lend, seconds, self._settings.wait_s))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            await asyncio.gather(asked, return_exceptions=True)
            raise
        except RoseError as error:
            if str(error) != self._error:
                self._error = str(error)
                logger.warning("the trainer's device cannot be lent: %s", error)
            return None
        self._error = ""
        return bool(answer["given_back"])
