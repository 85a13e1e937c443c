"""`make reference`: the API reference, out/reference/index.html, from docstrings and the routes of rose-scheduler.

Own code, because none of the pinned packages makes one.  Files are read and not imported; the routes are those of ``GET /openapi.json``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PUBLIC = """wire/answers wire/status wire/workers wire/samples wire/turns wire/errors wire/fleet auth errors
    weights/file_store weights/publisher weights/params weights/ranks weights/source weights/store weights/stores weights/subscriber lineage
    train/envs/* train/rewards train/client train/batch train/rollout train/protocol train/trainer train/loss"""
FILES = [path for glob in PUBLIC.split() for path in sorted((ROOT / "rose").glob(f"{glob}.py"))]
"""What users import; globs below ``rose``."""
STYLE = """body{font:16px/1.5 sans-serif;margin:0;display:flex}nav{flex:0 0 18em;height:100vh;overflow:auto;position:sticky;top:0}
nav,pre{padding:.5em 1em;background:#f4f4f1;box-sizing:border-box}nav a{display:block}main{padding:1em 2em;max-width:54em;min-width:0}
pre{white-space:pre-wrap;margin:1.5em 0 0}.in{margin-left:2em}th,td{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}"""


UNITS = {
    "_s": "seconds",
    "_at": "Unix seconds",
    "_ms": "milliseconds",
    "_pages": "pages of 2 MiB",
    "_bytes": "bytes",
}
"""What a field whose name ends so is in."""
Schema = dict[str, Any]
Entry = tuple[str, int, str, str]
"""Dotted name, level (0: a module), signature, docstring."""


def entries(path: Path) -> Iterator[Entry]:
    """The public names of a file, in its order."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text())
    yield module, 0, module, ast.get_docstring(tree) or ""
    yield from _members(tree.body, module, 1)


def _members(body: list[ast.stmt], prefix: str, level: int) -> Iterator[Entry]:
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name[0] != "_":
                name, doc, inner = f"{prefix}.{node.name}", ast.get_docstring(node) or "", node.body
                node.body = []
                yield name, level, ast.unparse(node).rstrip(":"), doc
                if isinstance(node, ast.ClassDef):
                    yield from _members(inner, name, level + 1)
            case ast.AnnAssign(target=ast.Name(id=field)) if field[0] != "_":
                said = after.value if isinstance(after, ast.Expr) else None
                doc = str(said.value) if isinstance(said, ast.Constant) else ""
                yield f"{prefix}.{field}", level, ast.unparse(node), doc


def prose(doc: str) -> str:
    """A docstring as HTML."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`").replace("::\n", ":\n")
    text = re.sub(r"^=+ [= ]+\n(?:.*\n)+=+ [= ]+$", r"```\n\g<0>\n```", text, flags=re.M)
    blocks = text.split("\n\n")
    for at, block in enumerate(blocks):
        title, _, items = block.partition("\n")
        if re.match(r"(Args|Raises|Returns|Attributes)\b.*:$", title):
            blocks[at] = f"**{title}**\n\n" + re.sub(r"^ {4}(?=\S)", "- ", items, flags=re.M)
    return MarkdownIt("commonmark").render("\n\n".join(blocks))


class Routes:
    """The routes of rose-scheduler, as its OpenAPI document has them.

    Args:
        docs: Dotted name -> docstring of every public name, in the order of the source.
    """

    def __init__(self, docs: dict[str, str]) -> None:
        from rose.scheduler.openapi import describe

        self.document = describe()
        self.kinds: dict[str, Schema] = self.document["components"]["schemas"]
        self.docs = {name: doc for name, doc in docs.items() if name.startswith("rose.wire.")}
        self.homes = {
            name.rpartition(".")[2]: name for name in self.docs if name.rpartition(".")[2] in self.kinds
        }
        """Name of a body or an answer -> its dotted name."""

    def html(self) -> Iterator[str]:
        """Of each route who may call it, what it is sent and what it answers, field by field."""
        for path, methods in self.document["paths"].items():
            for method, told in methods.items():
                who = ", ".join(role for each in told.get("security", ()) for role in each) or "anybody"
                yield f"<pre>{method.upper()} {path}</pre><p>{told['summary']}. For {who}."
                sent = told.get("requestBody", {"content": {}})["content"]
                for schema in (each["schema"] for each in sent.values()):
                    yield from self._table("Request", schema)
                for status, answer in sorted(told["responses"].items()):
                    for schema in (each["schema"] for each in answer.get("content", {}).values()):
                        for one in schema.get("oneOf", [schema]) if status < "400" else ():
                            yield from self._table(f"Answer, {status}", one)
                yield f"<p>Statuses: {', '.join(sorted(told['responses']))}."

    def _table(self, title: str, schema: Schema) -> Iterator[str]:
        name = schema.get("$ref", "").rpartition("/")[2]
        kind, home = self.kinds.get(name, schema), self.homes.get(name)
        yield f"<p>{title}: {self.words(schema)}" + (prose(kind["description"]) if name else "")
        properties = kind.get("properties", {})
        fields = [
            name.rpartition(".")[2] for name in self.docs if name.rpartition(".")[0] == home
        ] or properties
        yield "<table><tr><th>field<th>type<th>meaning" if properties else ""
        for field in fields:
            unit = next((f", {unit}" for ending, unit in UNITS.items() if field.endswith(ending)), "")
            may = "" if field in kind.get("required", ()) else ", may be left out"
            said = prose(self.docs.get(f"{home}.{field}", ""))
            yield f"<tr><td>{field}<td>{self.words(properties[field])}{unit}{may}<td>{said}"
        yield "</table>" if properties else ""

    def words(self, schema: Schema) -> str:
        """A schema as a phrase of HTML."""
        match schema:
            case {"$ref": str(ref)}:
                name = ref.rpartition("/")[2]
                return f'<a href="#{self.homes[name]}">{name}</a>'
            case {"anyOf": list(any_of)}:
                return " or ".join(self.words(one) for one in any_of)
            case {"enum": list(values)}:
                return "one of " + ", ".join(map(str, values))
            case {"type": list(kinds)}:
                return " or ".join(self.words({**schema, "type": kind}) for kind in kinds)
            case {"type": "array", "prefixItems": list(items)}:
                return f"[{', '.join(map(self.words, items))}]"
            case {"type": "array"}:
                return (
                    f"list{_between(schema, 'minItems', 'maxItems')} of {self.words(schema.get('items', {}))}"
                )
            case {"type": "object", "additionalProperties": dict(value)} if value:
                return (
                    f"object{_between(schema, 'minProperties', 'maxProperties')}: name to {self.words(value)}"
                )
            case {"type": "string"}:
                return f"text{_between(schema, 'minLength', 'maxLength')}"
            case {"type": "integer" | "number" as kind}:
                return (
                    f"{'whole ' if kind == 'integer' else ''}number{_between(schema, 'minimum', 'maximum')}"
                )
            case {"type": str(kind)}:
                return kind
            case _:
                return "anything"


def _between(schema: Schema, least: str, most: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if high is not None:
        return f" ({low or 0} to {high})"
    return f" (at least {low})" if low else ""


def page() -> str:
    """The whole reference."""
    told = [entry for path in FILES for entry in entries(path)]
    routes = Routes({name: doc for name, _, _, doc in told})
    nav, main = (
        ["<a href=#http>rose-scheduler over HTTP</a>"],
        ["<h2 id=http>rose-scheduler</h2>", *routes.html()],
    )
    for name, level, signature, doc in told:
        if level == 0:
            nav.append(f'<a href="#{name}">{name}</a>')
        tag, side = ("pre" if level else "h2"), "in" if level > 1 else ""
        main.append(f'<div class="{side}"><{tag} id="{name}">{escape(signature)}</{tag}>{prose(doc)}</div>')
    head = f"<!doctype html><meta charset=utf-8><title>ROSE: API reference</title><style>{STYLE}</style>"
    return f"{head}<nav>{''.join(nav)}</nav><main>{''.join(main)}</main>\n"


if __name__ == "__main__":
    target = ROOT / "out" / "reference" / "index.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page())
    print(f"wrote {target}")
