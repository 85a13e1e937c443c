"""Two FSDP2 ranks over gloo equal one: in gradients, in weights, in checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rose.errors import ConfigError, TrainError, WeightsError
from rose.train import checkpoint as checkpoints
from rose.train.loading import load_module
from rose.train.model import shard
from rose.train.ranks import listener_at, meeting_place, tells_of_a_lost_rank
from tests.engine_launcher import ROOT, Forked, fork_module, free_port
from tests.train.rank_main import run_steps

pytestmark = pytest.mark.timeout(200)


def run_ranks(model_path: Path, out: Path, world_size: int, *arguments: str) -> None:
    """One process per rank, with the variables of any launcher of torch programs."""
    port = str(free_port())
    out.mkdir(exist_ok=True)
    argv = [str(model_path), str(out), *arguments]
    processes: list[tuple[Forked, Path]] = []
    for rank in range(world_size):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        log = out / f"rank-{rank}.log"
        processes.append((fork_module("tests.train.rank_main", argv, env, {1: log, 2: log}), log))
    for process, log in processes:
        assert process.wait(180) == 0, log.read_text()[-3000:]


@pytest.fixture(scope="module")
def both(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same two steps on one rank and on two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_steps(policy_model, one)
    run_ranks(policy_model, two, 2)
    return one, two


def test_gradients_of_two_ranks_equal_those_of_one(both: tuple[Path, Path]) -> None:
    """Of every update.  The norm would hide a wrong divisor under AdamW, whose step does not depend on the scale."""
    assert_same_gradients(*both)


def assert_same_gradients(*folders: Path) -> None:
    one, two = (load_file(folder / "gradients.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    assert len(one) > 20
    for name, gradient in one.items():
        largest = float(gradient.abs().max())
        assert torch.allclose(gradient, two[name], atol=2e-5 * largest + 1e-9, rtol=1e-3), name


def test_weights_and_reports_of_two_ranks_equal_those_of_one(both: tuple[Path, Path]) -> None:
    assert_same_weights_and_reports(*both)


def test_two_ranks_that_begin_with_a_group_each_time_equal_one_on_the_whole_batch(
    policy_model: Path, tmp_path: Path
) -> None:
    """Two steps, the groups in another order than the batch's."""
    run_steps(policy_model, tmp_path / "one", one_update=True)
    run_ranks(policy_model, tmp_path / "two", 2, "", "2", "streamed")
    assert_same_gradients(tmp_path / "one", tmp_path / "two")
    assert_same_weights_and_reports(tmp_path / "one", tmp_path / "two")


def test_two_ranks_that_pack_equal_one_that_pads(
    both: tuple[Path, Path], policy_model: Path, tmp_path: Path
) -> None:
    run_ranks(policy_model, tmp_path, 2, "", "2", "packed")
    assert_same_gradients(both[0], tmp_path)
    assert_same_weights_and_reports(both[0], tmp_path)


def assert_same_weights_and_reports(*both: Path) -> None:
    one, two = (load_file(folder / "weights.safetensors") for folder in both)
    for name, weight in one.items():
        assert torch.allclose(weight, two[name], atol=2e-5), name
    reports: list[list[dict[str, Any]]] = [
        json.loads((folder / "reports.json").read_text()) for folder in both
    ]
    for left, right in zip(*reports, strict=True):
        for name in left:
            if name != "seconds":
                assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-5), name


def test_no_rank_holds_a_whole_model_and_nothing_is_gathered_for_a_checkpoint(
    both: tuple[Path, Path], policy_model: Path
) -> None:
    _, two = both
    whole = sum(tensor.numel() for tensor in load_module(policy_model).parameters())
    held = [json.loads((two / f"held-{rank}.json").read_text()) for rank in range(2)]
    assert sum(held) == whole
    assert max(held) < 0.6 * whole
    (folder,) = (two / "checkpoints").glob("step-*")
    for file in folder.glob("*.safetensors"):
        assert (
            sum(tensor.numel() for tensor in load_file(file).values()) < 3 * 0.6 * whole
        )  # weights, two moments
    assert len(list(folder.glob("*.safetensors"))) == 2


def test_two_ranks_publish_and_export_what_one_does(both: tuple[Path, Path]) -> None:
    """Each publishes its own part.  State hashes are of the bits: equal weights are compared through the export, these through the store."""
    one, two = both
    names = [set(json.loads((folder / "published.json").read_text())) for folder in both]
    assert names[0] == names[1]
    exported = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert exported[0].keys() == exported[1].keys()
    for name, tensor in exported[0].items():
        assert tensor.dtype == exported[1][name].dtype
        assert torch.allclose(tensor.float(), exported[1][name].float(), atol=2e-5), name
    assert {path.name for path in (one / "model").iterdir()} == {
        path.name for path in (two / "model").iterdir()
    }


