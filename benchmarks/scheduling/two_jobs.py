"""Two jobs with one model name on real engines that go over from one to the other: ``python -m benchmarks.scheduling.two_jobs --json FILE``.

**World.**  A real ``rose-scheduler`` process that provisions (``provisioning.mode = "on"``), a relay process, and two ``rose node run``
processes with real vLLM engines on the CPU: ``dedicated`` has its device to itself, ``harvested`` lies beside a production engine,
which answers a request a second.  Two jobs, ``a`` and ``b``, publish runs of their own under equal version numbers; the policies
differ in 30 % of the elements of each tensor.  Agents of both ask for the model ``policy``.  The jobs alternate: each samples for
:data:`ON_S`, rests for :data:`OFF_S`, and begins in the middle of the other's time, so that both devices are wanted by both and
change hands, until they have done so ``--switches`` times.  On the way all of :data:`KILLED` are killed (SIGKILL), one after the other and evenly over the
switches: the scheduler; a node's agent and all that it has started; an engine's processes alone.  Scheduler and agent are started
again at once, by their supervisor as it were; an engine by its agent.

**Figures**, by what the scheduler and the nodes say of themselves (asked every 50 ms):

- ``switch_s``: from the scheduler's order to the node's word that the engine has the job's run, in place of the other's, heartbeats included (one each
  0.25 s); of these ``commit_s`` is what the node says that the change took.  ``switch_max_s``, ``switches``.  An engine that was started anew and
  gets its first run is none.
- ``mixed``: recorded tokens whose segment names a run that is not their job's.
- ``scans``: of an engine's memory (``GET /rose/weights/hash``; of each engine half a second after the last, and whenever its run has changed).  ``wrong``:
  those whose state hashes are not the ones that the run in the engine's word has published.  ``unproved``: recorded tokens whose segment
  names an engine and a run that no right scan found there in the time of their turn, :data:`NEAR_S` before and after included.
- ``different``: turns whose tokens are not what an engine that was *started* with the run's weights samples for the same prompt (greedy,
  float32): so the stamp is not believed.  ``turns`` of them were compared, ``moved`` were moved in the middle.
- ``lost``: trajectories that did not end.  ``failed``: production's requests that failed.

**Bar**, written before the first run: ``mixed``, ``different``, ``lost`` and ``failed`` 0, median of ``switch_s`` at most 1 s, at least 10 switches;
that run killed the scheduler once and nothing else.  Written before the first run that kills nodes: at least 50 switches, every one of
:data:`KILLED` was, and ``wrong`` and ``unproved`` are 0 as well.  That run (``results/scheduling/two_jobs-killed``) met all but one: 540 of 32,256
tokens were ``unproved``, because an engine's refusal to be scanned while its node spoke to it was taken for its death, and the next scan
came a second later.  It is asked again at once since, and scanned twice as often; the same bar.  The second run (``two_jobs-killed-again``) has 19 left of
35,136, six segments of one moment: the harvested engine, in the idle class on a machine that others kept busy, was ordered away for twelve
seconds and not scanned meanwhile.  What was sampled there is right by the other check; the bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import psutil
import torch
from safetensors.torch import save_file

from benchmarks.lib.report import Report
from rose.auth import Tokens, bearer
from rose.demo.programs import to_toml
from rose.errors import RoseError
from rose.node_client import ControlClient
from rose.proc import free_port
from rose.shared_memory import SharedMemorySweep
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.stores import trainer_store
from tests.engine_launcher import SERVE_COMMAND, EngineServer
from tests.plugin.weights_kit import change
from tests.scheduler.audit import Client
from tests.scheduler.processes import Daemon
from tests.tiny_model import write_tiny_model
from tests.weights.relay_process import RelayProcess

RUNS = {"a": "run-a", "b": "run-b"}
ON_S, OFF_S = 10.0, 7.0
NUM_SWITCHES = 50
KILLED = (
    "scheduler",
    "node dedicated",
    "engine harvested",
    "scheduler",
    "node harvested",
    "engine dedicated",
    "scheduler",
)
SCAN_S, NEAR_S = 0.5, 2.0
NUM_AGENTS, NUM_TURNS, MAX_TOKENS = 6, 2, 48
POLL_S = 0.05
MODEL: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 640, "num_heads": 10, "num_kv_heads": 2, "head_size": 64, "intermediate_size": 1728,
    "dtype": torch.float32,
}  # fmt: skip
SETTINGS = (
    "timeouts.backoff_s=0.05",
    'provisioning.mode="on"',
    "provisioning.period_s=0.2",
    "provisioning.gain_factor=0.1",
    "provisioning.switch_s=0.5",
    "provisioning.min_active_s=2.0",
    "provisioning.rest_s=0.0",
    "provisioning.idle_s=3.0",
)


class Node:
    """``rose node run`` as a process, its engine below it.

    Args:
        serving: Its device has a production engine.
    """

    def __init__(
        self, folder: Path, name: str, tokens: Tokens, urls: dict[str, str], model: Path, serving: bool
    ) -> None:
        self.name, self.dir, self._tokens = name, folder / name, tokens
        self.dir.mkdir(mode=0o700, exist_ok=True)
        table: dict[str, Any] = {
            "node_id": name,
            "dir": self.dir,
            "mode": "on",
            "engine": {
                "model": model,
                "command": SERVE_COMMAND,
                "served_model_name": "policy",
                "port": free_port(),
                "max_model_len": 512,
                "args": ["--dtype=float32", "--enforce-eager", "--max-num-seqs=8", f"--kv-cache-memory-bytes={64 << 20}"],
                "log_path": folder / f"{name}-engine.log",
                "start_timeout_s": 400.0,
            },
            "scheduler": {"url": urls["scheduler"], "heartbeat_s": 0.25},
            "weights": {"relay_url": urls["relay"], "run_id": RUNS["a"], "directory": folder / "weights" / name},
        }  # fmt: skip
        if serving:
            table["serving"] = {"slo_ttft_ms": 5000, "slo_tpot_ms": 1000}
            table["lending"] = {"use_window_s": 2.0, "max_hit_rate_loss": 1.0}
        path = folder / f"{name}.toml"
        path.touch(mode=0o600)
        path.write_text(to_toml(table))
        env = {each: value for each, value in os.environ.items() if not each.startswith(("ROSE_", "VLLM_"))}
        env |= {
            "ROSE_TOKEN_FILE": str(folder / "tokens.toml"), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self.log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", "rose.cli", "node", "run", f"--config={path}"]
        self._env = env
        self.url = f"http://127.0.0.1:{table['engine']['port']}"
        """Of its engine."""
        self._client: ControlClient | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)

    def weights(self) -> dict[str, Any]:
        """What the node says of its weights; empty while it cannot be asked."""
        try:
            if self._client is None:
                self._client = ControlClient(self.dir, self._tokens)
            status = self._client.status()
        except RoseError:  # it is starting, or was killed
            self._forget()
            return {}
        return {**(status["weights"] or {}), "state": status["engine"]["state"]}

    def engine_token(self) -> str:
        """Of the engine that runs now, as its owner can read it; empty: none runs."""
        for process in self._below():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("ROSE_ROLE") == "rollout" and "ROSE_NODE_TOKEN" in environment:
                    return environment["ROSE_NODE_TOKEN"]
        return ""

    def kill_engine(self) -> None:
        """SIGKILL to every process of the engine, and to none of the agent's own."""
        for process in self._below():
            with contextlib.suppress(psutil.Error):
                is_guard = any("proc_guard" in argument for argument in process.cmdline())
                if process.environ().get("ROSE_ROLE") == "rollout" and not is_guard:
                    process.kill()

    def kill(self) -> None:
        """SIGKILL to the agent and all that it has started, as a host that fails."""
        below = self._below()
        self.process.kill()
        self.process.wait()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._forget()

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        self._forget()
        self.process.terminate()
        self.process.wait(90)


