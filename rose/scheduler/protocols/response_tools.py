"""Tools of ``/v1/responses``, as a model knows them and as their client does.

A *custom* tool, which takes free text, is a function with one argument ``input`` to the model.  A tool of a *namespace* (Codex has its
own, and one for each MCP server) is called ``NAMESPACE__NAME`` by the model; its client is told the two apart.  Tools that OpenAI's
servers run (web search and the like) have nobody to run them here: the model is not told of them, and ``rose.left_out`` names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rose.scheduler.protocols import Body, as_list, as_object, as_text, not_here

CUSTOM_INPUT = "input"
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")


class Tools:
    """Args:
    request: As it was sent.

    Raises:
        RequestError: Names the field.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.custom: set[str] = set()
        """By the model's name."""
        self.left_out: list[str] = []
        self._apart: dict[str, tuple[str, str]] = {}
        """The model's name -> namespace and name in it."""
        functions = list(self._read(request))
        self.body: Body = {}
        """What chat is asked of it."""
        if functions:
            self.body["tools"] = [{"type": "function", "function": each} for each in functions]
        choice = request.get("tool_choice")
        if isinstance(choice, dict):
            if choice.get("type") not in ("function", "custom"):
                raise not_here(f"the choice of type {str(choice.get('type'))[:64]}", "tool_choice")
            choice = {"type": "function", "function": {"name": model_name(choice, "tool_choice")}}
        if choice is not None and (functions or choice != "auto"):
            self.body["tool_choice"] = choice

    def client_name(self, name: str) -> dict[str, str]:
        """Fields of a call that say which tool of the client's it is for."""
        space, own = self._apart.get(name, ("", name))
        return {"name": own, "namespace": space} if space else {"name": own}

    def _read(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for at, tool in enumerate(as_list(request.get("tools") or [], "tools")):
            field = f"tools[{at}]"
            kind = as_text(as_object(tool, field).get("type"), f"{field}.type")
            if kind.startswith(_HOSTED):
                self.left_out.append(kind)
            elif kind == "namespace":
                yield from self._members(tool, field)
            else:
                yield self._function(tool, field)

    def _members(self, space: Mapping[str, Any], field: str) -> Iterator[dict[str, Any]]:
        name = as_text(space.get("name"), f"{field}.name")
        for at, tool in enumerate(as_list(space.get("tools"), f"{field}.tools")):
            where = f"{field}.tools[{at}]"
            own = as_text(as_object(tool, where).get("name"), f"{where}.name")
            function = self._function(
                {**tool, "name": model_name({"name": own, "namespace": name}, where)}, where
            )
            self._apart[function["name"]] = name, own
            if at == 0 and space.get("description"):
                # Of all of them, said once.
                both = (space["description"], function.get("description"))
                function["description"] = "\n\n".join(str(text) for text in both if text)
            yield function

    def _function(self, tool: Mapping[str, Any], field: str) -> dict[str, Any]:
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise not_here(f"a tool of type {str(kind)[:64]}", f"{field}.type")
        name = as_text(tool.get("name"), f"{field}.name")
        if kind == "custom":
            self.custom.add(name)
            text = {
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
            }
            return {"name": name, "description": _custom_description(tool), "parameters": text}
        said = {part: tool[part] for part in ("description", "parameters") if tool.get(part) is not None}
        return {"name": name, **said}


def model_name(call: Mapping[str, Any], field: str) -> str:
    """What the model calls a tool that a client names by ``name`` and perhaps ``namespace``."""
    name, space = as_text(call.get("name"), f"{field}.name"), call.get("namespace")
    return name if space is None else f"{as_text(space, f'{field}.namespace')}__{name}"


def custom_input(arguments: str) -> str:
    """A custom tool's text from the call of the function that stands for it; what is no such call is passed on as it is."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _custom_description(tool: Mapping[str, Any]) -> str:
    parts = [tool["description"]] if tool.get("description") else []
    made = tool.get("format")
    if isinstance(made, dict) and made.get("definition"):
        parts.append(f"The input follows this {made.get('syntax', '')} grammar:\n{made['definition']}")
    return "\n\n".join(map(str, parts))
