"""``rose train --check``: of a job that can run it says so, of one that cannot all that is wrong; and it leaves nothing behind."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rose.auth import Tokens
from rose.cli import app
from rose.config import load_config
from rose.testing.relay_thread import RelayThread
from rose.train import checkpoint as checkpoints
from rose.train.check import settings_of
from rose.train.cli import Screen, _line
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights.file_store import FileStore
from tests.train.file_publisher import RUN as FOLLOWED
from tests.train.world import running_world


def written(folder: Path, text: str) -> Path:
    file = folder / "job.toml"
    file.write_text(text)
    return file


def checked(job: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of the command."""
    done = CliRunner().invoke(app, ["train", "--config", str(job), "--check", *arguments])
    return done.exit_code, done.output.splitlines()


def test_of_a_job_that_can_run_all_is_said_and_nothing_is_started(tmp_path: Path, policy_model: Path) -> None:
    with (
        running_world(tmp_path / "world", policy_model, num_engines=0) as world,
        RelayThread(FileStore(tmp_path / "relay"), world.tokens) as relay,
    ):
        world.tokens.save(tmp_path / "tokens.toml")
        job = written(
            tmp_path,
            f'job = "lake"\nmodel = "{policy_model}"\noutput_dir = "{tmp_path / "out"}"\n'
            f'token_file = "{tmp_path / "tokens.toml"}"\n[scheduler]\nurl = "{world.url}"\n'
            f'[weights]\nrelay_url = "{relay.url}"\n[trainer]\nlearning_rate = 1e-5\nalgorithm = "dapo"\n'
            '[ray]\naddress = "local"\n[env]\nsettings = { num_maps = 4, size = 4 }\n',
        )
        before = sorted(tmp_path.iterdir())
        code, lines = checked(job, "--set", "rollout.group_size=8")
        assert sorted(tmp_path.iterdir()) == before
    assert code == 0, lines
    names = [line[4:].partition(":")[0] for line in lines if line.startswith("ok  ")]
    assert names == [
        "job", "settings", "model", "tokenizer", "chat template", "environment", "reward", "output_dir",
        "token file", "libraries", "Ray", "scheduler", "engines", "weights",
    ]  # fmt: skip
    assert "ok  environment: frozenlake, 4 tasks, 4 answers, each one token" in lines
    assert f"ok  output_dir: {tmp_path / 'out'}, begins anew" in lines
    assert f"ok  scheduler: {world.url} takes the trainer's token, and has not heard of lake" in lines
    assert "ok  engines: none is there yet" in lines
    assert f"ok  weights: {relay.url} answers, run lake has published nothing" in lines
    rows = {parts[0]: parts[1:] for line in lines if (parts := line.split())}
    assert rows["rollout.group_size"] == ["8", "job"]
    assert rows["trainer.clip_high"] == ["0.28", "dapo"]
    assert rows["rollout.alpha"] == ["1", "follows"]
    assert rows["trainer.adam_beta2"] == ["0.95", "default"]
    assert rows["env.settings"] == ["num_maps,", "size", "job"]
    assert lines[-1] == "the job can be started"


def test_of_a_job_that_cannot_run_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound and not listening: nothing answers there
        nobody.bind(("127.0.0.1", 0))
        job = written(
            tmp_path,
            f'model = "{tmp_path / "nowhere"}"\noutput_dir = "{tmp_path / "job.toml" / "out"}"\n'
            f'token_file = "{tmp_path / "none.toml"}"\n[scheduler]\nurl = "http://127.0.0.1:{nobody.getsockname()[1]}"\n'
            f'[weights]\ndirectory = "{tmp_path}"\n[trainer]\nlearning_rate = 1e-5\n[ray]\naddress = "local"\n'
            '[reward]\nkind = "oracle"\n',
        )
        code, lines = checked(job)
    assert code == 2
    said = {line[4:].partition(":")[0]: line for line in lines if line.startswith(("NO  ", "--  "))}
    assert said.keys() == {
        "model", "tokenizer", "chat template", "environment", "reward", "output_dir", "token file", "scheduler", "engines",
        "weights",
    }  # fmt: skip
    assert "nowhere is not a model folder" in said["model"]
    assert said["tokenizer"] == "--  tokenizer: was not looked at without model"
    assert "unknown reward 'oracle'" in said["reward"]
    assert "output_dir: " in said["output_dir"]
    assert said["scheduler"] == "--  scheduler: was not looked at without token file"
    assert lines[-1] == "10 of 13 checks failed"


