"""What each program of the demo is: its command line, its configuration file, its core, and when it is ready.

Nothing here starts anything; :mod:`rose.demo.run` orders the programs and :mod:`rose.demo.supervisor` runs them.

Placement, the same in every phase: production and the harvested engine on the first core (the latter at
idle priority, which its node agent sees to); everything else on the second, the traffic sender at normal
priority and the rest as batch work, so that the load generator is never late because of what it measures.

Every program gets the token file by ``ROSE_TOKEN_FILE``; no secret is on a command line.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rose.auth import ENV_TOKEN_FILE
from rose.demo.demo_config import DemoConfig
from rose.demo.supervisor import Program
from rose.demo.traffic import TrafficPlan, write_phase
from rose.errors import ConfigError
from rose.evaluation.arrivals import Arrival
from rose.proc import ProcSpec

TOKEN_FILE = "tokens.toml"
JOB, RUN_ID = "frozenlake", "demo"
PRODUCTION_MODEL, POLICY_MODEL = "production", "policy"
BYTE_TOKENS = 256
"""The first token ids of the demo's tokenizer are single bytes: safe as prompts, no special token among them."""
RESTARTS = 3
BATCH_NICE = 5
LENT_AGAIN_S = 5.0
"""A page that production has not used for so long is lent again."""
LOG_NAMES = (
    *("models", "relay", "scheduler", "production", "traffic", "dedicated", "dedicated-engine"),
    *("harvested", "harvested-engine", "train", "node on", "node off"),
)
"""What a run writes into its folder of logs, which may hold other things: it is named by the user."""

# A server that is started to be measured must not talk to the network, nor use more threads than its core.
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
# Left over from the user's shell these would change what runs.
SCRUBBED: dict[str, str | None] = dict.fromkeys(
    (
        "ROSE_ROLE",
        "ROSE_DIR",
        "ROSE_NODE_TOKEN",
        "ROSE_GUARD",
        "ROSE_GUARD_PROCESS",
        "ROSE_COMPUTE_RUNG",
        "ROSE_RESERVE_BYTES",
        "ROSE_GPU_RESERVE_BYTES",
        "ROSE_ALLOW_UNMEASURED",
        "RAY_ADDRESS",
        "VLLM_PLUGINS",
        "CUDA_VISIBLE_DEVICES",
    )
)

_MAKE_MODELS = """\
import json, pathlib, sys
from rose.demo.models import PRODUCTION, ensure_model
from rose.demo.pretrain import PLANNER, ensure_pretrained
from rose.train.envs.frozenlake import FrozenLakeParams
seed, lakes = int(sys.argv[1]), FrozenLakeParams(**json.loads(sys.argv[2]))
made = ensure_model(PRODUCTION, seed=seed), ensure_pretrained(PLANNER, lakes, seed=seed)
pathlib.Path(sys.argv[3]).write_text(json.dumps([str(path) for path in made]))
"""


