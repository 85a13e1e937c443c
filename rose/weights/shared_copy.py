"""One host copy for all node agents of a machine: whoever comes first keeps it, the others ask him.

All name the same directory.  The one who gets its lock follows the run (:class:`rose.weights.subscriber.WeightSubscriber`) and
answers on a socket in it; the others' polls wait there, and the update files that they are told lie in the same directory.  So
a version is pulled, checked, decoded and written once a machine, however many engines it has.  When the keeper dies, its lock is
free and one of the others goes on with the copy, which the directory proves or does not.

One user's processes only: the directory is private, and the socket asks whose a caller is.  A line of JSON each way; a
connection for each question.

Blocking; any thread may call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rose.errors import (
    CapacityError,
    ConfigError,
    Gone,
    LedgerError,
    NotAuthentic,
    NotFound,
    RequestError,
    RolledBack,
    RoseError,
    SectionCorrupt,
    WeightsError,
    WrongBase,
)
from rose.lineage import WeightVersion
from rose.private_dir import private_dir
from rose.signatures import PublicKeys
from rose.weights.host_copy import InUse, in_use
from rose.weights.params import WeightsParams
from rose.weights.stores import open_store
from rose.weights.subscriber import WeightSubscriber

_log = logging.getLogger(__name__)

SOCKET = "copy.sock"
USED_S = 60.0
"""Who asked within this time counts as a user of the copy."""
_MAX_LINE = 64 << 10
_MAX_CALLERS = 256
_RETRY_S = 0.1
_FETCH_TRIES = 5
_FETCH_S = 900.0  # a whole model is written meanwhile
_SLACK_S = 30.0
_KINDS: dict[str, type[RoseError]] = {
    kind.__name__: kind
    for kind in (
        CapacityError, ConfigError, Gone, NotAuthentic, NotFound, RequestError, RolledBack, SectionCorrupt, WeightsError,
        WrongBase,
    )
}  # fmt: skip


class _Ask(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str
    do: str
    held: str | None = None
    version: str | None = None
    timeout_s: float = 0.0


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    version: str | None = None
    path: str | None = None
    kind: str | None = None
    """Of an error; None: there is none."""
    message: str = ""
    field: str | None = None
    status: int | None = None


class SharedCopy:
    """What a :class:`WeightSubscriber` offers a node agent, shared with the other agents of the machine.

    Args:
        open_subscriber: Opens the copy in ``directory``, for the one who keeps it; may be called again.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(
        self, run_id: str, directory: Path | str, open_subscriber: Callable[[], WeightSubscriber]
    ) -> None:
        self._run_id = run_id
        self._directory = Path(directory).resolve()
        self._open = open_subscriber
        self._lock = threading.Lock()
        self._keeper: _Keeper | None = None
        self._told: WeightVersion | None = None
        self._required: WeightVersion | None = None
        self._closed = threading.Event()
        self._asking: set[socket.socket] = set()
        self._keep()

    @property
    def keeps(self) -> bool:
        """Whether it is this process that has the copy."""
        return self._keeper is not None

    def busy(self) -> bool:
        """Whether another process of the machine uses the copy."""
        keeper = self._keeper
        return in_use(self._directory) if keeper is None else keeper.is_asked()

    def poll(self, timeout_s: float) -> WeightVersion | None:
        """See :meth:`WeightSubscriber.poll`."""
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            keeper = self._keep()
            if keeper is not None:
                found = keeper.poll(self._told, left_s)
            else:
                held = None if self._told is None else str(self._told)
                ask = _Ask(run_id=self._run_id, do="poll", held=held, timeout_s=left_s)
                answer = self._ask(ask, left_s + _SLACK_S)
                if answer is None:
                    if left_s <= 0 or self._closed.wait(_RETRY_S):
                        return None
                    continue
                found = None if answer.version is None else WeightVersion.parse(answer.version)
            if found is not None:
                self._told = found
            return found

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        """See :meth:`WeightSubscriber.fetch`."""
        try:
            return self._fetch(version, engine_version)
        except (Gone, SectionCorrupt):
            self._told = None  # the copy is pulled again, perhaps to the same version: that is news then
            raise

    def _fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        base = None if engine_version is None else str(engine_version)
        ask = _Ask(run_id=self._run_id, do="fetch", version=str(version), held=base)
        for _ in range(
            _FETCH_TRIES
        ):  # a keeper that dies while it is asked leaves the copy to us, or to another
            keeper = self._keep()
            if keeper is not None:
                return keeper.subscriber.fetch(version, engine_version)
            answer = self._ask(ask, _FETCH_S)
            if answer is not None and answer.path is not None:
                return Path(answer.path)
            if self._closed.wait(_RETRY_S):
                break
        raise CapacityError("the process that keeps the host copy is gone", field=str(self._directory))

    def require(self, version: WeightVersion) -> None:
        """See :meth:`WeightSubscriber.require`.  Whoever keeps the copy hears it from the scheduler himself."""
        self._required, keeper = version, self._keeper
        if keeper is not None:
            keeper.subscriber.require(version)

    def close(self) -> None:
        """End what waits, and let another process keep the copy."""
        self._closed.set()
        for asking in list(self._asking):
            with contextlib.suppress(OSError):
                asking.shutdown(socket.SHUT_RDWR)
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def _keep(self) -> _Keeper | None:
        """The keeper, if that is us; None where it is another process."""
        with self._lock:
            if self._closed.is_set():
                raise CapacityError("the host copy is closed", retry_after_s=None)
            if self._keeper is None:
                try:
                    subscriber = self._open()
                except InUse:
                    return None
                if self._required is not None:
                    subscriber.require(self._required)
                try:
                    self._keeper = _Keeper(self._run_id, self._directory, subscriber)
                except BaseException:
                    subscriber.close()
                    raise
            return self._keeper

    def _ask(self, ask: _Ask, timeout_s: float) -> _Answer | None:
        """None: nobody answers who keeps the copy; he may just be starting, or be dead."""
        try:
            with _connected(self._directory) as connection:
                self._asking.add(connection)
                try:
                    if self._closed.is_set():
                        return None
                    connection.settimeout(timeout_s)
                    connection.sendall(msgspec.json.encode(ask) + b"\n")
                    line = _read_line(connection)
                finally:
                    self._asking.discard(connection)
        except TimeoutError:
            raise CapacityError(
                f"the process that keeps it has not answered for {timeout_s:.0f} s",
                field=str(self._directory),
            ) from None
        except OSError:
            return None
        if not line:
            return None
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except msgspec.DecodeError:
            return None
        if answer.kind is not None:
            kind = _KINDS.get(answer.kind, WeightsError)
            error = kind(answer.message, field=answer.field)
            if isinstance(error, RequestError) and answer.status is not None:
                error.status = answer.status
            raise error
        return answer


