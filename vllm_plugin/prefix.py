"""Which weights a cached prefix was computed with: prefix keys by version, and what that means for each turn.

vLLM finds a cached prefix by a chain of hashes that begins with a request's ``cache_salt``.  Here the salt names the
version in place when the request arrived, so after a commit with ``kv: salt`` no request finds keys and values of
other weights, though they are still there.  Requests in flight go on with what they have computed: from that commit
on their context is *mixed* (old weights' keys and values under new weights), and their answer says so.

A request may ask for the prefixes of a version of its own, ``cache_salt: "rose:1.7"``: a trajectory that began under
1.7 and prefers its cached context to an exact one.

Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_plugin import internals

OWN = "rose:"
_SLACK = 64  # records of requests that ended without an output, before they are looked for


@dataclass(slots=True)
class _Turn:
    prefix_version: str
    mixed: bool = False
    """Its context may hold keys and values of other weights than its newest tokens."""


class PrefixKeys:
    """One engine's prefix keys.

    Attributes:
        version: What new requests are keyed by; empty before the first version is known.
        running: The version in place: another one after a commit with ``keep``.
        kv: How the last commit treated the cache.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.version = ""
        self.running = ""
        self.kv = ""
        self._turns: dict[str, _Turn] = {}

    def status(self) -> dict[str, str]:
        return {"version": self.version, "kv": self.kv}

    def on_add(self, request: Any) -> None:
        """A request has arrived, and nothing of it is computed."""
        salt = request.cache_salt or ""
        if salt.startswith(OWN):
            version = salt.removeprefix(OWN)
        else:
            version = self.version
            if version:
                internals.set_cache_salt(request, _key(salt, version))
        if len(self._turns) > 2 * len(self._scheduler.requests) + _SLACK:
            alive = self._scheduler.requests
            self._turns = {name: turn for name, turn in self._turns.items() if name in alive}
        mixed = bool(version and self.running and version != self.running)
        self._turns[request.request_id] = _Turn(version, mixed)

    def on_commit(self, argument: dict[str, str] | None) -> dict[str, str]:
        """``{"version", "kv"}`` has been committed and the engine is still paused; None asks for the status."""
        if argument is None:
            return self.status()
        self.kv, self.running = argument["kv"], argument["version"]
        if self.kv != "keep":
            before, self.version = self.version, argument["version"]
            for request in internals.waiting_requests(self._scheduler, 1 << 30):
                if not request.num_computed_tokens and not (request.cache_salt or "").startswith(OWN):
                    salt = (request.cache_salt or "").removesuffix(_key("", before))
                    internals.set_cache_salt(request, _key(salt, self.version))
                    turn = self._turns.get(request.request_id)
                    if turn is not None and not request.num_output_tokens:
                        turn.prefix_version = self.version
        if self.kv != "reset":
            for name, turn in self._turns.items():
                request = self._scheduler.requests.get(name)
                turn.mixed = turn.mixed or bool(request is not None and request.num_computed_tokens)
        return self.status()

    def on_output(self, outputs: Any) -> None:
        """Say on each last output how its context came about."""
        for each in outputs.values() if isinstance(outputs, dict) else ():
            for output in each.outputs:
                if output.finish_reason is None:
                    continue
                turn = self._turns.pop(output.request_id, None)
                if turn is not None and output.kv_transfer_params is None:
                    output.kv_transfer_params = {
                        "rose": {"prefix_version": turn.prefix_version, "kv_mixed": turn.mixed}
                    }


def _key(salt: str, version: str) -> str:
    return f"{salt}@{version}" if version else salt
