"""Ray for one run: a private cluster that is removed at the end, or a given one.  Callers: ``rose.train.loop``."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rose.errors import ConfigError
from rose.train.config import TrainConfig
from rose.train.ray_private import on_loopback, reread_authentication

WATCH_EVERY_S = 1.0
RAY_PROCESSES = ("raylet", "gcs_server")

ray_died = threading.Event()
"""Set when a process of our own cluster has died: new actors would wait for it for ever."""


@contextmanager
def _watched(directory: Path | None) -> Iterator[None]:
    """While inside, the death of Ray's own processes ends the driver as a SIGTERM would, with :data:`ray_died` set.

    Ray itself replaces dead actors and workers, but not the processes that would start them, and its driver waits on.

    Args:
        directory: Of our own cluster; None where another supervisor sees to it.
    """
    ray_died.clear()
    if directory is None:
        yield
        return
    processes = ray_processes(directory)
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
        if ray_died.is_set():  # its agents would look for the dead for a minute
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


@contextmanager
def private_ray(config: TrainConfig) -> Iterator[None]:
    """Ray for one run: a private cluster without dashboard or network, removed at the end; or a given one."""
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
                "ray is not installed", field="ray", fix="pip install 'rose-rl[cpu]'"
            ) from error
        with _joined(config.ray.address) if config.ray.address is not None else _private(config):
            yield


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
def _joined(address: str) -> Iterator[None]:
    import ray

    try:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except (ConnectionError, OSError, ValueError) as error:
            raise ConfigError(f"Ray cannot start: {error}", field="ray") from error
        with _watched(None):
            yield
    finally:
        ray.shutdown()


@contextmanager
def _private(config: TrainConfig) -> Iterator[None]:
    import ray

    settings = config.ray
    own_dir = Path(tempfile.mkdtemp(prefix="rose-ray-"))
    directory = (
        settings.temp_dir or own_dir / "r"
    ).absolute()  # below ours, because Ray opens its own to everybody
    try:
        with on_loopback():
            try:
                _make_token(own_dir)
                ray.init(
                    address="local",  # or RAY_ADDRESS would win
                    num_cpus=max(settings.num_cpus, config.env.num_managers + config.trainer.num_ranks),
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=settings.object_store_bytes,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(directory),
                )
            except (ConnectionError, OSError, ValueError) as error:
                raise ConfigError(f"Ray cannot start: {error}", field="ray") from error
            with _watched(directory):
                yield
    finally:
        ray.shutdown()
        shutil.rmtree(own_dir, ignore_errors=True)


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
