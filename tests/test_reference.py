"""`make reference`: it builds, and nothing that users import is without a word on what it is."""

from __future__ import annotations

import importlib
import re

from rose.scheduler.openapi import ANSWERS, EVENTS, ROUTES, describe
from scripts.reference import FILES, PUBLIC, Entry, entries, page, prose

ALL: list[Entry] = [entry for path in FILES for entry in entries(path)]
CLASSES = {name: signature for name, _, signature, _ in ALL if re.search(r"^class ", signature, re.M)}


def members_of(name: str, *, properties: bool) -> dict[str, str]:
    """Method -> docstring; with properties too, where these are asked for."""
    return {
        other.removeprefix(f"{name}."): doc
        for other, _, signature, doc in ALL
        if other.startswith(f"{name}.")
        and re.search(r"^(async )?def ", signature, re.M)
        and (properties or "@property" not in signature)
    }


def told_elsewhere(name: str) -> set[str]:
    """Members of a class that a base class describes, or a protocol that the class fulfils."""
    module, _, own = name.rpartition(".")
    mine, told = set(dir(getattr(importlib.import_module(module), own))), set[str]()
    for other, signature in CLASSES.items():
        theirs = set(members_of(other, properties=False))
        is_base = re.search(rf"\b{other.rpartition('.')[2]}\b", CLASSES[name].partition("(")[2])
        if other != name and (is_base or (theirs and "(Protocol)" in signature and mine >= theirs)):
            told |= {member for member, doc in members_of(other, properties=True).items() if doc}
            told |= told_elsewhere(other) if is_base else set()
    return told


def test_every_name_that_users_import_says_what_it_is() -> None:
    silent = []
    for name, level, signature, doc in ALL:
        owner, _, method = name.rpartition(".")
        is_field = level > 0 and not re.search(r"^(class |def |async def )", signature, re.M)
        if not doc and not is_field and not (owner in CLASSES and method in told_elsewhere(owner)):
            silent.append(name)
    assert not silent


def test_nothing_that_is_listed_is_missing() -> None:
    there = {str(path) for path in FILES}
    plain = [each for each in PUBLIC.split() if "*" not in each]
    assert not [each for each in plain if not any(path.endswith(f"rose/{each}.py") for path in there)]
    environments = [name for name in CLASSES if "reset" in members_of(name, properties=False)]
    assert len(environments) >= 4


def test_the_page_has_every_route_and_every_name() -> None:
    text = page()
    for method, path, *_ in ROUTES:
        assert f"<pre>{method.upper()} {path}</pre>" in text
    for name, *_ in ALL:
        assert text.count(f'id="{name}"') == 1, name
    links = set(re.findall(r'<a href="#([^"]+)"', text))
    assert {
        "rose.wire.samples.Lease",
        "rose.wire.answers.LeasedBatch",
        "rose.wire.status.SchedulerStatus",
    } <= links
    assert not [link for link in links if f'id="{link}"' not in text]


def test_every_field_of_every_request_and_answer_of_ours_has_its_row_and_its_meaning() -> None:
    text, schemas = page(), describe()["components"]["schemas"]
    docs = {
        name.removeprefix("rose.wire.").partition(".")[2]: doc
        for name, _, _, doc in ALL
        if "rose.wire." in name
    }
    named = {
        "job",
        "id",
        "worker_id",
        "node",
        "tier",
        "model",
        "turn_id",
        "group_id",
        "prompt",
        "generated",
        "done",
    }
    silent = []
    ours = {name for name, schema in schemas.items() if f"rose.wire.answers.{name}" in CLASSES}
    for name in ours | {name for name in schemas if f"rose.wire.status.{name}" in CLASSES}:
        for field, schema in schemas[name]["properties"].items():
            told = docs[f"{name}.{field}"] or field in named or "$ref" in str(schema)
            silent += [] if told or field.endswith("_s") else [f"{name}.{field}"]
    for kind in [*ANSWERS.values(), *(kind for events in EVENTS.values() for kind in events.values())]:
        name = kind.__name__
        begin = text.index(f">{name}</a>{prose(schemas[name]['description'])}")
        table = text[begin : text.index("</table>", begin)] if schemas[name]["properties"] else ""
        for field, schema in schemas[name]["properties"].items():
            (row,) = re.findall(rf"<tr><td>{field}<td>(.+?)<td>", table)
            assert ("may be left out" in row) == (field not in schemas[name].get("required", ()))
            assert schema != {} or row.startswith("anything")
    assert not silent


def test_a_docstring_s_sections_become_lists() -> None:
    html = prose(
        "Do it.\n\nArgs:\n    one: The ``first``.\n    two: See :class:`~rose.errors.Gone`.\n\nRaises:\n    Gone: It is.\n"
    )
    assert html.count("<li>") == 3
    assert "<code>first</code>" in html
    assert "<code>rose.errors.Gone</code>" in html
