"""A thousand readers of one run: one relay for all, against a tree of relays on this machine.

Readers are light: the client's own requests (head by long poll, lease, manifest, object, lease let go), the bytes thrown away.  Every
relay is a process; a version is one object.  Relays' CPU seconds are the kernel's word of their processes: what else runs on the machine is
not in them, though it may lengthen them.  Rounds are interleaved, one relay then the tree.

The bar, written before the first run:

1. Nobody serves more than its children: below the root a relay takes in each version once (at most 1.01 of its bytes, manifest and
   all) and sends at most 1.01 of it for each of its readers; the root sends at most 1.01 of it for each relay.
2. CPU seconds per GB that readers got, of all relays of the tree together: at most 1.25 of one relay's for all.  The busiest relay of a tree of
   four: at most 0.35 of the one relay's CPU seconds.
3. 10,000 leases a minute are taken, and a lease costs the relay, while 10,000 are held, at most 1.25 of what it costs while 100 are.
4. One of the four is killed while a version goes out: all readers have that version and the next, and the last of them is done
   20 s after the kill at most.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import numpy as np

from benchmarks.lib.report import Report
from benchmarks.weight_transfer.weights_terms import cpu_of
from rose.lineage import WeightVersion
from rose.open_files import raise_limit
from rose.weights import manifest
from rose.weights.http_store import HttpStore
from rose.weights.manifest import Head, ObjectRef
from tests.weights.relay_process import RelayProcess

RUN = "fan"
STARTED, DONE, FAILED = "started", "done", "failed"


def read_versions(
    first: int, count: int, url: str, token: str, told: Queue[Any], stop: Event, patience_s: float
) -> None:
    """A process of ``count`` readers behind ``url``, a thread each."""
    raise_limit(4 * count)
    threading.stack_size(256 << 10)

    def read(number: int) -> None:
        store = HttpStore(url, token, patience_s=patience_s)
        at: WeightVersion | None = None
        told.put((number, STARTED, "", 0))
        while not stop.is_set():
            try:
                head = store.wait_head(RUN, at, 5.0)
                if head is None:
                    continue
                version, nbytes = head.identity, 0

                def count_bytes(piece: memoryview) -> None:
                    nonlocal nbytes
                    nbytes += len(piece)

                store.lease(RUN, f"reader-{number}", version, 600)
                store.get(head.manifest.key)
                store.stream(key_of(version), lambda total: None, count_bytes)
                store.lease(RUN, f"reader-{number}", None, 600)
                at = version
                told.put((number, DONE, str(version), nbytes))
            except Exception as error:  # noqa: BLE001 - whatever it is, the reader tries again, and the count tells
                told.put((number, FAILED, f"{type(error).__name__}: {error}", 0))
                stop.wait(0.5)

    threads = [threading.Thread(target=read, args=(first + number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    stop.wait()


def key_of(version: WeightVersion) -> str:
    return f"{manifest.version_prefix(RUN, version)}object"


class Readers:
    """All of them, in processes of 250 at most, spread over the addresses."""

    def __init__(self, urls: list[str], count: int, token: str) -> None:
        each = min(250, -(-count // len(urls)))
        context = multiprocessing.get_context("spawn")
        self.count = count
        self._told: Queue[Any] = context.Queue()
        self._stop = context.Event()
        self.errors: list[str] = []
        self._processes = []
        groups = [range(first, min(first + each, count)) for first in range(0, count, each)]
        for number, group in enumerate(groups):
            url = urls[number % len(urls)]
            process = context.Process(
                target=read_versions,
                args=(group[0], len(group), url, token, self._told, self._stop, 20.0),
                daemon=True,
            )
            process.start()
            self._processes.append(process)
        self.wait(STARTED, "", 120.0)

    def wait(self, what: str, version: str, timeout_s: float) -> tuple[int, int]:
        """Until all have said so; how many have, and the bytes that they got."""
        until_s = time.monotonic() + timeout_s
        seen: set[int] = set()
        num_bytes = 0
        while len(seen) < self.count and (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(Exception):
                number, said, of, nbytes = self._told.get(timeout=left_s)
                if said == FAILED:
                    self.errors.append(of)
                elif said == what and of == version:
                    seen.add(number)
                    num_bytes += nbytes
        return len(seen), num_bytes

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


class Trainer:
    """Publishes versions of one object."""

    def __init__(self, url: str, token: str, nbytes: int) -> None:
        self._store = HttpStore(url, token)
        self._rng = np.random.default_rng(7)
        self._nbytes = nbytes
        self._at: WeightVersion | None = None

    def publish(self) -> WeightVersion:
        version = WeightVersion(1, 0 if self._at is None else self._at.version + 1)
        self._store.put_new(key_of(version), self._rng.bytes(self._nbytes))
        table = self._rng.bytes(4096)
        key = manifest.manifest_key(RUN, version, "delta")
        self._store.put_new(key, table)
        head = Head(
            schema=manifest.SCHEMA, run_id=RUN, attempt=1, version=version.version, kind="delta",
            manifest=ObjectRef(key=key, nbytes=len(table), xxh3=manifest.digest(table)),
        )  # fmt: skip
        self._store.set_head(head, expected=self._at)
        self._at = version
        return version


def usage(relay: RelayProcess) -> dict[str, float]:
    found = {"cpu_s": cpu_of(relay.process.pid)}
    for line in httpx.get(f"{relay.url}/metrics", timeout=60).text.splitlines():
        for direction in ("in", "out"):
            if line.startswith(f'rose_relay_bytes_total{{direction="{direction}"}}'):
                found[direction] = float(line.rsplit(" ", 1)[1])
    return {"in": 0.0, "out": 0.0} | found


@contextlib.contextmanager
def relays(folder: Path, num_below: int) -> Iterator[list[RelayProcess]]:
    """The root, and so many that copy from it."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(RelayProcess(folder / "root", None, "--no-fsync"))
        below = [
            stack.enter_context(
                RelayProcess(folder / f"below-{number}", root.tokens, f"--upstream={root.url}")
            )
            for number in range(num_below)
        ]
        yield [root, *below]


