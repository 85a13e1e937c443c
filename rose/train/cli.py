"""``rose train``: read the job, run it, show each step.  Loads neither torch nor Ray itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rose.auth import Tokens
from rose.config import load_config
from rose.train.config import TrainConfig


def train_main(config: Path | str | None, overrides: Sequence[str] = ()) -> int:
    """Run the job of a TOML file with ``a.b=value`` overrides; 0 when its last step is done.

    Raises:
        RoseError: The job cannot start or cannot go on; its text is one line.
    """
    job = load_config(TrainConfig, config, overrides)
    tokens = Tokens.load(job.token_file)
    from rose.train.loop import run_training

    console = Console()
    result = run_training(job, tokens, progress=lambda record: console.print(_line(record, job.num_steps)))
    if result.success_last is None:
        console.print(f"nothing left to do: {result.num_steps} steps are done in {job.output_dir}")
    else:
        console.print(
            f"done: {result.num_steps} steps, success {result.success_first:.2f} -> {result.success_last:.2f}, "
            f"attempt {result.attempt}, {result.num_restarts} restarts; see {job.output_dir / 'metrics.jsonl'}"
        )
    return 0


def _line(record: Mapping[str, Any], num_steps: int) -> str:
    if record.get("event") == "attempt":
        return f"attempt {record['attempt']} goes on at step {record['step']}"
    if record.get("event") == "actor_died":
        return f"{record['actor']} died and is replaced: {record['reason']}"
    tiers = record["tiers"]
    shares = ", ".join(f"{tier} {counts['turns']}" for tier, counts in tiers.items())
    update = record["update"]
    return (
        f"step {record['step'] + 1:>3}/{num_steps}  success {record['success_rate']:.2f}  "
        f"turns {record['num_turns']} ({shares})  entropy {record['entropy']:.2f}  "
        f"kl {record['mismatch_kl']:.1e}  lr {record['lr']:.0e}  "
        f"rollout {record['rollout_s']:.1f} s, train {record['train_s']:.1f} s, "
        f"publish {record['publish_s']:.1f} s  {update['kind']} {update['bytes_sent']} B "
        f"({update['density']:.1%} changed)"
    )
