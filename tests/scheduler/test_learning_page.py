"""The page of jobs: rewards over a day, groups, search, a trajectory beside its siblings; in a real browser where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.scheduler.learning import BUCKET_S, MAX_BUCKETS, MAX_JOBS, Learning
from tests.scheduler.browser import CHROMIUM, Browser
from tests.scheduler.conftest import World, user


def test_rewards_are_means_of_half_a_minute_and_success_counts_where_it_was_said() -> None:
    learning = Learning()
    learning.finished("a", 10.0, 1.0, True)
    learning.finished("a", 29.0, 0.0, None)
    learning.finished("a", 61.0, -1.0, None)
    learning.finished("b", 61.0, 2.0, False)
    assert {job: list(rows) for job, rows in learning.curves().items()} == {
        "a": [(0.0, 2, 0.5, 1.0), (60.0, 1, -1.0, None)],
        "b": [(60.0, 1, 2.0, 0.0)],
    }


def test_curves_are_bounded() -> None:
    learning = Learning()
    for minute in range(MAX_BUCKETS + 5):
        learning.finished("long", minute * BUCKET_S, 1.0, None)
    (buckets,) = map(list, learning.curves().values())
    assert (len(buckets), buckets[0][0]) == (MAX_BUCKETS, 5 * BUCKET_S)
    for job in range(MAX_JOBS):
        learning.finished(f"job {job}", 1e9, 1.0, None)
    assert len(learning.curves()) == MAX_JOBS
    assert "long" not in learning.curves()


async def played(world: World) -> list[str]:
    """A group of two with different rewards, and one of another job that runs."""
    await world.start()
    await world.add("a")
    names = []
    for reward in (1.0, 0.0):
        name = await world.trajectory(group_id="g", group_size=2, metadata={"split": "train"})
        await world.chat(name, [user("hello")], max_tokens=5)
        body = {"reward": reward, "success": reward > 0}
        await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", body)
        await world.ok("POST", f"/rose/v1/trajectories/{name}/finish", body)  # asked again: counted once
        names.append(name)
    names.append(await world.trajectory(job="other"))
    return names


async def test_history_has_the_rewards_of_each_job(world: World) -> None:
    await played(world)
    await world.until(lambda: world.scheduler.timeline.hours)
    found = await world.ok("GET", "/rose/v1/history")
    assert sum(bucket[1] for bucket in found["jobs"]["job"]) == 2
    assert found["jobs"].keys() == {"job"}
    assert found["hours"][0]["t"] <= found["now"]
    assert (await world.call("GET", "/rose/v1/history", role="agent"))[0] == 401


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
async def test_the_page_finds_groups_and_shows_siblings(world: World, tmp_path: Path) -> None:
    names = await played(world)
    async with Browser() as page:
        await page.open(f"{world.url}/learning#token={world.tokens.environment}")
        await page.until("document.body.dataset.jobs == 1")
        await page.until("document.body.dataset.found == 3")
        assert await page.run("location.hash") == ""
        text = await page.run("document.getElementById('curves').innerText")
        assert "2 finished" in text
        assert "mean reward 0.5" in text

        async def search(**fields: str) -> list[int]:
            sets = ";".join(f"f.{name}.value = '{value}'" for name, value in fields.items())
            await page.run(
                "new Promise((done) => { const f = document.getElementById('search'); f.reset(); "
                f"{sets}; document.body.dataset.found = ''; f.requestSubmit(); "
                "const look = () => document.body.dataset.found ? done() : setTimeout(look, 20); look(); })"
            )
            return [
                int(await page.run("document.body.dataset.groups")),
                int(await page.run("document.body.dataset.found")),
            ]

        assert await search(job="other") == [1, 1]
        assert await search(meta="split=train") == [1, 2]
        assert await search(least="0.5") == [1, 1]
        assert await search(state="running") == [1, 1]
        assert await search(meta="split=test") == [0, 0]
        # A trajectory beside its siblings, itself first.
        await page.run(f"location.hash = '#t={names[1]}'")
        await page.until("document.body.dataset.siblings == 2")
        heads = await page.run("[...document.querySelectorAll('#siblings p')].map((e) => e.innerText)")
        assert heads[0].startswith(names[1])
        assert "reward 1" in heads[1]
        listed = (await world.ok("GET", "/rose/v1/trajectories"))["trajectories"]
        shown = await page.run("document.querySelectorAll('#siblings .tokens .s').length")
        assert shown == sum(each["num_tokens"] for each in listed)
        assert not page.errors
        assert all(url.startswith((world.url, "about:", "data:", "chrome")) for url in page.requests)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
async def test_asked_to_show_again_and_again_it_asks_no_oftener(world: World) -> None:
    await world.start()
    async with Browser() as page:
        await page.open(f"{world.url}/learning#token={world.tokens.environment}")
        await page.until("document.body.dataset.jobs == 0")
        await page.run(
            """window.due = new Set([0]); window.begun = 0; const set = setTimeout, clear = clearTimeout; due.clear();
            setTimeout = (f, ms) => { const id = set(() => { due.delete(id); f(); }, ms); if (f === watch) { begun++; due.add(id); } return id; };
            clearTimeout = (id) => { due.delete(id); clear(id); };
            for (let i = 0; i < 3; i++) document.getElementById("login").requestSubmit(); 0"""
        )
        await page.until("begun >= 3")
        assert await page.run("due.size") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("path", ["/", "/learning"])
async def test_no_alarm_colour_where_there_is_no_data(world: World, path: str) -> None:
    await world.start()
    async with Browser() as page:
        await page.open(f"{world.url}{path}#token={world.tokens.environment}")
        await page.until("document.body.dataset.draws >= 1 || document.body.dataset.jobs == 0")
        assert await page.run("[...document.querySelectorAll('.bad')].map((e) => e.textContent)") == []
        # No canvas has a pixel of the alarm's red, in either theme.
        assert (
            await page.run(
                """[...document.querySelectorAll("canvas")].filter((c) => { if (!c.width || !c.height) return false;
              const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
              for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 100 && d[i] > 180 && d[i + 1] < 90 && d[i + 2] < 90) return true;
              return false; }).map((c) => c.id)"""
            )
            == []
        )
