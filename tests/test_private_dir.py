"""Whose directory it is: what a node directory and a token file may be, and what another user can do about it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rose.auth import Tokens
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.errors import ConfigError, LedgerError
from rose.node_client import ControlClient
from rose.private_dir import private_dir
from tests.users import ANOTHER, STRANGER, act_as, needs_root, volume


def read(path: Path) -> NodeState | None:
    return NodeDir(path).node().read()


def write(path: Path) -> None:
    with NodeDir(path).node_writer() as writer:
        writer.write(NodeState(mode=Mode.ON, lend_pages=7))


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777, 0o755])
def test_a_directory_that_another_user_made_is_neither_obeyed_nor_used(public: Path, mode: int) -> None:
    def plant() -> None:
        os.umask(0)
        write(public / "n")
        (public / "n").chmod(mode)
        (public / "n" / "node.state").chmod(0o644)

    act_as(STRANGER, plant)
    with pytest.raises(LedgerError, match=rf"belongs to user {STRANGER}, and this program runs as 0"):
        read(public / "n")
    with pytest.raises(LedgerError, match=rf"belongs to user {STRANGER}"):
        NodeDir(public / "n").serving_lease_writer()
    with pytest.raises(LedgerError, match=rf"belongs to user {STRANGER}"):
        ControlClient(public / "n", Tokens.generate()).status()  # it would get the token


@needs_root
def test_who_runs_as_another_user_uses_what_is_that_users_and_not_roots(public: Path) -> None:
    (public / "roots").mkdir(mode=0o700)
    (public / "his").mkdir(mode=0o700)
    os.chown(public / "his", STRANGER, STRANGER)

    def deed() -> None:
        write(public / "his")
        found = read(public / "his")
        assert found is not None
        assert found.lend_pages == 7
        with pytest.raises(LedgerError, match=f"belongs to user 0, and this program runs as {STRANGER}"):
            write(public / "roots")

    act_as(STRANGER, deed)


@needs_root
def test_a_file_of_another_users_is_not_read_even_in_a_directory_of_ours(public: Path) -> None:
    write(public / "n")
    os.chown(public / "n" / "node.state", STRANGER, STRANGER)
    with pytest.raises(LedgerError, match=rf"node\.state: belongs to user {STRANGER}"):
        read(public / "n")
    write(public / "n")  # its writer puts one of its own there
    assert read(public / "n") is not None


def test_a_file_that_was_opened_to_others_is_closed_again_by_its_writer(public: Path) -> None:
    with NodeDir(public / "n").node_writer() as writer:
        writer.write(NodeState(lend_pages=7))
        writer.path.chmod(0o666)
        assert not writer.named()
        assert writer.mend()
        assert writer.named()
        assert not writer.mend()
        assert read(public / "n") is not None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_may_read_or_write_is_not_read(public: Path, mode: int) -> None:
    write(public / "n")
    (public / "n" / "node.state").chmod(mode)
    with pytest.raises(LedgerError, match=rf"has mode {mode:04o}: it is open to others .chmod 600"):
        read(public / "n")


@pytest.mark.parametrize(
    ("mode", "good"), [(0o700, True), (0o2700, True), (0o750, False), (0o2770, False), (0o701, False)]
)
def test_a_directory_has_no_bit_for_group_or_others(public: Path, mode: int, good: bool) -> None:
    (public / "n").mkdir()
    (public / "n").chmod(mode)
    if good:
        write(public / "n")
        return
    with pytest.raises(
        LedgerError, match=rf"has mode {mode:04o}: it is open to others .chmod 700 {public}/n"
    ):
        write(public / "n")


@needs_root
@pytest.mark.parametrize(
    ("mode", "uid", "message"),
    [
        (0o755, 0, None),
        (0o1777, 0, None),
        (0o1775, 0, None),
        (0o777, 0, "others may write there"),
        (0o775, 0, "others may write there"),
        (0o2777, 0, "others may write there"),  # not the root of a mount
        (0o700, STRANGER, f"belongs to user {STRANGER}, who could move what is below it"),
    ],
)
def test_the_directories_above_it_are_nobody_elses_to_change(
    public: Path, mode: int, uid: int, message: str | None
) -> None:
    above = public / "above"
    above.mkdir()
    write(above / "n")
    os.chown(above, uid, 0)
    above.chmod(mode)
    if message is None:
        assert read(above / "n") is not None
        return
    with pytest.raises(LedgerError, match=f"{above}: {message}"):
        read(above / "n")


@needs_root
@pytest.mark.parametrize(
    ("group", "mode", "good"), [(STRANGER, 0o2777, True), (ANOTHER, 0o2777, False), (STRANGER, 0o777, False)]
)
def test_the_volume_of_a_pod_is_taken_where_its_group_is_ours(
    public: Path, group: int, mode: int, good: bool
) -> None:
    """An emptyDir with fsGroup: root's, setgid, open to all, and mounted."""
    with volume(public / "rose", group, mode) as path:

        def inside() -> None:
            if good:
                write(path / "gpu0")
                assert os.stat(path / "gpu0").st_mode & 0o7777 == 0o2700
                return
            with pytest.raises(LedgerError, match="others may write there"):
                write(path / "gpu0")

        act_as(STRANGER, inside)


