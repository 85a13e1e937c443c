"""Weights for a stock vLLM server that has no node agent: a thread of worker rank 0 follows the weight store.

(With a node agent this is not used: the agent follows the store and hands the engine files.)  The thread keeps the host copy of the
weights current; servers of one machine that name the same directory share that copy (:mod:`rose.weights.shared_copy`).
:meth:`WeightFeed.take` returns the update file from the engine's version to the requested one.

The arguments come from requests to vLLM's routes, and are validated as untrusted input.  They hold no secret: the store's bearer token
is in a file on the server's machine.

It imports no vLLM and touches no model.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rose.auth import Tokens
from rose.errors import CapacityError, ConfigError, Gone, RequestError, RoseError, WrongBase
from rose.lineage import Lineage, WeightVersion, check_run
from rose.signatures import PublicKeys
from rose.weights.params import WeightsParams
from rose.weights.shared_copy import SharedCopy, make_own, open_shared

T = TypeVar("T")
logger = logging.getLogger("vllm.rose")

POLL_S = 2.0
"""Longest wait of one long poll."""
RETRY_S = 1.0
"""From a refusal to the next try, when nobody asks for a version meanwhile."""
MAX_WAIT_S = 1200.0
"""The other ranks wait for rank 0, and torch gives them 30 minutes."""
NO_ROOM = 507
ANY = "any"
"""A base that says: send every tensor whole, whatever the engine holds."""


@dataclass
class FeedInfo:
    """What ``/init_weight_transfer_engine`` is told."""

    store: str = ""
    """Where versions lie: a relay, or any URL that :mod:`rose.weights.stores` opens."""
    run: str = ""
    directory: str = ""
    """Of the server's machine, absolute, this user's alone: host copy and update files; about 2.2 copies of the model."""
    public_key: str = ""
    """Whose weights are taken: ``ed25519:KEY``, several with spaces between them, or the path of a file of such lines.  Empty: that of
    the token file."""
    token_file: str = ""
    """Of the server's machine: a token file with role ``relay``.  Empty: none is sent."""
    signed: bool = True
    """False: take what the store names, whoever wrote it."""
    threads: int = 1
    """That decode and hash."""


def read_info(kind: type[T], table: Any) -> T:
    """A dataclass from what was posted, every field of its type and none that it lacks.

    Raises:
        RequestError: It is not, and which field.
    """
    if not isinstance(table, dict):
        raise RequestError("must be an object", field=kind.__name__)
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    unknown = sorted(str(name) for name in table if name not in names)
    if unknown:
        raise RequestError("is no field", field=unknown[0][:40], fix=f"there are: {', '.join(names)}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise RequestError(message, field=path.strip("`.") or kind.__name__) from None


def open_copy(info: FeedInfo) -> SharedCopy:
    """The host copy that this names.

    Raises:
        ConfigError, RequestError: Something is missing, or cannot be used.
    """
    for name in ("store", "run", "directory"):
        if not getattr(info, name):
            raise ConfigError("is missing", field=name)
    if not Path(info.directory).is_absolute():
        raise ConfigError("must be an absolute path", field="directory")
    if not 1 <= info.threads <= 256:
        raise ConfigError(f"must be within 1..256, got {info.threads}", field="threads")
    check_run(info.run, field="run")
    tokens = Tokens.load(info.token_file, ["relay"]) if info.token_file else None
    trusted = None
    if info.signed:
        pinned = info.public_key or ("" if tokens is None else tokens.public_key)
        if not pinned:
            raise ConfigError(
                "is needed: whose weights are these to be?",
                field="public_key",
                fix='the line public_key of the trainer\'s token file; for a store that nobody else can write to: "signed": false',
            )
        trusted = PublicKeys.load(pinned)
    directory = Path(info.directory)
    make_own(directory)
    token = "" if tokens is None else tokens.relay
    params = WeightsParams(num_threads=info.threads)
    return open_shared(info.store, info.run, directory, token=token, trusted=trusted, params=params)


def _may_pass(error: RoseError) -> bool:
    """Whether the next poll may do better: the store is away, or busy."""
    return isinstance(error, CapacityError) and error.status != NO_ROOM


class WeightFeed:
    """Follows one run in a thread of its own until :meth:`close`; any thread may call.

    Args:
        copy: Closed with the feed.
    """

    def __init__(self, copy: SharedCopy, run: str) -> None:
        self.run = run
        self._copy = copy
        self._news = threading.Condition()
        self._version: WeightVersion | None = None
        self._error: RoseError | None = None
        self._num_errors = 0
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="rose-weights-feed", daemon=True)
        self._thread.start()

    def take(self, target: WeightVersion, held: Lineage, base: str | None, timeout_s: float) -> Path:
        """The update file that leads the engine to ``target``.

        Args:
            held: What the engine is at.
            base: What the caller believes that it is at; None: nothing; :data:`ANY`: every tensor comes whole.
            timeout_s: How long ``target`` may take to arrive.

        Raises:
            WrongBase: The engine is at another version than ``base``.
            SectionCorrupt, NotAuthentic, RolledBack, CapacityError: The newest version cannot be had, and why.  A store that is away
                may come back within ``timeout_s``.
            Gone: The run has gone on to a later version.
        """
        if not 0 <= timeout_s <= MAX_WAIT_S:
            raise RequestError(f"must be within 0..{MAX_WAIT_S:g}, got {timeout_s}", field="timeout_s")
        if base not in (None, ANY) and WeightVersion.parse(base, field="base") != held.version:
            raise WrongBase(f"the engine is at {held}, not at {base}", field="base")
        until_s = time.monotonic() + timeout_s
        with self._news:
            num_errors = self._num_errors
            while self._version is None or self._version < target:
                self._asked.set()
                if not self._news.wait(max(0.0, until_s - time.monotonic())):
                    why = "" if self._error is None else f": {self._error}"
                    raise CapacityError(
                        f"{target} did not come within {timeout_s:g} s; the copy is at {self._version}{why}",
                        status=504,
                        field="version",
                    )
                if self._num_errors != num_errors and self._error is not None and not _may_pass(self._error):
                    raise self._error
            if self._version != target:
                raise Gone(f"the run is at {self._version} already, past {target}", field="version")
        sparse = base != ANY and held.run == self.run
        return self._copy.fetch(target, held.version if sparse else None)

    def close(self) -> None:
        """Give the directory back; the copy stays in it."""
        self._closed = True
        self._asked.set()
        self._copy.close()
        self._thread.join()

    def _follow(self) -> None:
        said = ""
        while not self._closed:
            self._asked.clear()
            error: RoseError | None = None
            version: WeightVersion | None = None
            try:
                version = self._copy.poll(POLL_S)
            except RoseError as refused:
                error = refused
            except Exception as failed:  # the boundary of a thread: whoever asks is told
                logger.exception("ROSE: the weights of %s cannot be followed", self.run)
                error = CapacityError(f"failed: {failed!r}"[:300], field="store")
            with self._news:
                if version is not None:
                    self._version = version
                self._error = error
                if error is not None:
                    self._num_errors += 1
                if version is not None or error is not None:
                    self._news.notify_all()
            if error is not None and not self._closed:
                if str(error) != said:
                    logger.warning("ROSE: weights of %s: %s", self.run, error)
                self._asked.wait(RETRY_S)
            said = "" if error is None else str(error)
