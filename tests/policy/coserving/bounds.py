"""How large a world is, what may happen in it, and what is broken in it on purpose."""

from __future__ import annotations

from dataclasses import dataclass

SERVINGS = ("serving.lease", "serving.board", "serving.chunks")
ROLLOUTS = ("rollout.lease", "rollout.chunks")
FILES = ("node.state", *SERVINGS, "serving.rank0", *ROLLOUTS, "rollout.rank0")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How large the world is, and what may happen in it."""

    chunks: int = 2
    """Of each engine, a page each; the device has as many pages."""
    ranks: int = 1
    """Of the rollout engine; production has one."""
    kills: int = 0
    """Of the rollout engine's core and workers, with a restart each."""
    production_kills: int = 0
    """Of production's core and worker, with a restart each."""
    silences: int = 0
    """Of the agent: it dies, or stands still."""
    unlinks: int = 0
    """Of shared files."""
    files: tuple[str, ...] = FILES
    """Which of them."""
    lost_wakes: int = 0
    waits: int = 0
    """How often production waits for as long as it does before it calls pages stranded."""
    slow_reads: bool = False
    """A rollout engine may stand still between what it reads of production and what it does by it."""
    delayed: bool = False
    """Reports reach their engine core late; of several only the last may."""
    max_states: int = 400_000

    def __str__(self) -> str:
        first = Bounds.__dataclass_fields__
        other = {name: getattr(self, name) for name in first if getattr(self, name) != first[name].default}
        return " ".join(f"{name}={value}" for name, value in other.items()) or "small"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is broken on purpose; the defaults are the product."""

    believes_old_reports: bool = False
    """A report counts whatever the generation it was made by."""
    maps_unannounced: bool = False
    """A pager maps first and reports then."""
    takes_what_is_held: bool = False
    """Production maps what it wants back though the peer still holds it."""
    reads_first: bool = False
    """Production reads the peer's number before it says what it reserves."""
    grows_unasked: bool = False
    """The rollout engine does not read production's numbers once more when it has announced a growth."""
    follows_the_name: bool = False
    """A reader lets go of a file whose name is gone, though its writer lives, and the writer never makes it anew."""
    keeps_a_dead_file: bool = False
    """A reader never lets go of the file that it has, though its writer is dead and another has come."""
    takes_what_is_stranded: bool = False
    """Production maps what has been stranded for long, as if its holder were dead."""
    waits_in_silence: bool = False
    """It never says that pages are stranded."""
    stays_stranded: bool = False
    """It never takes that back."""
    no_heartbeat: bool = False
    """Who was not woken does not look."""
    trusts_the_silent: bool = False
    """An agent that says nothing any more still lends."""
    starts_with_all: bool = False
    """A production that starts does not ask what the rollout engine holds."""
    forgets_workers: bool = False
    """A production that starts does not ask what workers hold whose core is dead."""

    def __str__(self) -> str:
        return " ".join(name for name in Mutant.__dataclass_fields__ if getattr(self, name)) or "product"


class Broken(AssertionError):
    """An invariant does not hold; the message has the steps that lead there."""
