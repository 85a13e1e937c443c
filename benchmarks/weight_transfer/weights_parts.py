"""The two parts of the end-to-end weight benchmark that need no trainer: what a GB costs, and what recovery costs.

* ``large``: generated steps of a model of some size through the whole path, phase by phase; and engines that start beside
  a host copy that is current, as a device does that takes part in rollouts again.
* ``recovery``: faults in the running system, and how long until the engine runs the newest version again.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.report import Report
from benchmarks.weight_transfer import weights_data as data
from benchmarks.weight_transfer.weights_nodes import PHASES, RUN, Node, Run, row_of, timed_publish
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.source import RawBits
from tests.engine_launcher import EngineServer, session_processes
from tests.plugin.weights_server import FAULTS
from tests.tiny_model import write_tiny_model, write_weights

# --- large ------------------------------------------------------------------------------------------------


def large_pairs(lr: str, size: str) -> tuple[dict[str, Any], list[data.Pair]]:
    """Dimensions, and one generated step at the fitted density, with the head norms that the real model has."""
    shape = data.SHAPES[size]
    pairs = data.generate(shape, data.load_fit(lr))
    for layer in range(shape.layers):
        for norm in ("q_norm", "k_norm"):
            ones = np.full(64, 0x3F80, np.uint16)
            pairs.append(data.Pair(f"model.layers.{layer}.self_attn.{norm}.weight", (64,), ones, ones.copy()))
    h = shape.hidden
    return {
        "num_layers": shape.layers, "hidden_size": h, "num_heads": h // 64, "num_kv_heads": h // 128,
        "head_size": 64, "intermediate_size": 3 * h, "vocab_size": shape.vocab,
    }, pairs  # fmt: skip


def measure_large(
    args: argparse.Namespace, report: Report, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details)."""
    report.progress("making a step of the large model", 0, 1)
    dimensions, pairs = large_pairs(f"{args.lr:g}", args.large)
    old = {pair.name: pair.old.reshape(pair.shape) for pair in pairs}
    new = {pair.name: pair.new.reshape(pair.shape) for pair in pairs}
    model = folder / "large"
    write_tiny_model(model, **dimensions)
    write_weights(
        model,
        {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in old.items()},
    )
    rows: list[dict[str, Any]] = []
    held = old
    with Run(folder) as run:
        publisher = WeightPublisher(
            lambda: {name: RawBits(bits, "BF16") for name, bits in held.items()}, run.store, RUN, 1
        )
        with run.server(model, "large") as server, run.node(server, "large") as node:
            for number in range(args.large_versions + 1):
                held = new if number % 2 else old
                published = timed_publish(lambda number=number: publisher.publish(number))
                found = published.report
                rows.append(row_of(run, published, [node.wait_for(str(found.version))]))
                report.progress("large versions", number, args.large_versions)
            same = node.hashes() == dict(found.state)
        # The engine's process is gone, the host copy is not: what a device needs to take part in rollouts again.
        activations = []
        for _ in range(args.activations):
            with run.server(model, "large") as server, run.node(server, "large") as node:
                mark = node.wait_for(str(found.version))
                activations.append(
                    {
                        "server_start_s": server.start_s,
                        "prove_s": node.opened_at - node.began_at,
                        "write_s": mark["written_at"] - mark["copied_at"],
                        "stage_s": mark["staged_at"] - mark["written_at"],
                        "commit_s": mark["acknowledged_at"] - mark["staged_at"],
                        "activation_s": mark["acknowledged_at"] - mark["copied_at"],
                        "pause_s": mark["pause_s"],
                        "write_cpu_s": mark["write_cpu_s"],
                        "stage_in_engine_s": mark["stage_s"],
                        "commit_in_pause_s": mark["commit_s"],
                    }
                )
                same = same and node.hashes() == dict(found.state)
            report.progress("activations", len(activations), args.activations)
    publisher.close()
    deltas = [row for row in rows if row["kind"] == "delta"]
    gigabytes = rows[0]["bytes_dense"] / 1e9

    def per_gb(key: str, chosen: list[dict[str, Any]]) -> float:
        return float(np.median([row[key] for row in chosen])) / gigabytes

    summary = {
        "large_gb": gigabytes,
        "large_density": deltas[0]["density"],
        "large_share_of_dense": deltas[0]["bytes_sent"] / rows[0]["bytes_dense"],
        "large_sections_raw": sum(row["sections"].get("raw", 0) for row in deltas),
        "large_acknowledged_s": float(np.median([row["acknowledged_s"] for row in deltas])),
        **{
            f"large_{name}_s_per_gb": per_gb(f"{name}_s", deltas)
            for name in (
                *PHASES,
                "publish_cpu",
                "copy_cpu",
                "write_cpu",
                "stage_in_engine",
                "pause",
                "commit_in_pause",
            )
        },
        "activation_s_per_gb": per_gb("activation_s", activations),
        **{
            f"activation_{name}_s_per_gb": per_gb(f"{name}_s", activations)
            for name in (
                "prove",
                "write",
                "stage",
                "commit",
                "write_cpu",
                "stage_in_engine",
                "commit_in_pause",
            )
        },
        "large_hashes_are_the_trainers": same,
    }
    return summary, {"size": args.large, "rows": rows, "activations": activations}


