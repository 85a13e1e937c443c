"""What ``rose doctor`` says of an engine is what the plugin decides of it: the same command lines, asked of both."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.lib.engine_kinds import KINDS
from rose.coserve.node_dir import NodeDir
from rose.errors import ConfigError
from rose.policy.advice import advice
from rose.policy.compat import TABLE, Support, judge, row, row_of_number
from tests.plugin.ask_doctor import ask
from tests.plugin.conftest import ON_NEWEST, newest_only
from tests.plugin.test_kv_cache_table import cache_of
from tests.tiny_model import write_tiny_model
from tests.tiny_shapes import SHAPES, write_shape
from vllm_plugin import compat, doctor, selfcheck

pytestmark = pytest.mark.timeout(500)

BASE = (
    "--load-format=dummy",
    "--max-model-len=128",
    "--dtype=bfloat16",
    "--enforce-eager",
    f"--kv-cache-memory-bytes={48 << 20}",
)
NGRAM = '--speculative-config={"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}'
ENOUGH = (f"--kv-cache-memory-bytes={128 << 20}",)
"""For four chunks of latents."""
DRAFT_MODEL = '--speculative-config={"method":"draft_model","model":"MODEL","num_speculative_tokens":2}'
"""``MODEL``: the model itself is its draft."""
MTP = '--speculative-config={"method":"mtp","num_speculative_tokens":2}'
OFFLOAD = '--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'
SECRET = "hunter2-and-more"


@dataclasses.dataclass(frozen=True)
class Case:
    """``cache``: which of ``test_kv_cache_table``'s caches vLLM makes of that model; None: the configuration decides alone."""

    name: str
    shape: str
    args: tuple[str, ...]
    expected: tuple[str, str]
    role: str = "serving"
    cache: str | None = None


