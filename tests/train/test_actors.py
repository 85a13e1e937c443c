"""What Ray says of an actor, in our words."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from rose.train.actors import ActorDied, answer_of


async def raises(error: Exception) -> None:
    raise error


async def test_an_actor_that_rays_memory_monitor_killed_is_dead() -> None:
    text = "Task was killed due to the node running low on memory.\nMemory on the node was 15.3GB / 16GB."
    with pytest.raises(ActorDied, match="low on memory"):
        await answer_of(raises(OutOfMemoryError(text)))


async def test_an_actor_that_could_not_start_says_what_was_raised() -> None:
    text = (
        "The actor died because of an error raised in its creation task, ray::EnvManager.__init__() (pid=1)\n"
        '  File "registry.py", line 49, in make_family\n'
        "ModuleNotFoundError: No module named 'count'"
    )
    error = RayActorError(error_msg=text, actor_init_failed=True)
    with pytest.raises(ActorDied, match=r"^its start failed: ModuleNotFoundError: No module named 'count'$"):
        await answer_of(raises(error))