def test_a_scheduler_that_does_not_answer_is_not_waited_for(tmp_path: Path, policy_model: Path) -> None:
    with running_world(tmp_path / "world", policy_model, num_engines=0) as world:
        world.tokens.save(tmp_path / "tokens.toml")
    job = written(
        tmp_path,
        f'model = "{policy_model}"\noutput_dir = "{tmp_path / "out"}"\ntoken_file = "{tmp_path / "tokens.toml"}"\n'
        f'[scheduler]\nurl = "{world.url}"\n[weights]\ndirectory = "{tmp_path}"\n[ray]\naddress = "local"\n'
        "[trainer]\nlearning_rate = 1e-5\n",
    )
    code, lines = checked(job)
    assert code == 2
    (told,) = [line for line in lines if line.startswith("NO  ")]
    assert told.startswith("NO  scheduler: ")
    assert "--  engines: was not looked at without scheduler" in lines
    assert lines[-1] == "2 of 13 checks failed"


def test_a_run_that_no_engine_follows_is_remarked_and_refuses_nothing(
    tmp_path: Path, policy_model: Path
) -> None:
    """A node may be given another run before the job starts, or by the scheduler."""
    with running_world(tmp_path / "world", policy_model, num_engines=1) as world:
        (node,) = world.nodes
        node.engine.weights_run = FOLLOWED
        assert world.call(node.beat())
        world.tokens.save(tmp_path / "tokens.toml")
        job = written(
            tmp_path,
            f'job = "lake"\nmodel = "{policy_model}"\noutput_dir = "{tmp_path / "out"}"\n'
            f'token_file = "{tmp_path / "tokens.toml"}"\n[scheduler]\nurl = "{world.url}"\n'
            f'[weights]\ndirectory = "{tmp_path}"\n[trainer]\nlearning_rate = 1e-5\n[ray]\naddress = "local"\n',
        )
        code, lines = checked(job)
        _, others = checked(job, "--set", f"weights.run_id={FOLLOWED}")
    (told,) = [line for line in lines if "engines: " in line]
    assert told.startswith(f"!!  engines: none of 1 has run lake: they have {FOLLOWED}")
    assert (code, lines[-1]) == (0, "the job can be started")
    assert f"ok  engines: 1 of 1 has run {FOLLOWED}" in others