@dataclass(kw_only=True)
class DemoPlan:
    """Paths and programs of one run.

    Args:
        cores: ``(production_core, other_core)``.
        root: The run's private directory; holds the token file.
        logs: Outlives the run.
    """

    config: DemoConfig
    cores: tuple[int, int]
    root: Path
    logs: Path

    def __post_init__(self) -> None:
        self.node_dir = self.root / "node"
        self.dedicated_dir = self.root / "dedicated"
        self.records_path = self.root / "records.jsonl"
        self.phase_path = self.root / "phase.json"
        self.train_dir = self.root / "train"
        self.steps_path = self.train_dir / "metrics.jsonl"
        self._models_path = self.root / "models.json"
        self.production_model = self.policy_model = Path()
        self.dtype = serving_dtype(Path("/proc/cpuinfo").read_text())
        """Production's, here and in the benchmarks that measure what it is made of."""

    def prepare(self, arrivals: Sequence[Arrival]) -> None:
        """Make directories and the sender's plan; logs of an earlier run give way."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for name in LOG_NAMES:
                (self.logs / f"{name}.log").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.logs}: {error.strerror}", field="out") from error
        folders = (self.node_dir, self.dedicated_dir, self.train_dir, self.root / "relay", self.root / "tmp")
        for path in folders:
            path.mkdir(mode=0o700)
        write_phase(self.phase_path, "startup")
        plan = TrafficPlan(
            url=self.config.url("production"),
            model=PRODUCTION_MODEL,
            period_s=self.config.traffic.period_s,
            arrivals=[(a.at_s, a.prompt_tokens, a.output_tokens) for a in arrivals],
            seed=self.config.seed,
            token_id_low=0,
            token_id_high=BYTE_TOKENS,
            phase_file=str(self.phase_path),
            out_file=str(self.records_path),
        )
        (self.root / "traffic.json").write_text(plan.model_dump_json())

    def keep_decisions(self) -> Path | None:
        """Copy every decision log out of the private directory, in place of an earlier run's; where they are now.

        They hold no token and no secret; the scheduler's journal, which does hold tokens, stays behind.

        Raises:
            OSError: The folder cannot be written.
        """
        found = [*(self.root / "journal").glob("decisions-*.rose"), *(self.root / "decisions").glob("*.rose")]
        kept = self.config.out / "decisions"
        for old in kept.glob("*.rose"):
            old.unlink()
        for path in found:
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept / path.name)
        return kept if found else None

    def find_models(self) -> None:
        """Read what :meth:`models` wrote down."""
        production, policy = json.loads(self._models_path.read_text())
        self.production_model, self.policy_model = Path(production), Path(policy)

    # ------------------------------------------------------------ programs, in the order of their start

    def models(self) -> Program:
        """A process of its own: it imports torch, and the orchestrator must stay small."""
        lakes = json.dumps(asdict(self.config.lakes()))
        argv = (sys.executable, "-c", _MAKE_MODELS, str(self.config.seed), lakes, str(self._models_path))
        return Program(spec=self._other("models", argv), task=True)

    def relay(self) -> Program:
        return Program(
            spec=self._other(
                "relay",
                self._rose(
                    "relay",
                    "--host=127.0.0.1",
                    f"--port={self.config.port('relay')}",
                    f"--directory={self.root / 'relay'}",
                    f"--token-file={self.root / TOKEN_FILE}",
                ),
            ),
            ready=f"{self.config.url('relay')}/healthz",
            timeout_s=self.config.start_timeout_s,
            restarts=RESTARTS,
        )

    def scheduler(self) -> Program:
        config = {"host": "127.0.0.1", "port": self.config.port("scheduler"), "seed": self.config.seed}
        return Program(
            spec=self._other(
                "scheduler",
                self._rose(
                    "scheduler",
                    f"--config={self._write('scheduler', config)}",
                    f"--journal={self.root / 'journal'}",
                    f"--token-file={self.root / TOKEN_FILE}",
                ),
            ),
            ready=f"{self.config.url('scheduler')}/healthz",
            timeout_s=self.config.start_timeout_s,
            restarts=RESTARTS,
        )

    def production(self) -> Program:
        """A plain ``vllm serve``; the plugin is switched on by two variables, as in an existing fleet."""
        config, dtype = self.config.production, self.dtype
        argv = (
            str(_program("vllm")),
            "serve",
            str(self.production_model),
            f"--served-model-name={PRODUCTION_MODEL}",
            "--host=127.0.0.1",
            f"--port={self.config.port('production')}",
            f"--dtype={dtype}",
            "--enforce-eager",
            f"--max-model-len={config.max_model_len}",
            f"--max-num-seqs={config.max_num_seqs}",
            f"--kv-cache-memory-bytes={config.kv_cache_bytes * (2 if dtype == 'float32' else 1)}",
            f"--seed={self.config.seed}",
        )
        return Program(
            spec=ProcSpec(
                name="production",
                argv=argv,
                env={
                    **SCRUBBED,
                    **self._engine_env(),
                    "ROSE_ROLE": "serving",
                    "ROSE_DIR": str(self.node_dir),
                },
                cores=(self.cores[0],),
                log_path=self.logs / "production.log",
            ),
            ready=f"{self.config.url('production')}/health",
            timeout_s=self.config.start_timeout_s,
            restarts=RESTARTS,
        )

    def traffic(self) -> Program:
        argv = (sys.executable, "-m", "rose.demo.traffic", str(self.root / "traffic.json"))
        return Program(
            spec=ProcSpec(
                name="traffic",
                argv=argv,
                env=SCRUBBED,
                cores=(self.cores[1],),
                log_path=self.logs / "traffic.log",
            )
        )

    def dedicated(self) -> Program:
        """A host without production: its engine has the second core to itself and lends nothing."""
        engine = self._engine("dedicated", core=self.cores[1])
        return self._node("dedicated", self.dedicated_dir, {"mode": "on", "engine": engine})

    def harvested(self) -> Program:
        """The node agent of production's host, switched off: deployed, and holding nothing."""
        engine = {**self._engine("harvested", core=self.cores[0]), "sched": "idle", "warm": True}
        production = self.config.production
        serving = {
            "slo_ttft_ms": production.slo_ttft_s * 1e3,
            "slo_tpot_ms": production.slo_tpot_s * 1e3,
        }
        # Half a minute's memory of production's use would outlast a block: no burst would find its pages lent.  No prompt comes
        # again here, so no loan can cost a hit; a production that is minutes old has not shown it yet.
        table = {
            "mode": "off",
            "serving": serving,
            "engine": engine,
            "lending": {"use_window_s": LENT_AGAIN_S, "max_hit_rate_loss": 1.0},
        }
        return self._node("harvested", self.node_dir, table)

    def train(self) -> Program:
        """The RL job.  Started again after a SIGKILL it goes on from its last checkpoint."""
        config, job = self.config, self.config.job
        table = {
            "job": JOB,
            "seed": config.seed,
            "num_steps": config.steps,
            "model": self.policy_model,
            "output_dir": self.train_dir,
            "scheduler": {"url": config.url("scheduler"), "model": POLICY_MODEL},
            "weights": {"relay_url": config.url("relay"), "run_id": RUN_ID},
            "env": {"kind": "frozenlake_plan", "settings": asdict(config.lakes())},
            "rollout": {
                "num_groups": job.num_groups,
                "group_size": job.group_size,
                "max_tokens": job.lake_size**2,
            },
            # As its figures were taken: the asymmetric clip, no penalty, no guard.
            "trainer": {
                "aggregation": "token",
                "clip_high": 0.28,
                "kl_weight": 0.0,
                "count_idle": False,
                "guard": {
                    "kl_target": 0.0,
                    "starved": "train",
                    "proportional": False,
                    "grad_quantile": 0.0,
                    "dual_clip": 0.0,
                },
                "learning_rate": job.learning_rate,
                "adam_epsilon": job.adam_epsilon,
                "num_epochs": job.num_epochs,
                "minibatch_sequences": job.minibatch_sequences,
                "entropy_weight": 0.0,
                "fine_tuning_steps": 0,
            },
            "ray": {"address": "local", "temp_dir": self.root / "ray"},  # its cores are the demo's
        }
        argv = self._rose("train", f"--config={self._write('train', table)}")
        return Program(spec=self._other("train", argv), task=True)

    def node_command(self, command: str) -> Program:
        """``rose node on`` or ``off`` on production's host."""
        spec = self._other(f"node {command}", self._rose("node", command, f"--dir={self.node_dir}"))
        return Program(spec=spec, timeout_s=60.0, task=True)

    # ------------------------------------------------------------ helpers

    def _engine_env(self) -> dict[str, str]:
        """vLLM leaves sockets and rendezvous files in its temporary directory: one that goes with the run.

        The compiler's cache stays where it is, or every start would compile again.
        """
        env = {**ENGINE_ENV, "TMPDIR": str(self.root / "tmp")}
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            with suppress(KeyError, OSError):  # a user without a name
                cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
                env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return env

    def _engine(self, name: str, core: int) -> dict[str, Any]:
        """The ``[engine]`` table of a node: the policy model in its own ``vllm serve``."""
        rollout = self.config.rollout
        return {
            "model": self.policy_model,
            "served_model_name": POLICY_MODEL,
            # The agents run on the second core, the harvested engine on the first: so the engine's
            # core is set by the command, not by the agent, which may only hand on what it has itself.
            "command": ["taskset", "--cpu-list", str(core), str(_program("vllm")), "serve"],
            "args": [
                "--dtype=bfloat16",
                "--enforce-eager",
                f"--max-num-seqs={rollout.max_num_seqs}",
                f"--kv-cache-memory-bytes={rollout.kv_cache_bytes}",
                f"--seed={self.config.seed}",
            ],
            "env": self._engine_env(),
            "port": self.config.port(name),
            "max_model_len": rollout.max_model_len,
            "log_path": (self.logs / f"{name}-engine.log").resolve(),
            "start_timeout_s": self.config.start_timeout_s,
        }

    def _node(self, name: str, directory: Path, table: dict[str, Any]) -> Program:
        config = {
            "node_id": name,
            "dir": directory,
            "scheduler": {"url": self.config.url("scheduler")},
            "weights": {
                "relay_url": self.config.url("relay"),
                "run_id": RUN_ID,
                "directory": self.root / "weights" / name,
            },
            "decisions": {"directory": self.root / "decisions"},
            **table,
        }
        argv = self._rose("node", "run", f"--config={self._write(name, config)}")
        return Program(
            spec=self._other(name, argv),
            ready=f"{self.config.url(name)}/health",
            timeout_s=self.config.start_timeout_s,
            restarts=RESTARTS,
        )

    def _rose(self, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "rose.cli", *arguments)

    def _other(self, name: str, argv: Sequence[str], env: Mapping[str, str | None] | None = None) -> ProcSpec:
        """Batch work on the second core."""
        return ProcSpec(
            name=name,
            argv=tuple(argv),
            env={**SCRUBBED, ENV_TOKEN_FILE: str(self.root / TOKEN_FILE), **(env or {})},
            cores=(self.cores[1],),
            sched="batch",
            nice=BATCH_NICE,
            log_path=self.logs / f"{name}.log",
        )

    def _write(self, name: str, table: Mapping[str, Any]) -> Path:
        """Write a configuration file, 0600."""
        path = self.root / f"{name}.toml"
        path.touch(mode=0o600)
        path.write_text(to_toml(table), encoding="utf-8")
        return path


def _program(name: str) -> Path:
    """A console script of the environment that runs us, whatever ``PATH`` says."""
    return Path(sys.executable).with_name(name)


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Plain data as TOML: tables, strings, numbers, booleans and lists of those.  ``None`` is left out."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in table.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            tables.append(f"\n[{prefix}{name}]\n{to_toml(value, f'{prefix}{name}.')}")
        else:
            # JSON's strings, numbers, booleans and arrays are TOML's, but for its two-part escapes.
            plain = str(value) if isinstance(value, Path) else value
            lines.append(f"{name} = {json.dumps(plain, ensure_ascii=False)}\n")
    return "".join(lines) + "".join(tables)


def serving_dtype(cpuinfo: str) -> str:
    """What production computes in, by ``/proc/cpuinfo``: a CPU that does not multiply bf16 takes 1.6 to 9 times as long as in
    float32 (a product with 1 to 256 rows, AVX2), and production left nothing of its core.  Its KV cache then has twice the bytes, for as many tokens."""
    flags = set(cpuinfo.split())
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"
