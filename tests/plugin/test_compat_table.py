"""The compatibility table: one test per row, on vLLM's own configuration objects; and what is in force after each answer."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vllm_plugin
from rose.coserve.node_dir import NodeDir
from rose.coserve.record_layout import unpack_found
from rose.coserve.records import Phase
from rose.policy import engine_fields
from rose.policy.advice import advice
from rose.policy.compat import TABLE, UNLISTED, Support, judge, markdown, row, row_of_number
from rose.units import PAGE_BYTES
from tests.plugin import harness
from tests.tiny_model import write_tiny_model
from vllm_plugin import compat
from vllm_plugin.features import findings

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real VllmConfig of the CPU build, as an operator's command gives it."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    config = harness.engine_config(folder)
    config.parallel_config.worker_cls = compat.STOCK_CPU_WORKER
    return config


@pytest.fixture
def config(stock: Any) -> Any:
    return copy.deepcopy(stock)


def found_in(config: Any, env: dict[str, str] | None = None, device: Any = "cpu") -> dict[str, str]:
    return findings(
        config,
        device=device,
        stock_worker=compat.STOCK_CPU_WORKER,
        ours=(compat.SCHEDULER_FACTORY,),
        env=env or {},
    )


def answer(
    config: Any, role: str = "serving", env: dict[str, str] | None = None, device: Any = "cpu"
) -> tuple[str, str]:
    support, because = judge(role, found_in(config, env, device))
    return support.label, because.name


Change = Callable[[Any], None]


def put(path: str, value: Any) -> Change:
    """Set a field by its path in the configuration."""

    def change(config: Any) -> None:
        *sections, name = path.split(".")
        for section in sections:
            config = getattr(config, section)
        object.__setattr__(config, name, value)

    return change


def says(name: str, value: Any) -> Change:
    """Another answer of vLLM's ModelConfig, where it is a property of the architecture."""

    def change(config: Any) -> None:
        kind = type(config.model_config)
        config.model_config.__class__ = type(kind.__name__, (kind,), {name: property(lambda _: value)})

    return change


def cores(size: int, *, local: int, external: bool = False, moe: bool = False) -> Change:
    """So many engine cores, of which the command starts ``local``."""

    def change(config: Any) -> None:
        put("parallel_config.data_parallel_size", size)(config)
        put("parallel_config.data_parallel_size_local", local)(config)
        put("parallel_config.data_parallel_external_lb", external)(config)
        says("is_moe", moe)(config)

    return change


THING = SimpleNamespace()


def compressed(config: Any, numbers: str) -> None:
    config.model_config.quantization = "compressed-tensors"
    config.model_config.hf_config.quantization_config = {"format": numbers}


def adapters(config: Any, **options: Any) -> None:
    from vllm.config.lora import LoRAConfig

    config.lora_config = LoRAConfig(**options)


def speculative(config: Any, method: str) -> None:
    from vllm.config.speculative import SpeculativeConfig

    made = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    made.method = method  # vLLM would look for the drafter's files
    config.speculative_config = made


def mtp(config: Any, *architectures: str) -> None:
    """As vLLM makes the configuration of a drafter that is a part of the model."""
    speculative(config, "mtp")
    if architectures:
        drafter = SimpleNamespace(architectures=list(architectures))
        config.speculative_config.draft_model_config = drafter