def test_a_folder_whose_checkpoints_are_of_another_model_is_refused_as_a_start_refuses_it(
    tmp_path: Path, policy_model: Path
) -> None:
    def job(model: Path) -> Path:
        return written(
            tmp_path,
            f'model = "{model}"\noutput_dir = "{tmp_path / "out"}"\n[weights]\ndirectory = "{tmp_path}"\n'
            "[trainer]\nlearning_rate = 1e-5\n",
        )

    def said(model: Path, *arguments: str) -> str:
        _, lines = checked(job(model), *arguments)
        (line,) = [line for line in lines if line[4:].startswith("output_dir:")]
        return line

    trainer = TorchTrainer(policy_model, TrainerParams(learning_rate=1e-5))
    directory = tmp_path / "out" / "checkpoints"
    path = checkpoints.save(trainer.capture(attempt=3, version=0, consumed={}), directory)
    there = f"ok  output_dir: {tmp_path / 'out'} has checkpoints: goes on from step-000000.3, or the newest that can be read"
    assert said(policy_model) == there
    assert said(policy_model, "--set", "trainer.lora.rank=4").startswith(
        f"NO  output_dir: trainer.lora.rank: is 4, and {path} holds the whole model (set it to 0"
    )
    other = shutil.copytree(policy_model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors = {name: 1.01 * tensor for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert said(other).startswith(f"NO  output_dir: model: {path} is of another model than {other}")
    (path / "state.json").write_text("torn")
    assert said(other) == there  # what can be read is known when it is


def test_code_of_the_jobs_own_that_fails_is_said_as_it_fails(tmp_path: Path, policy_model: Path) -> None:
    job = written(
        tmp_path,
        f'model = "{policy_model}"\n[weights]\ndirectory = "{tmp_path}"\n[trainer]\nlearning_rate = 1e-5\n'
        f'[env]\nkind = "{__name__}:broken_family"\n',
    )
    code, lines = checked(job)
    assert code == 2
    assert "NO  environment: KeyError: 'of its own'" in lines


def broken_family() -> None:
    raise KeyError("of its own")


def test_each_task_has_its_rows_and_no_value_of_its_settings(tmp_path: Path) -> None:
    job = written(
        tmp_path,
        f'model = "{tmp_path}"\n[weights]\ndirectory = "{tmp_path}"\n[trainer]\nlearning_rate = 1e-5\n'
        '[[tasks]]\nname = "a"\nkind = "frozenlake"\nsettings = { api_key = "hush" }\n'
        '[[tasks]]\nname = "b"\nkind = "math_tools"\nmax_tokens = 9\n',
    )
    rows = {name: (value, origin) for name, value, origin in settings_of(load_config(TrainConfig, job))}
    assert rows["tasks.a.settings"] == ("api_key", "job")
    assert rows["tasks.b.max_tokens"] == (9, "job")
    assert rows["tasks.b.weight"] == (1.0, "default")
    assert "hush" not in repr(rows)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, policy_model: Path) -> None:
    Tokens.generate().save(tmp_path / "tokens.toml")
    job = written(
        tmp_path,
        f'model = "{policy_model}"\ntoken_file = "{tmp_path / "tokens.toml"}"\n[weights]\ndirectory = "{tmp_path}"\n'
        f'[trainer]\nlearning_rate = 1e-5\n[env]\nkind = "tests.train.ray_world:interrupted"\n',
    )
    command = [sys.executable, "-m", "rose.cli", "train", "--config", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert (
        done.stderr == "stopped by Ctrl-C: run it again to go on from its last checkpoint, if there is one\n"
    )


def test_a_run_that_begins_does_not_say_that_it_goes_on() -> None:
    begun = {"event": "attempt", "attempt": 1, "step": 0, "passed_over": []}
    assert _line(begun, 2) == "attempt 1 begins at step 1"
    assert _line(begun | {"attempt": 3, "step": 4}, 9) == "attempt 3 goes on at step 5"


def test_square_brackets_in_what_an_environment_says_end_no_run(tmp_path: Path) -> None:
    """A console that takes marks raises at one that closes nothing, and swallows the others."""
    config = TrainConfig.model_validate(
        {"model": tmp_path, "weights": {"directory": "x"}, "trainer": {"learning_rate": 1e-3}}
    )
    console = Console(file=io.StringIO(), width=500)
    reason = "template [INST] without [/INST]"
    with Screen(config, console) as screen:
        screen.show({"event": "actor_died", "actor": "manager 0", "reason": reason})
    assert reason in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_path_of_tasks_is_one_from_the_folder_that_the_job_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers run elsewhere."""
    monkeypatch.chdir(tmp_path)
    common = {"model": "m", "weights": {"directory": "x"}, "trainer": {"learning_rate": 1e-3}}
    settings = {"path": "questions.jsonl", "max_turns": 2}
    one = TrainConfig.model_validate(common | {"env": {"kind": "math_tools", "settings": settings}})
    assert one.env.settings == {"path": str(tmp_path / "questions.jsonl"), "max_turns": 2}
    several = [{"name": "sums", "kind": "math_tools", "settings": settings}]
    assert TrainConfig.model_validate(common | {"tasks": several}).tasks[0].settings == one.env.settings
    own = TrainConfig.model_validate(common | {"env": {"kind": "mine:make", "settings": settings}})
    assert own.env.settings == settings
