"""What the plugin would decide about an engine, asked without starting one: the engine's half of ``rose doctor``.

::

    python -m vllm_plugin.doctor FD  < questions.json

vLLM's own parser and dispatch read each command line and make its ``VllmConfig``; then the functions answer that the plugin asks at
an engine's start (:func:`compat.touched`, :func:`compat.standing_by`, :func:`selfcheck.problems`).  Nothing is patched, no engine,
socket or memory of one is made.  vLLM writes what it likes to standard output, so the answers go to the open descriptor ``FD``.

What only a built KV cache can tell is *predicted*: the layers that the model's configuration names are put through vLLM's own
grouping, and the result through the plugin's look at it.  A model that builds other layers than its configuration names answers otherwise when it
starts.

``ROSE_ROLE`` must not be set.  Until vLLM is found this module needs the standard library and ``rose`` alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rose.policy.advice import advice
from rose.policy.compat import Row, Support, judge, row

if TYPE_CHECKING:
    from vllm_plugin.features import Front

_ASSUMED_BYTES = 1 << 44
"""Of a KV cache whose size the arguments do not tell: its groups are the same whatever it is."""
_MAX_TEXT = 600
_SECRET = re.compile(r"(^|[-_.])(key|token|secret|password|passwd|credentials?)$", re.I)
_MIN_SECRET = 4
_IN_URL = re.compile(r"(?<=://)[^@/\s]+(?=@)")
_HIDDEN = "***"


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """One row of the table that an engine touches.

    ``support``: what an engine that touches it alone would get.  ``predicted``: only the built cache tells for certain.
    """

    row: str
    feature: str
    support: str
    found: str
    reason: str
    fix: str
    predicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportVerdict:
    """What the plugin would decide.

    Attributes:
        support: ``elastic``, ``compute-only`` or ``refused``; None: the engine would not start, or nobody can say (``problem``).
        rows: All that it touches, the deciding one first; the row ``decoder`` alone where there is none.
        total_pages: Of 2 MiB, in each rank's KV cache; None where the arguments do not tell.
        lendable_pages: Of these at most; before any floor, headroom or limit of the node's.
        memory_share: Part of each GPU that it takes in all; None: its KV cache has a size of its own, or nobody can say.
        num_cores: How many engine cores have a directory each below its ``ROSE_DIR``; 1: its one core uses that itself; None: nobody can say.
        notes: What else an operator should know.
    """

    support: str | None
    rows: tuple[Touched, ...] = ()
    total_pages: int | None = None
    lendable_pages: int | None = None
    memory_share: float | None = None
    num_cores: int | None = None
    problem: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()
    vllm: str = ""


class NoEngine(Exception):
    """vLLM itself would not start with this command line."""


class TooSmall(NoEngine):
    """Its KV cache has not room for one request of ``max_model_len``."""


# --------------------------------------------------------------------------- vLLM's configuration, as `vllm serve` makes it


class _Dispatched(Exception):
    """Where vLLM's dispatch would have started servers."""

    def __init__(self, where: str, args: Any) -> None:
        super().__init__(where)
        self.where, self.args_of_server = where, args


def config_of(arguments: Sequence[str]) -> tuple[Any, Front]:
    """The ``VllmConfig`` of ``vllm serve ARGUMENTS``, and what would take its requests; of several servers under vLLM's supervisor, of the first.

    Raises:
        NoEngine: vLLM does not take them.
    """
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser = FlexibleArgumentParser(prog="vllm")
            command = serve.ServeSubcommand()
            command.subparser_init(parser.add_subparsers(required=False, dest="subparser"))
            args = cast(Any, parser.parse_args(["serve", *arguments]))
            command.validate(args)
        over_grpc, args.grpc = args.grpc, False  # its dispatch would start that server
        where, args = _dispatched(serve, command, args)
        front: Front = "grpc" if over_grpc else "headless" if where == "run_headless" else "http"
        return _engine_config(where, args), front
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        raise NoEngine(lines[-1] if lines else "the command line ends by itself") from None
    except Exception as error:
        raise NoEngine(_words(error)) from error


def _dispatched(serve: Any, command: Any, args: Any) -> tuple[str, Any]:
    """Which of its servers vLLM would start, and the arguments as its dispatch leaves them."""

    def stop_at(name: str) -> Callable[..., Any]:
        def stop(given: Any, *_: Any, **__: Any) -> Any:
            raise _Dispatched(name, given)

        return stop

    names = ("run_server", "run_multi_api_server", "run_headless", "run_dp_supervisor")
    stock = {name: getattr(serve, name) for name in names}
    for name in names:
        setattr(serve, name, stop_at(name))
    try:
        command.cmd(args)
    except _Dispatched as found:
        return found.where, found.args_of_server
    finally:
        for name in names:
            setattr(serve, name, stock[name])
    raise NoEngine("vLLM starts no server with it")


