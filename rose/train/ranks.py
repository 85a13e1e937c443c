"""A trainer on several ranks: one process each, all of them taking every call alike.

Rank 0 lives in the train worker's process; the others are :class:`TrainRank` actors.  :class:`RankedTrainer` is a
:class:`~rose.train.protocol.Trainer`: it sends each call to the others and makes it itself, because the collectives
inside need everybody.

A rank that dies leaves the others waiting in a collective, with weights that may have been half updated.  Then rank 0
ends its process: all ranks are replaced, and the new ones go on from the checkpoint.  Of a rank whose host is lost without a word its connections
say nothing, and collectives would wait; Ray says it, and rank 0 listens.

An error of one rank's own (out of memory, say) is no such loss: it would come again, so it is told and the run ends.  A rank beyond the first leaves
its words in the store in which the ranks met, and ends: the others' collectives then fail at once, and rank 0 finds out why.

Ranks may be on several nodes: they meet at the addresses by which the cluster knows these, and the job's folders have to be the same on all of them.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from rose.auth import Tokens
from rose.errors import RoseError, TrainError, WeightsError
from rose.train.batch import TrainingSequence, in_order, share_of
from rose.train.checkpoint import SHARE, Checkpoint, disk_group
from rose.train.protocol import Trainer, TrainReport
from rose.train.publishing import MakePublisher
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_TIMEOUT_S = 300.0
"""For a rank to start, and for a collective to end: longer than any step between two collectives.  Waits for a disk have more:
:data:`rose.train.checkpoint.DISK_TIMEOUT`."""

WATCH_EVERY_S = 2.0
"""Between two looks at whether Ray has lost another rank."""
NOTICED_IN_S = 10.0
"""For rank 0 to find out by itself of a rank that is gone, which can tell then why; its connections end at once, unless its host is lost."""

MAX_WORD_CHARS = 2000
"""Of what a rank says of its error."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device.  What is counted lies in host memory on either."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

MakeTrainer = Callable[[TrainConfig], Any]


class TrainRank:
    """One rank beyond the first; an actor."""

    def __init__(self, config: TrainConfig, make_trainer: MakeTrainer, rank: int) -> None:
        self._config = config
        self._make_trainer = make_trainer
        self._rank = rank
        self._trainer: Any = None
        self._publisher: Any = None
        self._store: Any = None

    def pid(self) -> int:
        return os.getpid()

    def sees(self, path: Path) -> tuple[bool, str]:
        """Whether ``path`` is there on this rank's node, and the node's address."""
        return path.exists(), _own_address()

    def join(self, host: str, port: int) -> None:
        """Meet the others at ``host:port`` and build this rank's share of the model."""
        self._store = _join(self._config, self._rank, host, port, _own_address())
        with self._last_words(alone=True):
            self._trainer = self._make_trainer(self._config)

    def open_publisher(self, make: MakePublisher, tokens: Tokens, attempt: int) -> None:
        """Build the publisher of this rank's part."""
        with self._last_words():
            self._publisher = make(self._config, tokens, self._trainer.module, attempt)

    def call(self, name: str, *arguments: Any, of: str = "trainer", **named: Any) -> None:
        """Take the call that every rank takes; the answer is rank 0's to give."""
        owner = self._trainer if of == "trainer" else self._publisher
        with self._last_words():
            getattr(owner, name)(*arguments, **named)

    @contextmanager
    def _last_words(self, *, alone: bool = False) -> Iterator[None]:
        """What goes wrong inside with this rank alone ends it.

        Args:
            alone: That may be an error of ours, too: its node has no model folder, say.  Else these are raised on all ranks alike.
        """
        try:
            yield
        except Exception as error:
            if tells_of_a_lost_rank(error) or (isinstance(error, RoseError) and not alone):
                raise
            logger.exception("rank %d fails", self._rank)
            key, lines = _word_of(self._rank), str(error).splitlines() or [""]
            self._store.set(key, f"rank {self._rank}: {type(error).__name__}: {lines[0]}"[:MAX_WORD_CHARS])
            self._store.get(key)  # it has arrived
            os._exit(1)


