"""SIGKILLs at random instants, over a trainer, a tree of relays, subscribers and engines: is anything ever wrong, is anybody stuck?

Real processes on one machine (``kills_world.py``): a publisher that publishes small random steps as fast as it goes, signed; a root relay and
two below it; four subscribers behind these, two of which share one host copy.  A seeded schedule says who dies, alone, two at once, or
again while it comes back, how long the wait before is and how long it stays dead; the instants are what the machine makes of them.  A
killed publisher goes on as the next attempt, three times in ten from an older checkpoint.  With ``--engines`` a real vLLM engine follows too,
by the node agent's loop in a process of its own, which is killed as well, as is the engine itself in a tenth of these kills.

What is compared: the publisher writes the sha256 over all tensors of a version down before it publishes it.  All the time, not only after kills, each
subscriber's host copy (its file, read from outside) and the memory that its update files are applied to must be what was written down for the version
that they are said to be; so must a dead one's host copy, at the moment of its death.  An engine's memory is scanned (``/rose/weights/hash``) and compared with the state
hashes of the trainer's own tensors.  Nobody may go back to an older version.

The bar, written before the first run:

* wrong: 0.  A version whose bytes are not those that were published, or that nobody published, or that is older than the one before.
* stuck: 0.  Within 20 s of each kill (of the return of an engine that was killed) everybody who follows has a version that was
  published after it.
* fallen: 0.  No process ends but by our hand.

    python benchmarks/weight_transfer/weights_kills.py --kills 1000 --engines 50 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.lib.report import Report, write
from benchmarks.weight_transfer.kills_world import (
    RUN,
    Nursery,
    NurseryRelay,
    Role,
    Weights,
    digest_of_copy,
    first_weights,
    low_ports,
    save_checkpoint,
    state_digest,
)
from rose.auth import Tokens
from rose.lineage import WeightVersion
from tests.engine_launcher import EngineServer, session_processes
from tests.plugin.weights_server import dedicated
from tests.tiny_model import write_tiny_model

BOUND_S = 20.0
LOOK_S = 0.01
PUBLISHER, ROOT_RELAY, NODE, ENGINE = "publisher", "root", "node", "engine"
WAYS = {"sub-0": ("leaf-0",), "sub-1": ("leaf-1", ROOT_RELAY), "sub-2": ("leaf-1", "leaf-0"), "sub-3": ("leaf-0", "leaf-1")}  # fmt: skip
"""Which relays each subscriber is given; the first has one alone."""
FOLDERS = {"sub-0": "copy-0", "sub-1": "copy-1", "sub-2": "shared", "sub-3": "shared"}
PLAIN = {PUBLISHER: 0.2, ROOT_RELAY: 0.15, "leaf-0": 0.125, "leaf-1": 0.125, **dict.fromkeys(WAYS, 0.1)}
WITH_ENGINE = {PUBLISHER: 0.3, ROOT_RELAY: 0.15, "leaf-0": 0.15, NODE: 0.4}
KINDS = {"one": 0.7, "two": 0.15, "again": 0.15}
ENGINE_MODEL: dict[str, Any] = {
    "hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "intermediate_size": 512,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """One entry of the schedule.

    Args:
        victims: Killed in this order, at once; with ``again_s``, the one victim twice, so long after it was started again.
        wait_s: After all had recovered from the one before.
        down_s: Until the victims are started again.
        back: How many checkpoints a killed publisher goes back.
    """

    victims: tuple[str, ...]
    wait_s: float
    down_s: float
    again_s: float | None
    back: int

    @property
    def num_kills(self) -> int:
        return len(self.victims) + (self.again_s is not None)


def schedule(seed: int, kills: int, chances: dict[str, float], fixed: Sequence[str] = ()) -> list[Blow]:
    """So many kills; those of ``fixed`` are single ones, spread evenly over the rest."""
    rng = np.random.default_rng(seed)
    blows: list[Blow] = []
    left = kills - len(fixed)
    while left > 0:
        kind = rng.choice(list(KINDS), p=list(KINDS.values())) if left > 1 else "one"
        victims = rng.choice(
            list(chances), 2 if kind == "two" else 1, replace=False, p=list(chances.values())
        )
        blows.append(
            Blow(
                victims=tuple(map(str, victims)),
                wait_s=float(rng.uniform(0, 0.4)),
                down_s=float(rng.choice([0.0, rng.uniform(0, 0.3)])),
                again_s=float(rng.uniform(0, 1.0)) if kind == "again" else None,
                back=int(rng.integers(1, 6)) if rng.random() < 0.3 else 0,
            )
        )
        left -= blows[-1].num_kills
    for number, victim in enumerate(fixed):
        place = (number + 1) * len(blows) // (len(fixed) + 1) + number
        blows.insert(place, Blow(victims=(victim,), wait_s=0.2, down_s=0.0, again_s=None, back=0))
    return blows


@dataclass(slots=True)
class Judge:
    """Reads what all have said, and compares it.

    Args:
        published: The publisher's file.
        files: Each follower's.
        followers: Who has to come along.
    """

    published: Path
    files: dict[str, Path]
    followers: tuple[str, ...]
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    last_errors: dict[str, str] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    at: dict[tuple[str, str], str] = field(default_factory=dict)
    since_s: float = 0.0
    _offsets: dict[Path, int] = field(default_factory=dict)

    def expect(self, since_s: float) -> None:
        """From now on everybody has to reach a version that was published after ``since_s``."""
        self.since_s = since_s
        self.reached.clear()

    def missing(self) -> list[str]:
        return [name for name in self.followers if name not in self.reached]

    def read(self) -> None:
        for name, path in self.files.items():
            for line in self._new(path):
                if "error" in line:
                    self.heard(name, line["error"])
                else:
                    self.compare(name, line["of"], line["version"], line["digest"], line["at"])

    def compare(self, name: str, of: str, version: str, digest: str, at_s: float) -> None:
        """``name`` has ``version``, and these are its bytes."""
        self._read_published()
        told = self.said.get(version)
        key = "state" if of == ENGINE else "digest"
        place = (FOLDERS.get(name, name) if of == "copy" else name, of)
        before = self.at.get(place)
        if told is None:
            self.wrong.append(f"{name}: {of} is {version}, which nobody published")
            return
        if told[key] != digest:
            self.wrong.append(f"{name}: {of} of {version} is {digest}, published was {told[key]}")
        # Two look at a shared copy, and what one saw may be read after what the other saw later.
        if before is not None and of != "copy" and WeightVersion.parse(version) < WeightVersion.parse(before):
            self.wrong.append(f"{name}: {of} went from {before} back to {version}")
        self.at[place] = version
        self.compared[of] += 1
        if of != "copy" and told["at"] > self.since_s:
            self.reached.setdefault(name, at_s)

    def _read_published(self) -> None:
        for line in self._new(self.published):
            if "error" in line:
                self.heard(PUBLISHER, line["error"])
            elif line["version"] in self.said:
                self.wrong.append(f"{PUBLISHER}: {line['version']} twice")
            else:
                self.said[line["version"]] = line

    def heard(self, name: str, error: str) -> None:
        self.errors[f"{name.partition('-')[0]}: {error.partition(':')[0]}"] += 1
        self.last_errors[name] = error

    def _new(self, path: Path) -> list[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class World:
    """All processes, by name; ends them.

    Args:
        model: Of the engine; None: there is none, and four subscribers.
    """

    def __init__(self, folder: Path, seed: int, *, model: Path | None = None) -> None:
        self.folder, self._seed, self._model = folder, seed, model
        self._stack = contextlib.ExitStack()
        self._tokens = Tokens.generate()
        self._attempt = 1
        self._nursery = Nursery()
        self._stack.callback(self._nursery.close)
        self.relays: dict[str, NurseryRelay] = {}
        self.roles: dict[str, Role] = {}
        self.engine: EngineServer | None = None
        self._engine_stack = contextlib.ExitStack()
        self.fallen: list[str] = []
        names = ("sub-0",) if model else tuple(WAYS)
        self.judge = Judge(
            folder / "published",
            {name: folder / f"{name}.lines" for name in names},
            (*names, ENGINE) if model else names,
        )

    def __enter__(self) -> World:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for role in self.roles.values():
            role.kill()
        self._engine_stack.close()
        self._stack.close()

    def _start(self) -> None:
        rng = np.random.default_rng(self._seed)
        weights = first_weights(rng) if self._model is None else read_model(self._model)
        (self.folder / "checkpoints").mkdir()
        save_checkpoint(self.folder / "checkpoints", 0, weights)
        self._tokens.save(self.folder / "all/tokens.toml")
        self._tokens.only(["relay", "public_key"]).save(self.folder / "node.toml")
        names = (ROOT_RELAY, "leaf-0") if self._model else (ROOT_RELAY, "leaf-0", "leaf-1")
        for name, port in zip(names, low_ports(rng, len(names)), strict=True):
            options = (
                [f"--upstream={self.relays[ROOT_RELAY].url}", "--max-total-gib=0.1"] if self.relays else []
            )
            relay = NurseryRelay(self._nursery, self.folder / name, self._tokens, *options, port=port)
            self._stack.enter_context(relay)
            self.relays[name] = relay
        self._types = {name: kind for name, (kind, _) in weights.items()}
        self._role(PUBLISHER, "publisher", self._publisher(0))
        for name in self.judge.files:
            reader = {
                "url": self._urls(name),
                "token_file": str(self.folder / "node.toml"),
                "directory": str(self.folder / FOLDERS[name]),
                "lines": str(self.judge.files[name]),
            }
            self._role(name, "subscriber", reader)
        if self._model:
            self._start_engine()

    def _role(self, name: str, role: str, settings: dict[str, Any]) -> None:
        self.roles[name] = Role(self._nursery, role, settings, self.folder / f"{name}.errors")

    def _urls(self, name: str) -> str:
        return ",".join(self.relays[relay].url for relay in WAYS[name])

    def _publisher(self, back: int) -> dict[str, Any]:
        return {
            "folder": str(self.folder), "attempt": self._attempt, "seed": self._seed, "back": back, "types": self._types,
            "url": self.relays[ROOT_RELAY].url, "token_file": str(self.folder / "all/tokens.toml"),
            "states": self._model is not None,
        }  # fmt: skip

    def _start_engine(self) -> None:
        assert self._model is not None
        directory = self.folder / NODE
        directory.mkdir(mode=0o700, exist_ok=True)
        # The memory of the machine is for all who run here.
        args = ["--max-num-seqs=8", "--max-model-len=128", f"--kv-cache-memory-bytes={64 << 20}"]
        server = dedicated(self._model, env={"ROSE_WEIGHTS_DIR": str(directory)}, args=args)
        self.engine = self._engine_stack.enter_context(server)
        settings = {
            "server": {"model_dir": str(self._model), "port": self.engine.port, "node_token": self.engine.node_token},
            "url": f"{self.relays['leaf-0'].url},{self.relays[ROOT_RELAY].url}",
            "token_file": str(self.folder / "node.toml"),
            "directory": str(directory),
        }  # fmt: skip
        self._role(NODE, "node", settings)

    # -- what happens to them

    def kill(self, name: str) -> None:
        if name == ENGINE:  # and with it, as on a machine that goes, the agent that would start it again
            assert self.engine is not None
            self.roles[NODE].kill()
            for process in session_processes(self.engine.pid):
                process.kill()
            self._engine_stack.close()
            self._engine_stack = contextlib.ExitStack()
        elif name in self.relays:
            self.relays[name].kill()
        else:
            self.roles[name].kill()
        if name in FOLDERS:
            self.look(name)

    def restart(self, name: str, back: int) -> None:
        if name == ENGINE:
            self._start_engine()
        elif name in self.relays:
            self.relays[name].restart()
        else:
            if name == PUBLISHER:
                self._attempt += 1
                self.roles[name].settings = self._publisher(back)
            self.roles[name].start()

    def look(self, name: str) -> None:
        """At a host copy, from outside."""
        self.judge.read()
        found = digest_of_copy(self.folder / FOLDERS[name])
        if found is not None:
            self.judge.compare(name, "copy", *found, time.monotonic())

    def scan_engine(self) -> None:
        """What the engine's memory is, by its own scan."""
        assert self.engine is not None
        answer = self.engine.get("/rose/weights/hash")
        if answer.status_code != 200:  # in the middle of an update
            self.judge.heard(ENGINE, f"{answer.status_code}: {answer.text}")
            return
        (rank,) = answer.json()["ranks"]
        if rank["run"] == RUN:  # not the base model's, before the first update
            self.judge.compare(
                ENGINE, ENGINE, rank["version"], state_digest(rank["hashes"]), time.monotonic()
            )

    def check_alive(self) -> None:
        for name, each in {**self.relays, **self.roles}.items():
            if each.process.ended():
                errors = self.folder / f"{name}.errors"
                tail = errors.read_text()[-2000:] if errors.exists() else ""
                self.fallen.append(f"{name} ended: {tail}")
                self.restart(name, 0)

    def wait(self, bound_s: float) -> list[str]:
        """Until all who follow have come along; those who have not."""
        until_s = time.monotonic() + bound_s
        while True:
            self.judge.read()
            if self.engine is not None and ENGINE not in self.judge.reached:
                self.scan_engine()
            missing = self.judge.missing()
            if not missing or time.monotonic() > until_s:
                return missing
            self.check_alive()
            time.sleep(LOOK_S)


