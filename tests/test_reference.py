"""`make reference`: it builds, and nothing that users import is without a word on what it is."""

from __future__ import annotations

import importlib
import re

from rose.scheduler.openapi import ROUTES
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
    bodies = re.findall(r'Body: <a href="#([^"]+)"', text)
    assert bodies
    assert all(f'id="{body}"' in text for body in bodies)


def test_a_docstring_s_sections_become_lists() -> None:
    html = prose(
        "Do it.\n\nArgs:\n    one: The ``first``.\n    two: See :class:`~rose.errors.Gone`.\n\nRaises:\n    Gone: It is.\n"
    )
    assert html.count("<li>") == 3
    assert "<code>first</code>" in html
    assert "<code>rose.errors.Gone</code>" in html
