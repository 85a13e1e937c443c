"""What Prometheus is told of each node."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.scheduler.conftest import World
from tests.scheduler.test_fleet import Node, order

ROOT = Path(__file__).resolve().parents[2]
SAYS: dict[str, Any] = {
    "lent_pages": 50,
    "slo_breaches": 7,
    "slo_breaches_while_lending": 2,
    "engine_kills": 1,
}


PROMTOOL = shutil.which("promtool")


def alert_rules() -> str:
    page = (ROOT / "docs" / "operating.md").read_text().partition("## Alerts")[2]
    return page.partition("```yaml")[2].partition("```")[0]


async def metrics(world: World) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name: labels and value."""
    async with world.session.get(f"{world.url}/metrics") as response:
        text = await response.text()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


async def a_node(world: World, name: str = "a", **more: Any) -> Node:
    node = Node(world, name)
    node.more = more
    assert (await node.register())[0] == 200
    await node.beat()
    return node


async def test_broken_promises_are_counted_by_node_and_apart_for_while_lending(world: World) -> None:
    await world.start()
    a, old = await a_node(world, **SAYS), await a_node(world, "old", slo_breaches=3)
    await a.beat(slo_breaches=12, slo_breaches_while_lending=4, engine_kills=3)
    await a.beat(slo_breaches=1, slo_breaches_while_lending=5, engine_kills=0)  # production was restarted
    await old.beat(slo_breaches=4)
    found = await metrics(world)
    counts = {(one["node"], one["lending"]): value for one, value in found["rose_slo_breaches_total"]}
    assert counts == {("a", "yes"): 3.0, ("a", "no"): 3.0, ("old", "unknown"): 1.0}
    assert found["rose_node_engine_kills_total"] == [({"node": "a"}, 2.0)]


async def test_what_is_lent_and_held_and_what_ended_it_are_said_by_node(world: World) -> None:
    await world.start()
    node = await a_node(world, **SAYS)
    await order(world, "off")
    await node.beat(mode="off", switched_off="slo")
    await node.beat(mode="off", switched_off="slo", lent_pages=0)
    found = await metrics(world)
    assert found["rose_node_mode"] == [({"node": "a", "mode": "off"}, 1.0)]
    assert [found[f"rose_node_{one}"][0][1] for one in ("fleet_held", "lent_pages", "held_pages")] == [
        1,
        0,
        0,
    ]
    causes = {one["cause"]: value for one, value in found["rose_node_switched_off"]}
    assert causes == {"slo": 1.0, "audit": 0.0}  # of a node that does not say what became of the plugin
    assert 0 <= found["rose_node_silent_seconds"][0][1] < 60


async def test_memory_that_does_not_come_back_and_a_plugin_that_is_off_are_said_by_node(world: World) -> None:
    await world.start()
    node = await a_node(world, **SAYS, plugin_errors=0, stranded_pages=0)
    for errors, pages in ((0, 0), (1, 27)):
        await node.beat(plugin_errors=errors, stranded_pages=pages)
        found = await metrics(world)
        causes = {one["cause"]: value for one, value in found["rose_node_switched_off"]}
        assert (causes["plugin"], found["rose_node_stranded_pages"]) == (errors, [({"node": "a"}, pages)])


async def test_a_node_that_is_gone_has_no_series(world: World) -> None:
    await world.start()
    await a_node(world, **SAYS)
    assert (await metrics(world))["rose_node_lent_pages"] == [({"node": "a"}, 50.0)]
    await world.ok("DELETE", "/workers/a", role="node")
    world.scheduler.fleet_routes.tick()
    assert not [name for name in await metrics(world) if name.startswith(("rose_node_", "rose_slo_breaches"))]


async def test_the_alerts_of_the_guide_name_metrics_and_labels_that_exist(world: World) -> None:
    await world.start()
    await a_node(world, **SAYS, mode="off", stranded_pages=0)
    found = await metrics(world)
    page = (ROOT / "docs" / "operating.md").read_text().partition("## Alerts")[2]
    (group,) = yaml.safe_load(alert_rules())["groups"]
    assert len(group["rules"]) == 4
    for rule in group["rules"]:
        for name, labels in re.findall(r"(rose_\w+)(?:\{(.*?)\})?", rule["expr"]):
            asked = dict(re.findall(r'(\w+)="(\w+)"', labels))
            assert any(asked.items() <= one.items() and "node" in one for one, _ in found[name]), (
                name,
                asked,
            )
    for name in re.findall(r"`(rose_\w+)`", page.partition("\n## ")[0]):
        assert name in found


@pytest.mark.skipif(PROMTOOL is None, reason="Prometheus is not installed")
def test_the_alerts_of_the_guide_fire_for_the_node_that_they_are_about(tmp_path: Path) -> None:
    """Ten minutes of four nodes in Prometheus' own arithmetic."""
    series = {
        'rose_slo_breaches_total{node="a",lending="yes"}': "0+1x40",
        'rose_slo_breaches_total{node="b",lending="yes"}': "0x40",
        'rose_slo_breaches_total{node="b",lending="no"}': "0+9x40",
        'rose_node_switched_off{node="a",cause="slo"}': "0x40",
        'rose_node_switched_off{node="a",cause="plugin"}': "1x40",
        **{f'rose_node_held_pages{{node="{one}"}}': "40x40" for one in "abd"},
        'rose_node_held_pages{node="c"}': "0x40",
        **{f'rose_node_fleet_held{{node="{one}"}}': "1x40" for one in "ac"},
        **{f'rose_node_fleet_held{{node="{one}"}}': "0x40" for one in "bd"},
        **{f'rose_node_mode{{node="{one}",mode="on"}}': "1x40" for one in "ab"},
        **{f'rose_node_mode{{node="{one}",mode="off"}}': "1x40" for one in "cd"},
        'rose_node_stranded_pages{node="a"}': "0x40",
        'rose_node_stranded_pages{node="b"}': "27x40",
    }
    fires: dict[str, list[dict[str, str]]] = {
        "ProductionLateWhileLending": [{"node": "a"}],
        "NodeSwitchedItselfOff": [{"node": "a", "cause": "plugin"}],
        "MemoryNotGivenBack": [{"node": "a"}, {"node": "d"}],
        "ProductionsMemoryStranded": [{"node": "b"}],
    }
    (tmp_path / "rules.yml").write_text(alert_rules())
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"alertname": name, "eval_time": "8m", "exp_alerts": [{"exp_labels": one} for one in labels]}
            for name, labels in fires.items()
        ],
    }
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]})
    )
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