@dataclass(frozen=True, slots=True)
class Scan:
    """Of the memory of a node's engine, which says that ``run``'s weights are there; ``right``: they are."""

    node: str
    run: str
    began_s: float
    ended_s: float
    right: bool


class World:
    """What both jobs and the watcher see."""

    def __init__(
        self, client: Client, url: str, tokens: Tokens, report: Report, states: dict[str, dict[str, str]]
    ) -> None:
        self.client, self.url, self.tokens, self.report = client, url, tokens, report
        self._states = states
        """Run -> the state hashes that it has published."""
        self.names: dict[str, list[str]] = {job: [] for job in RUNS}
        self.begun: dict[str, int] = dict.fromkeys(RUNS, 0)
        self.over = asyncio.Event()
        self.switches: list[dict[str, Any]] = []
        self.times: dict[str, list[tuple[float, float]]] = {}
        """Trajectory -> when each turn of it was asked for, and answered."""
        self.scans: list[Scan] = []
        self.settled: dict[str, str] = {}
        """Node -> the run that its engine has, where it is to have no other."""
        self.served = self.failed = 0

    async def play(self, job: str, number: int) -> None:
        body = {"job": job, "group_id": f"{job}-{number}", "group_size": 1}
        keyed = {"Idempotency-Key": f"{job}-{number}"}
        name = (await self.client.post("/rose/v1/trajectories", body, keyed))["id"]
        prompt = [10 + (7 * number + 3 * at) % 200 for at in range(12)]
        for turn in range(NUM_TURNS):
            sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
            asked_s = time.monotonic()
            answer = await self.client.post(
                "/rose/v1/generate",
                {"token_ids": prompt, "sampling_params": sampling},
                {"X-Session-ID": name, "X-ROSE-Turn": str(turn)},
            )
            self.times.setdefault(name, []).append((asked_s, time.monotonic()))
            prompt = [*prompt, *answer["token_ids"], 13]
        await self.client.finish(name, float(number % 2))
        self.names[job].append(name)

    async def job(self, job: str, offset_s: float) -> None:
        """Samples and rests, until all is over."""
        numbers = itertools.count()
        await asyncio.sleep(offset_s)
        while not self.over.is_set():
            end_s = time.monotonic() + ON_S

            async def agent(end_s: float = end_s) -> None:
                while time.monotonic() < end_s and not self.over.is_set():
                    self.begun[job] += 1
                    await self.play(job, next(numbers))

            await asyncio.gather(*(agent() for _ in range(NUM_AGENTS)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), OFF_S)

    async def watch(self, nodes: list[Node]) -> None:
        """Every order and when it was carried out."""
        ordered: dict[str, tuple[float, str, str]] = {}
        while not self.over.is_set():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.client.session.get(
                    f"{self.url}/workers", headers=bearer(self.tokens.admin)
                ) as response:
                    workers = (await response.json())["workers"]
                now_s = time.monotonic()
                for worker in workers:
                    self._note(worker, now_s, ordered, {node.name: node for node in nodes})
            await asyncio.sleep(POLL_S)

    async def scan(self, node: Node) -> None:
        """What lies in the engine's memory, again and again, by its own word of whose it is.  While no other run is on its way: an engine
        takes one call about its weights at a time, and the node's is the one that matters."""
        token = ""
        while not self.over.is_set():
            if node.name not in self.settled:
                await asyncio.sleep(POLL_S)
                continue
            began_s, settled = time.monotonic(), self.settled[node.name]
            try:
                token = token or await asyncio.to_thread(node.engine_token)
                async with self.client.session.get(
                    f"{node.url}/rose/weights/hash", headers=bearer(token)
                ) as response:
                    if response.status == 409:  # the node's call is under way
                        await asyncio.sleep(POLL_S)
                        continue
                    response.raise_for_status()
                    (rank,) = (await response.json())["ranks"]
            except (aiohttp.ClientError, TimeoutError):
                token = ""  # it is dead, or another one by now
            else:
                right = rank["hashes"] == self._states.get(rank["run"])
                if rank["run"]:  # a fresh engine has its folder's weights, and is nobody's yet
                    self.scans.append(Scan(node.name, rank["run"], began_s, time.monotonic(), right))
            ended_s = time.monotonic()
            while time.monotonic() - ended_s < SCAN_S and self.settled.get(node.name) == settled:  # noqa: ASYNC110 - of two things, the first
                await asyncio.sleep(POLL_S)

    def _note(
        self,
        worker: dict[str, Any],
        now_s: float,
        ordered: dict[str, tuple[float, str, str]],
        nodes: dict[str, Node],
    ) -> None:
        """``ordered``: by node, since when, which run is wanted, and which one it had then."""
        name, run, job = worker["worker_id"], worker["run"], worker["job"]
        wanted = RUNS.get(job or "", run)
        if run not in RUNS.values():
            ordered.pop(name, None)  # the engine is a fresh one
            self.settled.pop(name, None)
        elif wanted != run and wanted is not None:
            since_s, before, had = ordered.get(name, (now_s, "", run))
            ordered[name] = (since_s if before == wanted else now_s, wanted, had)
            self.settled.pop(name, None)
            return
        else:
            self.settled[name] = run
        if name in ordered and ordered[name][1] == run:
            since_s, _, had = ordered.pop(name)
            if had != run:
                said = nodes[name].weights()
                self.switches.append(
                    {"node": name, "run": run, "switch_s": now_s - since_s, "commit_s": said.get("commit_s"), "at_s": now_s}
                )  # fmt: skip

    async def produce(self, server: EngineServer) -> None:
        """Production's own users: a request a second."""
        body = {"model": str(server.model_dir), "prompt": list(range(5, 65)), "max_tokens": 16, "ignore_eos": True}  # fmt: skip
        while not self.over.is_set():
            answer = await asyncio.to_thread(server.post, "/v1/completions", body)
            self.served += 1
            self.failed += answer.status_code != 200
            await asyncio.sleep(1.0)


