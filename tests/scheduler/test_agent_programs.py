"""Claude Code and Codex themselves, where their programs are installed: ``npm install -g @anthropic-ai/claude-code @openai/codex``.

Each does a small task with a tool of its own, with a sub-agent and without, and sees nothing but our endpoint.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.train.batch import samples_of
from tests.scheduler.conftest import World
from tests.scheduler.speaker import Speaker, Speech

CLAUDE, CODEX = shutil.which("claude"), shutil.which("codex")
SUB_TASK = "Report what the file says."
SAID = "The note says hello."
READ = {
    "Bash": '{"command": "cat note.txt", "description": "Reads"}',
    "exec_command": '{"cmd": "cat note.txt"}',
}
DELEGATE = {
    "Agent": f'{{"description": "Read", "prompt": "{SUB_TASK}", "subagent_type": "general-purpose"}}',
    "multi_agent_v1__spawn_agent": f'{{"message": "{SUB_TASK}"}}',
}


class Worker(Speaker):
    """Reads a file with whatever tool it is offered, or has a sub-agent do it, and then says what is in it."""

    delegates = False

    def speech(self, asked: dict[str, Any], token_ids: list[int]) -> Speech:
        tools = {tool["function"]["name"] for tool in asked.get("tools") or []}
        has_result = any(message["role"] == "tool" for message in asked["messages"])
        is_sub = any(SUB_TASK in str(message["content"]) for message in asked["messages"])
        if not has_result:
            for name, arguments in (DELEGATE if self.delegates and not is_sub else READ).items():
                if name in tools:
                    return Speech(content="I look.", calls=[(name, arguments)])
        return Speech(content=SAID)


async def claude(url: str, key: str, home: Path) -> asyncio.subprocess.Process:
    assert CLAUDE is not None
    command = [CLAUDE, "-p", "What does note.txt say?", "--allowedTools", "Bash(cat:*),Agent"]
    return await started(command, home, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=key)


async def codex(url: str, key: str, home: Path) -> asyncio.subprocess.Process:
    assert CODEX is not None
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "rose"\n[model_providers.rose]\nname = "rose"\n'
        f'base_url = "{url}/v1"\nenv_key = "ROSE_KEY"\nwire_api = "responses"\n'
    )
    command = [CODEX, "exec", "--skip-git-repo-check", "What does note.txt say?"]
    return await started(command, home, ROSE_KEY=key)


async def started(command: list[str], home: Path, **environment: str) -> asyncio.subprocess.Process:
    folder = home / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("hello")
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**kept, "HOME": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


PROGRAMS = [
    pytest.param(claude, marks=pytest.mark.skipif(CLAUDE is None, reason="no claude on this machine")),
    pytest.param(codex, marks=pytest.mark.skipif(CODEX is None, reason="no codex on this machine")),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("delegates", [False, True], ids=["alone", "sub-agent"])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_agent_program_works_and_stays_on_its_lines(
    world: World, tmp_path: Path, program: Callable[..., Any], delegates: bool
) -> None:
    await world.start()
    engine = await world.add("a", kind=Worker, says=lambda _: Speech(), max_model_len=2**22, mean_tokens=6)
    assert isinstance(engine, Worker)
    engine.delegates = delegates
    session = await world.trajectory(sampling={"min_tokens": 4})  # no words are parsed of an end alone
    home = tmp_path / "home"
    home.mkdir()
    process = await program(world.url, world.tokens.key_of(session), home)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    assert SAID in output.decode()

    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    turns = [turn for turn in trace["turns"] if not turn["side"]]
    begun = [turn for turn in turns if turn["parent"] is None]
    # Nothing but a sub-agent begins a line, and nothing goes on from the middle of one.
    assert (begun[0]["fork"], len(begun) > 1) == (None, delegates)
    assert all(turn["fork"] is None for turn in turns if turn["parent"] is not None)
    parents = [turn["parent"] for turn in turns if turn["parent"] is not None]
    assert len(set(parents)) == len(parents)
    assert parents
    trained = samples_of(trace | {"reward": 1.0}, vocab_size=2**20, max_tokens=2**22)
    assert len(trained) == len(begun)
    assert sum(len(each.positions) for each in trained) == sum(len(turn["token_ids"]) for turn in turns)
