"""The fleet's switch: ``GET /fleet``, ``POST /fleet/off`` and ``/fleet/on``, and what heartbeats say and are told of it.

Decides nothing (:mod:`rose.policy.fleet_switch` does).  The order is in ``fleet.json`` beside the journal before it is answered, so that neither
a restart nor a stand-by releases a node that somebody has switched off; a file that cannot be read holds the whole fleet.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from aiohttp import web

from rose.errors import CapacityError, Conflict, RequestError
from rose.policy.fleet_switch import (
    DEFAULT_GROUP,
    MAX_GROUPS,
    Action,
    Done,
    FleetSwitch,
    NodeSaid,
    Released,
    TakenBack,
)
from rose.policy.namesakes import Holder, Namesakes, NodePlace
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.http import json_response, read_wire
from rose.scheduler.journal import Journal
from rose.scheduler.node_metrics import NodeMetrics
from rose.wire.answers import FleetNode, FleetStatus
from rose.wire.fleet import FleetOff, FleetOn
from rose.wire.workers import Heartbeat, Registration

log = logging.getLogger("rose.scheduler")

FILE = "fleet.json"
RETRY_S = 1.0
"""Between attempts to keep what could not be kept."""
MAX_NAMESAKES = 4096
_MAX_NAME_CHARS = 128
FORMAT = 1
_MAX_BYTES = 1 << 20


class FleetRoutes:
    """Args:
    journal: Its directory has the file, and whose it is may write it.
    """

    def __init__(self, journal: Journal, dispatcher: Dispatcher, metrics: NodeMetrics) -> None:
        self._journal = journal
        self._path = journal.directory / FILE
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._switch = FleetSwitch(clock_gap_s=dispatcher.book.fleet.params.clock_gap_s)
        self._said: dict[str, tuple[float, Heartbeat]] = {}
        self._read()
        self._kept: dict[str, Any] | None = self._switch.state()
        """What the file says; None: nobody can tell."""
        self._try_at_s = 0.0
        self._namesakes = Namesakes[Heartbeat](
            fresh_s=dispatcher.book.fleet.params.dead_s,
            remember_s=dispatcher.book.params.forget_dead_s,
            most=MAX_NAMESAKES,
        )

    # --- heartbeats

    def check_name(self, body: Registration, url: str) -> None:
        """Raises:
        Conflict: Another node has this name, and lives.
        """
        name, place, now_s = (
            body.worker_id,
            NodePlace(url=url, host=body.host or ""),
            self._dispatcher.now_s(),
        )
        worker, endpoint = self._dispatcher.book.fleet.workers.get(name), self._dispatcher.endpoints.get(name)
        holder = None
        if worker is not None and endpoint is not None:
            has_it = NodePlace(url=endpoint.url, host=endpoint.host)
            holder = Holder(incarnation=worker.incarnation, heard_s=worker.heard_at_s, place=has_it)
        num_refusals = self._namesakes.num_refusals(now_s, name, body.incarnation, place, holder)
        if holder is None or not num_refusals:
            return
        if num_refusals == 1:
            log.error("two nodes have the node_id %s: %s has it, %s is refused", name, holder.place, place)
        raise Conflict(
            f"is in use: the node at {holder.place} has this node_id, and lives",
            field="worker_id",
            fix="give each node a node_id of its own; if that node is gone for good, this one is let in "
            f"{self._namesakes.fresh_s:g} s after its last heartbeat",
        )

    def heard_unknown(self, worker_id: str, body: Heartbeat) -> None:
        """A node has spoken that is not registered, or not any more."""
        if len(worker_id) <= _MAX_NAME_CHARS:
            self._heard_stranger(self._dispatcher.now_s(), worker_id, body)

    def heard(self, worker_id: str, body: Heartbeat) -> bool:
        """A node has spoken; whether it is held."""
        now_s = self._dispatcher.now_s()
        group = body.group or DEFAULT_GROUP
        before_s, before = self._said.get(worker_id, (now_s, body))
        if before.incarnation != body.incarnation and before.held_pages != 0:
            # A node that was started again says so no more, and another one of this name goes on.
            self._heard_stranger(before_s, worker_id, before)
        self._namesakes.has_the_name(worker_id, body.incarnation)
        self._said[worker_id] = now_s, body
        self._metrics.heard(worker_id, body)
        measured = body.serving_ttft_p99_s is not None or body.serving_tpot_p99_s is not None
        self._switch.said(
            now_s, NodeSaid(node=worker_id, group=group, late=broken_promise(body), measured=measured)
        )
        return self._switch.is_held(group)

    def _heard_stranger(self, at_s: float, worker_id: str, body: Heartbeat) -> None:
        self._namesakes.heard(at_s, worker_id, body.incarnation, body, may_hold=body.held_pages != 0)

    def tick(self) -> None:
        workers = self._dispatcher.book.fleet.workers
        for name in [name for name in self._said if name not in workers]:
            del self._said[name]
            self._switch.gone(name)
            self._metrics.gone(name)
        now_s = self._dispatcher.now_s()
        self._namesakes.forget_silent(now_s)
        self._log(self._switch.tick(now_s))
        if self._switch.state() != self._kept and now_s >= self._try_at_s:
            self._try_at_s = now_s + RETRY_S
            self._write()

    # --- routes

    async def get(self, request: web.Request) -> web.Response:
        return json_response(self._status())

    async def off(self, request: web.Request) -> web.Response:
        body = await read_wire(request, FleetOff)
        self._require_room(body.groups)
        self._require_nodes(body.groups, "groups")
        self._order(lambda: self._switch.off(body.groups))
        log.warning("fleet: off, %s", ", ".join(body.groups) or "all nodes")
        return json_response(self._status())

    async def on(self, request: web.Request) -> web.Response:
        body = await read_wire(request, FleetOn)
        self._require_room((*body.groups, *body.canary))
        if body.groups and not set(body.canary) <= set(body.groups):
            raise RequestError("names a group that is not among groups", field="canary")
        self._require_nodes(
            body.canary, "canary"
        )  # watched for nothing, it would never be followed by the rest
        # What is held may be released also before its nodes are heard, after a restart.
        unheld = tuple(one for one in body.groups if one not in body.canary and one not in self._switch.held)
        self._require_nodes(unheld, "groups")
        self._order(lambda: self._switch.on(self._dispatcher.now_s(), body.groups, body.canary, body.watch_s))
        return json_response(self._status())

    def _require_room(self, groups: tuple[str, ...]) -> None:
        if len({*self._switch.held, *groups}) > MAX_GROUPS:
            raise RequestError(
                f"more than {MAX_GROUPS} groups", field="groups", status=429, code="queue_full"
            )

    def _require_nodes(self, groups: tuple[str, ...], field: str) -> None:
        """An order to nobody is a slip of the pen: it would be answered with "all memory is back" while every node lends.

        Raises:
        RequestError: No node that was heard is of one of these groups.
        """
        group_of = {name: said.group or DEFAULT_GROUP for name, (_, said) in self._said.items()}
        known = sorted(set(group_of.values()))
        unknown = [group for group in dict.fromkeys(groups) if group not in known]
        if not unknown:
            return
        nodes = [f"; '{one}' is a node of group '{group_of[one]}'" for one in unknown if one in group_of]
        raise RequestError(
            "no node is of group " + " or ".join(f"'{one}'" for one in unknown) + "".join(nodes),
            field=field,
            fix=f"there are: {', '.join(known)}" if known else "no node has been heard",
        )

    def _order(self, order: Any) -> None:
        """Carry it out, and keep it; where it cannot be kept, nothing has changed."""
        before = self._switch.state()
        actions = order()
        try:
            self._write()
        except CapacityError:
            self._switch.restore(self._dispatcher.now_s(), before)
            if self._kept != before:
                # The file may have the new order already, and a restart would carry it out.  If this fails, too, a tick tries again.
                with contextlib.suppress(CapacityError):
                    self._write()
            raise
        self._log(actions)

    def _log(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Released():
                    log.warning("fleet: on, %s", ", ".join(action.groups) or "all nodes that are left")
                case TakenBack():
                    log.error(
                        "fleet: off again, %s: %s",
                        ", ".join(action.groups) or "all nodes that were left",
                        action.reason,
                    )
                case Done():
                    log.warning("fleet: every group was watched to its end")

    def _status(self) -> FleetStatus:
        switch, now_s = self._switch, self._dispatcher.now_s()
        release, skipped = switch.release, switch.skipped()
        nodes = [
            self._row(name, now_s - heard_s, body, skipped=name in skipped)
            for name, (heard_s, body) in sorted(self._said.items())
        ]
        for name, stranger in self._namesakes.strangers(now_s):
            where = "" if stranger.place is None else str(stranger.place)
            said = stranger.said
            if said is None:  # what it has it has not said; its file is most likely a copy
                group = self._said[name][1].group if name in self._said else None
                said = Heartbeat(incarnation="", seq=0, state="starting", group=group)
            row = self._row(name, now_s - stranger.heard_s, said, skipped=False)
            row["unregistered"], row["at"] = True, where
            nodes.append(row)
        return {
            "all_held": switch.all_held,
            "held": dict(switch.held),
            "release": None
            if release is None
            else {
                "stages": [list(stage) for stage in release.stages],
                "stage": release.index,
                "left_s": round(max(0.0, release.began_s + release.watch_s - now_s), 3),
            },
            "taken_back": switch.taken_back,
            "nodes": nodes,
        }

    def _row(self, name: str, silent_s: float, body: Heartbeat, *, skipped: bool) -> FleetNode:
        group = body.group or DEFAULT_GROUP
        return {
            "node": name,
            "unregistered": False,
            "at": "",
            "group": group,
            "ordered": "off" if self._switch.is_held(group) else "on",
            "held": body.held,
            "mode": body.mode,
            "held_pages": body.held_pages,
            "silent_s": round(silent_s, 3),
            "skipped": skipped,
            "ttft_p99_s": body.serving_ttft_p99_s,
            "slo_ttft_s": body.slo_ttft_s,
            "tpot_p99_s": body.serving_tpot_p99_s,
            "slo_tpot_s": body.slo_tpot_s,
            "late": broken_promise(body),
        }

    # --- the file

    def _read(self) -> None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            self._hold_all(error)
            return
        with open(descriptor, "rb") as file:
            try:
                told = json.loads(file.read(_MAX_BYTES))
                if told["format"] != FORMAT:
                    raise ValueError(f"format {told['format']!r}")
                self._switch.restore(self._dispatcher.now_s(), told["fleet"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self._hold_all(error)

    def _hold_all(self, error: Exception) -> None:
        log.error("%s cannot be read (%r): all nodes are held until `rose fleet on`", self._path, error)
        self._switch.off()

    def _write(self) -> None:
        """Raises:
        CapacityError: It could not be kept; or another has taken over, whose file it is now.
        """
        made = self._path.with_suffix(".new")
        state = self._switch.state()
        data = json.dumps({"format": FORMAT, "fleet": state}).encode()
        self._journal.check_ours()
        try:
            descriptor = os.open(
                made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._journal.check_ours()  # the disk may have taken its time
            self._kept = None
            os.replace(made, self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise CapacityError(f"{self._path}: {error.strerror}", field="journal") from error
        self._kept = state


def broken_promise(body: Heartbeat) -> str:
    """Which promise production breaks on this node, in words; empty: none."""
    for name, p99_s, slo_s in (
        ("first token", body.serving_ttft_p99_s, body.slo_ttft_s),
        ("between tokens", body.serving_tpot_p99_s, body.slo_tpot_s),
    ):
        if p99_s is not None and slo_s is not None and p99_s > slo_s:
            return f"P99 {name} is {p99_s * 1e3:.0f} ms, {slo_s * 1e3:.0f} ms were promised"
    return ""
