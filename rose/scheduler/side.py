"""Requests beside the task: an agent program's own, under the key of the trajectory that it works for.

A coding agent has its model write a title for the session, or probes with one token whether it is allowed to ask.  That is not the
task, and the task's reward says nothing about it.  A program that knows marks such requests itself (``X-ROSE-Side``).  Without a mark,
a request counts as one only if all of this holds (:meth:`~rose.scheduler.trajectory.Trajectory.is_side`):

- it offers no tools, although other requests of its trajectory do;
- it asks for a single token, or for an answer in an enforced format (which could not be trained on as it was sampled anyway);
- it continues no turn, and no turn continues it.

A sub-agent does not look like that: it has tools, answers freely, or takes several turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.errors import RequestError

SIDE = "side"
"""Its client says that it is one."""
TASK = "task"
"""Its client says that it is none."""
TOOLS = "tools"
"""It offers tools."""
SMALL = "small"
"""It may be one, where others of its trajectory offer tools."""
HEADER = "X-ROSE-Side"


def said(header: str | None) -> str:
    """What the client says of its request; empty: nothing.

    Raises:
        RequestError: Neither yes nor no.
    """
    if header is None:
        return ""
    if header not in ("yes", "no"):
        raise RequestError("must be yes or no", field=HEADER)
    return SIDE if header == "yes" else TASK


def kind_of(body: Mapping[str, Any]) -> str:
    """What a chat request is, as its client sent it; empty: none of these."""
    if body.get("tools"):
        return TOOLS
    form = body.get("response_format")
    is_formed = isinstance(form, dict) and form.get("type") not in (None, "text")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    return SMALL if is_formed or most == 1 else ""
