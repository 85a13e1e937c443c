"""Renders the Helm chart in the tests, where there is no Helm: the part of Go's templates and of Helm's functions that the chart uses.

Whatever else a template says is an error here, as is a value that is not there.  ``test_chart.py`` holds control structures and white
space against Go's own engine, where there is a ``kubectl`` to ask.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "rose"
_ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.S)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\||\(|\)|[^\s()|]+')
Node = tuple[str, Any, Any, Any]
"""``(kind, expression or text, body, what follows else)``."""


class TemplateError(Exception):
    """The template is wrong, or says something that is not known here."""


def parse(text: str) -> list[Node]:
    tokens = list(_tokens(text))
    nodes, rest = _block(tokens)
    if rest:
        raise TemplateError(f"unexpected {rest[0][1]!r}")
    return nodes


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, trim = 0, False
    for found in _ACTION.finditer(text):
        before = text[at : found.start()]
        before = before.lstrip() if trim else before
        yield "text", before.rstrip() if found[1] else before
        yield "action", found[2]
        at, trim = found.end(), bool(found[3])
    yield "text", text[at:].lstrip() if trim else text[at:]


def _block(tokens: list[tuple[str, str]]) -> tuple[list[Node], list[tuple[str, str]]]:
    nodes: list[Node] = []
    while tokens:
        kind, said = tokens[0]
        word, _, rest = said.partition(" ")
        if kind == "text":
            nodes.append(("text", said, None, None))
        elif word in ("end", "else"):
            return nodes, tokens
        elif word in ("if", "with", "range", "define"):
            body, tokens = _block(tokens[1:])
            other: list[Node] = []
            if tokens and tokens[0][1] == "else":
                other, tokens = _block(tokens[1:])
            if not tokens or tokens[0][1] != "end":
                raise TemplateError(f"{said!r} has no end")
            nodes.append((word, rest, body, other))
        elif not said.startswith("/*"):
            nodes.append(("output", said, None, None))
        tokens = tokens[1:]
    return nodes, tokens


class Template:
    """Templates that know each other's definitions."""

    def __init__(self, *texts: str) -> None:
        self._parsed = [parse(text) for text in texts]
        self._defined = {
            json.loads(said): body
            for nodes in self._parsed
            for kind, said, body, _ in nodes
            if kind == "define"
        }

    def render(self, root: Any) -> list[str]:
        """Each text with ``root`` as its dot."""
        return [self._run(nodes, root, root) for nodes in self._parsed]

    def _run(self, nodes: list[Node], dot: Any, root: Any) -> str:
        said: list[str] = []
        for kind, text, body, other in nodes:
            match kind:
                case "text":
                    said.append(text)
                case "output":
                    value = self._value(text, dot, root)
                    said.append(_plain(value))
                case "if":
                    said.append(self._run(body if self._value(text, dot, root) else other, dot, root))
                case "with":
                    value = self._value(text, dot, root)
                    said.append(self._run(body, value, root) if value else self._run(other, dot, root))
                case "range":
                    values = self._value(text, dot, root)
                    said += [self._run(body, value, root) for value in values] or [
                        self._run(other, dot, root)
                    ]
                case _:
                    pass
        return "".join(said)

    def _value(self, text: str, dot: Any, root: Any) -> Any:
        value, rest = self._pipeline(_WORD.findall(text), dot, root)
        if rest:
            raise TemplateError(f"{text!r}: {rest[0]!r} is too much")
        return value

    def _pipeline(self, words: list[str], dot: Any, root: Any) -> tuple[Any, list[str]]:
        values: list[Any] = []
        name = (
            words.pop(0)
            if words and re.fullmatch(r"[A-Za-z]\w*", words[0]) and words[0] not in ("true", "false")
            else None
        )
        piped: list[Any] = []
        while True:
            while words and words[0] not in ("|", ")"):
                word = words.pop(0)
                if word == "(":
                    value, words = self._pipeline(words, dot, root)
                    if not words or words.pop(0) != ")":
                        raise TemplateError("a parenthesis is open")
                    values.append(value)
                else:
                    values.append(self._operand(word, dot, root))
            result = self._call(name, [*values, *piped], root) if name else _one(values)
            if not words or words[0] == ")":
                return result, words
            words = words[1:]
            name, values, piped = words.pop(0), [], [result]

    def _operand(self, word: str, dot: Any, root: Any) -> Any:
        if word[0] == '"':
            return json.loads(word)
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if word in ("true", "false"):
            return word == "true"
        if word == "list":
            return []
        if not re.fullmatch(r"\$?(\.\w+)*\.?", word):
            raise TemplateError(f"{word!r} is not known here")
        value = root if word[0] == "$" else dot
        for key in filter(None, word.lstrip("$").split(".")):
            if not isinstance(value, dict) or key not in value:
                raise TemplateError(f"{word}: there is no {key}")
            value = value[key]
        return value

    def _call(self, name: str, given: list[Any], root: Any) -> Any:
        match name, given:
            case "include", [str(other), dot]:
                return self._run(self._defined[other], dot, dot)
            case "toYaml", [value]:
                return yaml.safe_dump(value, default_flow_style=False).rstrip("\n")
            case "nindent", [int(count), str(text)]:
                return "\n" + "\n".join(" " * count + line for line in text.split("\n"))
            case "quote", [value]:
                return json.dumps(_plain(value))
            case "sha256sum", [str(text)]:
                return hashlib.sha256(text.encode()).hexdigest()
            case "dict", [*pairs]:
                return dict(zip(pairs[::2], pairs[1::2], strict=True))
            case "list", [*values]:
                return values
            case _:
                raise TemplateError(f"{name} with {len(given)} arguments is not known here")


def _one(values: list[Any]) -> Any:
    if len(values) != 1:
        raise TemplateError(f"{len(values)} values where one is meant")
    return values[0]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise TemplateError(f"{type(value).__name__} as text")


def render(*changes: dict[str, Any], release: str = "rose") -> list[dict[str, Any]]:
    """The chart's manifests with its own values and ``changes`` on top of them."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for change in changes:
        values = _merged(values, change)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    root = {
        "Values": values,
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
        "Chart": {"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
    }
    paths = sorted((CHART / "templates").iterdir())
    texts = Template(*(path.read_text() for path in paths)).render(root)
    manifests = "\n---\n".join(
        text for path, text in zip(paths, texts, strict=True) if path.suffix == ".yaml"
    )
    return [each for each in yaml.safe_load_all(manifests) if each is not None]


def _merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(values[key], change[key])
        for key in change
        if isinstance(values.get(key), dict) and isinstance(change[key], dict)
    }
    return values | change | both
