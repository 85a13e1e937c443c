"""The quickstarts of ``docs/quickstart/`` as they stand, in one shell and in the order that they name: the fleet's to the rollout
engine, agents and training on it, then the fleet's end.

Only the ports are changed, to free ones; ``~`` is a folder of the test, with vLLM's cache of models in its own place.  Production is the installed ``vllm``; the rollout engine, which
the node agent starts by the same name, is the same program with one import for all of its processes.  It is started in the idle class and lifted
out of it: beside another test it would not be up in five minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rose.auth import Tokens
from rose.errors import RoseError
from rose.node_client import ControlClient
from rose.proc import free_port
from tests.engine_launcher import SERVE_COMMAND

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "quickstart"
PORTS = ("8000", "8100", "8470", "8800")
MARK = "=== {}"


def blocks(page: str) -> list[str]:
    found = re.findall(r"^```bash\n(.*?)^```$", (PAGES / page).read_text(), re.S | re.M)
    assert len(found) == len(re.findall(r"^```", (PAGES / page).read_text(), re.M)) / 2
    return found


def script() -> str:
    """Every block of every page, once, with a line before each page's part."""
    fleet, agents, training = blocks("fleet.md"), blocks("agents.md"), blocks("training.md")
    parts = {"fleet": fleet[:3], "agents": agents, "training": training, "switch off": fleet[3:4]}
    parts["end"] = fleet[4:]
    text = "".join(f"echo '{MARK.format(name)}'\n{''.join(part)}\n" for name, part in parts.items())
    for port in PORTS:
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    return text


def write_vllm(folder: Path) -> None:
    """A ``vllm`` that is the installed one where production asks, and :data:`SERVE_COMMAND` for others: half a minute of imports less."""
    installed = shutil.which("vllm", path=str(Path(sys.executable).parent))
    assert installed is not None
    assert SERVE_COMMAND[-1] == "serve"
    script = folder / "vllm"
    script.write_text(
        "#!/bin/sh\n"
        f'[ "$ROSE_ROLE" = serving ] && exec {shlex.quote(installed)} "$@"\n'
        f'export PYTHONPATH={shlex.quote(str(ROOT))}\nexec {shlex.join(SERVE_COMMAND[:-1])} "$@"\n'
    )
    script.chmod(0o700)


class Lift(threading.Thread):
    """``rose node set --sched normal`` once the rollout engine is being started."""

    def __init__(self, home: Path) -> None:
        super().__init__(daemon=True)
        self._dir, self._tokens = home / "rose-quickstart/node", home / "rose-quickstart/tokens.toml"
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(RoseError):  # there is no agent yet, or the kernel asks for patience
                if self._lifted(ControlClient(self._dir, Tokens.load(self._tokens, ["node"]))):
                    return

    def _lifted(self, agent: ControlClient) -> bool:
        with contextlib.closing(agent):
            if agent.status()["engine"]["pid"] is None:
                return False
            agent.set(sched="normal")
            return True

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each part printed."""
    home = tmp_path_factory.mktemp("home")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("ROSE_", "VLLM_", "RAY_"))
    }
    env |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    # In a new home vLLM would look at each class of models again, in a process of its own (tests/model_infos.py).
    env["VLLM_CACHE_ROOT"] = os.environ.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm")
    commands = tmp_path_factory.mktemp("commands")
    write_vllm(commands)
    env["PATH"] = f"{commands}:{Path(sys.executable).parent}:{env['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script()],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lift = Lift(home)
    try:
        output, _ = shell.communicate(timeout=560)
    except subprocess.TimeoutExpired as late:
        tails = {path.name: path.read_text()[-1500:] for path in (home / "rose-quickstart").glob("*.log")}
        pytest.fail(f"not done: {(late.output or b'')[-3000:]!r}\n{tails}")
    finally:
        lift.end()
        left = [each for each in psutil.process_iter() if _session(each) == shell.pid]
        for each in left:
            each.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=10)
    assert shell.returncode == 0, output[-4000:]
    return dict(re.findall(r"^=== ([^\n]+)\n(.*?)(?=^===|\Z)", output, re.S | re.M))


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def test_a_fleet_operator_sees_the_engine_ready_and_gets_all_memory_back(said: dict[str, str]) -> None:
    assert re.search(r"^observed  over .* could be lent", said["fleet"], re.M)
    assert re.search(r"^engine +ready, version ", said["fleet"], re.M)
    assert '"completion_tokens":16' in said["fleet"].replace(" ", "")
    assert "all memory is back" in said["switch off"]
    assert "Done: production has all its memory again and was never restarted." in said["switch off"]


def test_an_agent_author_s_turn_is_recorded(said: dict[str, str]) -> None:
    assert re.search(r"^Done: \d+ tokens are recorded with their log-probs, by here\.$", said["agents"], re.M)


def test_an_rl_engineer_trains_and_publishes_from_a_trainer_of_their_own(said: dict[str, str]) -> None:
    assert re.findall(r"^step (\d): (\d+) sequences$", said["training"], re.M) == [("0", "8"), ("1", "8")]
    assert re.search(r"^engine +ready, version 2\.2", said["training"], re.M)


def test_nothing_is_left_when_the_last_line_has_run(
    said: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "end" in said
    assert not list(tmp_path_factory.getbasetemp().glob("home*/rose-quickstart"))


def test_the_readme_links_to_every_quickstart() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"(docs/quickstart/{page.name})" in readme for page in PAGES.glob("*.md"))
