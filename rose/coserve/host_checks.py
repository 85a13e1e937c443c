"""What this host gives ROSE, each thing really tried: the host's half of ``rose doctor``.

Every check asks the function that the node agent itself uses and turns its answer, or its error, into a :class:`Check`.  Nothing is
left behind; a directory that is not there is not made.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rose.auth import ROLES, Tokens, bearer
from rose.coserve import mps, outside
from rose.coserve.device import DeviceView
from rose.coserve.engine import require_files
from rose.coserve.engine_args import weights_bytes
from rose.coserve.free_memory import GpuMemory, HostMemory
from rose.coserve.links import trusted_keys
from rose.coserve.node_config import DeviceConfig, NodeConfig, SchedulerLink, WeightsLink
from rose.coserve.node_dir import NodeDir, core_dirs
from rose.coserve.records import NodeState, phase_name
from rose.errors import ConfigError, LedgerError, RoseError
from rose.mounts import file_system
from rose.private_dir import private_dir
from rose.proc import Child, ProcSpec, require_cores, require_free_port
from rose.units import format_bytes
from rose.wire.addresses import Addresses

SHARED_MEMORY = Path("/dev/shm")
DIRECTORY_ROOM_BYTES = 16 << 20
"""Of a node directory: its records are pages, and a rank's grows with its chunks."""
SHARED_ROOM_BYTES = 256 << 20
"""vLLM's message queues between an engine and its workers; see ``deploy/kubernetes/sidecar.yaml``."""
WEIGHT_COPIES_ON_DISK = 2.2
"""See ``WeightsLink.directory``."""
_WAIT_S = 5.0
_NO_WAKE_S = 0.02
_ANSWER_S = 5.0


class Level(IntEnum):
    """How bad it is."""

    OK = 0
    WARN = 1
    """It runs, with less than it could."""
    FAIL = 2
    """Something would be refused, or fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the doctor's table.  ``says`` holds no secret; ``fix`` is empty where there is nothing to do."""

    level: Level
    name: str
    says: str
    fix: str = ""


def of_error(name: str, error: RoseError, level: Level = Level.FAIL) -> Check:
    text = error.message if error.field is None else f"{error.field}: {error.message}"
    return Check(level=level, name=name, says=text, fix=error.fix or "")


# --------------------------------------------------------------------------- the kernel


def check_kernel(scratch: Path) -> Check:
    """Locks and futexes of the shared files, between two open files of a scratch directory below ``scratch``."""
    where = f"Linux {platform.release()} on {platform.machine()}"
    try:
        with tempfile.TemporaryDirectory(prefix="rose-doctor-", dir=scratch) as folder:
            problem = _try_ledger(NodeDir(folder))
    except (RoseError, OSError) as error:
        problem = str(error)
    if problem:
        return Check(
            level=Level.FAIL,
            name="kernel",
            says=f"{where}: {problem} ({scratch})",
            fix="Linux on x86-64 or arm64, and a tmpfs for the node directory (/dev/shm)",
        )
    return Check(level=Level.OK, name="kernel", says=f"{where}; locks and futexes of shared files work")


def _try_ledger(directory: NodeDir) -> str:
    """What does not work; empty when all does."""
    with directory.node_writer() as writer, closing(directory.node()) as reader:
        writer.write(NodeState(epoch=1))
        found = reader.read()
        if found is None or found.epoch != 1:
            return "a record does not read as it was written"
        if not reader.alive():
            return "a reader does not see the writer's lock"
        try:
            directory.node_writer().close()
            return "a second writer gets the writer's lock"
        except LedgerError:
            pass
        if reader.wait(reader.word(), _NO_WAKE_S):
            return "futexes do not wait"
        word, woken = reader.word(), threading.Event()
        sleeper = threading.Thread(
            target=lambda: reader.wait(word, _WAIT_S) and woken.set(), name="rose-doctor", daemon=True
        )
        sleeper.start()
        writer.write(NodeState(epoch=2))
        writer.wake()
        sleeper.join(_WAIT_S)
        return "" if woken.is_set() else "futexes do not wake"


