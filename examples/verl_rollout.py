"""verl's agent loops on ROSE's engines: its trainer, its prompts, its tools and its rewards stay, and its tokens come from rose-scheduler.

verl takes agent loops by their class.  These are its own two, but for whom they ask for tokens.  With this file on PYTHONPATH of
every worker, in verl's configuration::

    actor_rollout_ref.rollout.calculate_log_probs: true       # ROSE's engines are not the actor: their log-probs are needed
    actor_rollout_ref.rollout.agent.agent_loop_config_path: rose_agents.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop: rose_single_turn

and in ``rose_agents.yaml``, which verl hands to the class::

    - {name: rose_single_turn, _target_: verl_rollout.RoseSingleTurn, url: "http://scheduler:8800", job: my-run, token_file: tokens.toml}
    - {name: rose_tools, _target_: verl_rollout.RoseToolAgent, url: "http://scheduler:8800", job: my-run, token_file: tokens.toml}

A sample is a trajectory: its turns stay where their prefix is, go on elsewhere when an engine is cut, and are there to be looked at.
verl trains on what it was handed, with rewards of its own, so a trajectory is given up when its loop ends: nobody leases it.  Weights go the
way of ``verl_engine.py``, where verl's trainer uses it (docs/other-trainers.md):
its versions are ``global_steps``, and so verl's own bookkeeping of staleness (``min_global_steps``, ``max_global_steps``) holds here too.

verl's interface as of its 0.9.1 (2026), with which ``tests/scheduler/test_verl_rollout.py`` runs it.
"""

# pyright: reportMissingImports=false
# verl pins an older transformers: it is in an environment of its own.

from __future__ import annotations

import asyncio
import functools
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopOutput, SingleTurnAgentLoop, ToolAgentLoop
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rose.auth import Tokens
from rose.errors import ConfigError
from rose.lineage import parse_version
from rose.train.client import SchedulerClient, StartedTrajectory


@functools.cache
def connected(url: str, token_file: str | None, loop: asyncio.AbstractEventLoop) -> SchedulerClient:
    """One pool of connections for all agent loops of a process."""
    token = Tokens.load(token_file, ["environment"]).environment
    return SchedulerClient(url, environment_token=token)


class RoseServer(LLMServerClient):
    """What an agent loop asks for tokens, in place of verl's own servers: one trajectory, from the first turn to :meth:`end`.

    Args:
        config: verl's, whole.
        job: Any but that of a running ``rose train``.
    """

    def __init__(self, config: Any, client: SchedulerClient, *, job: str) -> None:
        super().__init__(config, load_balancer_handle=None)
        self._rollout = config.actor_rollout_ref.rollout
        self._client, self._job = client, job
        self._begun: StartedTrajectory | None = None
        self._num_turns = 0

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """One turn.  ``kwargs`` are hints for verl's own servers.

        Raises:
            ConfigError: It came with images, video or sound.
            RoseError: The scheduler refused it, or no engine could finish it.
        """
        if image_data or video_data or audio_data:
            raise ConfigError("are not taken: only tokens go to ROSE's engines", field="multi_modal_data")
        if self._begun is None:
            self._begun = await self._client.create_trajectory(
                job=self._job, group_id=uuid4().hex, group_size=1, task={"request": str(request_id)}
            )
        prompt = [int(token) for token in prompt_ids]
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        answer = await self._client.generate(
            self._begun.key, turn, token_ids=prompt, sampling_params=self._sampling(sampling_params, prompt)
        )
        steps = [parse_version(version)[1] for version, _, _ in answer["versions"]]
        newest = steps[-1] if steps else None
        return TokenOutput(
            token_ids=answer["token_ids"],
            log_probs=answer["logprobs"] if sampling_params.get("logprobs") else None,
            stop_reason="completed" if answer["finish_reason"] in ("stop", "length") else "aborted",
            extra_fields={
                "global_steps": newest,
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
                "rose_trajectory": self._begun.id,
            },
        )

    async def end(self) -> None:
        """It takes no more turns, and no memory at the scheduler is held for a trainer."""
        if self._begun is not None:
            await self._client.cancel(self._begun.id)

    def _sampling(self, given: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        """verl's settings by vLLM's names; the length that its own servers would allow, where it names none."""
        params = {name: value for name, value in given.items() if name not in ("logprobs", "max_new_tokens")}
        if "max_tokens" not in params:
            longest = self._rollout.prompt_length + self._rollout.response_length - len(prompt)
            params["max_tokens"] = max(
                1, given.get("max_new_tokens", min(self._rollout.response_length, longest))
            )
        return params


class OnRose:
    """Of one of verl's agent loops: its tokens come from ROSE.

    Args:
        url, job, token_file: Of the agent loop's entry in ``agent_loop_config_path``.
        kwargs: verl's own, by their names, as it passes them.
    """

    def __init__(
        self, *, url: str, job: str, token_file: str | None = None, trainer_config: Any, **kwargs: Any
    ) -> None:
        client = connected(url, token_file, asyncio.get_running_loop())
        kwargs["server_manager"] = RoseServer(trainer_config.config, client, job=job)
        super().__init__(trainer_config=trainer_config, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        server: RoseServer = self.server_manager  # type: ignore[attr-defined]
        try:
            return await super().run(sampling_params, **kwargs)  # type: ignore[misc]
        finally:
            await server.end()


class RoseSingleTurn(OnRose, SingleTurnAgentLoop):
    """verl's ``single_turn_agent``."""


class RoseToolAgent(OnRose, ToolAgentLoop):
    """verl's ``tool_agent``."""
