"""What a worker's report says of its chunks, in a form that tests compare."""

from __future__ import annotations

from rose.policy.coserving.chunks import MAPPED


def having_memory(states: bytes) -> set[int | str]:
    """Chunks that have memory, and those on their way in or out by another name: neither here nor gone."""
    return {chunk if state == MAPPED else f"{chunk} moves" for chunk, state in enumerate(states) if state}
