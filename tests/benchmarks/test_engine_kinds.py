"""Kinds of production engines that benchmarks start by name: what is asked of them, and what is written for them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.coserving import world
from benchmarks.coserving.plan import Prefix, Timing, make_schedule
from benchmarks.coserving.rollouts import Registry
from benchmarks.coserving.world import BenchPlan, World
from benchmarks.lib.engine_kinds import FEATURES, KINDS, arguments
from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Phase, ServingLease
from rose.demo.demo_config import DemoConfig
from rose.demo.programs import TOKEN_FILE
from rose.demo.supervisor import Program
from rose.demo.traffic import load_plan
from rose.errors import RoseError
from rose.evaluation.arrivals import Arrival
from rose.policy.compat import Support


def test_options_become_arguments_of_the_command() -> None:
    options = {"enable_lora": True, "max_loras": 2, "speculative_config": {"method": "ngram"}}
    assert arguments(options) == (
        "--enable-lora",
        "--max-loras=2",
        '--speculative-config={"method":"ngram"}',
    )


def test_the_conformance_matrix_has_the_same_drafts_and_adapters() -> None:
    assert FEATURES["speculative"][1] == arguments(KINDS["ngram"].options)
    assert set(FEATURES["lora"][1]) <= set(arguments(KINDS["lora"].options))


@pytest.mark.parametrize("name", KINDS)
def test_an_engines_own_options_make_an_engine_in_this_process_too(name: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs(model="any", **KINDS[name].options)


@pytest.fixture
def plan(tmp_path: Path) -> BenchPlan:
    plan = BenchPlan(config=DemoConfig(), cores=(0, 1), root=tmp_path / "run", logs=tmp_path / "logs")
    plan.root.mkdir()
    plan.prepare([])
    return plan


def test_a_request_asks_for_the_same_adapter_in_every_arm(plan: BenchPlan) -> None:
    plan.kind = KINDS["lora"]
    segment = [(Arrival(at_s=0.1 * n, prompt_tokens=4, output_tokens=2), Prefix()) for n in range(4)]
    schedule = make_schedule([segment], ["alone_1", "alone_2", "rose"], Timing(), run=3)
    plan.write_traffic(schedule)

    models = load_plan(plan.root / "traffic.json").models
    assert models == ["production", "adapter0", "adapter1", "production"] * 3


def test_several_engine_cores_have_a_node_each_and_one_has_the_servers_own(plan: BenchPlan) -> None:
    assert plan.node_dirs() == [plan.node_dir]
    plan.kind = KINDS["dp2"]
    assert [one.name for one in plan.node_dirs()] == ["dp0", "dp1"]
    first, second = plan.node(0), plan.node(1)
    assert first.ready != second.ready
    tables = [(plan.root / f"{one.spec.name}.toml").read_text() for one in (first, second)]
    assert [str(one) in table for one, table in zip(plan.node_dirs(), tables, strict=True)] == [True, True]
    assert plan.config.url("scheduler") in tables[0]
    assert plan.config.url("scheduler") not in tables[1]


class Client:
    """Stands in for the agents' control sockets: each has its engine when it is asked for the third time."""

    said: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def __init__(self, directory: Path, _: Tokens) -> None:
        self.name, self.asked = directory.name, 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked == 1:
            raise RoseError("nobody listens")
        return {"engine": {"pid": 7 if self.asked == 3 else None}}

    def set(self, **settings: str) -> None:
        self.said.append((self.name, settings))


class Parts:
    """Stands in for the fleet: a node is ready when its engine was hurried."""

    async def start(self, program: Program, _: Any) -> None:
        if program.spec.name != "production":
            while len(Client.said) < 1 + (program.spec.name == "dedicated"):  # noqa: ASYNC110 - said in another thread
                await asyncio.sleep(0.01)


async def test_engines_start_as_others_do_and_are_measured_in_the_idle_class(
    plan: BenchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.kind = KINDS["dp2"]
    monkeypatch.setattr(world, "ControlClient", Client)
    monkeypatch.setattr(Client, "said", [])
    monkeypatch.setattr(world, "production_of", lambda *_: None)
    Tokens.generate().save(plan.root / TOKEN_FILE)
    registries = [Registry(1), Registry(2)]
    for registry in registries:
        registry.worker = {}
    with ExitStack() as writers:
        for directory in plan.node_dirs():
            directory.mkdir(mode=0o700)
            writer = writers.enter_context(NodeDir(directory).serving_lease_writer())
            writer.write(ServingLease(phase=Phase.READY, support=Support.ELASTIC))
        await World(plan.config, plan, *registries).start(Parts(), None)  # type: ignore[arg-type]

    normal, idle = {"sched": "normal"}, {"sched": "idle"}
    assert Client.said == [("dp0", normal), ("dp1", normal), ("dp0", idle), ("dp1", idle)]


def test_a_model_with_windows_has_the_plain_ones_size_and_tokenizer(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    told = sizes | {"num_hidden_layers": 16, "vocab_size": 320, "eos_token_id": 5}
    (plain / "config.json").write_text(json.dumps(told))
    (plain / "tokenizer.json").write_text("{}")

    model, args = KINDS["sliding"].prepare(plain, tmp_path / "made")

    made = json.loads((model / "config.json").read_text())
    assert {name: made[name] for name in sizes} == sizes
    assert (made["vocab_size"], made["eos_token_id"]) == (320, 5)
    assert made["layer_types"].count("full_attention") == 2
    assert len(made["layer_types"]) == made["num_hidden_layers"] == 12
    assert (model / "tokenizer.json").read_text() == "{}"
    assert args == ("--load-format=dummy",)
