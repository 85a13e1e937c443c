"""``rose demo`` with small stand-ins for its programs: real processes, real signals, no engine.

``python mini_demo.py OUT BASE_PORT RUN_DIRECTORY`` runs the orchestrator over those of ``mini_programs.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rose.demo import programs, run
from rose.demo.demo_config import load_demo_config
from rose.demo.supervisor import Program
from rose.evaluation import arrivals

PROGRAMS = Path(__file__).with_name("mini_programs.py")
PERIOD_S = 2.0
arrivals.QUIET_TAIL_S = 0.5
"""The stand-in of production has no backlog that would run into the next period: periods may be as short as that."""


class MiniPlan(programs.DemoPlan):
    """The real plan with other programs; what is not replaced is the real thing (the traffic sender)."""

    def _mine(self, program: Program, *argv: str) -> Program:
        spec = self._other(program.spec.name, (sys.executable, str(PROGRAMS), *argv))
        return Program(
            spec=spec, ready=program.ready, timeout_s=240.0, restarts=program.restarts, task=program.task
        )

    def models(self) -> Program:
        code = f'import pathlib; pathlib.Path({str(self._models_path)!r}).write_text(\'["/p", "/q"]\')'
        return Program(spec=self._other("models", (sys.executable, "-c", code)), task=True)

    def relay(self) -> Program:
        return self._mine(super().relay(), "serve", str(self.config.port("relay")))

    def scheduler(self) -> Program:
        return self._mine(super().scheduler(), "serve", str(self.config.port("scheduler")))

    def production(self) -> Program:
        return self._mine(super().production(), "serve", str(self.config.port("production")))

    def dedicated(self) -> Program:
        return self._mine(super().dedicated(), "serve", str(self.config.port("dedicated")))

    def harvested(self) -> Program:
        return self._mine(super().harvested(), "serve", str(self.config.port("harvested")))

    def train(self) -> Program:
        return self._mine(super().train(), "train", str(self.steps_path), str(self.phase_path))

    def node_command(self, command: str) -> Program:
        spec = self._other(f"node {command}", (sys.executable, "-c", "pass"))
        return Program(spec=spec, timeout_s=10.0, task=True)


def main(out: str, base_port: str, run_directory: str) -> int:
    programs.DemoPlan = MiniPlan  # type: ignore[misc]
    given = {
        "out": Path(out),
        "base_port": int(base_port),
        "run_directory": Path(run_directory),
        "num_pairs": 2,
        "traffic.period_s": PERIOD_S,
        "traffic.mean_rate_hz": 12.0,
    }
    return run.run_demo(load_demo_config(None, given))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
