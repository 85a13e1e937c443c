"""How a device stands by its shared files alone, for an operator whose agent does not answer.

Reads what the agent would have read, as any reader does: takes no lock and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from rose.coserve.device import DeviceView, age_s
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode
from rose.errors import LedgerError
from rose.units import PAGE_BYTES, format_bytes, format_s


def standing(path: Path, *, ordered: bool) -> list[str]:
    """Who holds what, and what becomes of it.

    Args:
        ordered: An order to give everything back has reached an agent that does not answer.
    """
    directory, errors = NodeDir(path), dict[str, str]()
    device = DeviceView(directory, errors)
    device.look()
    mode, heard = _agent(directory)
    lease, held = device.lease, device.held_pages()
    has = "unknown" if "serving.lease" in errors else "is not there"
    if lease is not None and device.serving_alive():
        has = f"has {lease.reserved_pages} of its {lease.total_pages} pages"
    lines = [f"agent     {heard}", f"serving   {has}"]
    if held:
        lines.append(
            f"rollout   holds {held} pages ({format_bytes(held * PAGE_BYTES)}); an engine whose agent is silent gives them back by itself within "
            "seconds, and one that does not is killed by the sentinel"
        )
    else:
        without = "unknown" if "rollout.lease" in errors else "is not there"
        lines.append(f"rollout   {'holds nothing' if device.rollout_alive() else without}")
    lines += [f"error     {error}" for error in errors.values()]
    if ordered:
        lines.append(
            "The order has reached the agent, and is carried out once it goes on (kill -CONT where it was stopped). If it is killed instead, the agent that "
            f"is started next goes on in mode {mode}: say `rose node off` to that one as well."
        )
    return lines


def _agent(directory: NodeDir) -> tuple[str, str]:
    """Its mode, and when it was last heard of."""
    reader = directory.node()
    try:
        state = reader.read()
        if state is None:
            return "of its file", "has left nothing here"
        mode = Mode(state.mode).name.lower()
        lives = "lives" if reader.alive() else "is dead"
        return mode, f"{lives}, last heard of {format_s(age_s(state.heartbeat_ns))} ago, in mode {mode}"
    except (LedgerError, ValueError) as error:
        return "unknown", str(error)
    finally:
        reader.close()
