"""``rose doctor``: what would run here, which row of the compatibility table decides, what to do.

Two halves.  This host: :mod:`rose.coserve.host_checks`.  The engines, production's by its command line and the rollout engine of a
``node.toml``: the plugin answers in a process of its own, with the Python that the ``vllm`` command runs in
(``python -m vllm_plugin.doctor``; only the plugin imports vLLM), and starts nothing.

Decides nothing itself, changes nothing, and needs none of its parts: what is missing is a line of the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rose.config import load_config
from rose.coserve.device import DeviceView
from rose.coserve.engine import RolloutEngine
from rose.coserve.engine_args import says_kv_size, says_memory_share, weights_bytes
from rose.coserve.free_memory import GpuMemory
from rose.coserve.host_checks import (
    SHARED_MEMORY,
    Check,
    Level,
    check_cgroups,
    check_cores,
    check_dedicated,
    check_directory,
    check_engine_files,
    check_gpu,
    check_idle_class,
    check_kernel,
    check_memory,
    check_production,
    check_relay,
    check_scheduler,
    check_shared_memory,
    check_tokens,
    of_error,
)
from rose.coserve.node_config import DeviceConfig, NodeConfig
from rose.coserve.node_dir import MAX_CORES, NodeDir, core_dir, is_core_dir
from rose.coserve.records import Phase
from rose.errors import ConfigError, LedgerError
from rose.policy.engine_start import EngineSize, kv_pages, memory_share
from rose.proc import find_program
from rose.units import PAGE_BYTES, format_bytes

PRODUCTION, ROLLOUT = "production engine", "rollout engine"
ENGINE_S = 600.0
"""The longest that one engine's answer may take; importing vLLM is most of it."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Options of env: behind the first its own words go on, the others take the next one.
_ENV_SPLITS = re.compile(r"-[0iv]*S|--split-string=?")
_ENV_TAKES_ONE = re.compile(r"-[0iv]*[uCa]|--(unset|chdir|argv0)")
_SHELL_WRAPPER = re.compile(rb"^'''exec' \"?([^\"\s]+)\"? ", re.M)
_MOVABLE_WRAPPER = re.compile(rb"""^'''exec' "\$\(dirname .*\)"?/'?([^/'"\s]+)['"]? "\$0" """, re.M)
"""Of an environment that can be moved: its Python is named by where the script is."""
_HEAD_BYTES = 4096
_LEVELS = {"elastic": Level.OK, "compute-only": Level.WARN, "refused": Level.FAIL}
_STYLES = {
    Level.OK: ("ok", "green"),
    Level.WARN: ("less", "yellow"),
    Level.FAIL: ("no", "bold red"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line of ``vllm serve``, taken apart.  ``env``: what stands before it, as a shell has it."""

    python: str
    args: tuple[str, ...]
    env: Mapping[str, str | None]


def parse_command(words: Sequence[str]) -> Command:
    """``[NAME=VALUE...] vllm serve ARGS`` or ``python -m ... serve ARGS``.

    Raises:
        ConfigError: It is neither, or its program is not there.
    """
    env: dict[str, str | None] = {}
    left = list(words)
    while left and _ASSIGNMENT.match(left[0]):
        name, _, env[name] = left.pop(0).partition("=")
    program = left[0] if left else ""
    at = 3 if left[1:2] == ["-m"] else 1
    if left[at : at + 1] != ["serve"]:
        raise ConfigError(
            f"'{' '.join(left[: at + 1])}' does not begin a server of vLLM's",
            field="command",
            fix="rose doctor -- vllm serve MODEL ARGS...",
        )
    return Command(python=interpreter_of(program), args=tuple(left[at + 1 :]), env=env)


def interpreter_of(program: str) -> str:
    """The Python that a console script runs in; ours where it is no such script.

    Raises:
        ConfigError: There is no such program.
    """
    path = find_program(program)
    if path is None:
        raise ConfigError(
            f"'{program}' is no program here", field="command", fix="name it as production starts it"
        )
    if Path(program).name.startswith("python"):
        return program
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if beside := _MOVABLE_WRAPPER.search(head):
        return os.path.join(os.path.dirname(os.path.realpath(path)), os.fsdecode(beside[1]))
    if wrapped := _SHELL_WRAPPER.search(head):
        return os.fsdecode(wrapped[1])
    if not head.startswith(b"#!"):
        return sys.executable
    found = _shebang_program(os.fsdecode(head[2:].partition(b"\n")[0]).split())
    return found if "python" in Path(found).name else sys.executable


def _shebang_program(words: list[str]) -> str:
    """What a first line of these words starts: its first, or what ``env`` is told to start; "" where that is nothing."""
    if not words or Path(words[0]).name != "env":
        return words[0] if words else ""
    left = words[:0:-1]  # the next is the last
    while left:
        word = left.pop()
        if split := _ENV_SPLITS.match(word):
            left += [rest] if (rest := word[split.end() :]) else []
        elif _ENV_TAKES_ONE.fullmatch(word):
            left[-1:] = []
        elif not word.startswith("-") and not _ASSIGNMENT.match(word):
            return word
    return ""


# --------------------------------------------------------------------------- engines


def ask_engine(role: str, command: Command) -> dict[str, Any]:
    """The plugin's word on an engine, ``vllm_plugin.doctor.SupportVerdict`` as JSON has it; a ``problem`` where it cannot be had."""
    env = {**os.environ, **command.env}
    env.pop("ROSE_ROLE", None)  # nothing of ours may be applied to what is looked at
    env.pop("ROSE_TOKEN_FILE", None)
    answers = os.memfd_create("rose-doctor")
    try:
        done = subprocess.run(
            # -P: what lies in this directory is not what vLLM's environment has
            [command.python, "-P", "-m", "vllm_plugin.doctor", str(answers)],
            input=json.dumps([{"role": role, "args": command.args}]),
            env={name: value for name, value in env.items() if value is not None},
            pass_fds=(answers,),
            stdout=subprocess.DEVNULL,  # vLLM's log; it may hold what nobody should see
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=ENGINE_S,
            check=False,
        )
        text = os.pread(answers, 1 << 20, 0)
        found = json.loads(text)
        if isinstance(found, dict):
            return found
        problem = f"{command.python} answers nonsense"
    except subprocess.TimeoutExpired:
        problem = f"{command.python} did not answer within {ENGINE_S:.0f} s"
    except OSError as error:
        problem = f"{command.python} cannot be started: {error.strerror}"
    except ValueError:
        problem = f"{command.python} -m vllm_plugin.doctor ended with {done.returncode} and no answer: is ROSE installed there?"
    finally:
        os.close(answers)
    return {
        "support": None,
        "problem": problem,
        "fix": "pip install ROSE's checkout where vLLM is",
        "rows": [],
    }


def engine_checks(name: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    """An engine's lines: the deciding row, then whatever else it touches."""
    support, rows = answer["support"], answer["rows"]
    if answer["problem"]:
        yield Check(level=Level.FAIL, name=name, says=answer["problem"], fix=answer["fix"])
    for place, row in enumerate(rows):
        found = f" ({row['found']}{', predicted' if row['predicted'] else ''})" if row["found"] else ""
        says = f"{row['feature']}{found}: {row['reason']}"
        if place == 0:
            lends = _lendable(answer) if name == PRODUCTION else ""
            yield Check(level=_LEVELS[support], name=name, says=f"{support}{lends}. {says}", fix=row["fix"])
        elif row["support"] != "elastic":
            yield Check(
                level=_LEVELS[row["support"]],
                name=name,
                says=f"also {row['support']}: {says}",
                fix=row["fix"],
            )
    for note in answer.get("notes", ()):
        yield Check(level=Level.WARN, name=name, says=note)


def _lendable(answer: Mapping[str, Any]) -> str:
    pages = answer.get("lendable_pages")
    if not pages:
        return ""
    return f", at most {format_bytes(pages * PAGE_BYTES)} of {format_bytes(answer['total_pages'] * PAGE_BYTES)} KV memory lent"


def rollout_plan(
    config: NodeConfig, production: Mapping[str, Any] | None
) -> tuple[Command | None, list[Check]]:
    """The rollout engine's command line as the agent would start it, and what would keep it from that.

    Args:
        production: The plugin's word on production; None: it was not asked.
    """
    engine, found = config.engine, list[Check]()
    pages, total = None, production.get("total_pages") if production is not None else None
    if config.serving is not None and production is not None and production["support"] is not None:
        refused, compute_only = (production["support"] == word for word in ("refused", "compute-only"))
        pages = kv_pages(
            total_pages=total or 0,
            compute_only=compute_only,
            max_lend_pages=config.lending.max_lend_pages,
        )
        if refused:
            found.append(
                Check(
                    level=Level.FAIL,
                    name=ROLLOUT,
                    says="not started beside production that is refused",
                    fix="see the production engine's own lines",
                )
            )
        if pages is None and not says_kv_size(engine):
            found.append(
                Check(
                    level=Level.FAIL,
                    name=ROLLOUT,
                    says="not started beside production that is compute-only: nobody knows what the device has left",
                    fix="set lending.max_lend_pages",
                )
            )
    share = None
    if config.serving is not None and config.device.kind == "gpu" and not says_memory_share(engine):
        try:
            gpu = GpuMemory(config.device.gpu)
            left, why_not = _left_by_production(config, gpu, production)
            total_bytes = gpu.total_bytes()
            share = memory_share(
                weights_bytes=weights_bytes(engine.model),
                device_bytes=total_bytes,
                free_bytes=total_bytes if left is None else left - config.device.reserve,
            )
            if left is None:
                says = f"whether it fits beside production was not judged: {why_not}"
                found.append(Check(level=Level.OK, name=ROLLOUT, says=says))
        except ConfigError as error:
            found.append(of_error(ROLLOUT, error))
        except LedgerError:
            pass  # the GPU's own line says it
    size = EngineSize(kv_bytes=pages * PAGE_BYTES, memory_share=share) if pages else None
    spec = RolloutEngine(config).planned(size)
    if find_program(engine.command[0]) is None:
        says = f"'{engine.command[0]}' is no program here"
        found.append(Check(level=Level.FAIL, name=ROLLOUT, says=says, fix="engine.command = its path"))
        return None, found
    try:
        command = parse_command(spec.argv)
    except ConfigError as error:
        found.append(Check(level=Level.FAIL, name="engine.command", says=error.message))
        return None, found
    return Command(python=command.python, args=command.args, env=dict(spec.env)), found


def _left_by_production(
    config: NodeConfig, gpu: GpuMemory, production: Mapping[str, Any] | None
) -> tuple[int | None, str]:
    """Bytes of the GPU that production leaves; None where that cannot be told, and why.

    What is free at this moment says so only beside a production that is up, and before our own engine is there.
    """
    view = DeviceView(NodeDir(config.dir), {})
    view.look()
    if view.rollout_alive():
        return None, "it runs already"
    if view.serving_alive() and view.lease is not None and view.lease.phase is not Phase.STARTING:
        return gpu.free_bytes(), ""
    share = production.get("memory_share") if production is not None else None
    if share is None:
        return (
            None,
            "production does not run, and its command line does not say what part of the GPU it takes",
        )
    return int(gpu.total_bytes() * (1 - share)), ""


# --------------------------------------------------------------------------- all of it


def examine(config_path: Path | None, words: Sequence[str]) -> dict[str, Any]:
    """Look at everything that is there to be looked at; the whole answer as ``--json`` prints it.

    Raises:
        ConfigError: ``words`` are no command line of ``vllm serve``, or its program is not there.
    """
    command = parse_command(words) if words else None
    checks: list[Check] = []
    config: NodeConfig | None = None
    if config_path is not None:
        try:
            config = load_config(NodeConfig, config_path)
            checks.append(Check(level=Level.OK, name="node.toml", says=f"{config_path} is well-formed"))
        except ConfigError as error:
            checks.append(of_error("node.toml", error))
    engines: dict[str, Any] = {}
    if command is not None:
        engines["production"] = ask_engine("serving", command)
    checks += _host(config, command, engines.get("production", {}).get("num_cores"))
    if command is not None:
        checks += engine_checks(PRODUCTION, engines["production"])
    elif config is None or config.serving is not None:
        says = "not looked at: its command line was not given"
        checks.append(
            Check(level=Level.OK, name=PRODUCTION, says=says, fix="rose doctor -- vllm serve MODEL ARGS...")
        )
    if config is not None:
        plan, found = rollout_plan(config, engines.get("production"))
        checks += found
        if plan is not None:
            engines["rollout"] = ask_engine("rollout", plan)
            checks += engine_checks(ROLLOUT, engines["rollout"])
    checks.sort(key=lambda one: -one.level)
    return {
        "ok": not any(one.level is Level.FAIL for one in checks),
        "engines": engines,
        "checks": [
            {"level": one.level.name.lower(), "name": one.name, "says": one.says, "fix": one.fix}
            for one in checks
        ],
    }


def _line(config: NodeConfig | None, command: Command) -> Iterator[Check]:
    """What production's own command line says against being shared, that no engine's answer tells."""
    role = command.env.get("ROSE_ROLE")
    if role not in (None, "serving"):
        yield Check(
            level=Level.FAIL,
            name="ROSE_ROLE",
            says=f"'{role}' is not production's role: it would serve as without ROSE, and lend nothing",
            fix="ROSE_ROLE=serving",
        )
    elif role and not (command.env.get("ROSE_DIR") or os.environ.get("ROSE_DIR")):
        yield Check(
            level=Level.FAIL,
            name="ROSE_DIR",
            says="is not set: production would serve as without ROSE, and lend nothing",
            fix="ROSE_DIR=DIR in front of the command, the dir of node.toml",
        )
    serving = config.serving if config is not None else None
    if serving is not None and serving.metrics_url is not None and "--disable-log-stats" in command.args:
        yield Check(
            level=Level.WARN,
            name="serving.metrics_url",
            says="with --disable-log-stats production's metrics page has no latencies: no P99 is shown, and a canary stage of `rose fleet on` is never followed",
            fix="start production without --disable-log-stats",
        )


def _host(config: NodeConfig | None, command: Command | None, num_cores: int | None) -> Iterator[Check]:
    """Lines on this machine.  ``num_cores``: of production, as the plugin says it; None: nobody can say."""
    told = (command.env.get("ROSE_DIR") if command is not None else None) or os.environ.get("ROSE_DIR")
    directory = config.dir if config is not None else Path(told) if told else None
    mine = command.env.get("ROSE_DIR") if command is not None else None
    if command is not None:
        yield from _line(config, command)
    if config is not None and command is not None and mine:
        yield from _same_directory(config, mine, num_cores)
    scratch = directory.parent if directory is not None and directory.parent.is_dir() else SHARED_MEMORY
    yield check_kernel(scratch if os.access(scratch, os.W_OK) else SHARED_MEMORY)
    yield check_idle_class()
    yield check_cgroups()
    yield check_shared_memory()
    yield check_cores(config.engine.cores if config is not None else ())
    yield check_memory(config.device if config is not None else DeviceConfig())
    yield from check_gpu(config)
    if directory is not None:
        yield from check_directory(directory)
        if config is not None and config.serving is None:
            yield from check_dedicated(directory, mine or "")
        if command is not None:
            yield from check_production(Path(mine) if mine else directory)
    else:
        yield Check(
            level=Level.OK, name="node directory", says="not looked at: none was named", fix="set ROSE_DIR"
        )
    token_file = config.token_file if config is not None else None
    if config is None and not os.environ.get("ROSE_TOKEN_FILE"):
        yield Check(
            level=Level.OK, name="token file", says="not looked at: none was named", fix="set ROSE_TOKEN_FILE"
        )
        return
    check, tokens = check_tokens(token_file)
    yield check
    if config is None:
        return
    yield from check_engine_files(config)
    if tokens is None:
        if config.scheduler is not None or config.weights is not None:
            says = "not asked: they want a token"
            yield Check(level=Level.WARN, name="scheduler, relay", says=says, fix="see the token file's line")
        return
    if config.scheduler is not None:
        yield check_scheduler(config.scheduler, tokens)
    if config.weights is not None:
        yield check_relay(config.weights, tokens)


def _same_directory(config: NodeConfig, told: str, num_cores: int | None) -> Iterator[Check]:
    """Whether the agent is where production is.  ``told``: production's ``ROSE_DIR``; None: any number of cores may be."""
    several = num_cores is not None and num_cores > 1
    same = os.path.abspath(told) == os.path.abspath(config.dir)
    below_it = is_core_dir(config.dir, told, MAX_CORES if num_cores is None else num_cores)
    if (below_it and num_cores != 1) or (same and not several):
        return
    below = f", with a directory below for each of its {num_cores} engine cores" if several else ""
    yield Check(
        level=Level.FAIL,
        name="node directory",
        says=f"production's ROSE_DIR is {told}{below}; dir of node.toml is {config.dir}: neither would see the other",
        fix=(
            f'dir = "{core_dir(told, 0)}" for the first engine core, dp1 for the second, and so on'
            if several
            else "name one directory in both"
        ),
    )


def doctor(config_path: Path | None, words: Sequence[str], *, as_json: bool) -> int:
    """Print what :func:`examine` finds; 0: all can run, 1: something would be refused or fail."""
    if as_json:
        found = examine(config_path, words)
        Console(soft_wrap=True).print_json(json.dumps(found))
        return 0 if found["ok"] else 1
    with Console(stderr=True).status("looking; vLLM takes its time to answer"):
        found = examine(config_path, words)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "says", "do"):
        table.add_column(heading, overflow="fold")  # what is to be done must be whole
    for check in found["checks"]:
        word, style = _STYLES[Level[check["level"].upper()]]
        table.add_row(
            f"[{style}]{word}[/]", escape(check["name"]), escape(check["says"]), escape(check["fix"])
        )
    Console().print(table)
    return 0 if found["ok"] else 1
