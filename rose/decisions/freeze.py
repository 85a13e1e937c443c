"""A policy's whole state as plain data, and back: what a decision log starts with.

Works on the objects of ``rose.policy`` alone, named in a closed list: nothing in the data can make anything
else.  Objects that are shared stay shared, so a copy behaves like the original, draw for draw.  What tokens
were made is not part of any decision and is left out: arrays of ids and log-probs come back as zeros of the
same length.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections import Counter, OrderedDict, deque
from enum import Enum
from typing import Any, cast

import numpy as np

from rose.errors import LedgerError
from rose.policy import (
    affinity,
    baselines,
    cold_cache,
    concurrency,
    draining,
    fleet,
    growth,
    lending,
    lending_events,
    lending_policy,
    pace,
    packed,
    pairing,
    phases,
    placing,
    provisioning,
    provisioning_events,
    provisioning_hosts,
    remaining,
    routing,
    speed,
    turn,
    turn_events,
    turns,
    worker,
)
from rose.policy.coserving import chunks, first_tokens, loans, rollout, serving, steps

_MODULES = (
    *(chunks, first_tokens, loans, rollout, serving, steps),
    *(
        affinity,
        baselines,
        cold_cache,
        concurrency,
        draining,
        fleet,
        growth,
        lending,
        lending_events,
        lending_policy,
        pace,
        packed,
    ),
    *(pairing, phases, provisioning, provisioning_events, provisioning_hosts),
    *(placing, remaining, routing, speed, turn, turn_events, turns, worker),
)
_CLASSES: dict[str, type] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": cls
    for module in _MODULES
    for name, cls in vars(module).items()
    if isinstance(cls, type) and cls.__module__ == module.__name__ and cls is not packed.Eligible
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}
_CLASSES |= {
    "fleet.Tier": worker.Tier,
    "fleet.Health": worker.Health,
    "fleet.Lending": worker.LendingState,
    "fleet.Duty": worker.Duty,
    "fleet.Worker": worker.Worker,
    "lending.LendingPolicy": lending_policy.LendingPolicy,
}
"""As older logs name them."""
_OLDER_FIELDS: dict[tuple[str, str], str] = {("lending._Promise", "asked_s"): "due_s"}
"""Class and field as older logs name them, and what holds the same now."""
_GONE = frozenset({"_rush"})
"""Fields of older logs that nothing holds any more."""
_FIELDS: dict[type, tuple[str, ...]] = {
    cls: tuple(field.name for field in dataclasses.fields(cast("Any", cls)))
    for cls in _NAMES
    if dataclasses.is_dataclass(cls)
}
_UPGRADED = (turns.TurnBook, placing.Placer, packed.WorkerTable, fleet.Fleet, growth.PeakGrowth)
"""These say themselves how a state from before they had all of their parts becomes whole."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_MAPS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LISTS: dict[str, type] = {"list": list, "tuple": tuple, "set": set}