ROWS: list[tuple[str, Change, str]] = [
    ("decoder", lambda config: None, "elastic"),
    ("tensor_parallel", put("parallel_config.tensor_parallel_size", 2), "elastic"),
    ("kv_connector", put("kv_transfer_config", THING), "compute-only"),
    ("kv_connector", put("cache_config.kv_offloading_size", 4.0), "compute-only"),
    ("encoder_connector", put("ec_transfer_config", THING), "refused"),
    ("data_parallel", cores(2, local=2), "elastic"),
    ("data_parallel_moe", cores(2, local=1, external=True), "refused"),
    ("data_parallel_hosts", cores(4, local=2), "refused"),
    ("data_parallel_hosts", put("parallel_config.data_parallel_hybrid_lb", True), "refused"),
    ("data_parallel_moe", cores(2, local=2, moe=True), "refused"),
    ("expert_parallel", put("parallel_config.enable_expert_parallel", True), "refused"),
    ("expert_parallel", put("parallel_config.enable_eplb", True), "refused"),
    ("multi_host", put("parallel_config.data_parallel_backend", "ray"), "refused"),
    ("other_option", put("scheduler_config.prefill_schedule_interval", 2), "refused"),
    ("pipeline_parallel", put("parallel_config.pipeline_parallel_size", 2), "compute-only"),
    ("context_parallel", put("parallel_config.decode_context_parallel_size", 2), "refused"),
    ("context_parallel", put("parallel_config.prefill_context_parallel_size", 2), "refused"),
    ("lora", lambda config: adapters(config), "elastic"),
    ("other_option", lambda config: adapters(config, enable_moe_shared_loras=True), "refused"),
    ("speculative", lambda config: speculative(config, "ngram"), "elastic"),
    ("speculative", lambda config: speculative(config, "eagle"), "elastic"),
    ("speculative", lambda config: speculative(config, "eagle3"), "elastic"),
    ("speculative", lambda config: mtp(config, "DeepSeekMTPModel"), "elastic"),
    ("drafts", lambda config: mtp(config, "Qwen3NextMTP"), "refused"),
    ("drafts", lambda config: mtp(config), "refused"),
    ("drafts", lambda config: speculative(config, "medusa"), "refused"),
    ("hybrid", says("is_hybrid", True), "compute-only"),
    ("hybrid", says("is_attention_free", True), "compute-only"),
    ("encoder_decoder", says("is_encoder_decoder", True), "refused"),
    ("multimodal", put("scheduler_config.is_multimodal_model", True), "elastic"),
    ("modalities", says("is_multimodal_model", True), "refused"),
    ("modalities", says("is_mm_prefix_lm", True), "refused"),
    ("pooling", put("model_config.runner", "pooling"), "refused"),
    ("fp8_kv", put("cache_config.cache_dtype", "fp8"), "elastic"),
    ("kv_quant", put("cache_config.cache_dtype", "int8_per_token_head"), "refused"),
    ("api_servers", put("parallel_config._api_process_count", 2), "elastic"),
    ("sleep_mode", put("model_config.enable_sleep_mode", True), "refused"),
    ("sleep_mode", put("model_config.enable_cumem_allocator", True), "refused"),
    ("other_scheduler", put("scheduler_config.scheduler_cls", "mine.Scheduler"), "refused"),
    ("other_scheduler", put("parallel_config.worker_cls", "mine.Worker"), "refused"),
    ("multi_host", put("parallel_config.nnodes", 2), "refused"),
    ("multi_host", put("parallel_config.distributed_executor_backend", "ray"), "refused"),
    ("mla", says("use_mla", True), "elastic"),
    ("kv_kind", says("rswa_window", 128), "compute-only"),
    ("kv_option", put("cache_config.kv_sharing_fast_prefill", True), "compute-only"),
    ("kv_option", put("scheduler_config.watermark", 0.3), "compute-only"),
    ("kv_option", put("offload_config.uva.cpu_offload_gb", 4.0), "compute-only"),
    ("attention_backend", put("attention_config.backend_per_kind", {"full": "X"}), "compute-only"),
    ("quantized_weights", put("model_config.quantization", "fp8"), "compute-only"),
    ("weight_formats", lambda config: compressed(config, "int-quantized"), "elastic"),
    ("quantized_weights", lambda config: compressed(config, "float-quantized"), "compute-only"),
    ("weight_formats", put("model_config.quantization", "awq"), "elastic"),
    ("weight_formats", put("model_config.quantization", "auto_gptq"), "elastic"),
    ("priority", put("scheduler_config.policy", "priority"), "refused"),
    ("prompt_embeds", put("model_config.enable_prompt_embeds", True), "elastic"),
    ("logits_processors", put("model_config.logits_processors", ["mine.Processor"]), "elastic"),
    ("other_option", says("is_diffusion", True), "refused"),
    ("other_option", put("watermark_config", THING), "refused"),
    ("other_option", put("parallel_config.enable_fault_tolerance", True), "refused"),
    ("unlisted", says("is_quantum", True), "refused"),
]