def check_idle_class() -> Check:
    """May a process of ours have only what others leave of a core, and be lifted out of that again?  Tried with a child."""
    name = "idle class"
    spec = ProcSpec(
        name="rose doctor",
        argv=(sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"),
        env={"ROSE_TOKEN_FILE": None},
        sched="idle",
    )
    try:
        with Child.start(spec) as child:
            rung = child.share.rung if child.share is not None else "none"
            lowered = os.sched_getscheduler(child.pid) == os.SCHED_IDLE or rung != "class"
            lifted = child.lift(True) and child.lift(False)
            child.kill()
    except RoseError as error:
        return of_error(name, error)
    if not lowered or not lifted:
        return Check(
            level=Level.WARN,
            name=name,
            says=f"by {rung}: an engine {'can be put there and not be lifted again' if lowered else 'stays a normal program'}; it may "
            "take until the deadline to give memory back, and is then killed",
            fix="CAP_SYS_NICE, or a delegated cgroup (systemd: Delegate=yes)",
        )
    if rung == "class":
        return Check(
            level=Level.OK,
            name=name,
            says="by class: right where both engines are in one scheduling group; a cgroup of ours cannot be made here",
        )
    return Check(level=Level.OK, name=name, says=f"by {rung}, and lifted out again")


def check_cgroups() -> Check:
    """What becomes of an engine that somebody freezes, by the hierarchies that can freeze here."""
    hierarchies = sorted({place.hierarchy for place in outside.places()})
    if not hierarchies:
        return Check(
            level=Level.WARN,
            name="cgroups",
            says="no cgroup hierarchy that can freeze is mounted: limits of memory are not seen",
            fix="mount cgroup version 2 at /sys/fs/cgroup",
        )
    if hierarchies != ["v2"]:
        return Check(
            level=Level.WARN,
            name="cgroups",
            says=f"{' and '.join(hierarchies)}: an engine that is frozen in a group of v1 is killed only when it thaws",
            fix="boot with systemd.unified_cgroup_hierarchy=1",
        )
    return Check(level=Level.OK, name="cgroups", says="v2: a frozen engine can be killed")


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    """Room for vLLM's message queues."""
    name = "shared memory"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            level=Level.FAIL, name=name, says=f"{folder}: {error.strerror}", fix="mount a tmpfs there"
        )
    if free < SHARED_ROOM_BYTES:
        return Check(
            level=Level.WARN,
            name=name,
            says=f"{folder} has {format_bytes(free)} left, vLLM's message queues want {format_bytes(SHARED_ROOM_BYTES)}",
            fix="a larger one: docker run --shm-size, or an emptyDir with medium: Memory",
        )
    return Check(level=Level.OK, name=name, says=f"{folder} has {format_bytes(free)} left")


def check_cores(cores: Iterable[int] = ()) -> Check:
    """Cores that we may use; ``cores``: what ``engine.cores`` asks for."""
    count = len(os.sched_getaffinity(0))
    try:
        require_cores(cores, "engine.cores")
    except ConfigError as error:
        return of_error("cores", error)
    if count < 2:
        return Check(
            level=Level.WARN,
            name="cores",
            says="one: production, rollouts and the agent take turns on it",
            fix="give the container two or more",
        )
    return Check(level=Level.OK, name="cores", says=f"{count}")


def check_memory(device: DeviceConfig) -> Check:
    """Main memory against the reserve that is never lent."""
    try:
        free = HostMemory().free_bytes()
    except LedgerError as error:
        return of_error("memory", error)
    if device.kind == "host" and free < device.reserve:
        return Check(
            level=Level.WARN,
            name="memory",
            says=f"{format_bytes(free)} free, the reserve is {format_bytes(device.reserve)}: nothing would be lent",
            fix="end other programs, or lower device.reserve_bytes",
        )
    return Check(level=Level.OK, name="memory", says=f"{format_bytes(free)} free")