CASES = [
    Case("dense", "qwen3", (), ("elastic", "decoder"), cache="dense"),
    Case("moe", "moe", (), ("elastic", "decoder"), cache="dense"),
    Case("sliding and full", "gemma3", (), ("elastic", "kv_groups"), cache="gemma3"),
    Case("gpt-oss", "gpt_oss", (), ("elastic", "kv_groups"), cache="gpt_oss"),
    Case("chunked", "chunked", (), ("compute-only", "kv_kind"), cache="chunked"),
    Case("sliding", "sliding", (), ("compute-only", "kv_kind"), cache="sliding"),
    Case("window off", "sliding", ("--disable-sliding-window",), ("elastic", "decoder"), cache="dense"),
    Case("latent", "mla", ENOUGH, ("elastic", "mla"), cache="mla"),
    Case("state", "mamba2", (), ("compute-only", "hybrid"), cache="mamba2"),
    Case("hybrid", "qwen3_next", (), ("compute-only", "hybrid")),
    Case("encoder", "encoder_decoder", (), ("refused", "encoder_decoder")),
    Case("images", "idefics3", (), ("elastic", "multimodal"), cache="dense"),
    Case("audio", "multimodal", (), ("refused", "modalities")),
    Case("pooling", "pooling", (), ("refused", "pooling")),
    Case("lora", "qwen3", ("--enable-lora",), ("elastic", "lora"), cache="dense"),
    Case("n-gram", "qwen3", (NGRAM,), ("elastic", "speculative"), cache="dense"),
    Case("draft model", "qwen3", (DRAFT_MODEL,), ("elastic", "speculative"), cache="dense"),
    Case(
        "draft beside windows", "gemma3", (DRAFT_MODEL,), ("compute-only", "grouped_drafts"), cache="gemma3"
    ),
    Case("draft beside chunks", "chunked", (DRAFT_MODEL,), ("compute-only", "kv_kind"), cache="chunked"),
    Case("mtp", "mtp", (MTP, *ENOUGH), ("elastic", "speculative")),
    Case("medusa", "qwen3", (DRAFT_MODEL.replace("draft_model", "medusa"),), ("refused", "drafts")),
    Case("fp8 cache", "qwen3", ("--kv-cache-dtype=fp8",), ("elastic", "fp8_kv"), cache="fp8"),
    Case("int8 cache", "qwen3", ("--kv-cache-dtype=int8_per_token_head",), ("refused", "kv_quant")),
    Case("fp8 weights", "qwen3", ("--quantization=fp8",), ("compute-only", "quantized_weights")),
    Case("priority", "qwen3", ("--scheduling-policy=priority",), ("refused", "priority")),
    Case("data parallel", "qwen3", ("--data-parallel-size=2",), ("elastic", "data_parallel")),
    Case("experts' ranks", "moe", ("--data-parallel-size=2",), ("refused", "data_parallel_moe")),
    Case("headless", "qwen3", ("--data-parallel-size=2", "--headless"), ("refused", "data_parallel_hosts")),
    Case("grpc", "qwen3", ("--grpc",), ("refused", "other_option")),
    Case("stages", "qwen3", ("--pipeline-parallel-size=2",), ("compute-only", "pipeline_parallel")),
    Case("tensor parallel", "qwen3", ("--tensor-parallel-size=2",), ("elastic", "tensor_parallel")),
    Case("api servers", "qwen3", ("--api-server-count=2",), ("elastic", "api_servers"), cache="dense"),
    Case("offload", "qwen3", (OFFLOAD,), ("compute-only", "kv_connector")),
    Case("embeddings", "qwen3", ("--enable-prompt-embeds",), ("elastic", "prompt_embeds"), cache="dense"),
    Case("policy", "qwen3", (), ("elastic", "decoder"), "rollout", "dense"),
    Case("policy, sliding", "gemma3", (), ("refused", "kv_groups"), "rollout", "gemma3"),
    Case("policy, api servers", "qwen3", ("--api-server-count=2",), ("refused", "api_servers"), "rollout"),
    Case("policy, lora", "qwen3", ("--enable-lora",), ("refused", "lora"), "rollout"),
    Case("policy, n-gram", "qwen3", (NGRAM,), ("refused", "speculative"), "rollout"),
    Case("policy, latent", "mla", ENOUGH, ("refused", "mla"), "rollout"),
    Case("policy, fp8 cache", "qwen3", ("--kv-cache-dtype=fp8",), ("refused", "fp8_kv"), "rollout"),
]
BY_NAME = {case.name: case for case in CASES if ON_NEWEST or case.role == "serving"}
MORE = {
    "two reasons": (
        "chunked",
        ("--scheduling-policy=priority", "--model-impl=transformers", f"--api-key={SECRET}"),
    ),
    "no such option": ("qwen3", ("--api-keys", SECRET, f"--hf-token={SECRET}", "--no-such-option")),
    "small": ("qwen3", (f"--kv-cache-memory-bytes={2 << 20}", "--max-num-seqs=1")),
    "no model": ("nothing-here", ()),
    "no size": ("chunked", ()),
    "drafts in parallel": ("qwen3", (DRAFT_MODEL[:-1] + ',"parallel_drafting":true}',)),
    "quantised draft": ("qwen3", (DRAFT_MODEL[:-1] + ',"quantization":"fp8"}',)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for shape in SHAPES:
        write_shape(folder / shape, shape)
    return folder


CORES = {
    "--data-parallel-size=2": 2,
    "--data_parallel_size 2": 2,
    "-dp=2": 2,
    "-dp 1 -dp 2": 2,
    "-dp 2 -dp 1": 1,
    "--config FILE": 3,
    "--config FILE -dp 2": 2,
}
"""Engine cores with a directory each below ``ROSE_DIR``, by arguments; FILE says ``data-parallel-size: 3``."""
APART = ("-dp 2 --data-parallel-rank 1", "-dp 2 -dpl 2 -dpm")
"""Servers of one rank each, which vLLM has for models with experts alone."""


@pytest.fixture(scope="module")
def answers(models: Path) -> dict[str, dict[str, Any]]:
    """All questions of this file, in one process."""
    questions = {name: {"role": case.role, "args": command(models, case)} for name, case in BY_NAME.items()}
    for name, (shape, args) in MORE.items():
        base = [one for one in BASE if name != "no size" or "memory-bytes" not in one]
        model = str(models / shape)
        args = tuple(one.replace("MODEL", model) for one in args)
        questions[name] = {"role": "serving", "args": [model, *base, *args]}
    write_tiny_model(models / "plain")
    (models / "serve.yaml").write_text("data-parallel-size: 3\n")
    for words in (*CORES, *APART):
        args = tuple(words.replace("FILE", str(models / "serve.yaml")).split())
        questions[words] = {"role": "serving", "args": [str(models / "qwen3"), *BASE, *args]}
        questions[f"experts {words}"] = {"role": "serving", "args": [str(models / "moe"), *BASE, *args]}
    for name, kind in KINDS.items():
        model, args = kind.prepare(models / "plain", models / f"kind-{name}")
        questions[f"kind {name}"] = {"role": "serving", "args": [str(model), *BASE, *args]}
    return dict(zip(questions, ask(list(questions.values())), strict=True))


def command(models: Path, case: Case) -> list[str]:
    model = str(models / case.shape)
    return [model, *BASE, *(one.replace("MODEL", model) for one in case.args)]


def decided_by_the_plugin(models: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The real hook around the real ``create_engine_config``, then what the scheduler asks of the real kind of cache."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command(models, case))
    args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args._api_process_count = args.api_server_count or 1
    hooked = compat._wrap_config(AsyncEngineArgs.create_engine_config, case.role)
    if args.grpc:  # as vLLM's server over gRPC, which nobody has installed here, does first of all
        monkeypatch.setitem(sys.modules, "smg_grpc_servicer", ModuleType("smg_grpc_servicer"))
    try:
        config = hooked(engine_args, headless=args.headless)
    except ConfigError as error:  # of the plugin: a rollout engine does not start, and names the row
        return "refused", next(one.name for one in TABLE if one.feature in error.message)
    if config.scheduler_config.scheduler_cls is None:
        (first, *_) = compat._node_dirs()
        record = NodeDir(first).serving_lease().read()
        assert record is not None
        return "refused", row_of_number(record.row).name
    assert config.scheduler_config.scheduler_cls == compat.SCHEDULER_FACTORY
    made = None if case.cache is None else cache_of(config, case.cache)
    standing = compat.standing_of(config, case.role, made)
    if case.role == "rollout" and standing.support is not Support.ELASTIC:
        return "refused", standing.row.name  # the scheduler's constructor raises
    return standing.support.label, standing.row.name


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The plugin's module state, put back afterwards."""
    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    if ON_NEWEST:  # an older line is tried by the operator's word, and the doctor was asked under it
        monkeypatch.delenv("ROSE_ALLOW_UNMEASURED", raising=False)
    monkeypatch.setenv("ROSE_CORES", "")  # what becomes of it is undone with it
    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    yield monkeypatch
    if compat._refusal is not None:
        compat._refusal.close()


@pytest.mark.parametrize("name", BY_NAME)
def test_the_doctor_says_what_the_plugin_decides(
    answers: dict[str, dict[str, Any]], models: Path, plugin: pytest.MonkeyPatch, name: str
) -> None:
    case, answer = BY_NAME[name], answers[name]
    assert answer["problem"] == ""
    assert (answer["support"], answer["rows"][0]["row"]) == case.expected
    label, because = decided_by_the_plugin(models, case, plugin)
    assert label == answer["support"]
    assert because == answer["rows"][0]["row"]


@pytest.mark.parametrize("words", CORES)
def test_engine_cores_with_a_directory_each_are_counted_as_vllm_counts(
    answers: dict[str, dict[str, Any]], words: str
) -> None:
    assert (answers[words]["problem"], answers[words]["num_cores"]) == ("", CORES[words])


@pytest.mark.parametrize("words", APART)
def test_servers_of_one_rank_each_are_what_vllm_makes_of_them(
    answers: dict[str, dict[str, Any]], words: str
) -> None:
    assert "Non-MoE models do not support external data parallel mode" in answers[words]["problem"]
    experts = answers[f"experts {words}"]
    assert (experts["support"], experts["rows"][0]["row"]) == ("refused", "data_parallel_moe")
    assert experts["num_cores"] == 1


def test_every_row_that_decides_says_what_to_do(answers: dict[str, dict[str, Any]]) -> None:
    rows = [one for name in BY_NAME for one in answers[name]["rows"]]
    assert all(one["fix"] for one in rows if one["support"] != "elastic")
    if ON_NEWEST:
        assert {one["fix"] for one in answers["policy, lora"]["rows"]} == {"leave out --enable-lora"}


@pytest.mark.parametrize(
    ("name", "field"), [("drafts in parallel", "parallel_drafting"), ("quantised draft", "quantization")]
)
def test_of_an_option_of_the_drafts_that_is_refused_the_advice_names_that_and_no_method(
    answers: dict[str, dict[str, Any]], name: str, field: str
) -> None:
    assert answers[name]["problem"] == ""
    first = answers[name]["rows"][0]
    assert (first["row"], first["support"]) == ("drafts", "refused")
    assert first["found"].startswith(f"speculative_config.{field} = ")
    assert first["fix"].startswith(f"leave out {field} in --speculative-config")


def test_of_a_method_that_is_refused_the_advice_names_those_that_are_not(
    answers: dict[str, dict[str, Any]],
) -> None:
    assert answers["medusa"]["rows"][0]["fix"].startswith("take the method ngram, draft_model, eagle")
    assert advice("drafts", "serving", "speculative_config.method = 'mtp', of Qwen3NextMTP") == advice(
        "drafts", "serving"
    )


@pytest.mark.parametrize("role", ["serving", "rollout"])
def test_the_table_has_advice_for_each_row_that_allows_less(role: str) -> None:
    for one in TABLE:
        support, _ = judge(role, [one.name])
        assert bool(advice(one.name, role)) == (support is not Support.ELASTIC), one.name


def test_all_rows_are_named_the_deciding_one_first(answers: dict[str, dict[str, Any]]) -> None:
    rows = answers["two reasons"]["rows"]
    assert [one["row"] for one in rows] == ["priority", "other_option", "kv_kind", "kv_groups"]
    assert rows[0]["found"] == "scheduler_config.policy = 'priority'"
    assert [one["support"] for one in rows] == ["refused", "refused", "compute-only", "elastic"]


def test_what_only_the_cache_tells_is_marked_as_predicted(answers: dict[str, dict[str, Any]]) -> None:
    assert [one["predicted"] for one in answers["two reasons"]["rows"]] == [False, False, True, True]
    assert not answers["latent"]["rows"][0]["predicted"]  # vLLM's ModelConfig says it


@pytest.mark.parametrize("name", KINDS)
def test_what_a_benchmark_measures_by_its_name_is_that_and_elastic(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    own = {"ngram": "speculative", "lora": "lora", "sliding": "kv_groups", "dp2": "data_parallel"}
    assert {*own, "plain"} == set(KINDS)
    answer = answers[f"kind {name}"]
    assert (answer["problem"], answer["support"]) == ("", "elastic")
    assert answer["rows"][0]["row"] == own.get(name, "decoder")


def test_no_secret_is_shown(answers: dict[str, dict[str, Any]]) -> None:
    assert SECRET not in json.dumps(answers)
    assert "--no-such-option" in answers["no such option"]["problem"]


def test_a_command_line_that_vllm_does_not_take_is_said_to_be_that(
    answers: dict[str, dict[str, Any]],
) -> None:
    for name in ("no such option", "no model"):
        assert answers[name]["support"] is None
        assert answers[name]["problem"].startswith("vLLM does not start with it: ")


def test_the_memory_that_could_be_lent_is_what_the_plan_of_the_chunks_says(
    answers: dict[str, dict[str, Any]],
) -> None:
    assert (answers["dense"]["total_pages"], answers["dense"]["lendable_pages"]) == (24, 23)
    assert (answers["sliding and full"]["total_pages"], answers["sliding and full"]["lendable_pages"]) == (24, 23)  # fmt: skip
    assert (answers["chunked"]["total_pages"], answers["chunked"]["lendable_pages"]) == (24, 0)
    assert (answers["small"]["support"], answers["small"]["rows"][0]["row"]) == ("refused", "small_cache")


def test_without_a_size_the_kinds_of_the_cache_are_predicted_all_the_same(
    answers: dict[str, dict[str, Any]],
) -> None:
    answer = answers["no size"]
    assert (answer["support"], answer["rows"][0]["row"]) == ("compute-only", "kv_kind")
    assert (answer["total_pages"], answer["lendable_pages"]) == (None, None)


def test_the_part_of_a_gpu_that_production_takes_is_told_where_its_cache_has_no_size(
    answers: dict[str, dict[str, Any]],
) -> None:
    from vllm.config import CacheConfig

    assert answers["no size"]["memory_share"] == CacheConfig().gpu_memory_utilization
    assert answers["dense"]["memory_share"] is None


# --- in this process: what a vLLM that changed, or is absent, leads to


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    write_tiny_model(tmp_path / "m")
    return [str(tmp_path / "m"), *BASE]


@newest_only
def test_another_release_line_says_what_moved(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    answer = doctor.judge_engine("serving", tiny)
    assert (answer.support, answer.rows[0].row) == ("refused", "unknown_version")
    assert "0.33.0 is not of a line that role serving is supported on (0.31, 0.32)" in answer.rows[0].found
    assert "none of the names that are used has moved" in answer.rows[0].found

    monkeypatch.delattr(CPUWorker, "determine_available_memory")
    monkeypatch.delattr(selfcheck.importlib.import_module("vllm.v1.worker.gpu_worker").Worker, "determine_available_memory")  # fmt: skip
    found = doctor.judge_engine("serving", tiny).rows[0].found
    assert "of the names that are used have moved: " in found
    assert "CPUWorker.determine_available_memory is gone" in found


def test_what_moved_within_the_line_is_said_by_its_name(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(BlockPool, "_maybe_evict_cached_block")
    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, ids: None)
    answer = doctor.judge_engine("serving", tiny)
    assert (answer.support, answer.rows[0].row) == ("refused", "unknown_version")
    assert answer.rows[0].found.split("; ") == [
        "Scheduler.finish_requests lacks request_ids, finished_status",
        "BlockPool._maybe_evict_cached_block is gone",
    ]


@pytest.mark.skipif(ON_NEWEST, reason="asks what an older line of vLLM refuses")
@pytest.mark.parametrize(("name", "by"), [("state", "untried_line"), ("lora", "lora")])
def test_what_has_not_run_on_this_line_is_refused_without_the_operators_word(
    models: Path, plugin: pytest.MonkeyPatch, name: str, by: str
) -> None:
    plugin.delenv("ROSE_ALLOW_UNMEASURED")
    case = BY_NAME[name]
    answer = doctor.judge_engine("serving", command(models, case))
    assert answer.rows[0].row == by
    assert answer.support == ("refused" if by == "untried_line" else case.expected[0])
    assert decided_by_the_plugin(models, case, plugin)[0] == answer.support


@pytest.mark.parametrize("role", ["serving", "rollout"] if ON_NEWEST else ["serving"])
@pytest.mark.parametrize(
    "less",
    [
        ("--kv-cache-memory-bytes=100000",),
        ("--kv-cache-memory-bytes=100000", DRAFT_MODEL),
        ("--num-gpu-blocks-override=1",),
    ],
)
def test_a_cache_without_room_for_one_request_does_not_start(
    tiny: list[str], role: str, less: tuple[str, ...]
) -> None:
    """vLLM's own rule: the null block and one request of ``max_model_len`` fit, or it does not start."""
    answer = doctor.judge_engine(role, [*tiny, *(one.replace("MODEL", tiny[0]) for one in less)])
    assert (answer.support, answer.rows) == (None, ())
    assert answer.problem.startswith("vLLM does not start with it: its KV cache is too small")
    assert "--max-model-len" in answer.fix


def test_where_layers_share_keys_and_values_too_small_is_no_verdict(tiny: list[str]) -> None:
    """Their model builds fewer caches than it names layers: the prediction is of too much."""
    share = '--hf-overrides={"num_kv_shared_layers": 1}'
    answer = doctor.judge_engine("serving", [*tiny, "--kv-cache-memory-bytes=100000", share])
    assert (answer.support, answer.problem) == ("elastic", "")
    assert "cannot be predicted" in answer.notes[0]


def test_what_cannot_be_predicted_for_another_reason_is_a_note(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    @functools.wraps(kv_cache_utils.get_kv_cache_configs)
    def odd(*_: Any, **__: Any) -> None:
        raise ValueError("layers that do not go together")

    monkeypatch.setattr(kv_cache_utils, "get_kv_cache_configs", odd)
    answer = doctor.judge_engine("serving", tiny)
    assert answer.support == "elastic"
    assert answer.notes == ("its KV cache cannot be predicted: ValueError: layers that do not go together",)


@newest_only
def test_names_that_only_a_rollout_engine_needs_refuse_that(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.delattr(CPUWorker, "determine_available_memory")
    monkeypatch.delattr(selfcheck.importlib.import_module("vllm.v1.worker.gpu_worker").Worker, "determine_available_memory")  # fmt: skip
    assert doctor.judge_engine("serving", tiny).support == "elastic"
    refused = doctor.judge_engine("rollout", tiny)
    assert (refused.support, refused.rows[0].row) == ("refused", "unknown_version")
    assert "determine_available_memory" in refused.rows[0].found


def test_a_configuration_that_cannot_be_read_is_refused_as_at_the_start(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(config: Any, **_: Any) -> None:
        raise AttributeError("its fields have moved")

    monkeypatch.setattr(compat, "touched", moved)
    answer = doctor.judge_engine("serving", tiny)
    assert (answer.support, answer.rows[0].row) == ("refused", "unknown_version")


def test_looking_starts_nothing_and_leaves_vllms_dispatch_as_it_was(tiny: list[str]) -> None:
    from vllm.entrypoints.cli import serve

    before = dict(vars(serve))
    applied = compat.applied()
    doctor.config_of(tiny)
    assert dict(vars(serve)) == before
    assert compat.applied() == applied


def test_the_operators_word_is_heard(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_ALLOW_UNMEASURED", raising=False)
    tiny = [*tiny, "--attention-backend=FLASH_ATTN"]
    monkeypatch.setattr(compat, "touched", lambda config, **_: {"gpu": "the platform"})
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    monkeypatch.setattr(doctor, "config_of", lambda arguments: (SHAPED(), "http"))
    monkeypatch.setattr(doctor, "_predict", lambda config: ({}, None, ()))
    assert doctor.judge_engine("serving", tiny).rows[0].fix == advice("gpu", "serving")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    answer = doctor.judge_engine("serving", tiny)
    assert (answer.support, answer.rows[0].row, answer.rows[0].fix) == ("elastic", "gpu", "")


class SHAPED:
    """Boundary: only :func:`compat.take_places` writes to it here."""

    def __init__(self) -> None:
        cores = {"data_parallel_size": 1, "data_parallel_external_lb": False}
        self.scheduler_config = self.parallel_config = type("Section", (), cores)()
        sized = {"kv_cache_memory_bytes": 2**20, "num_gpu_blocks_override": None}
        self.cache_config = type("Section", (), sized)()


@pytest.mark.parametrize(
    ("env", "names", "word"),
    [
        ({}, ["rose"], ""),
        ({"VLLM_PLUGINS": "lora_resolver,rose"}, ["rose"], ""),
        ({"VLLM_PLUGINS": "lora_resolver"}, ["rose"], "VLLM_PLUGINS"),
        ({}, ["other"], "not installed"),
    ],
)
def test_a_plugin_that_would_not_be_loaded_is_said(env: dict[str, str], names: list[str], word: str) -> None:
    problem = doctor.loaded_problem(env, names)
    assert bool(problem) == bool(word)
    assert word in problem


def test_where_vllm_is_not_installed_that_is_the_answer() -> None:
    base = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (answer,) = ask([{"role": "serving", "args": ["m"]}], python=base)
    assert answer["support"] is None
    assert answer["problem"].startswith("vLLM is not installed for ")


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (["--api-key", "aaaa", "bbbb", "--port", "8000"], {}, {"aaaa", "bbbb"}),
        (["--api-key=aaaa", "model"], {"HF_TOKEN": "cccc"}, {"aaaa", "cccc"}),
        (["--max-num-batched-tokens", "8192"], {"LANG": "english"}, set()),
        (['--kv-transfer-config={"a": {"password": "dddd", "port": 12345}}'], {}, {"dddd"}),
        (["--kv-transfer-config", '{"token": ["eeee", 12345]}'], {}, {"eeee", "12345"}),
        (["--hf-token", "--port", "8000"], {}, set()),
        (["--api-key", "", "x"], {}, set()),
    ],
)
def test_which_values_are_secrets(arguments: list[str], env: dict[str, str], expected: set[str]) -> None:
    assert doctor.secrets_in(arguments, env) == expected


def test_what_is_shown_is_bounded_and_a_password_in_an_address_is_not_in_it() -> None:
    shown = doctor._shown({"a": ["x" * 5000, "see tcp://me:pw@host/1"]}, [])
    assert len(shown["a"][0]) == 600
    assert shown["a"][1] == "see tcp://***@host/1"


def test_a_row_that_the_table_does_not_know_has_advice() -> None:
    assert advice(row("nobody").name, "serving")
