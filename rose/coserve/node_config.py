"""Settings of ``rose node``: what runs on this device, what it may take, and whom it reports to."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rose.config import Section
from rose.decisions.decision_config import DecisionConfig
from rose.errors import ConfigError
from rose.lineage import RUN_PATTERN
from rose.policy.admission import MOST_RESERVE, AdmissionParams, Rule
from rose.policy.baselines import make_lending
from rose.policy.lending import DEAD_AFTER_S, Lending, LendingParams
from rose.policy.lending_events import ALL_PAGES
from rose.wire.addresses import Addresses
from rose.wire.hosts import host_name, in_url, to_call

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+[^\s]*$", max_length=512)]
StoreUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s]+$", max_length=512)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]

HOST_RESERVE_BYTES = 512 << 20
"""Twice what a page pool of production leaves when it takes memory (``rose.coserve.pages.RESERVE_BYTES``)."""
GPU_RESERVE_BYTES = 2 << 30
"""Production's lazy kernels, activations and communication buffers."""


class ServingConfig(Section):
    """The production engine of this device.  Left out on a dedicated host: everything is lent."""

    slo_ttft_ms: Positive = 500.0
    """Time to the first token that production promises."""
    slo_tpot_ms: Positive = 150.0
    """Time between two tokens."""
    floor_pages: int = Field(default=0, ge=0)
    """Pages of 2 MiB that are never lent."""
    metrics_url: Url | None = None
    """Its Prometheus page, read every 10 s for its P99 on the dashboard; None = not shown."""


class EngineConfig(Section):
    """The rollout engine."""

    model: str = Field(min_length=1, max_length=4096)
    """Folder or name of the policy model."""
    served_model_name: str | None = Field(default=None, max_length=256)
    command: tuple[str, ...] = ("vllm", "serve")
    args: tuple[str, ...] = ()
    """Added behind ROSE's own; never put a secret here.  Beside production the size of the KV cache, eager mode and, on a GPU, the
    memory share follow from production's lease where nothing here says otherwise (a vLLM ``--config`` file is not looked into), and
    the schedule is synchronous: ``--async-scheduling`` is refused there."""
    warm: bool = False
    """Run it also while the mode is ``off``: it holds no KV memory then, but its weights and about 2 GB, and ``rose node on`` takes
    a tenth of a second instead of its start."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=1, le=65535)
    advertise_url: Url | None = None
    """How rose-scheduler reaches the engine; None = http://host:port, on the loopback where ``host`` is every address."""
    max_model_len: int = Field(gt=0)
    cores: tuple[int, ...] = ()
    sched: Literal["normal", "batch", "idle"] | None = None
    """Scheduling class; None = idle beside serving, normal on a dedicated host."""
    nice: int = Field(default=0, ge=0, le=19)
    log_path: Path | None = None
    """Of its output: the last 8 MiB, and as much before them in PATH.1.  None = ``logs/NODE_ID-engine.log`` in the cache folder, where the
    weights are by default."""
    profile: Path | None = None
    """Step times of this model on this device, from ``rose profile``; None = learn them while running."""
    start_timeout_s: Positive = 900.0
    stop_grace_s: float = Field(default=10.0, ge=0)
    allow_unmeasured: bool = False
    """Also start where the compatibility table says that nobody has measured it: on a GPU."""
    sm_share: Fraction = 0.5
    """CUDA: part of the device's SMs that it computes on, where the compute ladder has a rung that splits them."""
    compute_rung: Literal["host-gate", "green-context", "mps"] | None = None
    """CUDA: a rung of the compute ladder instead of the one it would choose, so that each can be measured.  ``mps`` needs ``allow_mps``;
    a green context without MPS shares no step's time: both engines still take time slices from each other."""
    allow_mps: bool = False
    """CUDA: be a client of a running MPS daemon, as production is.  A fault in a rollout kernel then ends production too."""
    mps_pipe_directory: Path | None = None
    """Of that daemon (CUDA_MPS_PIPE_DIRECTORY); None = our environment's, or CUDA's default."""
    max_restarts: int = Field(default=5, ge=0)
    """Within ``restart_window_s``; then the engine stays down for the window, and ``rose node status`` says so."""
    restart_window_s: Positive = 600.0
    restart_pause_s: Positive = 1.0
    """Before the first restart of a window, and twice the last before each further one; after a start that failed at least as
    long as it took.  At most the window."""

    def says(self, *options: str) -> bool:
        """Do :attr:`args` name one of ``options``?  vLLM takes ``--a-b``, ``--a_b`` and ``--a-b=value`` for one."""
        return any(arg.partition("=")[0].replace("_", "-") in options for arg in self.args)