def _vars(value: Any) -> dict[str, Any]:
    """``vars``, also of an object whose class is compiled (``rose.compiled``): it has slots, and its class names them."""
    names = getattr(type(value), "__mypyc_attrs__", None)
    if names is None:
        return vars(value)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def freeze(root: Any) -> list[Any]:
    """Nodes ``[kind, ...]`` that refer to each other by index; the first is ``root``.

    A value stands for itself if it is plain, and a tuple of plain values as ``{"": [...]}``: most of a large state is those.
    """
    nodes: list[Any] = []
    seen: dict[int, int] = {}
    alive: list[Any] = []  # an id is a name only while its object lives

    def ref(value: Any) -> Any:
        cls = type(value)
        if cls in _PLAIN:  # an Enum is a str, but not only
            return value
        if cls is tuple and _PLAIN.issuperset(map(type, value)):
            return {"": value}
        at = seen.get(id(value))
        if at is None:
            at = seen[id(value)] = len(nodes)
            alive.append(value)
            nodes.append(None)
            names = _FIELDS.get(cls)
            if names is None:
                nodes[at] = node(value)
            else:
                nodes[at] = found = ["object", _NAMES[cls]]
                for name in names:
                    found += (name, ref(getattr(value, name)))
        return [at]

    def node(value: Any) -> list[Any]:
        cls = type(value)
        if isinstance(value, Enum):
            return ["enum", _NAMES[cls], value.value]
        if cls.__name__ in _MAPS and isinstance(value, dict):
            return [cls.__name__, *(part for item in value.items() for part in map(ref, item))]
        if cls.__name__ in _LISTS:
            items = sorted(value) if isinstance(value, set) else value
            return [cls.__name__, *map(ref, items)]
        if isinstance(value, deque):
            return ["deque", value.maxlen, *map(ref, value)]
        if cls is bytearray:
            return ["bytearray", bytes(value)]
        if isinstance(value, array):
            return ["array", value.typecode, len(value)]
        if isinstance(value, np.ndarray):
            return ["ndarray", value.dtype.str, list(value.shape), value.tobytes()]
        if isinstance(value, random.Random):
            version, numbers, gauss = value.getstate()
            return ["rng", version, list(numbers), gauss]
        if cls in _NAMES:
            return ["object", _NAMES[cls], *(p for n, v in _vars(value).items() for p in (n, ref(v)))]
        raise LedgerError(f"{cls.__name__} is no part of a policy's state", field="decisions")

    ref(root)
    return nodes


def thaw(nodes: list[Any]) -> Any:
    """The object that :func:`freeze` was given.

    Raises:
        LedgerError: Not made by :func:`freeze`.
    """
    made: dict[int, Any] = {}

    def get(value: Any) -> Any:
        if isinstance(value, dict):
            return tuple(value[""])
        if not isinstance(value, list):
            return value
        at = value[0]
        if at not in made:
            build(at)
        return made[at]

    def build(at: int) -> None:
        kind, *parts = nodes[at]
        if kind == "enum":
            made[at] = _CLASSES[parts[0]](parts[1])
        elif kind in _MAPS:
            made[at] = mapping = _MAPS[kind]()
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                mapping[get(key)] = get(value)
        elif kind == "tuple":
            made[at] = tuple(get(part) for part in parts)
        elif kind in _LISTS:
            made[at] = items = _LISTS[kind]()
            add = items.add if kind == "set" else items.append
            for part in parts:
                add(get(part))
        elif kind == "deque":
            made[at] = queue = deque(maxlen=parts[0])
            queue.extend(get(part) for part in parts[1:])
        elif kind == "bytearray":
            made[at] = bytearray(parts[0])
        elif kind == "array":
            made[at] = array(parts[0], bytes(array(parts[0]).itemsize * parts[1]))
        elif kind == "ndarray":
            flat = np.frombuffer(parts[2], dtype=np.dtype(parts[0]))
            made[at] = flat.reshape(parts[1]).copy()
        elif kind == "rng":
            made[at] = rng = random.Random()
            rng.setstate((parts[0], tuple(parts[1]), parts[2]))
        else:
            cls = _CLASSES[parts[0]]
            made[at] = value = cast("Any", cls).__new__(cls)
            if dataclasses.is_dataclass(cls):  # what an older version did not have yet is at its default
                there = set(parts[1::2])
                for field in dataclasses.fields(cls):
                    if field.name in there:
                        continue
                    if field.default is not dataclasses.MISSING:
                        object.__setattr__(value, field.name, field.default)
                    elif field.default_factory is not dataclasses.MISSING:
                        object.__setattr__(value, field.name, field.default_factory())
            for name, part in zip(parts[1::2], parts[2::2], strict=True):
                if name in _GONE:
                    continue
                object.__setattr__(value, _OLDER_FIELDS.get((parts[0], name)) or name, get(part))

    try:
        build(0)
        for value in made.values():
            if isinstance(value, _UPGRADED):
                value.upgrade()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"a frozen state cannot be read: {error}", field="decisions") from error
    return made[0]