@pytest.mark.parametrize(("name", "change", "expected"), ROWS)
def test_a_configuration_gets_what_its_row_says(
    config: Any, name: str, change: Callable[[Any], None], expected: str
) -> None:
    change(config)
    label, because = answer(config)
    assert label == expected
    found = list(found_in(config))
    assert because == (name if expected != "elastic" or not found else found[0])
    assert name == "decoder" or name in found


@pytest.mark.parametrize(
    ("name", "env", "device"),
    [
        ("gpu", {}, "cuda"),
        ("other_device", {}, "other"),
        ("mig", {"CUDA_VISIBLE_DEVICES": "MIG-4f2a"}, "cpu"),
        ("rust_frontend", {"VLLM_USE_RUST_FRONTEND": "1"}, "cpu"),
        ("sleep_mode", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native, expandable_segments: True"}, "cpu"),
    ],
)
def test_what_the_machine_says_counts_like_the_configuration(
    config: Any, name: str, env: dict[str, str], device: str
) -> None:
    assert answer(config, env=env, device=device) == ("refused", name)


@pytest.mark.parametrize("role", ["serving", "rollout"])
def test_what_nobody_has_measured_is_shared_only_where_the_operator_says_so(role: str) -> None:
    assert judge(role, ["gpu"]) == (Support.REFUSED, row("gpu"))
    assert judge(role, ["gpu"], allow_unmeasured=True)[0] is Support.ELASTIC
    assert judge(role, ["gpu", "priority"], allow_unmeasured=True) == (Support.REFUSED, row("priority"))


@pytest.mark.parametrize("role", ["serving", "rollout"])
def test_the_operators_word_lifts_the_rows_that_name_it_and_no_other(role: str) -> None:
    """Every production on CUDA has it set: a row that it lifted besides would protect nobody there."""
    lifted = {
        one.name for one in TABLE if judge(role, [one.name]) != judge(role, [one.name], allow_unmeasured=True)
    }
    lifted |= {"untried_line"}  # not found at all under it: test_lines.py
    assert lifted == {one.name for one in TABLE if "ROSE_ALLOW_UNMEASURED" in one.reason}
    assert lifted == {"gpu", "untried_line"}
    said = {one.name for one in TABLE if "unmeasured" in advice(one.name, role).lower()}
    assert said == lifted


@pytest.mark.parametrize(("role", "expected"), [("serving", "compute-only"), ("rollout", "refused")])
def test_on_cuda_under_the_operators_word_a_backend_asked_for_by_name_still_decides(
    config: Any, monkeypatch: pytest.MonkeyPatch, role: str, expected: str
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(compat, "device", lambda: "cuda")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    config.parallel_config.worker_cls = compat.STOCK_GPU_WORKER
    config.attention_config.backend = AttentionBackendEnum.FLASHINFER
    config.model_config.enforce_eager = True
    standing = compat.standing_of(config, role)
    assert (standing.support.label, standing.row) == (expected, row("attention_backend"))


@pytest.mark.parametrize(
    ("role", "eager", "support"),
    [
        ("rollout", False, Support.REFUSED),
        ("rollout", True, Support.ELASTIC),
        ("serving", False, Support.ELASTIC),
    ],
)
def test_a_rollout_engine_that_would_capture_graphs_on_cuda_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, role: str, eager: bool, support: Support
) -> None:
    """What vLLM runs before it captures them writes to blocks that are not there yet."""
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", "1")
    config.parallel_config.worker_cls = compat.STOCK_GPU_WORKER
    config.model_config.enforce_eager = eager
    standing = compat.standing_of(config, role)
    assert standing.support is support
    assert (standing.row == row("cuda_graphs")) is (support is Support.REFUSED)


@pytest.mark.parametrize(
    ("given", "worker"),
    [("1", compat.GPU_WORKER), ("yes", compat.STOCK_GPU_WORKER), ("", compat.STOCK_GPU_WORKER)],
)
def test_a_gpu_engine_takes_part_only_with_the_operators_word(
    config: Any, lease: Any, monkeypatch: pytest.MonkeyPatch, given: str, worker: str
) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    monkeypatch.setenv("ROSE_ALLOW_UNMEASURED", given)
    config.parallel_config.worker_cls = compat.STOCK_GPU_WORKER
    wrapped(config)
    assert config.parallel_config.worker_cls == worker
    assert compat.is_elastic(config) == (given == "1")
    if given == "1":
        standing = compat.standing_of(config, "serving")
        assert (standing.row, compat.piece_bytes(config)) == (row("gpu"), PAGE_BYTES)
    else:
        assert row_of_number(lease.read().row) == row("gpu")


def test_a_rollout_engine_is_refused_where_its_own_routes_would_not_work(config: Any) -> None:
    config.parallel_config._api_process_count = 2
    assert answer(config, role="rollout") == ("refused", "api_servers")
    config.parallel_config._api_process_count = 1
    config.kv_transfer_config = THING
    assert answer(config, role="rollout") == ("refused", "kv_connector")


def test_the_least_that_any_feature_allows_counts(config: Any) -> None:
    config.kv_transfer_config = THING
    config.ec_transfer_config = THING
    assert answer(config) == ("refused", "encoder_connector")


def test_every_row_has_a_test_here() -> None:
    elsewhere = {"gpu", "other_device", "mig", "rust_frontend", "unknown_version", "small_cache"}
    # test_kv_cache_table.py
    elsewhere |= {"kv_groups", "kv_layout", "sliding_window", "grouped_drafts", "state_kind"}
    elsewhere |= {"cuda_graphs", "untried_line"}  # the latter: test_lines.py
    assert {name for name, _, _ in ROWS} | elsewhere == {one.name for one in TABLE}


def test_what_the_table_does_not_name_is_refused() -> None:
    assert judge("serving", ["decoder", "quantum"]) == (Support.REFUSED, UNLISTED)
    assert row_of_number(9999) is UNLISTED


def test_numbers_and_names_are_given_once() -> None:
    assert len({one.number for one in TABLE}) == len({one.name for one in TABLE}) == len(TABLE)


def test_each_row_of_the_page_has_the_key_by_which_answers_name_it() -> None:
    lines = markdown().splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        f"`{one.name}`" for one in (*TABLE[1:], UNLISTED)
    ]