def _engine_config(where: str, args: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    from vllm_plugin import internals, lines

    if (
        where == "run_dp_supervisor"
    ):  # it starts a server of its own for each rank, as with an external load balancer
        first = {"rank": 0, "start_rank": None, "size_local": 1, "external_lb": True}
        for name, value in first.items():
            setattr(args, f"data_parallel_{name}", value)
    engine_args = lines.engine_args_of(args)
    if where == "run_multi_api_server":
        internals.say_servers(engine_args, args.api_server_count)
    return engine_args.create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=where == "run_headless"
    )


def _words(error: Exception) -> str:
    """One line; of a pydantic error without what was given, which may hold anything."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        try:
            found: Any = errors(include_input=False, include_url=False)
            return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in found)
        except Exception:  # noqa: BLE001  # not pydantic's after all
            pass
    return " ".join(f"{type(error).__name__}: {error}".split())


# --------------------------------------------------------------------------- the KV cache, predicted


def predicted_cache(config: Any) -> tuple[Any, bool] | None:
    """The ``KVCacheConfig`` that vLLM would make of the layers that the model's configuration names; and whether its size is the real one.

    None: of layers whose specs it does not tell (state-space, cross-attention, sparse attention's).  A drafter's layers are not told either:
    of such an engine the cache has the model's own, and its size is not the real one.

    Raises:
        TooSmall: vLLM makes none of the size that the arguments tell, and would of a larger one.
        Exception: vLLM makes no cache of them.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )

    model, cache = config.model_config, config.cache_config
    odd = ("is_hybrid", "is_attention_free", "is_encoder_decoder", "has_inner_state")
    if model.runner_type != "generate" or any(getattr(model, name) for name in odd):
        return None
    told = model.hf_text_config.to_dict()
    full: type[FullAttentionSpec] = FullAttentionSpec
    common = {
        "block_size": cache.block_size or 16,
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }
    if model.use_mla:
        if "index_topk" in told:
            return None
        full = MLAAttentionSpec
        common |= {"num_kv_heads": 1, "max_tp_shards": 1, "cache_dtype_str": cache.cache_dtype}
    window, chunk = model.get_sliding_window(), told.get("attention_chunk_size")
    num_layers = model.get_num_layers(config.parallel_config)
    kinds = told.get("layer_types")
    if not isinstance(kinds, (list, tuple)) or len(kinds) < num_layers:
        kinds = ["sliding_attention" if cache.sliding_window is not None else "full_attention"] * num_layers
    layers: dict[str, Any] = {}
    for index, kind in enumerate(kinds[:num_layers]):
        name = f"model.layers.{index}.self_attn.attn"
        if kind == "full_attention" or (kind == "sliding_attention" and window is None):
            layers[name] = full(**common)
        elif kind == "sliding_attention" and window is not None:
            layers[name] = SlidingWindowSpec(**common, sliding_window=window)
        elif kind == "chunked_attention" and chunk is not None:
            layers[name] = ChunkedLocalAttentionSpec(**common, attention_chunk_size=chunk)
        else:
            return None
    register_all_kvcache_specs(config)
    if cache.kv_cache_layout is None:
        cache.kv_cache_layout = "LBHNC"  # each layer's blocks together, as on every platform of the table
    known = not _has_drafter(config) and (
        cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
    )
    return _made(config, layers), known


