"""How the events and actions of a policy are written down, one table per policy that keeps a decision log.

An item is ``[code, *fields]``.  Tokens and log-probs are written as their number: no decision depends on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol, get_args

import msgspec

from rose.errors import LedgerError
from rose.policy import lending, lending_events
from rose.policy import provisioning_events as pe
from rose.policy import turn_events as te
from rose.policy.coserving import events as ce
from rose.policy.coserving import loans as le
from rose.policy.coserving.rollout import RolloutBook
from rose.policy.coserving.serving import ServingBook
from rose.policy.provisioning import Provisioning
from rose.policy.turns import TurnBook

_COUNTED = ("token_ids", "logprobs")
_RESULT = tuple(f.name for f in dataclasses.fields(te.TurnResult))
_RESULT_VALUES = attrgetter(*_RESULT)


class Book(Protocol):
    """A policy with one door."""

    def handle(self, event: Any, /) -> Sequence[Any]: ...

    def check(self) -> None: ...


class EventFormat:
    """Args:
    book: The policy's class.
    events, actions: What goes through its door, both ways; their order is part of the format.
    always_check: Assert the policy's invariants after every event of a replay, not only at its end.
    """

    def __init__(
        self,
        name: str,
        book: type,
        events: tuple[type, ...],
        actions: tuple[type, ...],
        *,
        always_check: bool,
    ) -> None:
        self.name = name
        self.book = book
        self.always_check = always_check
        self._events = events
        self._codes = {cls: code for code, cls in enumerate((*events, *actions))}
        self._names = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in self._codes}
        self._values: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            cls: attrgetter(*names) for cls, names in self._names.items() if len(names) > 1
        }
        self._counted = {
            cls: tuple(names.index(name) for name in _COUNTED)
            for cls, names in self._names.items()
            if set(_COUNTED) <= set(names)
        }

    def pack(self, item: Any) -> list[Any]:
        cls = type(item)
        values = self._values.get(cls)
        found = [getattr(item, name) for name in self._names[cls]] if values is None else values(item)
        packed: list[Any] = [self._codes[cls], *found]
        for place in self._counted.get(cls, ()):
            packed[place + 1] = len(packed[place + 1])
        if isinstance(item, te.TurnEnded):
            bare = dict(zip(_RESULT, _RESULT_VALUES(item.result), strict=True))
            bare["token_ids"] = bare["logprobs"] = ()
            packed[self._names[cls].index("result") + 1] = [len(item.result.token_ids), bare]
        return packed

    def unpack_event(self, packed: Sequence[Any]) -> Any:
        """Raises:
        LedgerError: Not an event.
        """
        try:
            cls = self._events[packed[0]]
            if len(packed) - 1 > len(self._names[cls]):
                raise ValueError("more fields than it has")
            # An older version's events are shorter: new fields come last, with a default.
            fields = dict(zip(self._names[cls], packed[1:], strict=False))
            if cls in self._counted:
                fields["token_ids"] = (0,) * fields["token_ids"]
                fields["logprobs"] = (0.0,) * fields["logprobs"]
            return msgspec.convert(fields, cls)
        except (msgspec.ValidationError, IndexError, TypeError, ValueError) as error:
            raise LedgerError(f"an event cannot be read: {error}", field="decisions") from error


TURNS = EventFormat("turns", TurnBook, get_args(te.Event), get_args(te.Action), always_check=False)
"""Where a turn goes: the scheduler's."""
LENDING = EventFormat(
    "lending",
    lending.Lending,
    get_args(lending_events.Event),
    get_args(lending_events.Action),
    always_check=True,
)
"""What a device lends: a node agent's."""
SERVING = EventFormat(
    "serving", ServingBook, get_args(ce.ServingEvent), get_args(ce.ServingAction), always_check=True
)
"""Which chunks production's engine uses, lends and wants back."""
ROLLOUT = EventFormat(
    "rollout", RolloutBook, get_args(ce.RolloutEvent), get_args(ce.RolloutAction), always_check=True
)
"""The same of the rollout engine beside it."""
LOANS = EventFormat("loans", le.LoanBook, get_args(le.LoanEvent), get_args(le.LoanAction), always_check=True)
"""What production's engine lends by the agent's word, looks for, and claims back before a step."""
PROVISIONING = EventFormat(
    "provisioning", Provisioning, get_args(pe.Event), get_args(pe.Action), always_check=True
)
"""Which device works for which job: the scheduler's."""
FORMATS = {format_.name: format_ for format_ in (TURNS, LENDING, SERVING, ROLLOUT, LOANS, PROVISIONING)}
