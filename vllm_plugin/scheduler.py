"""vLLM's scheduler with ROSE around it: the class that ``--scheduler-cls`` names.

:func:`make_scheduler` picks by role and by asynchronous scheduling, so that production keeps its overlap.  The mixins
only *call* the two sides (:mod:`vllm_plugin.serving`, :mod:`vllm_plugin.rollout`) around vLLM's own methods.

On the serving side every call of ours is inside :meth:`_Serving._safely`: an exception switches ROSE off and never reaches
vLLM.  On the rollout side exceptions propagate: the engine dies and its node agent starts another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.errors import ConfigError
from rose.policy.compat import Support
from rose.policy.engine_start import REFUSED_ROLE
from vllm_plugin import compat
from vllm_plugin.missing import Missing
from vllm_plugin.prefix import PrefixKeys
from vllm_plugin.roles import role
from vllm_plugin.rollout import RolloutSide
from vllm_plugin.runs import Runs
from vllm_plugin.serving import ServingSide

logger = logging.getLogger("vllm.rose")


def make_scheduler(**kwargs: Any) -> Scheduler:
    """Factory for ``--scheduler-cls``; vLLM passes keyword arguments only."""
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    if role() == "rollout":
        return (RolloutAsyncScheduler if asynchronous else RolloutScheduler)(**kwargs)
    return (ServingAsyncScheduler if asynchronous else ServingScheduler)(**kwargs)


class _Serving:
    """Mixin of the serving role."""

    rose: ServingSide | None = None
    _rose_missing: Missing | None = None
    """Where ROSE is off from the beginning: what of our memory we have started without."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        missing: Missing | None = None
        try:
            config, kv_cache_config = kwargs["vllm_config"], kwargs["kv_cache_config"]
            standing = compat.standing_of(config, "serving", kv_cache_config)
            if standing.support is Support.REFUSED:
                compat.stay_stock(standing)
                return
            elastic = standing.support is Support.ELASTIC and compat.is_elastic(config)
            if not elastic and compat.is_elastic(
                config
            ):  # only the cache has told, and the workers have seen it too
                logger.warning("ROSE shares compute only: %s", standing)
            cache = kv_cache_config if elastic else compat.counted(kv_cache_config)
            num_ranks, piece_bytes = config.parallel_config.world_size, compat.piece_bytes(config)
            missing = Missing(self, cache, num_ranks if elastic else 0, piece_bytes)
            self.rose = ServingSide(
                self,
                cache,
                num_ranks,
                elastic,
                piece_bytes=piece_bytes,
                because=standing.row,
                found=standing.found,
                missing=missing,
            )
        except Exception as error:  # noqa: BLE001  # fail-open
            if missing is not None and missing.take_back():
                self._rose_missing = missing
            compat.stay_stock(error)

    def _safely(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001  # fail-open
            assert self.rose is not None
            self.rose.fail(error)
            return None

    def _take_what_came(self) -> None:
        assert self._rose_missing is not None
        try:
            self._rose_missing.before_schedule()
        except Exception as error:  # noqa: BLE001  # fail-open: what is still missing stays so
            logger.error("ROSE: what production was started without stays missing: %r", error)
            self._rose_missing = None

    def rose_attach(self, engine: Any) -> None:
        if self.rose is not None:
            self._safely(self.rose.attach, engine)

    @property
    def rose_calls(self) -> dict[str, Callable[[Any], Any]]:
        return {"status": self.rose.status} if self.rose is not None else {}

    def add_request(self, request: Any) -> None:
        if self.rose is not None and self.rose.failed is None:
            self._safely(self.rose.before_add, request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        rose = self.rose
        if rose is None:
            if self._rose_missing is not None:
                self._take_what_came()
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._safely(rose.before_schedule)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if rose.failed is None:
            self._safely(rose.after_schedule, output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.rose is not None and self.rose.failed is None:
            self._safely(self.rose.after_update, scheduler_output)
        return result

    def get_kv_cache_usage(self) -> float:
        usage = None if self.rose is None else self._safely(self.rose.usage)
        return super().get_kv_cache_usage() if usage is None else usage  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if (
            stats is not None and self.rose is not None and self.rose.balloon.inflated
        ):  # else vLLM's own is right
            usage = self._safely(self.rose.usage)
            if usage is not None:
                stats.kv_cache_usage = usage
        return stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        reset = super().reset_prefix_cache  # type: ignore[misc]
        if self.rose is None or not self.rose.balloon.inflated:
            done = reset(*args, **kwargs)
            if self.rose is not None and done:
                self._safely(self.rose.cache_cleared)
            return done
        theirs: list[Exception] = []

        def stock() -> bool:
            try:
                return reset(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # vLLM's own: it goes to vLLM, and switches nothing off
                theirs.append(error)
                return False

        done = bool(self._safely(self.rose.reset_prefix_cache, stock))
        if theirs:
            raise theirs[0]
        return done


class _Rollout:
    """Mixin of the rollout role."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config, kv_cache_config = kwargs["vllm_config"], kwargs["kv_cache_config"]
        standing = compat.standing_of(config, "rollout", kv_cache_config)
        if standing.support is not Support.ELASTIC:
            raise ConfigError(str(standing), field=REFUSED_ROLE)
        self.rose = RolloutSide(
            self,
            kv_cache_config,
            config.parallel_config.world_size,
            piece_bytes=compat.piece_bytes(config),
            on_gpu=compat.is_on_gpu(config),
        )
        self.rose_prefixes = PrefixKeys(self)
        self.rose_runs = Runs(self)
        self._rose_engine: Any = None

    def rose_attach(self, engine: Any) -> None:
        self._rose_engine = engine
        self.rose.attach(engine)

    @property
    def rose_calls(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "status": lambda argument: {**self.rose.status(argument), "runs": self.rose_runs.status()},
            "prefixes": self.rose_prefixes.on_commit,
            "run": lambda run: self.rose_runs.on_switch(self._rose_engine, run),
        }

    def get_num_unfinished_requests(self) -> int:
        if self.rose.gated():
            return 0
        return super().get_num_unfinished_requests()  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        self.rose_prefixes.on_add(request)
        super().add_request(request)  # type: ignore[misc]
        if self.rose_runs.admits(request):
            self.rose.after_add(request)
        else:
            self.rose_runs.refuse(self._rose_engine, [request.request_id])

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        budget = self.rose.before_schedule()
        full = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(full, budget)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = full
        self.rose.after_schedule(output)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self.rose_prefixes.on_output(result)
        self.rose.after_update()
        return result

    def get_kv_cache_usage(self) -> float:
        return self.rose.usage()

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            stats.kv_cache_usage = self.rose.usage()
        return stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        reset = super().reset_prefix_cache  # type: ignore[misc]
        return self.rose.reset_prefix_cache(lambda: reset(*args, **kwargs))


class ServingScheduler(_Serving, Scheduler):
    """Production, synchronous scheduling."""


class ServingAsyncScheduler(_Serving, AsyncScheduler):
    """Production, asynchronous scheduling."""


class RolloutScheduler(_Rollout, Scheduler):
    """Rollout engine, synchronous scheduling."""


class RolloutAsyncScheduler(_Rollout, AsyncScheduler):
    """Rollout engine, asynchronous scheduling."""
