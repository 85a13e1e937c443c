"""Read a body as what it must be; whatever it is not is refused by the name of the field.

Bodies come from anybody.  Their size is bounded by who receives them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from rose import lineage
from rose.errors import RequestError

T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound=msgspec.Struct)
_MAX_NAMED = 64
_FAULT = re.compile(r"(?P<what>.*?)(?: - at `(?:key` in `)?\$\.?(?P<where>[^`]*)`)?\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.{1,64}?)`")
_MISSING = re.compile(r"Object missing required field `(.{1,64}?)`")


def read(kind: type[S], data: bytes) -> S:
    """``data``, JSON, as a ``kind``.

    Raises:
        RequestError: It is not; the field is named, and what it must be.
    """
    try:
        return read_struct(data or b"{}", cast("msgspec.json.Decoder[S]", _decoder(kind)).decode)
    except RequestError as error:
        raise _in_words(kind, error) from error.__cause__


def check(kind: type[msgspec.Struct], values: Mapping[str, Any], prefix: str = "") -> None:
    """Are ``values``, parts of a body that was read as JSON, what ``kind`` says?

    Args:
        prefix: Where they are in the body, with its dot.

    Raises:
        RequestError: As :func:`read`.
    """
    try:
        read_struct(values, lambda found: msgspec.convert(found, kind))
    except RequestError as error:
        told = _in_words(kind, error)
        raise RequestError(told.message, field=prefix + (told.field or "")) from None


def _in_words(kind: type[msgspec.Struct], error: RequestError) -> RequestError:
    """What the field that was wrong must be."""
    must = _requirement(kind, error.field or "") if error.message.startswith("wrong type") else None
    return error if must is None else RequestError(f"must be {must}", field=error.field)


class Reports:
    """Reads what nodes report, which may be newer than this program: unknown fields are passed over, counted, and each named once in the log.

    Args:
        logger: Of the program that reads.
        on_unread: Called with the name of the body for each that had such a field.
    """

    def __init__(self, logger: logging.Logger, on_unread: Callable[[str], None] = lambda body: None) -> None:
        self._logger, self._on_unread = logger, on_unread
        self._named: set[tuple[str, str]] = set()

    def read(self, kind: type[S], data: bytes) -> S:
        """As :func:`read`."""
        report = read(kind, data)
        unread = sorted(_keys(data) - requirements(kind).keys())
        if unread:
            self._on_unread(kind.__name__)
            new = [name for name in unread if (kind.__name__, name) not in self._named]
            if new and len(self._named) < _MAX_NAMED:
                self._named.update((kind.__name__, name) for name in new[:_MAX_NAMED])
                text = ", ".join(name[:64] for name in new[:8])
                self._logger.warning(
                    "%s of a newer node: not read here: %r; upgrade this program", kind.__name__, text
                )
        return report


def _keys(data: bytes) -> set[str]:
    return set(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))


def read_struct(data: D, decode: Callable[[D], T]) -> T:
    """``data`` as what a typed decoder makes of it.

    Raises:
        RequestError: Not JSON, not UTF-8, nested too deeply, or not of that type.
    """
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown, missing = _UNKNOWN.match(text), _MISSING.match(text)
        fault = _FAULT.match(text)
        assert fault is not None
        where = fault["where"] or ""
        for said, told in ((unknown, "unknown field"), (missing, "is required")):
            if said is not None:
                raise RequestError(told, field=f"{where}.{said[1]}".lstrip(".")) from None
        if not where and text.startswith("Expected `object`"):
            raise RequestError("must be a JSON object", field="body") from error
        # A value of an object has no name here: it is its object that is wrong.
        field = (where or "body").split("[...]", 1)[0]
        what = fault["what"][:1].lower() + fault["what"][1:]  # a pattern keeps its letters
        raise RequestError(f"wrong type: {what}", field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"is not JSON: {error}", field="body") from error
    except RecursionError as error:
        raise RequestError("is nested too deeply", field="body") from error


@lru_cache(maxsize=64)
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@lru_cache(maxsize=64)
def requirements(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What each field must be, in words."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: describe(field.type) for field in info.fields}


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def _requirement(kind: type[msgspec.Struct], path: str) -> str | None:
    """What is asked for at ``path`` (``turns[0].reward``), in words; None: there is no such place."""
    found: list[inspect.Type] = [inspect.type_info(kind)]
    for name, index in _STEP.findall(path):
        within: list[inspect.Type] = []
        for each in found:
            for one in each.types if isinstance(each, inspect.UnionType) else (each,):
                if isinstance(one, inspect.StructType) and name:
                    within += [field.type for field in one.fields if field.encode_name == name]
                elif isinstance(one, inspect.ListType) and index:
                    within.append(one.item_type)
        found = within
    return describe(found[0]) if found and path else None


def describe(kind: inspect.Type) -> str:
    """A type and its bounds, for a person."""
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(describe(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
            if pattern is not None and lineage.VERSION_PATTERN in pattern:
                return "a version like '2.17'"
            if pattern is not None and lineage.RUN_PATTERN in pattern:
                return f"{least} to {most} of A-Z a-z 0-9 . _ -, and begin with a letter or digit"
            return "text" if most is None else f"text of {least or 0} to {most} printable characters"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            return "a whole number" + _between(least, most)
        case inspect.FloatType(ge=least, le=most):
            return "a number" + _between(least, most)
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.DictType(value_type=value, max_length=most):
            bound = "" if most is None else f" of at most {most} names"
            each = "" if isinstance(value, inspect.AnyType) else f", each {describe(value)}"
            return f"an object{bound}{each}"
        case inspect.StructType():
            return "an object"
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            size = f" of {least}" if least is not None and least == most else ""
            return f"a list{size}, each {describe(item)}"
        case _:
            return "something else"


def _between(least: Any, most: Any) -> str:
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}" if isinstance(least, float) else f" from {least} to {most}"
    return f" of at least {least:g}" if least is not None else ""