# --- recovery ---------------------------------------------------------------------------------------------


class Kill:
    """Kills an engine's processes before it is asked for ``path`` the first time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.server: EngineServer | None = None
        self.at: float | None = None

    def __call__(self, path: str) -> int:
        if path.endswith(self._path) and self.at is None and self.server is not None:
            self.at = time.monotonic()
            for process in session_processes(self.server.pid):
                process.kill()
        return 0


def measure_recovery(
    args: argparse.Namespace, report: Report, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details): seconds from each fault until the engine has acknowledged the newest version.

    A killed engine's restart is the tests' fast start, so it is given apart: what counts is from "up" on.
    """
    dimensions, pairs = large_pairs(f"{args.lr:g}", "5M")
    states = [
        {pair.name: each.reshape(pair.shape) for pair in pairs for each in [getattr(pair, side)]}
        for side in ("old", "new")
    ]
    model = folder / "small"
    write_tiny_model(model, **dimensions)
    write_weights(
        model,
        {
            name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            for name, bits in states[0].items()
        },
    )
    found: dict[str, dict[str, float]] = {}
    same = True
    attempt, number, held = 1, 0, states[0]

    with Run(folder) as run:

        def make_publisher() -> WeightPublisher:
            return WeightPublisher(
                lambda: {name: RawBits(bits, "BF16") for name, bits in held.items()},
                run.store, RUN, attempt, WeightsParams(anchor_every=1000),
            )  # fmt: skip

        publisher = make_publisher()

        def publish() -> str:
            nonlocal number, held
            held = states[number % 2]
            version = publisher.publish(number).version
            number += 1
            return str(version)

        def settled(node: Node, version: str, since: float) -> float:
            nonlocal same
            seconds = node.wait_for(version)["acknowledged_at"] - since
            same = same and node.hashes() == dict(publisher.publish(number - 1).state)
            return seconds

        def note(name: str, **seconds: float) -> None:
            found[name] = seconds
            report.progress(name, len(found), 7)

        publish()
        with run.server(model, "node") as server:
            with run.node(server, "node") as node:
                settled(node, f"{attempt}.0", node.began_at)
                began = time.monotonic()
                note("undisturbed", recovery_s=settled(node, publish(), began))

                run.relay.kill()  # while the node waits for news, and before the trainer has any
                versions: list[str] = []
                trainer = threading.Thread(target=lambda: versions.append(publish()))
                trainer.start()
                run.relay.restart()
                began = time.monotonic()
                trainer.join()
                note("relay_killed", recovery_s=settled(node, versions[0], began))

                began = time.monotonic()
                attempt, number = attempt + 1, 1  # from the checkpoint of version 1
                publisher = make_publisher()
                note("trainer_restarted_from_older", recovery_s=settled(node, publish(), began))
            path = run.nodes_folder("node") / "weights.safetensors"
            with path.open("r+b") as file:
                file.seek(-1000, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-1000, os.SEEK_END)
                file.write(bytes([byte ^ 1]))
            newest = publish()
            with run.node(server, "node") as node:
                note("host_copy_damaged", recovery_s=settled(node, newest, node.began_at))
        for moment in ("stage", "commit"):
            kill = Kill(moment)
            with run.server(model, "node") as server, run.node(server, "node", kill) as node:
                settled(node, f"{attempt}.{number - 1}", node.began_at)
                kill.server = server
                newest = publish()
                while kill.at is None:
                    time.sleep(0.002)
            with run.server(model, "node") as server, run.node(server, "node") as node:
                note(
                    f"engine_killed_at_{moment}",
                    recovery_s=settled(node, newest, node.began_at),
                    fast_start_s=server.start_s,
                )
        with (
            run.server(model, "node", FAULTS, VLLM_SERVER_DEV_MODE="1") as server,
            run.node(server, "node") as node,
        ):
            settled(node, newest, node.began_at)
            server.post("/collective_rpc", {"method": "spoil_next_write", "args": [0]}).raise_for_status()
            began = time.monotonic()
            note("commit_failed_and_undone", recovery_s=settled(node, publish(), began))
    publisher.close()
    summary: dict[str, Any] = {f"recovery_s_{name}": each["recovery_s"] for name, each in found.items()}
    summary["recovery_hashes_are_the_trainers"] = same
    return summary, {"parameters": sum(pair.old.size for pair in pairs), "faults": found}
