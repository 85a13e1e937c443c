"""`make reference`: the API reference, out/reference/index.html, from docstrings and the routes of rose-scheduler.

Own code, because none of the pinned packages makes one.  Files are read and not imported, but for the routes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PUBLIC = """wire/workers wire/samples wire/turns wire/errors wire/fleet auth errors
    weights/publisher weights/params weights/ranks weights/source weights/store weights/stores weights/subscriber lineage
    train/envs/* train/rewards train/client train/batch train/rollout train/protocol train/trainer train/loss"""
FILES = [path for glob in PUBLIC.split() for path in sorted((ROOT / "rose").glob(f"{glob}.py"))]
"""What users import; globs below ``rose``."""
STYLE = """body{font:16px/1.5 sans-serif;margin:0;display:flex}nav{flex:0 0 18em;height:100vh;overflow:auto;position:sticky;top:0}
nav,pre{padding:.5em 1em;background:#f4f4f1;box-sizing:border-box}nav a{display:block}main{padding:1em 2em;max-width:54em;min-width:0}
pre{white-space:pre-wrap;margin:1.5em 0 0}.in{margin-left:2em}th,td{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}"""


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


def routes() -> Iterator[str]:
    """Every route of rose-scheduler, with what the fields of its body must be."""
    from rose.scheduler.openapi import ROUTES
    from rose.wire.reading import requirements

    for method, path, roles, summary, body, statuses in ROUTES:
        who = ", ".join((*roles, "admin")) if roles else "anybody"
        yield f"<pre>{method.upper()} {path}</pre><p>{summary}. For {who}. Answers {', '.join(map(str, statuses))}."
        if isinstance(body, type):
            name = f"{body.__module__}.{body.__name__}"
            yield f'<p>Body: <a href="#{name}">{name}</a><table><tr><th>field<th>must be'
            yield from (f"<tr><td>{field}<td>{escape(must)}" for field, must in requirements(body).items())
            yield "</table>"


def page() -> str:
    """The whole reference."""
    nav, main = ["<a href=#http>rose-scheduler over HTTP</a>"], ["<h2 id=http>rose-scheduler</h2>", *routes()]
    for name, level, signature, doc in (entry for path in FILES for entry in entries(path)):
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