def test_the_documentation_shows_this_table() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert markdown() in text, "put rose.policy.compat.markdown() into docs/compatibility.md"
    fields = engine_fields.markdown()
    assert fields in text, "put rose.policy.engine_fields.markdown() into docs/compatibility.md"


# --- what is in force after the answer


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The node directory's serving.lease, with the plugin's module state put back afterwards."""
    node_dir = tmp_path / "n"
    monkeypatch.setenv("ROSE_DIR", str(node_dir))
    for name in ("ROSE_CORES", "ROSE_ENGINE"):  # what becomes of them is undone with them
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(compat, "_refused", None)
    monkeypatch.setattr(compat, "_refusal", None)
    yield NodeDir(node_dir).serving_lease()
    if compat._refusal is not None:
        compat._refusal.close()


def wrapped(config: Any, **how: Any) -> Any:
    """What vLLM gets from ``create_engine_config`` with the plugin on."""
    return compat._wrap_config(lambda self, **_: config, "serving")(None, **how)


def test_a_refused_engine_stays_stock_and_says_why_in_its_lease(config: Any, lease: Any) -> None:
    config.ec_transfer_config = THING
    assert wrapped(config).scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == compat.STOCK_CPU_WORKER
    record = lease.read()
    assert (record.phase, record.support) == (Phase.OFF, Support.REFUSED)
    assert row_of_number(record.row) == row("encoder_connector")
    assert lease.alive()


@pytest.mark.parametrize(
    ("headless", "imported", "expected"),
    [
        (True, "", ("data_parallel_hosts", "--headless")),
        (False, "smg_grpc_servicer", ("other_option", "--grpc")),
    ],
)
def test_a_server_without_vllms_http_front_end_is_refused_by_the_option_that_says_so(
    config: Any,
    lease: Any,
    monkeypatch: pytest.MonkeyPatch,
    headless: bool,
    imported: str,
    expected: tuple[str, str],
) -> None:
    """No field of the configuration tells: vLLM's call does, or what its server over gRPC has imported."""
    if imported:
        monkeypatch.setitem(sys.modules, imported, ModuleType(imported))
    assert wrapped(config, headless=headless).scheduler_config.scheduler_cls is None
    assert (row_of_number(lease.read().row).name, unpack_found(lease.extra)) == expected