def check_gpu(config: NodeConfig | None, driver: Path = Path("/proc/driver/nvidia/version")) -> list[Check]:
    """The NVIDIA driver, MIG and MPS; nothing where there is no GPU and none is asked for."""
    wanted = config is not None and config.device.kind == "gpu"
    there = driver.exists()
    if not there and not wanted:
        return []
    found: list[Check] = []
    index = config.device.gpu if config is not None else 0
    try:
        gpu = GpuMemory(index)
        says = f"{index}: driver {gpu.driver_version()}, {format_bytes(gpu.free_bytes())} of {format_bytes(gpu.total_bytes())} free"
        found.append(Check(level=Level.OK, name="GPU", says=says))
        if gpu.is_cut_up():
            found.append(
                Check(
                    level=Level.FAIL,
                    name="GPU",
                    says=f"{index} is in MIG mode: a slice is refused",
                    fix=f"nvidia-smi -i {index} -mig 0",
                )
            )
    except LedgerError as error:
        found.append(of_error("GPU", error, Level.FAIL if wanted else Level.WARN))
    if config is None:
        return found
    if there and not wanted:
        says = (
            "device.kind is 'host': free memory is not the GPU's, whose KV memory would be lent blind of it"
        )
        found.append(Check(level=Level.WARN, name="GPU", says=says, fix='device.kind = "gpu" and device.gpu'))
    if config.engine.allow_mps and mps.find_control(config) is None:
        found.append(
            Check(
                level=Level.WARN,
                name="MPS",
                says="engine.allow_mps is set, and no control daemon answers: the engine goes on without",
                fix="start nvidia-cuda-mps-control -d as production's user, or name engine.mps_pipe_directory",
            )
        )
    return found


# --------------------------------------------------------------------------- files


def check_directory(path: Path) -> list[Check]:
    """The node directory: whose it is, where it lies, and what is in it already."""
    name = "node directory"
    found: list[Check] = []
    try:
        private_dir(path).fd()
        there = True
    except FileNotFoundError:
        there = False
    except LedgerError as error:
        return [of_error(name, error)]
    except OSError as error:
        return [Check(level=Level.FAIL, name=name, says=f"{path}: {error.strerror}")]
    place = _nearest(path)
    if not os.access(place, os.W_OK | os.X_OK):
        return [
            Check(
                level=Level.FAIL,
                name=name,
                says=f"{path} is not there and cannot be made in {place}",
                fix=f"make it as the user of production: install -d -m 700 {path}",
            )
        ]
    free = shutil.disk_usage(place).free
    if free < DIRECTORY_ROOM_BYTES:
        says = (
            f"{place} has {format_bytes(free)} left, its files may take {format_bytes(DIRECTORY_ROOM_BYTES)}"
        )
        found.append(
            Check(level=Level.FAIL, name=name, says=says, fix="make room, or name another directory")
        )
    kind = file_system(place)
    if kind not in ("tmpfs", "ramfs"):
        found.append(
            Check(
                level=Level.WARN,
                name=name,
                says=f"{path} is on {kind}: write-back could stall what production writes",
                fix="name one on a tmpfs, as /dev/shm/rose-gpu0",
            )
        )
    if there:
        errors: dict[str, str] = {}
        DeviceView(NodeDir(path), errors).look()
        found += [
            Check(
                level=Level.FAIL,
                name=name,
                says=f"{file}: {error}",
                fix="run the same version of ROSE on both sides",
            )
            for file, error in errors.items()
        ]
    if not found:
        state = "private" if there else f"not there yet, can be made in {place}"
        found.append(Check(level=Level.OK, name=name, says=f"{path}: {state}, {format_bytes(free)} left"))
    return found


def check_production(path: Path) -> list[Check]:
    """Does a production engine live in ``path``, the ROSE_DIR of one that is to start there, or in that of one of its cores?"""
    found: list[Check] = []
    for place in (path, *(path / name for name in core_dirs(path))):
        view = DeviceView(NodeDir(place), {})
        view.look()
        if not view.serving_alive():
            continue
        phase = "" if view.lease is None else f" ({phase_name(view.lease.phase)})"
        found.append(
            Check(
                level=Level.WARN,
                name="node directory",
                says=f"{place}: a production engine lives there already{phase}; a second one would run as plain vLLM",
                fix="another ROSE_DIR, unless that is the engine of this command",
            )
        )
    return found


def check_dedicated(path: Path, told: str) -> list[Check]:
    """Of an agent whose node.toml has no ``[serving]``: is its directory that of a production engine?

    Args:
        told: ROSE_DIR of the production that the doctor was asked about; "": of none.
    """
    if DeviceView(NodeDir(path), {}).serving_alive():
        says = "a production engine lives there"
    elif told and os.path.abspath(told) == os.path.abspath(path):
        says = "it is production's ROSE_DIR"
    else:
        return []
    return [
        Check(
            level=Level.FAIL,
            name="node directory",
            says=f"{path}: {says}, and node.toml has no [serving]: nothing would be lent, and no engine started",
            fix="add [serving] beside production; on a dedicated host another dir",
        )
    ]


