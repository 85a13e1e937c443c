"""The node side of the end-to-end weight benchmark: real engines, each with a real subscriber and weight loop.

What the node agent (``rose node``) runs is taken as it is: :class:`rose.coserve.links.WeightLoop` follows a
:class:`rose.weights.subscriber.WeightSubscriber` and drives an engine through :class:`RolloutEngine`.  Only the start
of the engine is the tests' fast one, so :class:`RunningEngine` is told about a server that is already up.

Every step is timed where it ends, on one clock (``time.monotonic``): the host copy is at the version, the update file is
written, the engine has staged it, the commit is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weight_transfer.rl_checkpoints import ANSWER_TOKENS, GROUP_SIZE, problem
from rose.auth import Tokens, bearer
from rose.coserve.engine import RolloutEngine
from rose.coserve.links import WeightLoop, WeightSource, open_weight_source, trusted_keys
from rose.coserve.node_config import EngineConfig, NodeConfig, WeightsLink
from rose.lineage import WeightVersion
from rose.signatures import SigningKey
from rose.train.batch import TrainingSequence
from rose.weights import stored_manifests
from rose.weights.http_store import HttpStore
from rose.weights.manifest import Head
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport
from rose.weights.sealed import SealedStore
from rose.weights.shared_copy import open_shared
from rose.wire.http_client import open_client
from tests.engine_launcher import EngineServer
from tests.plugin.weights_server import dedicated
from tests.weights.relay_process import RelayProcess

Marks = dict[str, float]
"""What happened to one version at one engine: moments on the monotonic clock, and durations the engine tells."""
PHASES = {
    # phase: from, to
    "publish": ("began_at", "head_at"),
    "copy": ("head_at", "copied_at"),
    "write": ("copied_at", "written_at"),
    "stage": ("written_at", "staged_at"),
    "commit": ("staged_at", "acknowledged_at"),
}
"""The head names the version; the host copy is current; the update file is written; staged; committed."""
ENGINE_ARGS = ("--max-num-seqs=16", "--max-model-len=128", f"--kv-cache-memory-bytes={512 << 20}")
RUN = "live"
Before = Callable[[str], int]
"""Called with the path before the engine is asked to stage or commit; returns the turns in flight."""


class LoopThread:
    """An event loop in a thread of its own, for the nodes' loops."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RunningEngine(RolloutEngine):
    """A server that is up, as the weight loop sees it; ``marks`` says when it answered what."""

    def __init__(self, config: NodeConfig, token: str, marks: dict[str, Marks], before: Before) -> None:
        super().__init__(config)
        self.token, self._marks, self._before = token, marks, before

    @property
    def running(self) -> bool:
        """It is no child of ours, and runs as long as it is attached."""
        return self._client is not None

    async def attach(self) -> None:
        self._client = open_client(bearer(self.token))
        await self.refresh_status()
        self.state = "ready"

    async def detach(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        is_weights = body is not None and path in ("/rose/weights/stage", "/rose/weights/commit")
        turns = self._before(path) if is_weights else 0
        answer = await super().call(method, path, body, timeout_s)
        if is_weights:
            assert body is not None
            mark = self._marks.setdefault(f"{body['attempt']}.{body['version']}", {})
            if answer.get("state") == "staged":
                mark |= {"staged_at": time.monotonic(), "stage_s": answer["stage_s"]}
            elif path.endswith("commit"):
                mark |= {key: answer[key] for key in ("pause_s", "commit_s")}
                mark |= {"turns_in_flight": turns, "acknowledged_at": time.monotonic()}
        return answer


class TimedSource:
    """A subscriber that notes when the host copy is current and when an update file is written."""

    def __init__(self, source: WeightSource, marks: dict[str, Marks]) -> None:
        self._source, self._marks = source, marks

    def busy(self) -> bool:
        return self._source.busy()

    def poll(self, timeout_s: float) -> WeightVersion | None:
        began_s = time.thread_time()
        found = self._source.poll(timeout_s)
        if found is not None:
            mark = self._marks.setdefault(str(found), {})
            mark |= {"copied_at": time.monotonic(), "copy_cpu_s": time.thread_time() - began_s}
        return found

    def fetch(self, version: WeightVersion, engine_version: WeightVersion | None) -> Path:
        began_s = time.thread_time()
        path = self._source.fetch(version, engine_version)
        mark = self._marks.setdefault(str(version), {})
        mark |= {"written_at": time.monotonic(), "write_cpu_s": time.thread_time() - began_s}
        mark["update_bytes"] = path.stat().st_size
        return path

    def require(self, version: WeightVersion) -> None:
        self._source.require(version)

    def close(self) -> None:
        self._source.close()


class Node:
    """One engine and what follows the relay for it, from ``began_at`` until :meth:`close`.

    Args:
        folder: Of this node; ``weights/`` in it is the host copy.  The server's ``ROSE_WEIGHTS_DIR`` must be it.
        before: See :data:`Before`.
        pull_ahead: False: it begins to pull when the head has moved.
    """

    def __init__(
        self,
        server: EngineServer,
        folder: Path,
        *,
        relay_url: str,
        tokens: Tokens,
        run_id: str,
        loop: LoopThread,
        before: Before = lambda path: 0,
        pull_ahead: bool = True,
    ) -> None:
        self.server, self._loop = server, loop
        self.marks: dict[str, Marks] = {}
        link = WeightsLink(relay_url=relay_url, run_id=run_id, directory=folder)
        config = NodeConfig(
            node_id="node",
            dir=folder,
            engine=EngineConfig(model=str(server.model_dir), port=server.port, max_model_len=128),
            weights=link,
        )
        self.began_at = time.monotonic()
        self.engine = RunningEngine(config, server.node_token, self.marks, before)
        source = (
            open_weight_source(config, link, tokens)
            if pull_ahead
            else open_shared(
                relay_url,
                run_id,
                config.weights_dir,
                token=tokens.relay,
                trusted=trusted_keys(link, tokens),
                params=WeightsParams(pull_ahead=False),
            )
        )
        self._weights = WeightLoop(link, folder, self.engine, TimedSource(source, self.marks))
        self.opened_at = time.monotonic()
        loop.call(self.engine.attach())
        self._task = loop.call(self._start())

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._weights.run())

    def wait_for(self, version: str, timeout_s: float = 120.0) -> Marks:
        """Until the engine has acknowledged ``version``.

        Raises:
            RuntimeError: It has not, in time; with what the loop says.
        """
        until_s = time.monotonic() + timeout_s
        while "acknowledged_at" not in self.marks.get(version, {}):
            if time.monotonic() > until_s:
                raise RuntimeError(f"{version} was not acknowledged: {self._weights.error or self.marks}")
            time.sleep(0.002)
        return self.marks[version]

    def hashes(self) -> dict[str, str]:
        """State hash of every tensor, by a scan of the engine's memory."""
        (rank,) = self.server.get("/rose/weights/hash").json()["ranks"]
        return rank["hashes"]

    def close(self) -> None:
        async def end() -> None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.engine.detach()

        self._loop.call(end())