def fan_out(folder: Path, args: argparse.Namespace, num_below: int) -> dict[str, Any]:
    """Some versions to all readers, through one relay or a tree."""
    nbytes = args.mib << 20
    with relays(folder, num_below) as all_relays:
        root, *below = all_relays
        trainer = Trainer(root.url, root.tokens.publish, nbytes)
        readers = Readers([relay.url for relay in below or [root]], args.readers, root.tokens.publish)
        try:
            readers.wait(DONE, str(trainer.publish()), 120.0)  # warm
            before = [usage(relay) for relay in all_relays]
            began_s = time.monotonic()
            num_done = got_bytes = 0
            for _ in range(args.versions):
                num, got = readers.wait(DONE, str(trainer.publish()), 300.0)
                num_done, got_bytes = num_done + num, got_bytes + got
            wall_s = time.monotonic() - began_s
            spent = [
                {name: now - then[name] for name, now in usage(relay).items()}
                for relay, then in zip(all_relays, before, strict=True)
            ]
        finally:
            readers.close()
    sent = nbytes * args.versions
    return {
        "relays": spent,
        "done": num_done,
        "wanted": args.readers * args.versions,
        "errors": len(readers.errors),
        "wall_s": wall_s,
        "cpu_s": sum(each["cpu_s"] for each in spent),
        "busiest_cpu_s": max(each["cpu_s"] for each in spent),
        "cpu_s_per_gb": sum(each["cpu_s"] for each in spent) / (got_bytes / 1e9),
        "root_out_per_child": spent[0]["out"] / sent / (num_below or args.readers),
        "below_in": max((each["in"] / sent for each in spent[1:]), default=None),
        "below_out_per_reader": max(
            (each["out"] / sent / (args.readers / num_below) for each in spent[1:]), default=None
        ),
    }


def leases(folder: Path, num_held: int, num_timed: int) -> dict[str, float]:
    """What a lease costs while so many are held."""
    with RelayProcess(folder, None, "--no-fsync") as relay:
        store = HttpStore(relay.url, relay.tokens.publish)

        def hold(number: int) -> None:
            store.lease(RUN, f"node-{number % num_held}", WeightVersion(1, number % 5), 3600)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(hold, range(num_held)))
            before_s, began_s = cpu_of(relay.process.pid), time.monotonic()
            list(pool.map(hold, range(num_timed)))
            wall_s = time.monotonic() - began_s
        cpu_s = cpu_of(relay.process.pid) - before_s
    return {"held": num_held, "cpu_us": 1e6 * cpu_s / num_timed, "per_minute": 60 * num_timed / wall_s}