class LendingConfig(Section):
    """See ``rose.policy.lending``; fractions are of the device's pages."""

    policy: Literal["rose", "paper", "static"] = "rose"
    """``static`` lends ``max_lend_pages`` for good; it and ``paper`` are there to be compared with."""
    max_lend_pages: int = Field(default=ALL_PAGES, ge=0)
    min_headroom_fraction: Fraction = 0.1
    growth_window_s: Positive = 3600.0
    use_window_s: Positive = 30.0
    reclaim_deadline_s: Positive | None = None
    """A cut that is not obeyed until then ends with the rollout engine's death.  None = twice its longest step of the last minutes,
    0.1 to 5 s (:mod:`rose.policy.deadlines`)."""
    backstop_s: Positive | None = None
    """From the kill to usable memory.  None = twice the longest that a killed engine took, 0.5 to 30 s."""
    period_s: Positive = 0.05
    grow_period_s: Positive = 0.5
    grow_step_fraction: Fraction = 0.2
    hysteresis_fraction: Fraction = 0.02
    cool_down_s: Positive = 2.0
    max_cuts: int = Field(default=4, ge=1)
    cut_window_s: Positive = 60.0
    dead_after_s: Positive = DEAD_AFTER_S
    max_hit_rate_loss: Fraction = 0.01
    """How much of production's prefix cache hits, in tokens of its prompts, a loan may cost; one point."""
    max_slo_breaches: int = Field(default=0, ge=0)
    """Switch off by itself after so many broken promises of production within ``slo_window_s``; 0 = never."""
    slo_window_s: Positive = 60.0

    def params(self) -> LendingParams:
        return LendingParams(
            **self.model_dump(exclude={"policy", "max_lend_pages", "max_slo_breaches", "slo_window_s"})
        )

    def make(self) -> Lending:
        """The policy that governs the device, live and simulated."""
        return make_lending(self.policy, self.params())


class DeviceConfig(Section):
    """The memory that both engines share, and what of it stays free."""

    kind: Literal["host", "gpu"] = "host"
    """Where the KV memory is: main memory, or a GPU whose driver is asked for its free figure."""
    gpu: int = Field(default=0, ge=0, le=1023)
    """As nvidia-smi numbers them."""
    reserve_bytes: int | None = Field(default=None, ge=0, le=1 << 46)
    """Never lent: less than it free, by the device's own word, is a cut.  None = 512 MiB of main memory, 2 GiB of a GPU."""

    @property
    def reserve(self) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return HOST_RESERVE_BYTES if self.kind == "host" else GPU_RESERVE_BYTES


class GateConfig(Section):
    """When a rollout step may start; see ``rose.policy.admission``."""

    rule: Literal["slack", "paper", "free"] = "slack"
    serialise: bool = False
    """Start no rollout step while a serving step runs."""
    stop_at_layers: bool = False
    """Where steps take turns: a rollout step that is under way waits between two layers while production owes a first token.  Not
    measured yet; needs an eager engine."""

    first_token_reserve: float = Field(default=0.0, ge=0, le=MOST_RESERVE)
    """Of production's limit for a first token, the share that rollout steps leave unspent, with the rule ``slack``: for requests that
    arrive behind the one that waits.  Missed its bar in its one live run (docs/evidence.md)."""

    def params(self, slo_ttft_ms: float = 0.0) -> AdmissionParams:
        """What the rollout engine asks with, before it knows how much of a step production waits for (``delay``)."""
        return AdmissionParams(
            rule=Rule[self.rule.upper()],
            serialise=self.serialise,
            first_token_reserve_s=self.first_token_reserve * slo_ttft_ms / 1e3,
        )


