"""The simulated fleet is configured as the daemons are: every parameter of theirs has an effect here, or is on a list that says why not."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from rose.auth import Tokens
from rose.coserve.agent import NodeAgent
from rose.coserve.node_config import EngineConfig, NodeConfig, SchedulerLink, ServingConfig, WeightsLink
from rose.policy.coserving.steps import StepBook
from rose.scheduler.app import Scheduler
from rose.scheduler.scheduler_config import JobBatches, JobShare, SchedulerConfig, StaticWorker
from rose.sim.engine import Request
from rose.sim.events import EventDigest
from rose.sim.live import NO_OCCASION, NOT_SIMULATED, Configs, configs_of
from rose.sim.scenario import Scenario
from rose.sim.systems import SYSTEMS
from rose.sim.world import SimWorld

ROSE = SYSTEMS["rose"]
SCENARIO = Scenario.model_validate({"name": "parity", "fleet": {"dedicated": 1, "serving": 1}})
CONFIGS = configs_of(SCENARIO, ROSE, serving_pages=1000)
OTHERS: dict[str, Any] = {
    "scheduler.workers": (StaticWorker(worker_id="w", url="http://w", model="m", max_model_len=9),),
    "scheduler.batches.jobs": {"job": JobBatches(alpha=9)},
    "scheduler.provisioning.jobs": {"job": JobShare(weight=9.0)},
}
"""What no other value of a simple type can be."""
SIMPLE = (
    True,
    False,
    3,
    0.5,
    0.75,
    2.5,
    77,
    "http://other",
    "other",
    Path("other"),
    ("other",),
    {"a": "b"},
    (3,),
)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, also where it may be left out."""
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def leaves(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = (
            section_in(field.annotation) if typing.get_origin(field.annotation) not in (dict, tuple) else None
        )
        if inner is None:
            yield f"{prefix}.{name}"
        else:
            yield from leaves(inner, f"{prefix}.{name}")


PARAMETERS = [*leaves(SchedulerConfig, "scheduler"), *leaves(NodeConfig, "node")]


def with_other(tree: BaseModel, path: str, full_name: str) -> BaseModel:
    """``tree`` with another valid value at ``path``."""
    name, _, rest = path.partition(".")
    value = getattr(tree, name)
    if rest:
        return tree.model_copy(update={name: with_other(value, rest, full_name)})
    if full_name in OTHERS:
        return tree.model_copy(update={name: OTHERS[full_name]})
    field = type(tree).model_fields[name]
    adapter = TypeAdapter(
        Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    )
    choices = [
        choice
        for each in (field.annotation, *typing.get_args(field.annotation))
        if typing.get_origin(each) is Literal
        for choice in typing.get_args(each)
    ]
    for candidate in itertools.chain(choices, SIMPLE):
        try:
            other = adapter.validate_python(candidate, strict=True)
        except ValidationError:
            continue
        if other != value:
            return tree.model_copy(update={name: other})
    raise AssertionError(f"no other value for {full_name}: add one to OTHERS")


def whole(node: NodeConfig) -> NodeConfig:
    """With the sections that may be left out."""
    weights = WeightsLink(relay_url="http://relay", run_id="run")
    return node.model_copy(update={"weights": weights})


def with_change(configs: Configs, parameter: str) -> Configs:
    daemon, _, path = parameter.partition(".")
    if daemon == "scheduler":
        return replace(configs, scheduler=with_other(configs.scheduler, path, parameter))
    changed = {
        tier: with_other(whole(getattr(configs, tier)), path, parameter)
        for tier in ("harvested", "dedicated")
        if not path.startswith("serving.") or tier == "harvested"
    }
    return replace(configs, **changed)


def policies(configs: Configs) -> dict[str, Any]:
    """All that the policies of a simulated fleet were told when it was built."""
    world = SimWorld(SCENARIO, ROSE, EventDigest(None), None, configs)
    book = world.cluster.book
    told: dict[str, Any] = {
        "routing": (
            type(book.policy),
            book.policy.rng.getstate() if hasattr(book.policy, "rng") else None,
            getattr(book.policy, "params", None),
        ),
        "turns": book.params,
        "fleet": book.fleet.params,
        "samples": world.job.book.params,
        "provisioning": (
            world.cluster.provisioning.mode,
            world.cluster.provisioning.period_s,
            world.cluster.assigner.policy.params,
            world.cluster.assigner.share_of("job"),
            world.cluster.assigner.job_forget_s,
        ),
        "heartbeat_s": world.cluster.heartbeat_s,
    }
    for name, node in world.cluster.nodes.items():
        worker, device = book.fleet.workers[name], node.device
        told[name] = (worker.max_model_len, worker.cap, device.slo_ttft_s, device.slo_tpot_s, device.params)
        if node.lending is not None:
            told[f"{name} lending"] = (type(node.lending), node.lending.params, node.lending._mode)
    return told


def test_every_parameter_of_the_daemons_is_simulated_or_is_said_not_to_be() -> None:
    told = policies(CONFIGS)
    simulated = {name for name in PARAMETERS if policies(with_change(CONFIGS, name)) != told}

    # In neither: carry it into the simulator, or say in rose/sim/live.py why not.
    assert set(PARAMETERS) - simulated - set(NOT_SIMULATED) == set()
    # In both: it has an effect, so it comes off the list.
    assert simulated & set(NOT_SIMULATED) == set()


def test_the_lists_of_what_is_not_simulated_name_parameters_that_exist() -> None:
    assert not {*NOT_SIMULATED, *NO_OCCASION} - set(PARAMETERS)
    assert not set(NOT_SIMULATED) & set(NO_OCCASION)


def test_the_simulated_scheduler_is_told_what_the_daemon_s_is(tmp_path: Path) -> None:
    config = SchedulerConfig(oldest_first_s=7.0, oldest_first_share=0.5, cap_harvested=3, adaptive_cap=True)
    tokens = Tokens.generate()
    live = Scheduler(config, tokens, tmp_path)
    simulated = SimWorld(SCENARIO.model_copy(update={"scheduler": config}), ROSE, EventDigest(None), None)
    live.journal.close()

    book = simulated.cluster.book
    assert type(book.policy) is type(live.book.policy)
    waits = {"max_queue_s": book.params.max_queue_s, "max_queued": book.params.max_queued}
    assert book.params == replace(live.book.params, **waits)
    assert book.fleet.params == live.book.fleet.params


def test_the_simulated_node_is_told_what_the_agent_s_is(tmp_path: Path) -> None:
    config = NodeConfig(
        node_id="n",
        dir=tmp_path,
        serving=ServingConfig(),
        mode="on",
        engine=EngineConfig(model="m", max_model_len=SCENARIO.job.max_model_len),
        scheduler=SchedulerLink(url="http://s"),
    )
    tokens = Tokens.generate()
    agent = NodeAgent(config, tokens)
    world = SimWorld(SCENARIO, ROSE, EventDigest(None), None)

    node = world.cluster.nodes["s0"]
    assert node.lending is not None
    assert type(node.lending) is type(agent.policy)
    assert node.lending.params == agent.policy.params
    mode = node.lending._mode
    assert (mode.mode, mode.floor_pages, mode.max_lend_pages) == (
        agent.mode,
        agent.floor_pages,
        agent.max_lend_pages,
    )
    assert (node.device.params.rule, node.device.params.serialise) == (agent.rule, agent.serialise)
    assert (node.device.slo_ttft_s, node.device.slo_tpot_s) == (
        agent.slo_ttft_ms / 1e3,
        agent.slo_tpot_ms / 1e3,
    )


def test_between_tokens_live_counts_a_long_step_and_the_simulator_a_request_s_mean() -> None:
    """The one difference in what is late; of first tokens there is none (tests/plugin/test_first_tokens.py)."""
    world = SimWorld(SCENARIO, ROSE, EventDigest(None), None)
    device, live = world.serving_devices[0], StepBook(num_blocks=100, chunk_blocks=8)
    device.slo_ttft_s, device.slo_tpot_s = 0.0, 0.1
    request, now_s = Request("p0", 20, 11, 0.0), 0.0
    request.first_s = 0.0
    for step_s in (0.3, *[0.02] * 9):  # the mean of ten: 48 ms
        live.scheduled(0, 1, int(now_s * 1e9))
        now_s += step_s
        live.ended(int(now_s * 1e9), int(device.slo_tpot_s * 1e9))
    world.cluster.served(device, request, now_s)

    assert (live.breaches, len(world.cluster.late)) == (1, 0)