def _made(config: Any, layers: Mapping[str, Any]) -> Any:
    """vLLM's own way from layers to a ``KVCacheConfig``.  Raises as :func:`predicted_cache`."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    cache = config.cache_config
    num_blocks, num_bytes = cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes
    try:
        return get_kv_cache_configs(config, [dict(layers)], [num_bytes or _ASSUMED_BYTES])[0]
    except ValueError as error:
        if getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0):
            raise  # it builds fewer caches than its configuration names layers
        cache.num_gpu_blocks_override = None
        try:
            get_kv_cache_configs(config, [dict(layers)], [_ASSUMED_BYTES])
        except Exception:  # noqa: BLE001  # not for want of memory
            raise error from None
        finally:
            cache.num_gpu_blocks_override = num_blocks
        raise TooSmall(_words(error)) from error


def _has_drafter(config: Any) -> bool:
    """Does something with layers of its own draft for it?"""
    return config.speculative_config is not None and config.speculative_config.method != "ngram"


# --------------------------------------------------------------------------- the answer


def judge_engine(role: str, arguments: Sequence[str]) -> SupportVerdict:
    """What the plugin would decide in role ``role`` about ``vllm serve ARGUMENTS``; never raises for what these hold."""
    import vllm

    from vllm_plugin import compat, selfcheck

    answer = SupportVerdict(support=None, vllm=vllm.__version__)
    if problems := _name_problems(role):
        support, because = judge(role, ["unknown_version"])
        return replace(
            answer, support=support.label, rows=(_touched(because, role, support, "; ".join(problems)),)
        )
    if problems := selfcheck.problems_of(selfcheck.DOCTOR):
        return replace(answer, problem=f"vLLM cannot be asked: {'; '.join(problems)}")
    try:
        config, front = config_of(arguments)
    except NoEngine as error:
        return replace(
            answer, problem=f"vLLM does not start with it: {error}", fix="mend the command line of vllm serve"
        )
    try:
        found = compat.touched(config, front=front)
        standing = compat.standing_by(found, role)
    except Exception as error:  # noqa: BLE001  # as at the start: what cannot be read is refused
        support, because = judge(role, ["unknown_version"])
        says = f"the configuration could not be read: {error!r}"
        return replace(answer, support=support.label, rows=(_touched(because, role, support, says),))
    answer = replace(answer, num_cores=compat.num_cores_below(config), memory_share=_memory_share(config))
    if standing.support is not Support.REFUSED:
        compat.take_places(config, standing)
    try:
        predicted, pages, notes = _predict(config)
    except TooSmall as error:
        return replace(
            answer,
            problem=f"vLLM does not start with it: its KV cache is too small, as predicted: {error}",
            fix="more --kv-cache-memory-bytes, or a smaller --max-model-len",
        )
    # As at the start, what the cache tells comes last; of one row, what is certain.
    found = compat.of_line({**found, **predicted, **found})
    standing = compat.standing_by(found, role)
    if role == "rollout" and standing.support is Support.COMPUTE_ONLY:
        standing = replace(standing, support=Support.REFUSED)  # such an engine has elastic memory, or none
    elastic = standing.support is Support.ELASTIC
    total, lendable = pages if pages is not None else (None, None)
    return replace(
        answer,
        support=standing.support.label,
        rows=_rows(role, found, predicted, standing),
        total_pages=total,
        lendable_pages=lendable if elastic or lendable is None else 0,
        notes=notes,
    )


def _memory_share(config: Any) -> float | None:
    cache = config.cache_config
    sized = cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
    return None if sized else float(cache.gpu_memory_utilization)


def _name_problems(role: str) -> list[str]:
    """What the plugin of that role would miss in this vLLM, in any of its processes."""
    from vllm_plugin import compat, lines, selfcheck

    problems = selfcheck.problems(role)
    if lines.problem(role) is not None:
        return [*problems, selfcheck.moved()]
    if problems or role != "rollout":
        return problems
    on_cpu = selfcheck.CPU_WORKER if compat.device() == "cpu" else ()
    return selfcheck.problems_of((*selfcheck.API, *selfcheck.WORKER, *on_cpu))


def _predict(config: Any) -> tuple[Mapping[str, str], tuple[int, int] | None, tuple[str, ...]]:
    """Rows that the cache would touch, its pages (all, and those that can be lent), and what could not be told.

    Raises:
        TooSmall: vLLM would not start.
    """
    from rose.errors import ConfigError
    from vllm_plugin import compat
    from vllm_plugin.features import kv_findings
    from vllm_plugin.memory import ChunkPlan

    try:
        made = predicted_cache(config)
        if made is None:
            return {}, None, ("only the engine's start tells the kinds of its KV cache",)
        cache, known = made
        piece_bytes = compat.piece_bytes(config)
        found = kv_findings(cache, piece_bytes, drafts=compat.has_drafts(config))
        if not known:
            notes = (
                ("only the engine's start tells the layers of its drafter",) if _has_drafter(config) else ()
            )
            return found, None, notes
        if judge("serving", found)[0] is not Support.ELASTIC:
            return found, (ChunkPlan.of(compat.counted(cache)).total_pages, 0), ()
        try:
            plan = ChunkPlan.of(cache, piece_bytes)
        except ConfigError as error:
            return {**found, "small_cache": str(error)}, None, ()
        return found, (plan.total_pages, plan.lendable_pages), ()
    except TooSmall:
        raise
    except Exception as error:  # noqa: BLE001  # a prediction: the start decides
        return {}, None, (f"its KV cache cannot be predicted: {_words(error)}",)


def _rows(
    role: str, found: Mapping[str, str], predicted: Mapping[str, str], standing: Any
) -> tuple[Touched, ...]:
    allowed = _allows_unmeasured()
    rows = [
        _touched(
            row(name),
            role,
            judge(role, [name], allow_unmeasured=allowed)[0],
            says,
            predicted=predicted.get(name) == says,
        )
        for name, says in found.items()
    ]
    rows.sort(key=lambda one: (one.row != standing.row.name, Support[one.support.upper().replace("-", "_")]))
    return tuple(rows) or (_touched(standing.row, role, standing.support, standing.found),)


def _touched(because: Row, role: str, support: Support, says: str, *, predicted: bool = False) -> Touched:
    return Touched(
        row=because.name,
        feature=because.feature,
        support=support.label,
        found=says,
        reason=because.reason,
        fix=advice(because.name, role, says) if support is not Support.ELASTIC else "",
        predicted=predicted,
    )


def _allows_unmeasured() -> bool:
    from vllm_plugin import compat

    return os.environ.get(compat.ENV_ALLOW_UNMEASURED) == "1"


# --------------------------------------------------------------------------- would the plugin be loaded?


def loaded_problem(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Why vLLM would not load the plugin; empty when it would.  ``names``: entry points of ``vllm.general_plugins`` that are installed."""
    if "rose" not in names:
        return "the plugin is not installed where vLLM is: ROSE_ROLE would change nothing"
    wanted = env.get("VLLM_PLUGINS")
    if wanted is not None and "rose" not in wanted.split(","):
        return "VLLM_PLUGINS leaves the plugin out: ROSE_ROLE would change nothing"
    return ""