def test_resume_of_two_ranks_is_exact(both: tuple[Path, Path], policy_model: Path, tmp_path: Path) -> None:
    """From a checkpoint, and from one that was saved again right after loading: to the last bit, so nothing of a rank's state is left out."""
    _, two = both
    run_ranks(policy_model, tmp_path / "copy", 2, str(two), "0")
    found = []
    for name, start in (("a", two), ("b", tmp_path / "copy")):
        run_ranks(policy_model, tmp_path / name, 2, str(start), "1")
        found.append(load_file(tmp_path / name / "weights.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_two_ranks_write_in_the_background_is_what_was_there_when_it_began(
    both: tuple[Path, Path], policy_model: Path, tmp_path: Path
) -> None:
    """They take another step meanwhile, with collectives of its own."""
    run_ranks(policy_model, tmp_path, 2, "", "2", "in_background")
    folders = [next((folder / "checkpoints").glob("step-*")) for folder in (both[1], tmp_path)]
    assert folders[0].name == folders[1].name
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        waited, background = (load_file(folder / name) for folder in folders)
        assert waited.keys() == background.keys()
        assert all(torch.equal(waited[key], background[key]) for key in waited)
    checkpoints.load(folders[1])


@pytest.mark.conformance
def test_adapters_on_two_ranks_equal_those_on_one(policy_model: Path, tmp_path: Path) -> None:
    """Of rank 3, which two ranks share unequally."""
    run_steps(policy_model, tmp_path / "one", lora=True)
    run_ranks(policy_model, tmp_path / "two", 2, "", "2", "lora")
    reports = json.loads((tmp_path / "two" / "reports.json").read_text())
    assert any(report["num_shortened_updates"] for report in reports)  # taken back alike, too
    for file in ("gradients.safetensors", "weights.safetensors", "model-adapter/adapter_model.safetensors"):
        one, two = (load_file(tmp_path / folder / file) for folder in ("one", "two"))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            largest = float(tensor.abs().max())
            assert torch.allclose(tensor, two[name], atol=2e-5 * largest + 2e-5, rtol=1e-3), name
    run_ranks(policy_model, tmp_path / "resumed", 2, str(tmp_path / "two"), "0", "lora")
    one, two = (load_file(tmp_path / folder / "weights.safetensors") for folder in ("resumed", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@contextlib.contextmanager
def two_ranks(folder: Path, *argv: str) -> Iterator[list[tuple[Forked, Path]]]:
    """Of ``tests/train/rank_faults.py``, and where each says what it made of it; what still runs at the end is killed."""
    port, ranks = str(free_port()), []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        said, errors = folder / f"rank-{rank}.out", folder / f"rank-{rank}.log"
        ranks.append((fork_module("tests.train.rank_faults", argv, env, {1: said, 2: errors}), said))
    try:
        yield ranks
    finally:
        for process, _ in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(("how", "seconds"), [("killed", 60.0), ("hangs", 2.0)])
def test_what_gloo_says_of_a_rank_that_was_killed_or_hangs_is_known(
    tmp_path: Path, how: str, seconds: float
) -> None:
    with two_ranks(tmp_path, "ends", how, str(seconds)) as [(first, said), (other, _)]:
        assert first.wait(150) == 0
        assert said.read_text() == "True\n"
        assert other.poll() == (-signal.SIGKILL if how == "killed" else None)


def what_ranks_say(folder: Path, how: str) -> list[str]:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    with two_ranks(folder, "disk", how, str(checkpoint)) as ranks:
        for process, _ in ranks:
            process.wait(150)
        return [said.read_text() for _, said in ranks]


@pytest.mark.parametrize("how", ["written", "hashed", "of the one before", "read"])
def test_a_checkpoint_may_take_longer_than_a_step(tmp_path: Path, how: str) -> None:
    """One rank writes or reads its part, or the first hashes all of them, for longer than a step's collectives wait."""
    assert what_ranks_say(tmp_path, how) == ["done\n"] * 2
    newest, passed_over = checkpoints.load_latest(tmp_path / "checkpoint")
    assert newest is not None
    assert (newest.step, passed_over) == (2, [])


def test_a_checkpoint_that_could_not_be_read_again_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, other = what_ranks_say(tmp_path, "refused")
    assert "state.json would take" in first
    assert "rank 0 could not write" in other
    assert not list((tmp_path / "checkpoint").iterdir())


@pytest.mark.parametrize("how", ["apart", "apart in the background"])
def test_a_checkpoint_of_which_parts_lie_on_several_disks_is_none(tmp_path: Path, how: str) -> None:
    """It would be whole by its hashes, and lack what the other rank wrote."""
    said = what_ranks_say(tmp_path, how)
    folders = [tmp_path / "checkpoint" / f"disk-{rank}" for rank in range(2)]
    name = "shard-00002-model-00001-of-00001.safetensors"
    for one in said:
        assert one.startswith(
            f"output_dir: {folders[0] / '.writing-step-000002.1'} has no {name}, which rank 1 wrote "
        )
        assert one.endswith("(put it on storage that all nodes share)\n")
    assert not [path for folder in folders if folder.exists() for path in folder.iterdir()]


def of_two_that_build(folder: Path, model: Path, how: str) -> tuple[int, str]:
    """How the first ends, and what it says."""
    (folder / "model").symlink_to(model)
    with two_ranks(folder, "builds", how, str(folder)) as [(first, said), _]:
        return first.wait(150), said.read_text()


def test_a_rank_that_is_killed_before_it_builds_its_model_ends_the_others_at_once(
    policy_model: Path, tmp_path: Path
) -> None:
    """To go on with new ones.  As long as a disk may take, hours, would be long."""
    assert of_two_that_build(tmp_path, policy_model, "killed") == (1, "")
    assert "a rank is gone; ending, to go on from the checkpoint" in (tmp_path / "rank-0.log").read_text()


def test_a_rank_whose_node_has_no_model_folder_says_so(policy_model: Path, tmp_path: Path) -> None:
    """The others have it, and would wait for the rank."""
    code, said = of_two_that_build(tmp_path, policy_model, "lacks")
    assert code == 0
    assert said == f"trainer: rank 1: ConfigError: model: {tmp_path / 'none'} is not a model folder\n"


MACHINES = """
ip link set lo up
ip link add v0 type veth peer name v1
ip address add 10.99.0.1/24 dev v0
ip link set v0 up
mkfifo there linked
unshare --net sh -c 'echo > there; read _ < linked; ip link set lo up; ip address add 10.99.0.2/24 dev v1; ip link set v1 up;
    RANK=1 exec timeout 90 "$@"' - "$@" 10.99.0.2 > rank-1 2>&1 &
read _ < there
ip link set v1 netns $!
echo > linked
RANK=0 timeout 90 "$@" 10.99.0.1 > rank-0 2>&1
wait $!
"""
"""A command on two machines with a cable between them, both of this one's name."""


def test_ranks_on_two_machines_meet_at_the_addresses_that_the_cluster_knows(tmp_path: Path) -> None:
    """Where a host's own name is its loopback's, as on many systems, gloo by itself tells the other rank 127.0.0.1."""
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    command = [sys.executable, "-m", "tests.train.rank_faults", "meets", "10.99.0.1:29500"]
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    subprocess.run(
        [*alone, "sh", "-ec", MACHINES, "-", *command], cwd=tmp_path, env=env, check=False, timeout=150
    )
    said = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert [one.splitlines()[-1:] for one in said] == [["2.0"]] * 2, said


def test_ranks_meet_at_the_nodes_address_alone() -> None:
    """Torch's own way listens on all interfaces, and who reaches the store can end the job."""
    with listener_at("127.0.0.2") as listener:
        host, port = listener.getsockname()
        store = meeting_place(host, port, 1, timedelta(seconds=30), listener)
    store.set("rank", "0")

    assert meeting_place(host, port, 1, timedelta(seconds=30)).get("rank") == b"0"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        torch.OutOfMemoryError("CUDA out of memory"),
        TrainError("gradient norm is nan", field="grad_norm"),
        WeightsError("some ranks have begun, others not", field="ranks"),
    ],
)
def test_other_errors_are_not_taken_for_the_loss_of_a_rank(error: Exception) -> None:
    assert not tells_of_a_lost_rank(error)


def test_a_lost_rank_is_seen_through_the_names_that_its_error_was_given() -> None:
    for cause in (dist.DistBackendError("NCCL error"), RuntimeError("[.../gloo/transport/tcp/pair.cc:1] x")):
        renamed = WeightsError("another rank is gone", field="ranks")
        renamed.__cause__ = cause
        assert tells_of_a_lost_rank(renamed)


def test_gradients_of_bf16_products_are_summed_in_fp32(policy_model: Path, tmp_path: Path) -> None:
    """Two ranks cannot show it: the sum of two bf16 numbers is rounded once, in either type."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        computing: Any = load_module(policy_model).to(torch.bfloat16)
        shard(computing, computing, torch.device("cpu"))
        found = {
            module._get_fsdp_state()._mp_policy.reduce_dtype
            for module in computing.modules()
            if hasattr(module, "_get_fsdp_state")
        }
    finally:
        dist.destroy_process_group()
    assert found == {torch.float32}


def test_a_model_whose_layers_are_not_found_is_refused_by_name() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks: models of type gpt2 are not shared"):
        shard(model, model, torch.device("cpu"))
