"""What ``weights_kills.py`` kills: a trainer, relays, subscribers and a node agent, each a process of its own.

Each says in a file of lines (JSON) what it does, for the judge, who believes no hash of ROSE's:

* the **publisher** writes down, and makes durable, the sha256 over all of a version's tensors *before* it publishes it; it takes its
  weights from a checkpoint, a later attempt perhaps from an older one, and changes them by random steps;
* a **subscriber** is what a node agent runs (:func:`rose.weights.shared_copy.open_shared`) with a stand-in for the engine: memory that each
  update file is applied to.  After every version it writes down the sha256 of that memory, and of the host copy's file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rose.auth import Tokens
from rose.errors import RoseError
from rose.lineage import WeightVersion
from rose.signatures import PublicKeys, SigningKey
from rose.weights import statehash
from rose.weights.cli import relay_main
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.shared_copy import open_shared
from rose.weights.source import RawBits
from rose.weights.stores import open_store
from rose.weights.update import Update, read_update
from rose.weights.warmup import warm_up
from tests.weights.relay_process import RelayProcess

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.weight_transfer.kills_world"
RUN = "kills"
PARAMS = WeightsParams(fragment_elements=1 << 18, bucket_bytes=1 << 20, anchor_every=12)
KEPT_CHECKPOINTS = 6
CHECKPOINT_EVERY = 4
BACK_OFF_S = 0.1
REST_S = 0.4
Bits = NDArray[Any]
Weights = dict[str, tuple[str, Bits]]
"""Type and bits by name."""


# -- what is compared --------------------------------------------------------------------------------


def digest(tensors: Mapping[str, Any]) -> str:
    """sha256 over names and bytes of all tensors."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        data = memoryview(tensors[name]).cast("B") if len(tensors[name]) else b""
        whole.update(f"{name} {len(data)}\n".encode())
        whole.update(data)
    return whole.hexdigest()


def state_digest(hashes: Mapping[str, str]) -> str:
    """Of state hashes by name: what an engine can say of its memory."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def digest_of_copy(directory: Path) -> tuple[str, str] | None:
    """Version and :func:`digest` of a host copy as it lies on the disk; None: there is none just now, or it changed meanwhile.

    The state file exists while the copy is whole, and is another file after every change.
    """
    state = directory / "state.json"
    try:
        before = state.stat()
        version = json.loads(state.read_bytes())["version"]
        with (directory / "weights.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = memoryview(file.read())
        after = state.stat()
    except (OSError, ValueError):
        return None
    if (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns):
        return None
    places = {name: row["data_offsets"] for name, row in header.items() if name != "__metadata__"}
    return version, digest({name: data[begin:end] for name, (begin, end) in places.items()})


class Lines:
    """A file that a process adds to, a write for each line: who is killed leaves none by halves."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, *, durable: bool = False, **fields: object) -> None:
        os.write(self._file, (json.dumps({"at": time.monotonic(), **fields}) + "\n").encode())
        if durable:
            os.fsync(self._file)


# -- the trainer -------------------------------------------------------------------------------------


def first_weights(rng: np.random.Generator) -> Weights:
    """A few MB, of each type that the engines hold."""

    def bits(shape: tuple[int, ...], dtype: str) -> Bits:
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)

    return {
        "model.embed_tokens.weight": ("BF16", bits((1000, 256), "u2")),
        "model.layers.0.mlp.up_proj.weight": ("BF16", bits((800, 1025), "u2")),
        "model.layers.0.self_attn.k_proj.weight": ("BF16", bits((1, 70_001), "u2")),
        "model.layers.0.input_layernorm.weight": ("BF16", bits((256,), "u2")),
        "codes": ("F8_E4M3", bits((300, 400), "u1")),
        "scales": ("F32", bits((300,), "u4")),
        "counter": ("I64", bits((3,), "u8")),
        "empty": ("BF16", bits((0, 4), "u2")),
    }