class TimedStore(HttpStore):
    """Notes when a version became the run's head."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token)
        self.head_at: dict[str, float] = {}

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        super().set_head(head, expected=expected)
        self.head_at[str(head.identity)] = time.monotonic()


class Run:
    """A relay process, a store on it, and the engines that were asked for; ends all of it."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.loop = LoopThread()
        self._stack.callback(self.loop.close)
        self.relay = self._stack.enter_context(RelayProcess(folder, signed=True))
        tokens = self.relay.tokens
        self.timed = TimedStore(self.relay.url, tokens.publish)
        self.store = SealedStore(self.timed, key=SigningKey.parse(tokens.publish_key))
        self._stack.callback(self.store.close)
        # Where a deployment keeps them: host copies and update files are memory.
        shared = Path("/dev/shm")
        self._nodes = Path(
            self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="rose-nodes-", dir=shared if shared.is_dir() else None)
            )
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def nodes_folder(self, name: str) -> Path:
        folder = self._nodes / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @contextlib.contextmanager
    def server(self, model: Path, name: str, *args: str, **env: str) -> Iterator[EngineServer]:
        env = {"ROSE_WEIGHTS_DIR": str(self.nodes_folder(name)), **env}
        with dedicated(model, env=env, args=[*ENGINE_ARGS, *args]) as server:
            yield server

    @contextlib.contextmanager
    def node(
        self,
        server: EngineServer,
        name: str,
        before: Before = lambda path: 0,
        *,
        relay_url: str = "",
        pull_ahead: bool = True,
    ) -> Iterator[Node]:
        node = Node(
            server,
            self.nodes_folder(name),
            relay_url=relay_url or self.relay.url,
            pull_ahead=pull_ahead,
            tokens=self.relay.tokens,
            run_id=RUN,
            loop=self.loop,
            before=before,
        )
        try:
            yield node
        finally:
            node.close()

    def sections(self, report: PublishReport) -> Counter[str]:
        """How the sections of a version travelled, by its manifest on the relay."""
        record = stored_manifests.read(self.store, RUN, report.version, report.kind)
        return Counter(section.encoding for section in record.sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One publish: when it began, and what it took of the trainer's thread."""

    report: PublishReport
    began_at: float
    cpu_s: float


def timed_publish(publish: Callable[[], PublishReport]) -> Timed:
    began_at, began_s = time.monotonic(), time.thread_time()
    report = publish()
    return Timed(report=report, began_at=began_at, cpu_s=time.thread_time() - began_s)


def row_of(run: Run, published: Timed, marks: list[Marks]) -> dict[str, Any]:
    """One version: bytes, and seconds by phase at the slower engine."""
    report = published.report
    last = max(marks, key=lambda mark: mark["acknowledged_at"])
    moments = {**last, "began_at": published.began_at, "head_at": run.timed.head_at[str(report.version)]}
    return {
        "version": str(report.version),
        "kind": report.kind,
        "density": report.density,
        "num_changed": report.num_changed,
        "bytes_sent": report.bytes_sent,
        "bytes_dense": report.bytes_dense,
        "bytes_anchor_besides": report.bytes_anchor,
        "sections": dict(run.sections(report)),
        **{f"{name}_s": moments[end] - moments[begin] for name, (begin, end) in PHASES.items()},
        "acknowledged_s": last["acknowledged_at"] - published.began_at,
        "pause_s": max(mark["pause_s"] for mark in marks),
        "commit_in_pause_s": max(mark["commit_s"] for mark in marks),
        "turns_in_flight": int(min(mark["turns_in_flight"] for mark in marks)),
        "update_bytes": int(last["update_bytes"]),
        # What each phase took of its own thread: other work on the same core is not in it.
        "publish_cpu_s": published.cpu_s,
        "copy_cpu_s": max(mark["copy_cpu_s"] for mark in marks),
        "write_cpu_s": max(mark["write_cpu_s"] for mark in marks),
        "stage_in_engine_s": max(mark["stage_s"] for mark in marks),
    }


class Sampler(threading.Thread):
    """Samples groups of answers to the sorting task of ``rl_checkpoints.py`` from one engine, except while at rest.

    ``groups`` never fills up: the oldest group gives way, so that the engine has turns in flight as long as it is
    wanted.  The log-probs are the engine's, so what is trained on may be a version or two old.
    """

    def __init__(
        self, server: EngineServer, name: str, groups: queue.Queue[list[TrainingSequence]], seed: int
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._server, self._groups = server, groups
        self._rng = np.random.default_rng(seed)
        self._ended, self._awake = threading.Event(), threading.Event()
        self.in_flight = 0
        self.num_answers = 0
        self.num_mixed = 0
        """Answers that more than one version sampled."""
        self.error: Exception | None = None

    def wake(self) -> None:
        """Sample until :meth:`rest`; returns with turns in flight."""
        self._awake.set()
        while not self.in_flight and self.error is None:
            time.sleep(0.002)

    def rest(self) -> None:
        """Returns when no turn is in flight."""
        self._awake.clear()
        while self.in_flight and self.error is None:
            time.sleep(0.002)

    def run(self) -> None:
        try:
            with ThreadPoolExecutor(GROUP_SIZE) as pool:
                while self._awake.wait() and not self._ended.is_set():
                    self._put(self._group(pool))
                    if not self._awake.is_set():
                        self.in_flight = 0
        except Exception as error:  # noqa: BLE001 - told to the trainer's thread, which waits for groups
            self.error = error

    def _put(self, group: list[TrainingSequence]) -> None:
        while True:
            try:
                return self._groups.put_nowait(group)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._groups.get_nowait()

    def _group(self, pool: ThreadPoolExecutor) -> list[TrainingSequence]:
        prompt, right = problem(self._rng)
        self.in_flight = GROUP_SIZE
        seeds = [int(seed) for seed in self._rng.integers(1 << 31, size=GROUP_SIZE)]
        choices = list(pool.map(lambda seed: self._answer(prompt, seed), seeds))
        name = f"{self.name}-{self.num_answers}"
        self.num_answers += len(choices)
        self.num_mixed += sum(len(choice["weight_versions"]) > 1 for choice in choices)
        return [
            TrainingSequence(
                trajectory_id=f"{name}-{number}",
                group_id=name,
                reward=sum(a == b for a, b in zip(choice["token_ids"], right, strict=True)) / ANSWER_TOKENS,
                token_ids=(*prompt, *choice["token_ids"]),
                positions=tuple(range(len(prompt), len(prompt) + ANSWER_TOKENS)),
                logprobs=tuple(min(each["logprob"], 0.0) for each in choice["logprobs"]["content"]),
                temperatures=(1.0,) * ANSWER_TOKENS,
                allowed=(None,) * ANSWER_TOKENS,
            )
            for number, choice in enumerate(choices)
        ]

    def _answer(self, prompt: list[int], seed: int) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "seed": seed, "logprobs": 1}
        return self._server.generate(prompt, max_tokens=ANSWER_TOKENS, **sampling)["choices"][0]

    def end(self) -> None:
        self._ended.set()
        self._awake.set()
        self.join(60.0)
