"""An environment as verifiers' packages have them, all of its kinds of parts: tasks with a rubric, a program with a tool, and a user.

verifiers finds it by its name, ``rose-desk``, as a module of the path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Desk", "DeskEnv", "DeskHarness"]

READ = {
    "type": "function",
    "function": {
        "name": "read_note",
        "description": "What a note says.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


class DeskData(vf.TaskData):
    note: str
    """What the tool says."""
    fails: bool = False
    """Its rubric does."""
    num_runs: int = 1


class DeskTask(vf.Task[DeskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def answered(self, trace: vf.Trace[Any, Any, Any]) -> float:
        if self.data.fails:
            raise ValueError("no such rubric")
        replies = [node.message.content or "" for node in trace.nodes if node.sampled]
        return float(any(self.data.note in reply for reply in replies))

    @vf.reward(weight=0.25)
    async def looked_up(self, trace: vf.Trace[Any, Any, Any]) -> float:
        return float(any(isinstance(node.message, vf.ToolMessage) for node in trace.nodes))

    @vf.metric
    async def turns(self, trace: vf.Trace[Any, Any, Any]) -> float:
        return float(trace.num_turns)


class Desk(vf.Taskset[DeskTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DeskTask]:
        for note in ("hello", "good night"):
            yield DeskTask(DeskData(prompt=f"What does the note {note[0]} say?", note=note))


class DeskHarness(vf.Harness[vf.HarnessConfig]):
    """A plain loop over OpenAI's client, in this process, which verifiers allows: it knows verifiers' endpoint and nothing else."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any, Any, Any],
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        prompt = data.prompt
        messages: list[Any] = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(message) for message in prompt or []]
        )
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(4):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[READ]
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    asked = json.loads(call.function.arguments)["name"]
                    said = {"h": "hello", "g": "good night"}[asked]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class DeskEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class DeskEnv(vf.Env[DeskEnvConfig]):
    """A user who asks once more."""

    async def run(self, task: vf.Task[Any, Any, Any], agents: vf.Agents[Any]) -> None:
        for _ in range(task.data.num_runs):
            async with agents.agent.interaction(task) as talk:
                await talk.turn()
                await talk.turn("In other words?")
