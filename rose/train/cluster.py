"""Ray for one run: a cluster that is there, or a private one that is removed at the end."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rose.errors import ConfigError
from rose.train.ray_private import (
    cluster_started_here,
    on_loopback,
    raylets,
    reread_authentication,
    without_helpers,
)
from rose.train.train_config import TrainConfig

WATCH_EVERY_S = 1.0
CONNECT_TIMEOUT_S = 5.0
PREFIX, LOCK = "rose-ray-", "lock"
RAY_PROCESSES = ("raylet", "gcs_server")

ray_died = threading.Event()
"""Set when a process of Ray's that this driver hangs on has died: new actors would wait for it for ever."""


@contextmanager
def _watched(processes: list[psutil.Process], *, own: bool) -> Iterator[None]:
    """While inside, the death of one of Ray's own ``processes`` ends the driver as a SIGTERM would, with :data:`ray_died` set.

    Ray itself replaces dead actors and workers, but not the processes that would start them, and its driver waits on.

    Args:
        own: They are of our own cluster, and what outlives them is ours to end.
    """
    ray_died.clear()
    agents = set[psutil.Process]()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_EVERY_S):
            if not all(_lives(process) for process in processes):
                ray_died.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    agents.update(process.children())

    thread = threading.Thread(target=watch, name="rose-ray-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if ray_died.is_set() and own:  # its agents would look for the dead for a minute
            for process in agents:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def ray_processes(directory: Path) -> list[psutil.Process]:
    """Those of the cluster in ``directory``; Ray detaches them, so they are nobody's children."""
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in RAY_PROCESSES
        and any(str(directory) in argument for argument in process.info["cmdline"] or ())
    ]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    """A cluster that was there before the run, and stays."""

    address: str
    num_nodes: int
    num_cpus: int


@contextmanager
def ray_for(config: TrainConfig) -> Iterator[RayCluster | None]:
    """Ray for one run: what :func:`find_cluster` finds (given to the block), or a private cluster (None) without dashboard or
    network, removed at the end.

    Raises:
        ConfigError: Ray is not installed, cannot be started, or the cluster cannot be joined.
    """
    with _own_environment():
        # Before the import: Ray reads them once.  No usage report, and no worker is started ahead of need: on
        # one core each costs seconds.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "ray is not installed", field="ray", fix="pip install '.[train]' from a checkout of ROSE"
            ) from error
        address = find_cluster(config.ray.address)
        with _private(config) if address is None else _joined(address) as cluster:
            yield cluster


def find_cluster(wanted: str | None) -> str | None:
    """The cluster to join; None stands for a private one.

    Args:
        wanted: ``ray.address``.

    Returns:
        ``auto`` for the one that ``ray start`` started on this machine: Ray then goes by its rules for that one's token.

    Raises:
        ConfigError: ``auto`` was asked for, and none is there; or an address is of the jobs API.
    """
    named, field = wanted, "ray.address"
    if wanted in (None, "auto"):
        named, field = os.environ.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
    if named == "local":
        return None
    if named == "auto":
        if cluster_started_here() is not None:
            return "auto"
        if wanted is None:
            return None
        fix = "start one with `ray start --head`, name it in RAY_ADDRESS, or leave ray.address out"
        raise ConfigError("no Ray cluster of yours runs on this machine", field="ray.address", fix=fix)
    assert named is not None
    scheme, _, place = named.rpartition("://")
    if scheme not in ("", "ray"):
        fix = 'name the cluster itself, as host:port; or set ray.address = "local" for a private one'
        raise ConfigError(f"{named} is the address of a dashboard", field=field, fix=fix)
    try:
        parts = urlsplit(f"//{place}")
        with socket.create_connection((parts.hostname or "", parts.port or 6379), CONNECT_TIMEOUT_S):
            return named
    except (OSError, ValueError) as error:  # Ray itself would try for minutes
        fix = 'name a cluster that runs, as host:port; or set ray.address = "local" for a private one'
        raise ConfigError(f"nothing answers at {named}: {error}", field=field, fix=fix) from error


@contextmanager
def _own_environment() -> Iterator[None]:
    """What is set of ``RAY_`` inside, by us or by Ray, is for this run: a ``ray start`` after it would take it up."""

    def variables() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    before = variables()
    try:
        yield
    finally:
        for name in variables().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if "ray" in sys.modules:
            reread_authentication()


@contextmanager
def _joined(address: str) -> Iterator[RayCluster]:
    import ray
    from ray.exceptions import RayError

    try:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
            nodes = [node for node in ray.nodes() if node["Alive"]]
        except (RayError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            fix = 'see `ray status`; ray.address = "local" starts a private one'
            raise ConfigError(f"cannot join {address}: {reason}", field="ray.address", fix=fix) from error
        here = ray.get_runtime_context()
        mine = [process for process, arguments in raylets() if f"--node_id={here.get_node_id()}" in arguments]
        with _watched(mine, own=False):
            yield RayCluster(
                address=here.gcs_address,
                num_nodes=len(nodes),
                num_cpus=int(sum(node["Resources"].get("CPU", 0) for node in nodes)),
            )
    finally:
        ray.shutdown()


def private_cpus(config: TrainConfig) -> int:
    """Logical CPUs of a job's private cluster: one for each of its actors at least."""
    return max(config.ray.num_cpus, (config.env.num_managers or 1) + config.trainer.num_ranks)


@contextmanager
def _private(config: TrainConfig) -> Iterator[None]:
    import ray

    settings = config.ray
    with own_folder() as folder:
        # Below ours, because Ray opens its own to everybody.
        directory = (settings.temp_dir or folder / "r").absolute()
        try:
            with on_loopback(), without_helpers():
                try:
                    _make_token(folder)
                    ray.init(
                        address="local",  # or RAY_ADDRESS would win
                        num_cpus=private_cpus(config),
                        num_gpus=config.trainer.num_ranks if config.trainer.device == "cuda" else 0,
                        include_dashboard=False,
                        object_store_memory=settings.object_store_bytes,
                        logging_level=logging.ERROR,
                        log_to_driver=False,
                        _node_ip_address="127.0.0.1",
                        _temp_dir=str(directory),
                    )
                except Exception as error:
                    # Ray has no class of its own for a node that did not start in time.
                    raise ConfigError(f"Ray cannot start: {error}", field="ray") from error
                with _watched(ray_processes(directory), own=True):
                    yield
        finally:
            ray.shutdown()


@contextmanager
def own_folder() -> Iterator[Path]:
    """For the token and the files of a private cluster; removed at the end, and after a driver that was killed by the next one.

    The lock in it is held for as long as the run lives.  A folder that has none yet may be of one that is just being begun.
    """
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / "new", folder / LOCK)  # nobody sees it free
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left() -> None:
    """The folders of our own runs whose driver is dead and whose cluster has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not ray_processes(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its run lives
        finally:
            os.close(lock)


def _make_token(directory: Path) -> None:
    """Have Ray use a token of this run's own: other users of this machine reach its ports too.

    Left to itself Ray (2.60) writes one into the home folder, which every later ``ray start --head`` then finds and asks for.

    Args:
        directory: Nobody else's.
    """
    path = directory / "auth_token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    reread_authentication()
