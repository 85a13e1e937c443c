"""Every reason to refuse, from made-up facts; and one look at the real machine."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from rose.demo.preflight import (
    Facts,
    _cgroup_memory,
    check_facts,
    gather_facts,
    is_port_free,
    parse_cpu_flags,
)
from rose.errors import ConfigError

GIB = 2**30
GOOD = Facts(
    system="Linux",
    machine="x86_64",
    python=(3, 11),
    num_cores=2,
    cpu_flags=frozenset({"avx2"}),
    total_bytes=int(11.3 * GIB),
    available_bytes=9 * GIB,
    run_directory="/dev/shm",
    run_directory_free_bytes=GIB,
    missing_modules=(),
    ports_taken={},
)


def test_a_machine_of_12_gb_with_two_cores_passes() -> None:
    check_facts(GOOD)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"system": "Darwin"}, "runs on Linux, this is Darwin"),
        ({"machine": "aarch64"}, "needs x86_64"),
        ({"cpu_flags": frozenset({"avx"})}, "lacks AVX2"),
        ({"num_cores": 1}, "1 core usable, 2 needed"),
        ({"total_bytes": 8 * GIB}, "8.0 GiB in all"),
        ({"available_bytes": 3 * GIB}, "3.0 GiB free, 8.0 GiB needed"),
        ({"python": (3, 10)}, "Python 3.10"),
        ({"python": (3, 13)}, "Python 3.13"),
        ({"missing_modules": ("vllm", "ray")}, "not installed: vllm, ray"),
        ({"run_directory_free_bytes": 64 * 2**20}, "/dev/shm has 64.0 MiB free"),
        ({"ports_taken": {"scheduler_port": 8080}}, "scheduler_port: port 8080 is taken"),
    ],
)
def test_each_shortcoming_is_one_line_that_names_it(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_facts(dataclasses.replace(GOOD, **change))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_with_a_listener_is_taken_until_it_closes() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_port_free(port)
    assert is_port_free(port)


def test_facts_name_the_taken_port_and_the_missing_module(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        facts = gather_facts({"relay_port": port}, tmp_path / "not" / "yet", ["json", "no_such_module_x"])

    assert facts.ports_taken == {"relay_port": port}
    assert facts.missing_modules == ("no_such_module_x",)
    assert facts.run_directory == str(tmp_path)
    assert facts.num_cores >= 1
    assert facts.total_bytes >= facts.available_bytes > 0


def test_cpu_flags_are_whole_words() -> None:
    assert "avx2" in parse_cpu_flags("model name\t: X\nflags\t\t: fpu avx avx2\n")
    assert "avx2" not in parse_cpu_flags("flags\t\t: avx2x avx\n")
    assert parse_cpu_flags("") == frozenset()


def test_container_limit_counts_and_reclaimable_cache_does_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\n")
    assert _cgroup_memory(tmp_path) == (4 * GIB, GIB)

    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_memory(tmp_path) == (None, 0)