def _installed() -> list[str]:
    return [one.name for one in importlib.metadata.entry_points(group="vllm.general_plugins")]


# --------------------------------------------------------------------------- secrets


def secrets_in(arguments: Sequence[str], env: Mapping[str, str]) -> set[str]:
    """Values that no answer may show: of options, of names in their JSON, and of variables that sound like a secret."""
    found = {value for name, value in env.items() if _SECRET.search(name)}
    secret = False
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            secret = bool(_SECRET.search(name))
            if equals:
                found |= {value} if secret else set()
                secret = False
            argument = value
        elif secret:
            found.add(argument)
        if argument.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                found |= set(_secret_leaves(json.loads(argument), secret=False))
    return {value for value in found if len(value) >= _MIN_SECRET}


def _secret_leaves(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _secret_leaves(each, secret=secret or bool(_SECRET.search(str(name))))
    elif isinstance(value, list):
        for each in value:
            yield from _secret_leaves(each, secret=secret)
    elif secret and isinstance(value, (str, int)):
        yield str(value)


def _shown(value: Any, secrets: Sequence[str]) -> Any:
    """The answer with every text bounded and without secrets; the longest first, for one may be a part of another."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, _HIDDEN)
        value = _IN_URL.sub(_HIDDEN, value)
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 3] + "..."
    if isinstance(value, Mapping):
        return {name: _shown(each, secrets) for name, each in value.items()}
    return [_shown(each, secrets) for each in value] if isinstance(value, (list, tuple)) else value


# --------------------------------------------------------------------------- the program


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """One question ``{"role": ..., "args": [...]}`` and its :class:`SupportVerdict`, as JSON has it."""
    role, arguments = str(question["role"]), [str(one) for one in question["args"]]
    if importlib.util.find_spec("vllm") is None:
        found = SupportVerdict(
            support=None,
            problem=f"vLLM is not installed for {sys.executable}",
            fix="from a checkout of ROSE: make setup, then its .venv/bin/vllm; on a GPU pip install '.[gpu]'",
        )
    else:
        try:
            found = judge_engine(role, arguments)
        except Exception as error:  # noqa: BLE001  # a vLLM that cannot even be imported
            found = SupportVerdict(support=None, problem=f"vLLM cannot be asked: {_words(error)}")
        if problem := loaded_problem(os.environ, _installed()):
            fix = "pip install ROSE's checkout into that environment, and 'rose' among VLLM_PLUGINS where it is set"
            found = replace(found, problem=found.problem or problem, fix=found.fix or fix)
    return _shown(asdict(found), sorted(secrets_in(arguments, os.environ), key=len, reverse=True))


def main() -> int:
    questions = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w") as file:
        for question in questions:
            file.write(json.dumps(answer(question)) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