def killed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One of four relays is killed while a version goes out."""
    with relays(folder, 4) as all_relays:
        root, *below = all_relays
        trainer = Trainer(root.url, root.tokens.publish, args.mib << 20)
        urls = [f"{relay.url},{root.url}" for relay in below]
        readers = Readers(urls, args.readers, root.tokens.publish)
        try:
            readers.wait(DONE, str(trainer.publish()), 120.0)
            version = trainer.publish()
            before = usage(below[0])["out"]
            while usage(below[0])["out"] == before:
                time.sleep(0.01)
            below[0].kill()
            began_s = time.monotonic()
            num_first, _ = readers.wait(DONE, str(version), 120.0)
            first_s = time.monotonic() - began_s
            num_next, _ = readers.wait(DONE, str(trainer.publish()), 120.0)
        finally:
            readers.close()
    return {
        "stuck": 2 * args.readers - num_first - num_next,
        "all_have_it_s": first_s,
        "errors": sorted(set(readers.errors))[:5],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--mib", type=int, default=8, help="of a version")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    raise_limit(4096)
    report = Report("fanout")
    arms: dict[str, list[dict[str, Any]]] = {"one": [], "tree": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fanout-") as scratch:
        folder = Path(scratch)

        def place(name: str) -> Path:
            (folder / name).mkdir()
            return folder / name

        for number in range(args.rounds):
            for name, num_below in (("one", 0), ("tree", 4)):
                arms[name].append(fan_out(place(f"{name}-{number}"), args, num_below))
                report.progress(f"rounds ({name})", number + 1, args.rounds)
        held = []
        for number, count in enumerate((100, 10_000)):
            report.progress("leases", number, 2)
            held.append(leases(place(f"leases-{count}"), count, args.leases))
        report.progress("a killed relay", 0, 1)
        kill = killed(place("kill"), args)

    def best(name: str, key: str) -> float:
        return min(each[key] for each in arms[name])

    everything = [*arms["one"], *arms["tree"]]
    checks = {
        "nobody serves more than its children": all(
            max(each["root_out_per_child"], each["below_in"], each["below_out_per_reader"]) <= 1.01
            for each in arms["tree"]
        ),
        "all readers got all versions": all(each["done"] == each["wanted"] for each in everything),
        "CPU per GB of the tree <= 1.25 of one relay's": best("tree", "cpu_s_per_gb")
        <= 1.25 * best("one", "cpu_s_per_gb"),
        "busiest relay <= 0.35 of the one": best("tree", "busiest_cpu_s")
        <= 0.35 * best("one", "busiest_cpu_s"),
        "10,000 leases a minute": min(each["per_minute"] for each in held) >= 10_000,
        "a lease costs the same": held[1]["cpu_us"] <= 1.25 * held[0]["cpu_us"],
        "nobody stuck": kill["stuck"] == 0 and kill["all_have_it_s"] <= 20,
    }
    report.table(
        ["", "one relay", "tree of four"],
        [
            [key, best("one", key), best("tree", key)]
            for key in ("cpu_s_per_gb", "cpu_s", "busiest_cpu_s", "wall_s")
        ],
    )
    report.table(["check", ""], [[name, "met" if met else "MISSED"] for name, met in checks.items()])
    summary: dict[str, Any] = {
        "readers": args.readers,
        "versions": args.versions,
        "mib": args.mib,
        "one_cpu_s_per_gb": best("one", "cpu_s_per_gb"),
        "tree_cpu_s_per_gb": best("tree", "cpu_s_per_gb"),
        "busiest_share": best("tree", "busiest_cpu_s") / best("one", "busiest_cpu_s"),
        "lease_cpu_us_100": held[0]["cpu_us"],
        "lease_cpu_us_10000": held[1]["cpu_us"],
        "leases_per_minute": held[1]["per_minute"],
        "stuck": kill["stuck"],
        "after_kill_s": kill["all_have_it_s"],
        "cores": os.cpu_count(),
        "checks": checks,
    }
    report.finish(summary, {"arms": arms, "leases": held, "kill": kill}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