def make_own(directory: Path, *, field: str = "directory") -> None:
    """Make a directory that is this user's alone: what lies there becomes the policy.

    Raises:
        ConfigError: It cannot be, and why.
    """
    try:
        private_dir(directory).make()
    except LedgerError as error:
        fix = error.fix or "name one of your own"
        raise ConfigError(f"{error.field}: {error.message}", field=field, fix=fix) from error


def open_shared(
    url: str,
    run_id: str,
    directory: Path,
    *,
    token: str = "",
    trusted: PublicKeys | None = None,
    params: WeightsParams | None = None,
) -> SharedCopy:
    """The copy of a run in ``directory``, kept current from the store at ``url``; see :func:`rose.weights.stores.open_store`.

    Raises:
        ConfigError: The directory or the store cannot be used.
    """

    def subscribe() -> WeightSubscriber:
        store = open_store(url, token, trusted=trusted)
        try:
            return WeightSubscriber(store, run_id, directory, params, owns_store=True)
        except BaseException:
            store.close()
            raise

    return SharedCopy(run_id, directory, subscribe)


class _Keeper:
    """The copy, for the threads of this process and for the others'."""

    def __init__(self, run_id: str, directory: Path, subscriber: WeightSubscriber) -> None:
        self.subscriber = subscriber
        self._run_id = run_id
        self._following = threading.Lock()
        """Held by the waiting thread that polls the head on behalf of all others that wait."""
        self._changed = threading.Condition()
        self._closed = False
        self._asked_at_s = -USED_S
        self._callers: set[socket.socket] = set()
        self._listener = _listening(directory)
        self._thread = threading.Thread(target=self._accept, name="rose-copy", daemon=True)
        self._thread.start()

    def is_asked(self) -> bool:
        return time.monotonic() - self._asked_at_s < USED_S

    def poll(self, told: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            if self._following.acquire(blocking=False):
                try:
                    version = self.subscriber.version
                    if version is None or version == told:
                        self.subscriber.poll(left_s)
                        version = self.subscriber.version
                except CapacityError:
                    if not self._closed:
                        raise
                    version = None  # its store is closed, which is no error: whoever asks keeps the copy next
                finally:
                    self._following.release()
                    with self._changed:
                        self._changed.notify_all()
            else:
                with self._changed:
                    version = self.subscriber.version
                    if version is None or version == told:
                        self._changed.wait(left_s)
                        version = self.subscriber.version
            if version is not None and version != told:
                return version
            if time.monotonic() >= until_s or self._closed:
                return None

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.subscriber.close()
        with self._changed:
            self._changed.notify_all()
        for caller in list(self._callers):
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # out of file descriptors, say
                    _log.warning("host copy: %s", error)
                    time.sleep(_RETRY_S)
                continue
            if not _is_ours(caller) or len(self._callers) >= _MAX_CALLERS:
                caller.close()
                continue
            self._callers.add(caller)
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(_SLACK_S)
                ask = msgspec.json.decode(_read_line(caller), type=_Ask)
                self._asked_at_s = time.monotonic()
                try:
                    answer = self._answer(ask)
                except RoseError as error:
                    answer = _Answer(
                        kind=type(error).__name__,
                        message=error.message,
                        field=error.field,
                        status=error.status if isinstance(error, RequestError) else None,
                    )
                caller.sendall(msgspec.json.encode(answer) + b"\n")
        except (OSError, msgspec.DecodeError) as error:
            _log.info("host copy: %s", error)
        except Exception:  # noqa: BLE001 - the boundary of a thread; the caller sees the end of its connection
            _log.exception("host copy")
        finally:
            self._callers.discard(caller)

    def _answer(self, ask: _Ask) -> _Answer:
        if ask.run_id != self._run_id:
            raise ConfigError(
                f"holds the copy of run {self._run_id}, not of {ask.run_id}",
                field="weights.directory",
                fix="agents that share it follow one run; give the others another directory",
            )
        held = None if ask.held is None else WeightVersion.parse(ask.held)
        if ask.do == "poll":
            found = self.poll(held, min(max(ask.timeout_s, 0.0), 3600.0))
            return _Answer(version=None if found is None else str(found))
        return _Answer(path=str(self.subscriber.fetch(WeightVersion.parse(ask.version), held)))


@contextlib.contextmanager
def _place(directory: Path) -> Iterator[str]:
    """The socket's address; the folder's own path may be longer than a socket's may."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _connected(directory: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _place(directory) as place:
        connection.connect(place)
        if not _is_ours(connection):
            raise PermissionError("another user's socket")
        yield connection


def _listening(directory: Path) -> socket.socket:
    """The directory is locked by us: what lies there is a dead one's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _place(directory) as place:
            (directory / SOCKET).unlink(missing_ok=True)
            listener.bind(place)
            os.chmod(directory / SOCKET, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{directory}: {error.strerror}", field="weights.directory") from error
    return listener


def _is_ours(peer: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()


def _read_line(connection: socket.socket) -> bytes:
    """Empty where the other side went away; raises OSError where it says too much."""
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(4096)
        if not more:
            return b""
        line += more
        if len(line) > _MAX_LINE:
            raise OSError("a line that does not end")
    return line