def step(weights: Weights, rng: np.random.Generator) -> None:
    """Low bits of a random share of the elements: mostly a delta, at times an anchor, at times nothing in a tensor."""
    share = rng.choice([0.001, 0.01, 0.03, 0.5], p=[0.3, 0.45, 0.22, 0.03])
    for _, bits in weights.values():
        flat = bits.reshape(-1)
        if flat.size and rng.random() < 0.9:
            places = rng.integers(0, flat.size, max(1, int(share * flat.size)))
            flat[places] ^= rng.integers(1, 8, places.size, flat.dtype)


def save_checkpoint(folder: Path, version: int, weights: Weights) -> None:
    """The newest few are kept; one that is there is whole."""
    numbers = [int(path.stem) for path in folder.glob("*.npz")]
    number = max(numbers, default=0) + 1
    temporary = folder / ".new"
    with temporary.open("wb") as file:
        arrays: dict[str, Any] = {
            "": np.array(version),
            **{name: bits for name, (_, bits) in weights.items()},
        }
        np.savez(file, **arrays)
    os.replace(temporary, folder / f"{number}.npz")
    for old in sorted(numbers)[: -(KEPT_CHECKPOINTS - 1)]:
        (folder / f"{old}.npz").unlink()


def load_checkpoint(folder: Path, back: int, types: Mapping[str, str]) -> tuple[int, Weights]:
    """The newest, or one that is ``back`` before it where there is one."""
    paths = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))
    with np.load(paths[max(0, len(paths) - 1 - back)]) as table:
        return int(table[""]), {name: (kind, table[name]) for name, kind in types.items()}


def publisher(settings: dict[str, Any]) -> None:
    """One attempt, as fast as it goes but for short random rests."""
    folder, attempt = Path(settings["folder"]), settings["attempt"]
    rng = np.random.default_rng((settings["seed"], attempt))
    version, weights = load_checkpoint(folder / "checkpoints", settings["back"], settings["types"])
    tokens = Tokens.load(settings["token_file"], ["publish", "publish_key"])
    store = open_store(settings["url"], tokens.publish, key=SigningKey.parse(tokens.publish_key))

    def tensors() -> dict[str, RawBits]:
        return {name: RawBits(bits, kind) for name, (kind, bits) in weights.items()}

    lines = Lines(folder / "published")
    trainer = WeightPublisher(tensors, store, RUN, attempt, PARAMS)
    while True:
        said: dict[str, Any] = {"digest": digest({name: bits for name, (_, bits) in weights.items()})}
        if settings["states"]:
            states = {
                name: statehash.to_hex(statehash.hash_bits(bits.reshape(-1)))
                for name, (_, bits) in weights.items()
            }
            said["state"] = state_digest(states)
        lines.say(version=f"{attempt}.{version}", durable=True, **said)
        while True:
            try:
                trainer.publish(version)
                break
            except RoseError as error:
                lines.say(error=f"{type(error).__name__}: {error}")
                time.sleep(BACK_OFF_S)
        if version % CHECKPOINT_EVERY == 0:
            save_checkpoint(folder / "checkpoints", version, weights)
        step(weights, rng)
        version += 1
        if rng.random() < 0.5:  # several in a row, then none for a while
            time.sleep(rng.uniform(0, REST_S))


# -- those who follow it -----------------------------------------------------------------------------