def check_tokens(path: Path | None) -> tuple[Check, Tokens | None]:
    """The token file, and its tokens where it is good.  ``path``: None = ROSE_TOKEN_FILE."""
    try:
        tokens = Tokens.load(path, ["node"])
    except ConfigError as error:
        return of_error("token file", error), None
    where = path or os.environ.get("ROSE_TOKEN_FILE")
    has_all = set(tokens.names) >= set(ROLES)
    said = "one token for each role" if has_all else f"tokens for {', '.join(tokens.names)} alone"
    if not tokens.has_environment:
        return Check(
            level=Level.WARN,
            name="token file",
            says=f"{where} has no token for environments: whoever may chat may set rewards",
            fix=f"rose tokens --upgrade {where}",
        ), tokens
    return Check(level=Level.OK, name="token file", says=f"{where}: {said}"), tokens


def check_engine_files(config: NodeConfig) -> Iterator[Check]:
    """What the rollout engine reads and where its weights go; silent about what is well."""
    engine = config.engine
    try:
        require_files(engine)
        # The port of a node that runs already is its engine's.
        if not NodeDir(config.dir).node().alive():
            require_free_port(engine.port, "engine.port", engine.host)
    except ConfigError as error:
        yield of_error("rollout engine", error)
    except LedgerError:
        pass  # the directory's own check says it
    if config.weights is None:
        return
    place = config.weights_dir
    try:
        private_dir(place).fd()
    except FileNotFoundError:
        pass
    except LedgerError as error:
        yield of_error("weights.directory", error)
        return
    except OSError as error:
        yield Check(level=Level.FAIL, name="weights.directory", says=f"{place}: {error.strerror}")
        return
    size = weights_bytes(engine.model)
    free = shutil.disk_usage(_nearest(place)).free
    if size is not None and free < WEIGHT_COPIES_ON_DISK * size:
        needed = format_bytes(WEIGHT_COPIES_ON_DISK * size)
        yield Check(
            level=Level.FAIL,
            name="weights.directory",
            says=f"{place} has {format_bytes(free)} left, a policy of {format_bytes(size)} takes {needed}",
            fix="name one on a larger disk",
        )


def _nearest(path: Path) -> Path:
    """The directory itself, or the nearest above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())


# --------------------------------------------------------------------------- who should answer


def check_scheduler(link: SchedulerLink, tokens: Tokens) -> Check:
    """It answers, and knows the token of this node; of several, one does: the others stand by."""
    fix = "start it: rose scheduler, or mend scheduler.url"
    found = [_ask("scheduler", url, "/workers", tokens.node, fix) for url in Addresses(link.url).all]
    return next((check for check in found if check.level is Level.OK), found[0])


def check_relay(link: WeightsLink, tokens: Tokens) -> Check:
    """It answers, and knows the token; so do the others that would be asked for it; and it is known whose weights to take.  Of another store
    only that it is not asked."""
    if link.signed:
        try:
            trusted_keys(link, tokens)
        except ConfigError as error:
            return of_error("relay", error)
    urls = Addresses(link.relay_url).all
    if urlsplit(urls[0]).scheme not in ("http", "https"):
        return Check(
            level=Level.OK, name="relay", says="a store of another kind: not asked before the node runs"
        )
    path = f"/leases?run_id={link.run_id}"
    fix = "start it: rose relay, or mend weights.relay_url"
    found = [_ask("relay", url, path, tokens.relay, fix) for url in urls]
    return next((check for check in found if check.level is not Level.OK), found[0])


def _ask(name: str, url: str, path: str, token: str, fix: str) -> Check:
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    try:
        with (
            httpx.Client(headers=bearer(token), timeout=_ANSWER_S, trust_env=False) as client,
            client.stream("GET", url.rstrip("/") + path) as answer,
        ):
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Check(
            level=Level.FAIL, name=name, says=f"{shown}: no answer ({type(error).__name__})", fix=fix
        )
    if status in (401, 403):
        return Check(
            level=Level.FAIL,
            name=name,
            says=f"{shown} does not know our token ({status})",
            fix="give both sides the same token file",
        )
    if status != 200:
        return Check(level=Level.FAIL, name=name, says=f"{shown} answered {status}", fix=fix)
    return Check(level=Level.OK, name=name, says=f"{shown} answers")
