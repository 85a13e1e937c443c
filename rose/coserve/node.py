"""The node as its agent holds it: what runs on the device, what an operator has set, and why the engine may not run.

The agent (:mod:`rose.coserve.agent`) acts on it, :mod:`rose.coserve.report` tells others about it; nothing here starts, writes or sends.
"""

from __future__ import annotations

import logging
import time

from rose.coserve.audit import ResidentAudit
from rose.coserve.device import DeviceView, FreeFigure
from rose.coserve.engine import RolloutEngine
from rose.coserve.engine_args import says_kv_size, says_memory_share, weights_bytes
from rose.coserve.free_memory import GpuMemory
from rose.coserve.latency import ServingLatency
from rose.coserve.links import SchedulerUplink, WeightLoop
from rose.coserve.node_config import NodeConfig
from rose.coserve.node_dir import NodeDir, core_dirs
from rose.coserve.records import Mode, Phase
from rose.errors import ConfigError
from rose.policy.compat import Support, row_of_number
from rose.policy.engine_start import EngineSize, is_outgrown, kv_pages, memory_share
from rose.policy.lending import Lending
from rose.policy.watch import Harvestable, SloGuard
from rose.units import PAGE_BYTES, format_bytes, format_s
from rose.wire.workers import HeartbeatAnswer

logger = logging.getLogger("rose.node")