@contextlib.contextmanager
def deployed(
    folder: Path, tokens: Tokens, url: str, relay: str, model: Path
) -> Iterator[tuple[EngineServer, list[Node]]]:
    """Production with a node beside it, and a dedicated one."""
    urls = {"scheduler": url, "relay": relay}
    (folder / "harvested").mkdir(mode=0o700)
    write_tiny_model(folder / "production")
    with contextlib.ExitStack() as ends:
        env = {"ROSE_DIR": str(folder / "harvested"), "ROSE_GUARD": "1"}
        production = ends.enter_context(EngineServer(folder / "production", role="serving", env=env))
        nodes = []
        for name in ("dedicated", "harvested"):
            node = Node(folder, name, tokens, urls, model, serving=name == "harvested")
            ends.callback(node.close)
            nodes.append(node)
        yield production, nodes


async def ready(nodes: list[Node], report: Report, timeout_s: float = 500.0) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        states = [node.weights().get("state") for node in nodes]
        if states == ["ready"] * len(nodes):
            return
        for node in nodes:
            if node.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{node.name} is not ready:\n{node.log.read_text()[-3000:]}")
        report.progress("engines ready", states.count("ready"), len(nodes))
        await asyncio.sleep(0.2)


async def kill(what: str, daemon: Daemon, nodes: list[Node]) -> None:
    """One of :data:`KILLED`; it is started again, or will be."""
    part, _, name = what.partition(" ")
    if part == "scheduler":
        await daemon.end()
        await daemon.start()
        return
    (node,) = [each for each in nodes if each.name == name]
    if part == "engine":
        await asyncio.to_thread(node.kill_engine)
    else:
        await asyncio.to_thread(node.kill)
        node.start()


