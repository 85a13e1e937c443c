"""Requests beside the task: an agent program's own, under the key of the trajectory that it works for.

A coding agent has its model write a title for the session, or probes with one token whether it may ask at all.  Nothing of that is the
task, and a reward of the task says nothing of it.  Who knows says so (``X-ROSE-Side``).  Where nobody does, only what cannot well be an
agent's work is taken for such a request: it offers no tools although others of its trajectory do, asks for one token or for an answer
in a form that is enforced, continues no turn, and none continues it (:meth:`~rose.scheduler.trajectory.Trajectory.is_side`).  An agent
that another begins has tools, or speaks freely, or goes on; what a form is enforced on could not be trained on as it was sampled, either.
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
