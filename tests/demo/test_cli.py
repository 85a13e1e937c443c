"""The ``rose`` command: light to import, clear when wrong."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from rose import cli
from rose.auth import PARTS, Tokens, read_key
from rose.errors import ConfigError

HEAVY = ("torch", "vllm", "ray", "numpy", "numba", "aiohttp", "transformers", "gymnasium")


def rose_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``rose`` as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "rose.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


def rose(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script's entry point, in this process: a new one imports for seconds."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["rose", *arguments]),
        mock.patch.dict(os.environ, COLUMNS="120"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def test_importing_the_command_line_loads_no_heavy_library() -> None:
    probe = f"import sys, rose.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_help_names_every_program() -> None:
    done = rose_process("--help")

    assert done.returncode == 0
    for name in ("demo", "train", "node", "scheduler", "relay", "weights", "tokens"):
        assert f" {name} " in done.stdout


def test_an_error_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    done = rose_process("demo", "--config", str(tmp_path / "none.toml"))

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: config:")
    assert "none.toml does not exist" in done.stderr


@pytest.mark.parametrize("override", ["stepz=3", "job.group_size=2", "nonsense"])
def test_a_wrong_override_is_refused_before_anything_starts(override: str) -> None:
    done = rose("demo", "--set", override)

    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_bad_trace_names_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-1,1\n")

    done = rose("demo", "--trace", str(trace))

    assert done.returncode == 2
    assert f"{trace}:2: ContextTokens is -1" in done.stderr


def test_tokens_are_written_private_and_never_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"

    done = rose_process("tokens", str(path))

    assert done.returncode == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = Tokens.load(path)
    assert first.agent not in done.stdout
    again = rose("tokens", str(path))
    assert again.returncode == 2
    assert Tokens.load(path) == first
    assert rose("tokens", str(path), "--force").returncode == 0
    assert Tokens.load(path) != first


def test_a_token_file_is_split_by_programs_and_stays_as_it_is(tmp_path: Path) -> None:
    path, folder = tmp_path / "tokens.toml", tmp_path / "tokens"

    assert rose("tokens", str(path), "--split", str(folder)).returncode == 0
    whole = Tokens.load(path)
    assert rose("tokens", str(path), "--split", str(folder)).returncode == 0

    assert Tokens.load(path) == whole
    assert {file.name for file in folder.iterdir()} == {"train.key", *(f"{part}.toml" for part in PARTS)}
    with_key = Tokens.load(path, [*whole.names, "publish_key"])
    for part, names in PARTS.items():
        assert Tokens.load(folder / f"{part}.toml", names) == with_key.only(names)
    for file in (*folder.iterdir(), tmp_path / "tokens.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert (with_key.publish_key in file.read_text()) == (file.suffix == ".key")


def test_an_older_token_file_gets_a_key_and_keeps_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    before = replace(Tokens.generate(), publish="", public_key="", publish_key="")
    before.save(path)
    assert Tokens.load(path).publish == before.relay  # it may write until it is upgraded

    assert rose("tokens", str(path), "--upgrade").returncode == 0
    after = Tokens.load(path, [*before.names, "publish", "public_key", "publish_key"])
    assert after.publish != before.relay
    assert replace(after, publish="", public_key="", publish_key="") == before
    assert rose("tokens", str(path), "--upgrade").returncode == 0
    assert Tokens.load(path, [*after.names]) == after


def test_a_programs_part_of_the_tokens_is_not_sent_round_in_a_circle(tmp_path: Path) -> None:
    """What --upgrade adds is not what another program's part lacks."""
    path, folder = tmp_path / "tokens.toml", tmp_path / "parts"
    assert rose("tokens", str(path), "--split", str(folder)).returncode == 0

    for answer in (
        rose("tokens", str(folder / "node.toml"), "--upgrade"),
        rose("fleet", "status", "--token-file", str(folder / "node.toml")),
    ):
        assert answer.returncode == 2
        assert "--split" in answer.stderr
        assert "--upgrade" not in answer.stderr


def test_a_key_is_never_replaced_unasked_and_a_delegated_one_is_made_of_it(tmp_path: Path) -> None:
    path, key = tmp_path / "tokens.toml", tmp_path / "tokens.key"
    assert rose("tokens", str(path)).returncode == 0
    first = key.read_text()
    path.unlink()
    refused = rose("tokens", str(path))
    assert (refused.returncode, "tokens.key exists" in refused.stderr) == (2, True)
    assert rose("tokens", str(path), "--force").returncode == 0
    assert key.read_text() != first

    assert rose("tokens", str(path), "--anchor-key", str(tmp_path / "composer.key")).returncode == 0
    delegated = read_key(tmp_path / "composer.key")
    assert (delegated.may_all, delegated.public) == (False, Tokens.load(path).public_key)
    assert stat.S_IMODE((tmp_path / "composer.key").stat().st_mode) == 0o600


def test_a_key_that_is_open_to_others_or_missing_is_named_with_its_cure(tmp_path: Path) -> None:
    path, key = tmp_path / "tokens.toml", tmp_path / "tokens.key"
    assert rose("tokens", str(path)).returncode == 0
    key.chmod(0o640)
    with pytest.raises(ConfigError, match=r"tokens\.key has mode 0640.*chmod 600"):
        Tokens.load(path, ["publish_key"])
    key.unlink()
    with pytest.raises(ConfigError, match=r"tokens\.key does not exist.*--upgrade.*weights\.signed = false"):
        Tokens.load(path, ["publish_key"])


def test_a_library_that_is_not_installed_is_named_with_its_cure(tmp_path: Path) -> None:
    """A stand-in ``ray`` that cannot be imported, as on a machine without the extras."""
    (tmp_path / "needs_missing.py").write_text("import no_such_library_x\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(
            ConfigError, match=r"needs 'no_such_library_x', which is not installed.*pip install"
        ):
            cli._load("needs_missing", "main", "train")
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        "import typer\ndef entry(port: int = 1) -> None: print('port', port)",
        "import typer\nentry = typer.Typer()\n@entry.command()\ndef f(port: int = 1) -> None: print('port', port)",
        "import sys\ndef entry() -> int: print('port', sys.argv[1].partition('=')[2]); return 0",
    ],
    ids=["function", "typer", "argv"],
)
def test_a_parts_own_command_line_gets_the_arguments(tmp_path: Path, source: str) -> None:
    (tmp_path / "entry_module.py").write_text(source)
    code = "from rose import cli; cli._forward('entry_module', 'entry', 'x', ['--port=7'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )

    assert done.stdout == "port 7\n", done.stderr