class SchedulerLink(Section):
    """rose-scheduler; left out, the engine is used by hand."""

    url: Url
    """Of the scheduler; or several with commas between them, its stand-by's too."""
    heartbeat_s: Positive = 0.5
    timeout_s: Positive = 5.0
    group: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    """Which part of the fleet this node is of, for ``rose fleet on --canary`` and the like; None = ``default``."""

    @field_validator("url")
    @classmethod
    def _is_the_daemon(cls, url: str) -> str:
        for each in url.split(","):
            if urlsplit(each.strip()).path.rstrip("/").endswith("/v1"):
                raise ValueError(
                    "ends with /v1, the endpoint for agents: a node wants the scheduler's address alone"
                )
        return url


class WeightsLink(Section):
    """Where new weights come from; left out, the engine keeps those it started with."""

    relay_url: StoreUrl
    """A relay, or several with commas between them, the nearest first, for when one does not answer; or any store that
    ``rose.weights.stores`` opens."""
    run_id: str = Field(pattern=f"^{RUN_PATTERN}$")
    """Whose policy the engine has until rose-scheduler gives the device to a job of another run."""
    public_key: str | None = Field(default=None, min_length=1, max_length=8192)
    """Whose signed weights are taken: ``ed25519:KEY``, several with spaces between them, or the path of a file of such lines.  None =
    the ``public_key`` of the token file."""
    signed: bool = True
    """False: take what the store names, whoever wrote it.  For a store that nobody but the trainer can write to."""
    max_policies: int = Field(default=4, ge=1, le=1024)
    """Host copies that are kept, of this run and of others that the device served: as many as the disk holds, least recently used
    out."""
    directory: Path | None = None
    """Host copy and update files, on a disk: 2.2 times the model, and once more for each update that takes it whole.  Nodes of one machine that
    name the same directory, and the same run, share the copy.  None = ``/var/cache/rose/weights/RUN_ID`` as root,
    ``rose/weights/RUN_ID`` in $XDG_CACHE_HOME (or ``~/.cache``) as another user, and below a systemd unit's CacheDirectory;
    never in the node directory, which is memory."""
    poll_s: Positive = 2.0
    """Longest wait of one long poll; the node ends no sooner than the poll in progress."""
    timeout_s: Positive = 300.0
    """Staging one version in the engine."""
    threads: int = Field(default=1, ge=1, le=256)
    """That decode a version, and that stage it in the engine, all its ranks together; beside serving they take its cores."""


class NodeDecisions(DecisionConfig):
    """What the lending policy and the rollout engine's book of chunks were told and what they decided, for ``rose replay``: about 2 kB
    a second.  The bounds are of each of the two."""

    directory: Path | None = None
    """Nodes may share one; None records nothing."""
    max_bytes: int = Field(default=16 * 2**20, ge=0)


def _first_mode(given: dict[str, Any]) -> Literal["observe", "on"]:
    """Production's memory is lent when somebody has said so, and not because a file left something out."""
    return "on" if given.get("serving") is None else "observe"


def _own_name(given: dict[str, Any]) -> str:
    """One file may be right for many hosts."""
    directory = given["dir"].name if "dir" in given else ""  # what is wrong with it is said of it
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{host_name() or 'localhost'}-{directory}")[:128]