class RankedTrainer:
    """See the module's docstring.

    Args:
        ranks: Handles of the :class:`TrainRank` actors, rank 1 first.
    """

    def __init__(self, config: TrainConfig, make_trainer: MakeTrainer, ranks: Sequence[Any]) -> None:
        self._ranks = ranks
        self._store: Any = None
        self._check_shared(config.output_dir, "output_dir")
        if config.weights.directory is not None:
            self._check_shared(config.weights.directory, "weights.directory")
        with listener_at(_own_address()) as listener:
            host, port = listener.getsockname()
            joining = [rank.join.remote(host, port) for rank in ranks]
            self._store = _join(config, 0, host, port, host, listener)
        self._trainer: Trainer = self._own(make_trainer, config)
        self._publisher: Any = None
        self._config = config
        self._wait(joining)
        self.vocab_size = self._trainer.vocab_size
        self.max_tokens = self._trainer.max_tokens
        threading.Thread(target=self._watch, name="rose-ranks-watch", daemon=True).start()

    @property
    def step_index(self) -> int:
        return self._trainer.step_index

    @property
    def module(self) -> Any:
        return self._trainer.module

    @property
    def inner(self) -> Trainer:
        """Rank 0's own trainer, which is of the same kind as the others'."""
        return self._trainer

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        return self._shared("step", samples, learning_rate=learning_rate, single_update=single_update)

    def begin(self, samples: Sequence[TrainingSequence]) -> None:
        self._shared("begin", samples)

    def forget(self) -> None:
        self._all("forget")

    def save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        self._all("save", directory, attempt=attempt, version=version, consumed=dict(consumed), keep=keep)

    def begin_save(
        self,
        directory: Path,
        *,
        attempt: int,
        version: int,
        consumed: Mapping[int, tuple[str, ...]],
        keep: int,
    ) -> None:
        self._all(
            "begin_save", directory, attempt=attempt, version=version, consumed=dict(consumed), keep=keep
        )

    def finish_save(self) -> None:
        """Of all ranks' parts: the first completes what the others have written."""
        self._own(self._trainer.finish_save)

    def restore(self, checkpoint: Checkpoint) -> None:
        self._all("restore", checkpoint)

    def export(self, target: Path) -> None:
        self._all("export", target)

    def open_publisher(self, make: MakePublisher, tokens: Tokens, attempt: int) -> RankedPublisher:
        """Publishers of all ranks, each of its own part."""
        theirs = replace(tokens, publish_key="")  # rank 0, this one, signs
        opening = [rank.open_publisher.remote(make, theirs, attempt) for rank in self._ranks]
        self._publisher = self._own(make, self._config, tokens, self._trainer.module, attempt)
        self._wait(opening)
        return RankedPublisher(self)

    def publish(self, version: int, **told: Any) -> Any:
        """With every rank's publisher; rank 0's report."""
        return self._all("publish", version, **told, of="publisher")

    def _check_shared(self, folder: Path, field: str) -> None:
        """Have all ranks see the same ``folder``: what one writes of a checkpoint or a version on a disk of its own is of no use.

        Raises:
            TrainError: One does not; or it cannot be written.
        """
        # Under a name that nobody has asked for before: network filesystems remember for a while what was not there.
        mark = folder / f".shared-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
            try:
                seen = self._wait([rank.sees.remote(mark) for rank in self._ranks])
            finally:
                mark.unlink()
        except OSError as error:
            raise TrainError(f"{folder} cannot be written: {error}", field=field) from error
        for rank, (is_there, address) in enumerate(seen, start=1):
            if not is_there:
                lack = f"{folder} of rank {rank}, on {address}, is not that of rank 0, on {_own_address()}"
                raise TrainError(lack, field=field, fix=SHARE)

    def _shared(self, name: str, samples: Sequence[TrainingSequence], **told: Any) -> Any:
        """A call of which each rank is told its share of ``samples``."""
        ordered, world_size = in_order(samples), 1 + len(self._ranks)
        calls = [
            rank.call.remote(name, share_of(ordered, number, world_size), **told)
            for number, rank in enumerate(self._ranks, start=1)
        ]
        answer = self._own(getattr(self._trainer, name), ordered, **told)
        self._wait(calls)
        return answer

    def _all(self, name: str, *arguments: Any, of: str = "trainer", **named: Any) -> Any:
        calls = [rank.call.remote(name, *arguments, of=of, **named) for rank in self._ranks]
        owner = self._trainer if of == "trainer" else self._publisher
        answer = self._own(getattr(owner, name), *arguments, **named)
        self._wait(calls)
        return answer

    def _own(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The first rank's part of a call.

        Raises:
            TrainError: Another rank has failed, and said why.
        """
        try:
            return call(*arguments, **named)
        except Exception as error:
            if tells_of_a_lost_rank(error):
                self._lost(error)
            if isinstance(error, WeightsError) and error.field == "ranks":
                # They disagree about what is published; a new attempt has nothing to disagree about.
                logger.exception("ending, to go on from the checkpoint")
                os._exit(1)
            raise

    def _wait(self, calls: Sequence[Any]) -> list[Any]:
        """The other ranks' answers."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError

        try:
            return ray.get(list(calls))
        except (RayActorError, OutOfMemoryError) as error:
            self._lost(error)

    def _watch(self) -> None:
        """Until Ray says that another rank is dead: what this one computes with it then will not end by itself."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

        while True:
            try:
                ray.get([rank.pid.remote() for rank in self._ranks])
            except ActorUnavailableError:
                logger.warning("a rank cannot be reached")
            except (ActorDiedError, OutOfMemoryError) as error:
                time.sleep(NOTICED_IN_S)
                logger.error(
                    "a rank is gone, and this one waits for it; ending, to go on from the checkpoint",
                    exc_info=error,
                )
                os._exit(1)
            time.sleep(WATCH_EVERY_S)

    def _lost(self, error: Exception) -> NoReturn:
        """Another rank is gone, or has failed.  What this one holds now is not to be trusted."""
        store = self._store
        for rank in range(1, 1 + len(self._ranks)):
            if store is not None and store.check([_word_of(rank)]):  # None: they have not met yet
                raise TrainError(store.get(_word_of(rank)).decode(), field="trainer") from error
        logger.error("a rank is gone; ending, to go on from the checkpoint", exc_info=error)
        os._exit(1)


class RankedPublisher:
    """A :class:`rose.train.publishing.Publisher`."""

    def __init__(self, trainer: RankedTrainer) -> None:
        self._trainer = trainer

    def publish(self, version: int, *, step: int | None = None, lr: float | None = None) -> Any:
        return self._trainer.publish(version, step=step, lr=lr)


def tells_of_a_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or does not answer; also under a name that the error was given since."""
    import torch.distributed as dist

    found: BaseException | None = error
    while found is not None:
        # Gloo has no class of its own for it.
        if isinstance(found, dist.DistError) or "gloo/transport" in str(found):
            return True
        found = found.__cause__
    return False


def _word_of(rank: int) -> str:
    return f"rose/failed/{rank}"


def _join(
    config: TrainConfig, rank: int, host: str, port: int, own: str, listener: socket.socket | None = None
) -> Any:
    """Meet the other ranks; the store in which they did, which is rank 0's.

    Args:
        own: This node's address as the cluster sees it.
        listener: Rank 0's, bound to ``host:port``.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.trainer.num_threads)
    _speak_through(own)
    if config.trainer.device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each rank its own device alone
    timeout, world_size = timedelta(seconds=JOIN_TIMEOUT_S), config.trainer.num_ranks
    store = meeting_place(host, port, world_size, timeout, listener)
    dist.init_process_group(
        BACKENDS[config.trainer.device], store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    # Now, while all are here: later they would wait for one that is gone by then, in the store, where its end is not seen.
    disk_group()
    return store


def _speak_through(address: str) -> None:
    """Have gloo use the interface of ``address``, unless the environment names another.

    Left to itself it takes what the host's own name stands for.  That is a loopback address on many systems, and ranks on other nodes would look
    for this one on their own.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ[GLOO_INTERFACE] = name
            return


def _own_address() -> str:
    """This node's, as the cluster sees it."""
    import ray

    return ray.util.get_node_ip_address()


def meeting_place(
    host: str, port: int, world_size: int, timeout: timedelta, listener: socket.socket | None = None
) -> Any:
    """Torch's store at ``host:port``.

    Args:
        listener: Bound there: the store is served here, at that address alone.  Left to itself torch would listen on all interfaces.
    """
    import torch.distributed as dist

    fd = None if listener is None else listener.detach()  # the store closes it
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, world_size, is_master=fd is not None, timeout=timeout, master_listen_fd=fd
    )


def listener_at(host: str) -> socket.socket:
    """Where the ranks will meet: a port of ``host`` that is ours from now on."""
    listener = socket.socket()
    listener.bind((host, 0))
    return listener
