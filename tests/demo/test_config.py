"""Settings of the demo: refusals that name the field, and files that come out as they went in."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rose.config import load_config
from rose.coserve.node_config import NodeConfig
from rose.demo.demo_config import DemoConfig, load_demo_config
from rose.demo.programs import LOG_NAMES, TOKEN_FILE, DemoPlan, to_toml
from rose.demo.supervisor import Program
from rose.demo.traffic import load_plan
from rose.errors import ConfigError
from rose.evaluation.arrivals import Arrival
from rose.train.envs.frozenlake_plan import LakePlanFamily
from rose.train.envs.registry import make_family
from rose.train.train_config import TrainConfig


def programs_of(plan: DemoPlan) -> list[Program]:
    """Every program, in the order of its start."""
    return [
        plan.models(),
        plan.relay(),
        plan.scheduler(),
        plan.production(),
        plan.dedicated(),
        plan.traffic(),
        plan.harvested(),
        plan.train(),
        plan.node_command("on"),
    ]


def test_defaults_are_valid_and_ports_are_consecutive() -> None:
    config = load_demo_config(None)

    assert list(config.ports().values()) == list(range(18470, 18475))
    assert config.url("scheduler") == "http://127.0.0.1:18472"


def test_named_options_and_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text("seed = 1\nsteps = 9\n[traffic]\nperiod_s = 20\n")

    config = load_demo_config(path, {"steps": 7, "out": Path("x y")}, ["traffic.mean_rate_hz=2.5"])

    assert (config.seed, config.steps, config.out) == (1, 7, Path("x y"))
    assert (config.traffic.period_s, config.traffic.mean_rate_hz) == (20, 2.5)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"base_port": 80}, "base_port"),
        ({"traffic.period_s": 1.0}, "traffic.period_s"),
        ({"traffic.prompt_max_tokens": 2000}, "traffic.prompt_max_tokens"),
        ({"job.group_size": 4}, "job.group_size"),
        ({"num_pairs": 1}, "num_pairs"),
        ({"job.lake_size": 3}, "job.lake_size"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_a_wrong_setting_names_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_demo_config(None, given)
    assert caught.value.field == field


def test_a_misspelt_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        load_demo_config(None, {"stepz": 3})


def test_cores_are_two_different_ones_that_we_may_use() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one core only")

    assert DemoConfig().cores() == (usable[0], usable[1])
    assert DemoConfig(production_core=usable[1]).cores() == (usable[1], usable[0])
    with pytest.raises(ConfigError, match="core 4096"):
        DemoConfig(production_core=4096).cores()
    with pytest.raises(ConfigError, match="two different"):
        DemoConfig(production_core=usable[0], other_core=usable[0]).cores()


def test_toml_comes_out_as_it_went_in() -> None:
    table = {
        "a": 'x "y" \\ z',
        "n": 3,
        "f": 1e-06,
        "flag": True,
        "l": ["p", "q"],
        "t": {"u": {"v": 1}, "w": 2},
    }

    assert tomllib.loads(to_toml({**table, "none": None, "path": Path("/p")})) == {**table, "path": "/p"}


def test_any_character_of_a_path_survives_as_toml(tmp_path: Path) -> None:
    path = tmp_path / "\N{SNOWMAN}\N{PARTY POPPER}.csv"
    assert tomllib.loads(to_toml({"model": path}))["model"] == str(path)
    assert load_demo_config(None, {"trace": path}).trace == path


def test_only_logs_of_an_earlier_run_give_way(tmp_path: Path) -> None:
    """``--out`` may name a folder that has a ``logs`` of its own."""
    kept, old = tmp_path / "logs" / "letters.txt", tmp_path / "logs" / "train.log"
    kept.parent.mkdir()
    kept.write_text("mine")
    old.write_text("old")
    plan = DemoPlan(
        config=DemoConfig(out=tmp_path), cores=(0, 1), root=tmp_path / "run", logs=tmp_path / "logs"
    )
    plan.root.mkdir()
    plan.prepare([])
    assert kept.read_text() == "mine"
    assert not old.exists()


def test_no_part_has_a_secret_on_its_command_line_and_the_senders_plan_loads(tmp_path: Path) -> None:
    from rose.auth import ROLES, Tokens

    root = tmp_path / "run"
    root.mkdir()
    tokens = Tokens.generate()
    tokens.save(root / TOKEN_FILE)
    plan = DemoPlan(config=DemoConfig(), cores=(0, 1), root=root, logs=tmp_path / "logs")
    plan.prepare([Arrival(at_s=0.5, prompt_tokens=3, output_tokens=4)])
    (root / "models.json").write_text(json.dumps(["/m/production", "/m/policy"]))
    plan.find_models()

    assert load_plan(root / "traffic.json").to_arrivals()[0].prompt_tokens == 3
    logs = {program.spec.log_path.stem for program in programs_of(plan) if program.spec.log_path is not None}
    assert logs < set(LOG_NAMES)
    words = [word for program in programs_of(plan) for word in program.spec.argv]
    files = [path.read_text() for path in root.glob("*.toml") if path.name != TOKEN_FILE]
    for secret in (*(getattr(tokens, role) for role in ROLES), tokens.secret, tokens.publish_key):
        assert not any(secret in text for text in (*words, *files))


def test_the_harvested_host_s_deadlines_are_the_code_s_own(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    DemoPlan(config=DemoConfig(), cores=(0, 1), root=root, logs=tmp_path / "logs").harvested()
    table = tomllib.loads((root / "harvested.toml").read_text())
    assert not {name for name in table.get("lending", {}) if name.endswith(("deadline_s", "backstop_s"))}
    assert load_config(NodeConfig, root / "harvested.toml").lending.reclaim_deadline_s is None


def test_the_job_answers_with_a_move_for_every_cell_of_the_lakes_that_its_policy_has_read(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    config = load_demo_config(None, {"job.lake_size": 6, "seed": 3})
    plan = DemoPlan(config=config, cores=(0, 1), root=root, logs=tmp_path / "logs")
    plan.train()
    job = load_config(TrainConfig, root / "train.toml")
    family = make_family(job.env.kind, job.env.settings)

    assert job.rollout.max_tokens == 36
    assert list(family.tasks()) == list(LakePlanFamily(config.lakes()).tasks())
    assert {job.learning_rate_at(step) for step in range(job.num_steps)} == {config.job.learning_rate}


def test_only_production_and_the_harvested_engine_use_the_first_core(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    plan = DemoPlan(config=DemoConfig(), cores=(0, 1), root=root, logs=tmp_path / "logs")
    plan.prepare([Arrival(at_s=0.5, prompt_tokens=3, output_tokens=4)])

    def core_of(program: Program) -> tuple[int, ...]:
        """Of the program, or of the engine that it starts."""
        if program.spec.name not in ("harvested", "dedicated"):
            return program.spec.cores
        words = tomllib.loads((root / f"{program.spec.name}.toml").read_text())["engine"]["command"]
        return (int(words[words.index("--cpu-list") + 1]),)

    on_first = {program.spec.name for program in programs_of(plan) if 0 in core_of(program)}

    assert on_first == {"production", "harvested"}
    assert {p.spec.name for p in programs_of(plan) if p.spec.sched == "normal"} >= {"production", "traffic"}
