"""What one may look for among trajectories: the query of a listing, read."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from rose.errors import RequestError
from rose.policy import samples as sp
from rose.scheduler.http import whole_number
from rose.scheduler.records import CreateRecord
from rose.scheduler.store import UNSCORED
from rose.wire import samples as wire

_STATES = (*(state.value for state in sp.SampleState), UNSCORED)
_META = "meta."
_NAMES = ("job", "group_id", "state", "limit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """None: whichever."""

    job: str | None = None
    group_id: str | None = None
    state: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    """All of these."""
    limit: int = wire.USUAL_FOUND

    @classmethod
    def of(cls, request: web.Request) -> Search:
        """From ``?job=&group_id=&state=&meta.NAME=VALUE&limit=``.

        Raises:
            RequestError: A value cannot be one.
        """
        query = request.query
        for name in query:
            if name not in _NAMES and not name.startswith(_META):
                raise RequestError(f"is none of {', '.join(_NAMES)}, {_META}NAME", field=name[:64])
        state = query.get("state")
        if state is not None and state not in _STATES:
            raise RequestError(f"must be one of {', '.join(_STATES)}", field="state")
        return cls(
            job=query.get("job"),
            group_id=query.get("group_id"),
            state=state,
            metadata={
                name.removeprefix(_META): value for name, value in query.items() if name.startswith(_META)
            },
            limit=whole_number(
                query.get("limit", str(wire.USUAL_FOUND)), field="limit", least=1, most=wire.MOST_FOUND
            ),
        )

    def fits(self, created: CreateRecord, state: str) -> bool:
        return (
            self.job in (None, created.job)
            and self.group_id in (None, created.group_id)
            and self.state in (None, state)
            and self.metadata.items() <= created.metadata.items()
        )