def test_production_that_may_sleep_is_refused_by_the_field_that_says_so(
    lease: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``vllm serve --enable-sleep-mode`` makes its configuration, on a platform that says that it can."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    write_tiny_model(tmp_path / "model")
    made = harness.engine_config(tmp_path / "model", enable_sleep_mode=True)
    made.parallel_config.worker_cls = compat.STOCK_CPU_WORKER

    assert wrapped(made).scheduler_config.scheduler_cls is None
    assert made.parallel_config.worker_cls == compat.STOCK_CPU_WORKER
    record = lease.read()
    assert (record.phase, row_of_number(record.row)) == (Phase.OFF, row("sleep_mode"))
    assert unpack_found(lease.extra) == "model_config.enable_sleep_mode = True"


def test_each_engine_core_of_a_refused_server_says_why_in_its_own_directory(
    config: Any, lease: Any, tmp_path: Path
) -> None:
    cores(2, local=2, moe=True)(config)
    wrapped(config)
    assert lease.read() is None
    for core in range(2):
        record = NodeDir(tmp_path / "n" / f"dp{core}").serving_lease().read()
        assert record is not None
        assert (record.phase, row_of_number(record.row)) == (Phase.OFF, row("data_parallel_moe"))


@pytest.mark.parametrize(
    ("change", "core", "directory"),
    [
        (cores(3, local=3), 2, "n/dp2"),
        (lambda config: None, 0, "n"),
    ],
    ids=["several", "one"],
)
def test_an_engine_core_has_a_directory_of_its_own_where_its_server_has_several(
    config: Any, lease: Any, tmp_path: Path, change: Change, core: int, directory: str
) -> None:
    change(config)
    wrapped(config)
    config.parallel_config.data_parallel_index = core
    config.parallel_config.reconfigure_for_independent_dp_rank()
    made: list[Any] = []
    compat._wrap_executor(lambda self, config: made.append(os.environ["ROSE_DIR"]), "serving")(None, config)
    try:
        assert made == [str(tmp_path / directory)]
        record = NodeDir(tmp_path / directory).serving_lease().read()
        assert record is not None
        assert record.phase == Phase.STARTING
        assert "ROSE_CORES" not in os.environ
    finally:
        writer = compat.starting_lease()
        assert writer is not None
        writer.close()


def test_a_configuration_that_cannot_be_read_is_refused(config: Any, lease: Any) -> None:
    config.parallel_config = SimpleNamespace(worker_cls=compat.STOCK_CPU_WORKER)  # its fields have moved
    assert wrapped(config) is config
    assert row_of_number(lease.read().row) == row("unknown_version")
    assert config.scheduler_config.scheduler_cls is None


def test_compute_only_keeps_vllms_own_worker(config: Any, lease: Any) -> None:
    config.kv_transfer_config = THING
    wrapped(config)
    assert config.scheduler_config.scheduler_cls == compat.SCHEDULER_FACTORY
    assert config.parallel_config.worker_cls == compat.STOCK_CPU_WORKER
    assert not compat.is_elastic(config)


def test_an_elastic_engine_gets_our_worker(config: Any, lease: Any) -> None:
    assert compat.is_elastic(wrapped(config))
    assert lease.read() is None


def test_an_unknown_vllm_version_is_refused_by_number(lease: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(compat, "_applied", {})
    compat.switch_on("serving")
    assert compat.applied() == {}
    assert row_of_number(lease.read().row) == row("unknown_version")


def test_a_vllm_whose_modules_have_moved_is_refused_and_production_starts(
    lease: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.core.block_pool", None)  # importing it is an ImportError
    monkeypatch.setattr(compat, "_applied", {})
    compat.switch_on("serving")
    assert compat.applied() == {}
    assert row_of_number(lease.read().row) == row("unknown_version")


def test_registering_never_raises_into_production(lease: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(role: str) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(compat, "switch_on", broken)
    monkeypatch.setenv("ROSE_ROLE", "serving")
    vllm_plugin.register()
    monkeypatch.setenv("ROSE_ROLE", "rollout")
    with pytest.raises(ZeroDivisionError):
        vllm_plugin.register()


def test_a_message_queue_that_cannot_be_told_to_park_spins_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.delattr(shm_broadcast, "SpinCondition")
    monkeypatch.setattr(compat, "_applied", {})
    compat.patch_spin()
    assert compat.applied() == {}


@pytest.mark.parametrize("spins", [False, True])
def test_waiting_for_a_message_is_vllms_own_only_where_it_may_spin(
    monkeypatch: pytest.MonkeyPatch, spins: bool
) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    yields: list[int] = []
    parks: list[int] = []
    for name in ("wait", "notify"):
        monkeypatch.setattr(shm_broadcast.SpinCondition, name, getattr(shm_broadcast.SpinCondition, name))
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(1))
    monkeypatch.setattr(compat, "_applied", {})
    monkeypatch.setattr(compat, "_spins", not spins)
    compat.patch_spin()
    compat.let_spin(spins)
    just_read = SimpleNamespace(
        is_reader=True,
        last_read=time.monotonic() + 60,
        busy_loop_s=1,
        read_cancel_socket=None,
        local_notify_socket=None,
        poller=SimpleNamespace(poll=lambda timeout: parks.append(timeout) or []),
    )
    shm_broadcast.SpinCondition.wait(just_read, None)
    assert (len(yields), parks) == ((1, []) if spins else (0, [compat.PARKED_MS]))


def test_a_compute_only_scheduler_publishes_slack_and_lends_nothing(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    scheduler = harness.build(ServingScheduler, config)  # no worker reports elastic memory
    try:
        assert scheduler.rose is not None
        scheduler.add_request(harness.request("a"))
        harness.step(scheduler)
        node = NodeDir(tmp_path / "n")
        lease, board = node.serving_lease().read(), node.serving_board().read()
        assert lease is not None
        assert board is not None
        assert lease.support == Support.COMPUTE_ONLY
        assert (lease.reserved_pages, lease.lent_pages) == (lease.total_pages, 0)
        assert (board.step, board.running) == (1, 1)
    finally:
        scheduler.rose.stop() if scheduler.rose._thread.is_alive() else None


def test_the_lease_names_the_field_and_value_for_which_nothing_is_lent(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_plugin.scheduler import ServingScheduler

    monkeypatch.setenv("ROSE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    config.scheduler_config.watermark = 0.3
    scheduler = harness.build(ServingScheduler, config)
    try:
        lease = NodeDir(tmp_path / "n").serving_lease()
        record = lease.read()
        assert record is not None
        assert record.support == Support.COMPUTE_ONLY
        assert unpack_found(lease.extra) == "scheduler_config.watermark = 0.3"
    finally:
        scheduler.rose.stop() if scheduler.rose._thread.is_alive() else None