def read_model(folder: Path) -> Weights:
    """The tensors of a checkpoint in bfloat16."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name: ("BF16", each.view(torch.int16).numpy().view(np.uint16).copy()) for name, each in tensors.items()}  # fmt: skip


def strike(world: World, blow: Blow) -> dict[str, Any]:
    """One entry of the schedule, until all have recovered or the bound has passed; what came of it."""
    time.sleep(blow.wait_s)
    for victim in blow.victims:
        world.kill(victim)
    struck_s = time.monotonic()
    if blow.down_s:
        time.sleep(blow.down_s)
    for victim in blow.victims:
        world.restart(victim, blow.back)
    if blow.again_s is not None:
        time.sleep(blow.again_s)
        world.kill(blow.victims[0])
        struck_s = time.monotonic()
        world.restart(blow.victims[0], 0)
    if ENGINE in blow.victims:
        struck_s = time.monotonic()  # it is up
    world.judge.expect(struck_s)
    missing = world.wait(BOUND_S - (time.monotonic() - struck_s))
    last = max(world.judge.reached.values(), default=struck_s)
    found: dict[str, Any] = {
        "victims": blow.victims,
        "again": blow.again_s is not None,
        "recovery_s": last - struck_s,
    }
    if missing:
        found |= {
            "stuck": missing,
            "errors": {name: world.judge.last_errors.get(name, "") for name in missing},
        }
        found["later_stuck"] = world.wait(3 * BOUND_S)  # so that the next blow begins from rest
        found["recovery_s"] = time.monotonic() - struck_s
    return found


def run(
    folder: Path,
    seed: int,
    blows: Sequence[Blow],
    *,
    model: Path | None = None,
    progress: Callable[[int], None] = lambda kills: None,
) -> dict[str, Any]:
    """The whole schedule in a world of its own; what was found."""
    rows: list[dict[str, Any]] = []
    done = 0
    with World(folder, seed, model=model) as world:
        world.judge.expect(0.0)
        late = world.wait(6 * BOUND_S)
        if late:
            raise RuntimeError(f"{late} have no version: {world.judge.last_errors}, {world.fallen}")
        for blow in blows:
            rows.append(strike(world, blow))
            done += blow.num_kills
            progress(done)
        judge = world.judge
    kills = Counter(victim for blow in blows for victim in (*blow.victims, *blow.victims[:1] * (blow.again_s is not None)))  # fmt: skip
    return {
        "seed": seed,
        "kills": done,
        "kills_by_victim": dict(kills),
        "wrong": judge.wrong,
        "stuck": [row for row in rows if "stuck" in row],
        "fallen": world.fallen,
        "published": len(judge.said),
        "compared": dict(judge.compared),
        "errors": dict(judge.errors),
        "recovery_s": [row["recovery_s"] for row in rows],
        "recovery_s_by_victim": by_victim(rows),
    }


def by_victim(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of those that were killed alone; "two" and "again" for the others."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        name = "again" if row["again"] else "two" if len(row["victims"]) > 1 else row["victims"][0]
        found[name].append(row["recovery_s"])
    return {name: {"events": len(times), **quantiles(times)} for name, times in sorted(found.items())}


def quantiles(times: Sequence[float]) -> dict[str, float]:
    return {
        "p50": float(np.median(times)),
        "p99": float(np.quantile(times, 0.99, method="higher")),
        "max": max(times),
    }


def summary_of(details: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, prefix in (("plain", ""), ("engines", "engine_")):
        if part not in details:
            continue
        each = details[part]
        found |= {
            f"{prefix}kills": each["kills"],
            **{f"{prefix}{name}": len(each[name]) for name in ("wrong", "stuck", "fallen")},
            f"{prefix}published": each["published"],
            f"{prefix}compared": sum(each["compared"].values()),
            **{f"{prefix}recovery_s_{name}": value for name, value in quantiles(each["recovery_s"]).items()},
            **{f"{prefix}kills.{name}": count for name, count in sorted(each["kills_by_victim"].items())},
        }
    return found


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: all processes end, and the folder goes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="0: none without engines")
    parser.add_argument("--engines", type=int, default=50, help="kills with a real engine; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="a part that it has already is kept, where it is not run anew"
    )
    args = parser.parse_args()
    report = Report("weights_kills")
    details: dict[str, Any] = {}
    if args.json and args.json.exists():
        details = json.loads(args.json.read_text())["details"]
    parts: dict[str, list[Blow]] = {}
    if args.kills:
        parts["plain"] = schedule(args.seed, args.kills, PLAIN)
    if args.engines:
        parts["engines"] = schedule(args.seed, args.engines, WITH_ENGINE, [ENGINE] * (args.engines // 10))
    with ended_by_sigterm():
        for part, blows in parts.items():
            total = sum(blow.num_kills for blow in blows)
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kills-") as scratch:
                model = None
                if part == "engines":
                    model = Path(scratch) / "model"
                    write_tiny_model(model, seed=args.seed, tied=False, **ENGINE_MODEL)
                details[part] = run(
                    Path(scratch), args.seed, blows, model=model,
                    progress=lambda done, part=part, total=total: report.progress(f"kills ({part})", done, total),
                )  # fmt: skip
            report.table(
                ["victim", "events", "p50 s", "p99 s", "max s"],
                [[name, *row.values()] for name, row in details[part]["recovery_s_by_victim"].items()],
                title=part,
            )
            for said in ("wrong", "stuck", "fallen"):
                for each in details[part][said][:20]:
                    print(f"{said}: {each}")
            if args.json:  # the second part may be stopped
                write(args.json, report.name, summary_of(details), details)
    summary = summary_of(details)
    report.finish(summary, details, args.json)
    faults = ("wrong", "stuck", "fallen")
    return int(any(len(details[part][fault]) for part in details for fault in faults))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