class Node:
    """The parts of a node and its settings in force.

    Args:
        changed_at_s: When the configuration was written last, seconds since the epoch; of one that has no file, never.
    """

    def __init__(self, config: NodeConfig, changed_at_s: float = 0.0) -> None:
        self.config = config
        self.changed_at_s = changed_at_s
        self.dir = NodeDir(config.dir)
        self.engine = RolloutEngine(config)
        self.policy: Lending = config.lending.make()
        self.policy_name: str = config.lending.policy
        gate = config.gate.params()
        self.rule, self.serialise = gate.rule, gate.serialise
        self.stop_at_layers = config.gate.stop_at_layers
        self.first_token_reserve = config.gate.first_token_reserve
        if problem := self.no_stops(self.serialise, self.stop_at_layers):
            raise ConfigError(problem, field="gate.stop_at_layers", fix="gate.serialise = true")
        serving = config.serving
        self.mode = Mode[config.mode.upper()]
        self.floor_pages = serving.floor_pages if serving else 0
        self.max_lend_pages = config.lending.max_lend_pages
        self.slo_ttft_ms = serving.slo_ttft_ms if serving else 0.0
        self.slo_tpot_ms = serving.slo_tpot_ms if serving else 0.0
        self.want_engine = True
        self.assignment = HeartbeatAnswer()
        """Whom rose-scheduler wants this device to serve, by its last answer."""
        self.told = config.scheduler is None or config.serving is None
        """rose-scheduler has said whether the fleet is on, or has no say: until then production's device is held."""
        self.released_because = ""
        """Why nothing is lent to this device's engine, which stays where it is, whatever the mode: its owner has the device, the fleet is
        switched off, no job wants it, the agent is stopping.  "": nothing of the kind."""
        self.lent_until_s: float | None = None
        """Of a borrowed device, by the monotonic clock; None: its owner has not lent it yet."""
        self.errors: dict[str, str] = {}
        self.device = DeviceView(self.dir, self.errors)
        self.free = FreeFigure(config.device.reserve, self.errors)
        self.audit = ResidentAudit(self.dir)
        self.uplink: SchedulerUplink | None = None
        self.weights: WeightLoop | None = None
        metrics_url = None if serving is None else serving.metrics_url
        self.latency = None if metrics_url is None else ServingLatency(metrics_url)
        self.observed = Harvestable()
        self.slo_guard = SloGuard(config.lending.max_slo_breaches, config.lending.slo_window_s)
        self.epoch = 0

    @property
    def released(self) -> bool:
        return bool(self.released_because)

    def no_stops(self, turns: bool, stops: bool) -> str:
        """Why steps cannot stop at layers; "" where they can, or need not.  On a GPU the engine's rung says whether steps take turns."""
        if not stops or turns or self.config.device.kind == "gpu":
            return ""
        return "is for steps that take turns; beside others the kernel stops them sooner"

    @property
    def breaches_while_lending(self) -> int:
        """Promises that production broke while something was lent."""
        return self.slo_guard.total

    @property
    def switched_off(self) -> str | None:
        """Which of its own watches ended the lending; None: none, or an operator has switched it on again."""
        kinds = ("slo", "audit") if self.mode == Mode.OFF else ()
        return next((kind for kind in kinds if self.errors.get(kind, "").startswith("off: ")), None)

    @property
    def wants_engine(self) -> bool:
        """Should its process be there?  Mode off leaves one that is, and starts none."""
        warm = self.mode == Mode.OFF and self.config.engine.warm
        return self.want_engine and (self.mode == Mode.ON or warm)

    @property
    def lent_s(self) -> float | None:
        """How much longer a borrowed device is lent; None of one that is not borrowed."""
        if not self.config.borrowed:
            return None
        return max(0.0, (self.lent_until_s or 0.0) - time.monotonic())

    @property
    def unnamed_production(self) -> str:
        """Why nothing may be lent or held: a production engine lives here that node.toml does not name; "" where none does."""
        if self.config.serving is not None or not self.device.serving_is_there():
            return ""
        return f"a production engine lives in {self.config.dir}, and node.toml has no [serving]"

    def waits_for(self) -> str | None:
        """Why the engine may not be started now: it takes nothing of the device before an operator says ``on``, and serving
        sizes its memory first."""
        if not self.wants_engine:
            return f"mode is {self.mode.name.lower()}" if self.want_engine else "an operator stopped it"
        if self.config.serving is not None and (reason := self._waits_for_serving()) is not None:
            return reason
        if reason := self.unnamed_production:
            return reason
        if self.lent_s == 0.0:
            return "its owner does not lend it now"
        if self.engine.restarts.is_refused:
            return "it is refused with these settings: mend them and start the agent again (`rose node off` and `on` tries it once more)"
        left_s = self.engine.restarts.next_start_s - time.monotonic()
        return f"a pause of {format_s(left_s)} before it is started again" if left_s > 0 else None

    def _waits_for_serving(self) -> str | None:
        lease, engine = self.device.lease, self.config.engine
        for name in ("serving.lease", "serving.board"):
            if name in self.errors:  # another version's, or damaged
                return self.errors[name]
        if lease is None or not self.device.serving_alive():
            if cores := core_dirs(self.config.dir):
                return f"serving is not there; engine cores of one command have used {' and '.join(cores)} below, each of which takes an agent of its own"
            return "serving is not there"
        if lease.phase == Phase.OFF:
            because = row_of_number(lease.row)
            found = f" ({text})" if (text := self.device.found()) else ""
            return f"serving does not share: {because.feature}{found}: {because.reason}"
        if lease.phase != Phase.READY:
            return "serving is not ready"
        if self.could_lend_pages is None and not says_kv_size(engine):
            return "compute only: lending.max_lend_pages is not set, and nobody else knows what the device has left"
        free_bytes, num_bytes = self.free.num_bytes, weights_bytes(engine.model)
        if (
            free_bytes is not None
            and num_bytes is not None
            and free_bytes - self.free.reserve_bytes < num_bytes
        ):
            left = max(0, free_bytes - self.free.reserve_bytes)
            return f"the device has {format_bytes(left)} beside its reserve, the policy's weights are {format_bytes(num_bytes)}"
        return None

    @property
    def could_lend_pages(self) -> int | None:
        lease = self.device.lease
        if lease is None:
            return None
        compute_only = lease.support == Support.COMPUTE_ONLY
        return kv_pages(
            total_pages=lease.total_pages, compute_only=compute_only, max_lend_pages=self.max_lend_pages
        )

    def outgrown(self) -> str | None:
        """Why an engine that was started beside another production is too small for this one; None: it is not.

        Too large does not matter: addresses that nothing is lent behind cost nothing.
        """
        size, lease = self.engine.size, self.device.lease
        if size is None or lease is None or lease.phase != Phase.READY or says_kv_size(self.config.engine):
            return None
        pages, made_for = self.could_lend_pages or 0, size.kv_bytes // PAGE_BYTES
        if not is_outgrown(pages=pages, made_for=made_for) or not self.device.serving_alive():
            return None
        return f"its KV memory is of {made_for} pages, and production could lend {pages} now"

    def engine_size(self) -> EngineSize | None:
        """What the engine may take beside production; None on a dedicated device.

        Raises:
            ConfigError: A policy that does not fit beside production, or of unknown size, on a GPU.
        """
        if self.config.serving is None:
            return None
        memory, engine, share = self.free.memory, self.config.engine, None
        if isinstance(memory, GpuMemory) and not says_memory_share(engine):
            share = memory_share(
                weights_bytes=weights_bytes(engine.model),
                device_bytes=memory.total_bytes(),
                free_bytes=memory.free_bytes() - self.free.reserve_bytes,
            )
        return EngineSize(kv_bytes=(self.could_lend_pages or 0) * PAGE_BYTES, memory_share=share)