class Memory:
    """A stand-in for an engine: it does what an update file says, and checks nothing."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.bits: dict[str, Bits] = {}

    def apply(self, update: Update) -> None:
        if update.base is not None and update.base != self.version:
            raise AssertionError(f"a step from {update.base} for an engine at {self.version}")
        for name, tensor in update.tensors.items():
            if tensor.dense is not None:
                self.bits[name] = tensor.dense.reshape(-1).copy()
            elif tensor.idx is not None:
                self.bits[name][tensor.idx] = tensor.val
        self.version = update.target


def subscriber(settings: dict[str, Any]) -> None:
    """Follows the run; says what it has after each version."""
    directory = Path(settings["directory"])
    lines = Lines(Path(settings["lines"]))
    tokens = Tokens.load(settings["token_file"], ["relay", "public_key"])
    trusted = PublicKeys.parse(tokens.public_key)
    copy = open_shared(settings["url"], RUN, directory, token=tokens.relay, trusted=trusted)
    memory = Memory()
    while True:
        try:
            version = copy.poll(5.0)
            if version is None:
                continue
            memory.apply(read_update(copy.fetch(version, memory.version)))
        except RoseError as error:
            lines.say(error=f"{type(error).__name__}: {error}")
            time.sleep(BACK_OFF_S)
            continue
        lines.say(version=str(memory.version), digest=digest(memory.bits), of="update")
        found = digest_of_copy(directory)
        if found is not None:
            lines.say(version=found[0], digest=found[1], of="copy")


def node(settings: dict[str, Any]) -> None:
    """A node agent's side of a real engine that is up."""
    from benchmarks.weight_transfer.weights_nodes import LoopThread, Node

    server: Any = SimpleNamespace(**settings["server"])
    tokens = Tokens.load(settings["token_file"], ["relay", "public_key"])
    folder = Path(settings["directory"])
    Node(server, folder, relay_url=settings["url"], tokens=tokens, run_id=RUN, loop=LoopThread())
    threading.Event().wait()


# -- their processes ---------------------------------------------------------------------------------


class Child:
    """A process that the nursery made, as far as the judge has to do with it."""

    stdout = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def ended(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def wait(self, timeout_s: float) -> None:
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout_s:.0f} s")


class Nursery:
    """Has imported everything and loaded every kernel, and forks whoever is asked for: on a few cores, starting anew what is killed
    would otherwise be most of what a thousand kills take.  All that it made ends with it, and it with the benchmark."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", MODULE, str(os.getpid())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role: str, settings: Any, errors: Path) -> Child:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([role, settings, str(errors)]) + "\n")
        self._process.stdin.flush()
        return Child(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Role:
    """A process of this module; killed and started again, with other settings perhaps."""

    def __init__(self, nursery: Nursery, role: str, settings: dict[str, Any], errors: Path) -> None:
        self.settings = settings
        self._nursery, self._role, self._errors = nursery, role, errors
        self.start()

    def start(self) -> None:
        self.process = self._nursery.start(self._role, self.settings, self._errors)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class NurseryRelay(RelayProcess):
    """On a port that is given; who asks before it listens asks again."""

    def __init__(self, nursery: Nursery, folder: Path, tokens: Tokens, *options: str, port: int) -> None:
        super().__init__(folder, tokens, *options, port=port)
        self._nursery = nursery

    def _start(self, port: int) -> tuple[Child, str]:
        child = self._nursery.start("relay", self._argv(port), self._folder.with_suffix(".errors"))
        return child, f"http://127.0.0.1:{port}"


def low_ports(rng: np.random.Generator, count: int) -> list[int]:
    """Free ones below those that the system hands out: nobody else gets one while its relay is down."""
    found: list[int] = []
    while len(found) < count:
        port = int(rng.integers(12_000, 32_000))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def relay(argv: list[str]) -> None:
    sys.argv = ["rose relay", *argv]
    relay_main()


ROLES = {"publisher": publisher, "subscriber": subscriber, "node": node, "relay": relay}


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def nursery(parent: int) -> None:
    die_with(parent)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which then ends us
    here = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            begin(here, *json.loads(line))
        print(pid, flush=True)


def begin(parent: int, role: str, settings: Any, errors: str) -> NoReturn:
    """The rest of a forked process's life."""
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        told = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, descriptor in enumerate((nothing, nothing, told)):
            os.dup2(descriptor, number)
        ROLES[role](settings)
    except BaseException:  # noqa: BLE001 - a process's last words
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    nursery(int(sys.argv[1]))