async def disturb(args: argparse.Namespace, world: World, daemon: Daemon, nodes: list[Node]) -> list[str]:
    """Kill one part after the other until there were enough switches; what was killed."""
    killed: list[str] = []
    end_s = time.monotonic() + args.seconds
    while time.monotonic() < end_s and (len(world.switches) < args.switches or len(killed) < len(KILLED)):
        is_due = (len(killed) + 1) * args.switches <= len(world.switches) * (len(KILLED) + 1)
        if is_due and len(killed) < len(KILLED):
            states = [(await asyncio.to_thread(node.weights)).get("state") for node in nodes]
            if states == ["ready"] * len(nodes):  # one at a time
                await kill(KILLED[len(killed)], daemon, nodes)
                killed.append(KILLED[len(killed)])
        world.report.progress(f"switches, {len(killed)} killed", len(world.switches), args.switches)
        await asyncio.sleep(0.5)
    return killed


def proved(world: World, name: str, number: int, segment: dict[str, Any]) -> bool:
    """Did a right scan find the segment's run in its engine, in the time of its turn?"""
    asked_s, answered_s = world.times[name][number]
    return any(
        each.right and each.node == segment["worker"] and each.run == segment["run"]
        and each.ended_s >= asked_s - NEAR_S and each.began_s <= answered_s + NEAR_S
        for each in world.scans
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(*work: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def compared(
    turns: dict[str, list[dict[str, Any]]], models: dict[str, Path], report: Report
) -> tuple[int, int]:
    """(turns, those whose tokens an engine that was started with the run's weights does not sample)."""
    count = different = 0
    for job, mine in turns.items():
        with EngineServer(models[job], args=("--dtype=float32", "--enable-scale-out")) as server:

            def again(turn: dict[str, Any], server: EngineServer = server) -> bool:
                sampling = {"max_tokens": len(turn["token_ids"]), "ignore_eos": True, "temperature": 0.0}
                body = {"token_ids": turn["prompt_token_ids"], "sampling_params": sampling}
                answer = server.post("/inference/v1/generate", body)
                answer.raise_for_status()
                (choice,) = answer.json()["choices"]
                return choice["token_ids"] == turn["token_ids"]

            with ThreadPoolExecutor(8) as pool:
                for same in pool.map(again, mine):
                    count += 1
                    different += not same
                    report.progress("turns sampled again", count, sum(map(len, turns.values())))
    return count, different


async def measure(args: argparse.Namespace, report: Report, folder: Path) -> tuple[dict[str, Any], Any]:
    tokens = Tokens.generate()
    tokens.save(folder / "tokens.toml")
    base = write_tiny_model(folder / "base", seed=1, **MODEL)
    held = {job: change(base, seed=at, fraction=0.3) for at, job in enumerate(RUNS)}
    models = {job: folder / f"model-{job}" for job in RUNS}
    for job, path in models.items():
        write_tiny_model(path, seed=1, **MODEL)
        save_file(held[job], path / "model.safetensors", metadata={"format": "pt"})
    daemon = Daemon(folder, *SETTINGS)
    url = await daemon.start()
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(daemon.end)
        relay = ends.enter_context(RelayProcess(folder / "weights-relay", tokens=tokens))
        states: dict[str, dict[str, str]] = {}
        for job, run in RUNS.items():
            store = trainer_store(relay.url, tokens)
            publisher = WeightPublisher(lambda job=job: held[job], store, run, 1, WeightsParams(cast="F32"))
            states[run] = dict(publisher.publish(1).state)
            publisher.close()
        session = await ends.enter_async_context(aiohttp.ClientSession())
        client = Client(session, url, tokens)
        for job, run in RUNS.items():
            await client.trainer("/rose/v1/versions", {"job": job, "attempt": 1, "version": 1, "run": run})
        world = World(client, url, tokens, report, states)
        production, nodes = ends.enter_context(deployed(folder, tokens, url, relay.url, folder / "base"))
        await ready(nodes, report)
        jobs = [world.job("a", 0.0), world.job("b", ON_S / 2)]
        began_s = time.monotonic()
        watching = [world.watch(nodes), *(world.scan(node) for node in nodes)]
        async with running(*jobs, *watching, world.produce(production)) as tasks:
            disturbing = asyncio.create_task(disturb(args, world, daemon, nodes))
            await asyncio.wait([disturbing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            killed = await disturbing
            world.over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
        turns: dict[str, list[dict[str, Any]]] = {}
        mixed = moved = 0
        unproved: list[dict[str, Any]] = []
        for job, names in world.names.items():
            turns[job] = []
            for name in names:
                async with session.get(
                    f"{url}/rose/v1/trajectories/{name}", headers=bearer(tokens.trainer)
                ) as response:
                    trace = await response.json()
                for number, turn in enumerate(trace["turns"]):
                    turns[job].append(turn)
                    moved += len(turn["segments"]) > 1
                    mixed += sum(each["n"] for each in turn["segments"] if each["run"] != RUNS[job])
                    asked_s, answered_s = (each - began_s for each in world.times[name][number])
                    unproved += [
                        {**each, "asked_s": asked_s, "answered_s": answered_s}
                        for each in turn["segments"]
                        if not proved(world, name, number, each)
                    ]
    count, different = await asyncio.to_thread(compared, turns, models, report)
    seconds = [each["switch_s"] for each in world.switches]
    summary = {
        "switches": len(seconds),
        "switch_s": statistics.median(seconds) if seconds else None,
        "switch_max_s": max(seconds, default=None),
        "commit_s": statistics.median([each["commit_s"] for each in world.switches if each["commit_s"]] or [0.0]),
        "megabytes": sum(each.numel() * each.element_size() for each in base.values()) / 1e6,
        "trajectories": sum(map(len, world.names.values())),
        "lost": sum(world.begun.values()) - sum(map(len, world.names.values())),
        "turns": count,
        "moved": moved,
        "mixed": mixed,
        "scans": len(world.scans),
        "wrong": sum(not each.right for each in world.scans),
        "unproved": sum(each["n"] for each in unproved),
        "killed": len(killed),
        "different": different,
        "served": world.served,
        "failed": world.failed,
    }  # fmt: skip
    rows = [{**each, "at_s": each["at_s"] - began_s} for each in world.switches]
    told = {"switches": rows, "killed": killed, "unproved": unproved, "on_s": ON_S, "off_s": OFF_S}
    return summary, {**told, "settings": json.dumps(SETTINGS)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write summary and every switch here")
    parser.add_argument("--switches", type=int, default=NUM_SWITCHES, help="that are waited for")
    parser.add_argument("--seconds", type=float, default=1500.0, help="that the jobs sample for, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("two_jobs")
    with SharedMemorySweep(), tempfile.TemporaryDirectory(prefix="rose-two-jobs-") as folder:
        summary, details = asyncio.run(measure(args, report, Path(folder)))
    report.finish(summary, details, args.json)
    sound = not any(summary[key] for key in ("mixed", "wrong", "unproved", "different", "lost", "failed"))
    fast = summary["switch_s"] is not None and summary["switch_s"] <= 1.0
    whole = summary["switches"] >= args.switches and summary["killed"] == len(KILLED)
    return 0 if sound and fast and whole else 1


if __name__ == "__main__":
    sys.exit(main())