class NodeConfig(Section):
    dir: Path
    """Shared with the serving engine (its ``ROSE_DIR``); best on tmpfs, for example /dev/shm/rose-gpu0."""
    node_id: str = Field(default_factory=_own_name, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Worker id at the scheduler, of this node alone.  Left out: the host's name and the last part of ``dir``, HOST-rose-gpu0."""
    token_file: Path | None = None
    """None = the file that ROSE_TOKEN_FILE names."""
    serving: ServingConfig | None = None
    mode: Literal["off", "observe", "on"] = Field(default_factory=_first_mode)
    """At start; ``rose node on|off|set`` changes it.  Left out: ``observe`` beside production, which measures and lends nothing, and ``on``
    where there is no ``[serving]``."""
    borrowed: bool = False
    """A training GPU: the engine has it only while its owner lends it (``rose node lend``, ``lend.node_dir`` of ``rose train``)."""
    engine: EngineConfig
    device: DeviceConfig = DeviceConfig()
    lending: LendingConfig = LendingConfig()
    gate: GateConfig = GateConfig()
    scheduler: SchedulerLink | None = None
    weights: WeightsLink | None = None
    decisions: NodeDecisions = NodeDecisions()

    @field_validator("dir")
    @classmethod
    def _of_no_working_directory(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError(
                "is relative, and an agent's working directory is a service's: give the whole path"
            )
        return path

    @model_validator(mode="after")
    def _one_owner(self) -> Self:
        if self.borrowed and self.serving is not None:
            raise ValueError("borrowed is for a device without [serving]: leave one of the two out")
        return self

    @model_validator(mode="after")
    def _synchronous_beside_production(self) -> Self:
        if self.serving is not None and self.engine.says("--async-scheduling"):
            # Its next step would be decided before the last has ended: one too early for the gate, and timed as another's.
            raise ValueError(
                "engine.args has --async-scheduling, with which the gate would let steps begin too early beside production:"
                " leave it out"
            )
        return self

    @property
    def tier(self) -> Literal["dedicated", "harvested", "borrowed"]:
        return "borrowed" if self.borrowed else "dedicated" if self.serving is None else "harvested"

    @property
    def engine_url(self) -> str:
        """How rose-scheduler reaches the engine."""
        return self.engine.advertise_url or f"http://{in_url(to_call(self.engine.host))}:{self.engine.port}"

    def require_reachable(self) -> None:
        """A scheduler on another host cannot call an engine on this one's loopback, or at no address (0.0.0.0): no turn would ever
        run here.

        Raises:
            ConfigError: It is told to.
        """
        link = self.scheduler
        far = [] if link is None else [url for url in Addresses(link.url).all if not _is_here(url)]
        if far and _is_here(self.engine_url):
            raise ConfigError(
                f"{self.engine_url} cannot be reached by the scheduler at {far[0]}",
                field="engine.advertise_url",
                fix='engine.host = "0.0.0.0" and engine.advertise_url = "http://THIS_HOST:PORT"',
            )

    @property
    def socket_path(self) -> Path:
        return self.dir / "agent.sock"

    @property
    def weights_dir(self) -> Path:
        if self.weights is not None and self.weights.directory is not None:
            return self.weights.directory
        run_id = self.node_id if self.weights is None else self.weights.run_id
        return cache_directory() / "weights" / run_id


def _is_here(url: str) -> bool:
    """Whoever calls it reaches its own host."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def cache_directory(env: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """Where this user's programs keep what can be fetched again.  ``env``, ``uid``: None = ours."""
    env, uid = os.environ if env is None else env, os.geteuid() if uid is None else uid
    given, home = env.get("CACHE_DIRECTORY", "").partition(":")[0], env.get("XDG_CACHE_HOME", "")
    if given.startswith("/"):
        return Path(given)  # systemd's: made for this unit, and of its user
    if uid == 0:
        return Path("/var/cache/rose")
    return (Path(home) if home.startswith("/") else Path(env.get("HOME", "/nonexistent")) / ".cache") / "rose"
