"""What is added to the command line of an engine beside production, and when the operator has the last word."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.coserve.engine_args import derived_args, says_kv_size, weights_bytes
from rose.coserve.node_config import EngineConfig, cache_directory
from rose.policy.engine_start import EngineSize

SIZE = EngineSize(kv_bytes=4096, memory_share=0.25)


def engine(*args: str, **env: str) -> EngineConfig:
    return EngineConfig(model="policy", max_model_len=64, args=args, env=env)


def test_all_of_it_where_the_operator_said_nothing() -> None:
    assert derived_args(engine("--seed=1"), SIZE) == (
        *("--kv-cache-memory-bytes", "4096", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.25", "--no-async-scheduling"),
    )


def test_nothing_on_a_device_that_the_engine_has_to_itself() -> None:
    assert derived_args(engine(), None) == ()


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (("--kv-cache-memory-bytes", "1"), "--kv-cache-memory-bytes"),
        (("--kv_cache_memory_bytes=1",), "--kv-cache-memory-bytes"),
        (("--num-gpu-blocks-override=9",), "--kv-cache-memory-bytes"),
        (("--no-enforce-eager",), "--enforce-eager"),
        (("-O0",), "--enforce-eager"),
        (("--compilation_config={}",), "--enforce-eager"),
        (("--gpu-memory-utilization", "0.9"), "--gpu-memory-utilization"),
        (("--no_async_scheduling",), "--no-async-scheduling"),
    ],
)
def test_what_the_operator_gives_is_not_given_again(given: tuple[str, ...], left_out: str) -> None:
    found = derived_args(engine(*given), SIZE)
    assert left_out not in found
    assert len([arg for arg in found if arg.startswith("--")]) == 3


def test_vllms_own_variable_for_the_size_counts() -> None:
    assert says_kv_size(engine(VLLM_CPU_KVCACHE_SPACE="4"), {})
    assert says_kv_size(engine(), {"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert not says_kv_size(engine(), {})


@pytest.mark.parametrize(
    ("env", "uid", "directory"),
    [
        ({"HOME": "/root"}, 0, "/var/cache/rose"),
        ({"HOME": "/home/a"}, 7, "/home/a/.cache/rose"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}, 7, "/c/rose"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, 7, "/home/a/.cache/rose"),
        ({"HOME": "/home/a", "CACHE_DIRECTORY": "/var/cache/unit:/var/cache/two"}, 7, "/var/cache/unit"),
    ],
)
def test_weights_lie_in_the_users_cache_by_default_and_never_among_the_shared_files(
    env: dict[str, str], uid: int, directory: str
) -> None:
    assert cache_directory(env, uid) == Path(directory)


def test_the_weights_are_what_lies_in_the_folder(tmp_path: Path) -> None:
    assert weights_bytes("some/name") is None
    (tmp_path / "a.safetensors").write_bytes(b"123")
    (tmp_path / "b.safetensors").write_bytes(b"45")
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same again")
    assert weights_bytes(str(tmp_path)) == 5