def test_no_part_of_the_path_is_a_symbolic_link(public: Path) -> None:
    write(public / "a" / "n")
    (public / "link").symlink_to(public / "a")
    (public / "direct").symlink_to(public / "a" / "n")
    for path, name in ((public / "link" / "n", "link"), (public / "direct", "direct")):
        with pytest.raises(LedgerError, match=rf"{name}: is a symbolic link"):
            read(path)


def test_a_file_that_is_a_symbolic_link_is_not_followed(public: Path) -> None:
    write(public / "a")
    write(public / "n")
    (public / "n" / "node.state").unlink()
    (public / "n" / "node.state").symlink_to(public / "a" / "node.state")
    with pytest.raises(LedgerError, match=r"node\.state: cannot be read"):
        read(public / "n")


def test_where_another_directory_is_under_the_name_it_is_looked_at_anew(public: Path) -> None:
    held = private_dir(public / "n")
    with NodeDir(public / "n").node_writer() as writer:
        writer.write(NodeState(lend_pages=1))
        descriptor = held.fd()
        (public / "n").rename(public / "moved")
        (public / "n").mkdir()
        (public / "n").chmod(0o777)
        with pytest.raises(LedgerError, match="has mode 0777: it is open to others"):
            writer.mend()
        (public / "n").chmod(0o700)
        assert writer.mend()
        assert writer.named()
        assert held.fd() == descriptor
        assert os.path.samestat(os.fstat(descriptor), (public / "n").stat())


def test_a_directory_that_was_removed_and_made_again_is_found_again(public: Path) -> None:
    reader = NodeDir(public / "n").node()
    assert reader.read() is None
    write(public / "n")
    assert reader.read() is not None
    shutil.rmtree(public / "n")
    assert reader.read() is None
    write(public / "n")
    assert reader.read() is not None


# -- token files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "good"), [(0o600, True), (0o400, True), (0o640, False), (0o604, False)])
def test_a_token_file_is_its_users_alone(public: Path, mode: int, good: bool) -> None:
    path = public / "tokens.toml"
    Tokens.generate().save(path)
    path.chmod(mode)
    if good:
        Tokens.load(path)
        return
    with pytest.raises(
        ConfigError, match=rf"token_file: .*has mode {mode:04o}: it is open to others .chmod 600"
    ):
        Tokens.load(path)


@needs_root
def test_a_token_file_of_another_user_is_refused(public: Path) -> None:
    path = public / "tokens.toml"
    Tokens.generate().save(path)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=rf"token_file: .*belongs to user {STRANGER}"):
        Tokens.load(path)


def test_nobody_is_told_to_close_a_directory_that_others_use(public: Path) -> None:
    """``dir = "/dev/shm"``, its last part forgotten: the mend that was offered took it from everybody else on the host."""
    public.chmod(0o1777)
    with pytest.raises(LedgerError) as caught:
        write(public)
    assert caught.value.fix == f"name a directory of its own below it, as {public}/rose"

    public.chmod(0o755)
    with pytest.raises(
        LedgerError, match=f"chmod 700 {public} if nothing else uses it; else name a directory"
    ):
        write(public)
