"""Change caps and policy while the daemon runs: ``GET`` and ``POST /admin/settings``, role admin.

What was changed is logged with the old value and answered; nothing is written to the configuration file.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from rose.errors import RequestError
from rose.policy.worker import Tier
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.http import REQUEST_ID, json_response, read_wire
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.wire.answers import SettingsChanged
from rose.wire.samples import Settings

log = logging.getLogger("rose.scheduler")


class SettingsRoutes:
    def __init__(self, config: SchedulerConfig, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._policy_named = config.policy_named
        self._now: dict[str, Any] = {
            "policy": config.policy,
            "cap_dedicated": config.cap_dedicated,
            "cap_harvested": config.cap_harvested,
            "max_running": config.limits.max_running,
        }

    async def get(self, request: web.Request) -> web.Response:
        return json_response(self._now)

    async def change(self, request: web.Request) -> web.Response:
        """``{policy?, cap_dedicated?, cap_harvested?, max_running?}`` -> ``{changed: {name: [old, new]}}``."""
        body = await read_wire(request, Settings)
        asked = {name: new for name in self._now if (new := getattr(body, name)) is not None}
        if not asked:
            raise RequestError(f"name at least one of {', '.join(self._now)}", field="body")
        changed = {name: [self._now[name], new] for name, new in asked.items() if self._now[name] != new}
        for name, (old, new) in changed.items():
            self._apply(name, new)
            self._now[name] = new
            log.warning("request %s: setting %s changed from %s to %s", request[REQUEST_ID], name, old, new)
        return json_response(SettingsChanged(changed=changed))

    def _apply(self, name: str, new: Any) -> None:
        match name:
            case "policy":
                self._dispatcher.set_policy(self._policy_named(new))
            case "max_running":
                self._dispatcher.max_running = new
            case _:
                self._dispatcher.set_cap(Tier(name.removeprefix("cap_")), new)
