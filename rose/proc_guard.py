"""The process between a supervisor and its child: makes sure that the whole tree dies with the supervisor.

Run as a script by ``rose.proc`` (``python -I -S proc_guard.py SETTINGS argv...``), imported for a name alone; standard
library only, about 10 MB.  ``SETTINGS`` is JSON: ``parent`` pid, ``cores``, ``sched``, ``nice``, ``pid_fd``,
``cgroup`` (a directory for the child to join, ours to remove; or null), ``autogroup_nice`` (of our session; or null),
``before_kill`` (a program, run with the pids of the tree ahead of its first SIGKILL; or empty) and ``before_kill_s`` (its time).

Why a process of its own: a parent-death signal reaches only the direct child, and an engine has children
of its own; it fires when the *thread* that forked ends, though the process lives; and it cannot be set
safely in a forked copy of a program with threads.  The guard is single-threaded, is the subreaper of
everything below it (nothing escapes by double fork or setsid), and is told when its parent is gone.

- Supervisor dies, for whatever reason: everything below is killed at once.
- Main child ends: what it left running is killed, and the guard ends with its status (128 + signal).
- SIGTERM: passed to the main child alone.  SIGUSR2: kill everything now.
- The guard itself is killed: the main child dies by its own parent-death signal; who below it asks may learn of it, for
  ``ROSE_GUARD_PROCESS`` in the environment names us (``PID:TICKS:NAMESPACE``: when we began, as the kernel says it, and where the number counts).
- Before it kills, it gives a tree of the idle class a normal share again (``rose.proc_share``): the dying give back what others wait
  for, and on a busy core they would not get to it.
"""

import ctypes
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
KILL_ALL = signal.SIGUSR2
HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, PARENT_DIED, KILL_ALL}
ENV_GUARD_PROCESS = "ROSE_GUARD_PROCESS"
POLICIES = {"normal": os.SCHED_OTHER, "batch": os.SCHED_BATCH, "idle": os.SCHED_IDLE}


def main() -> int:
    settings = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    parent = settings["parent"]
    libc = ctypes.CDLL(None, use_errno=True)
    # Blocked before the first of them can come; they are taken one by one with sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    libc.prctl(PR_SET_PDEATHSIG, int(PARENT_DIED), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        return 1
    if settings["autogroup_nice"] is not None:
        # Without privilege the kernel takes one such change in 100 ms, from all processes together.
        write("/proc/self/autogroup", str(settings["autogroup_nice"]), attempts=10)
    guard = os.getpid()
    with open("/proc/self/stat") as file:
        began = file.read().rpartition(")")[2].split()[19]
    os.environ[ENV_GUARD_PROCESS] = f"{guard}:{began}:{os.stat('/proc/self/ns/pid').st_ino}"
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
            if settings["cores"]:
                os.sched_setaffinity(0, settings["cores"])
            if settings["nice"]:
                os.setpriority(os.PRIO_PROCESS, 0, settings["nice"])
            if settings["sched"] != "normal":
                os.sched_setscheduler(0, POLICIES[settings["sched"]], os.sched_param(0))
            if settings["cgroup"] is not None:
                write(settings["cgroup"] + "/cgroup.procs", "0")
            os.close(settings["pid_fd"])
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the program decides itself
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: cannot be started: {error.strerror}\n".encode())
        os._exit(127)
    os.write(settings["pid_fd"], f"{child}\n".encode())
    os.close(settings["pid_fd"])
    status = watch(child, parent, settings)
    if settings["cgroup"] is not None:
        try:
            os.rmdir(settings["cgroup"])
        except OSError:  # gone already
            pass
    return status


def write(path: str, text: str, attempts: int = 1) -> None:
    """Say it if the kernel refuses, and go on: a child that yields too little is the supervisor's to report."""
    for attempt in range(attempts):
        try:
            with open(path, "w") as file:
                file.write(text)
            return
        except FileNotFoundError:  # a kernel without it
            return
        except BlockingIOError as error:
            reason = error.strerror
            if attempt + 1 < attempts:
                time.sleep(0.1)
        except OSError as error:
            reason = error.strerror
            break
    os.write(2, f"{path}: {reason}\n".encode())


def watch(child: int, parent: int, settings: dict) -> int:
    while True:
        if os.getppid() != parent:
            kill_all(settings)
            return 1
        match signal.sigwait(HANDLED):
            case signal.SIGCHLD:
                status = reap(child)
                if status is not None:
                    kill_all(settings)
                    return exit_code(status)
            case signal.SIGTERM:
                os.kill(child, signal.SIGTERM)  # not reaped yet, so the number is still its own
            case signal.SIGUSR2:
                kill_all(settings)
                return 128 + signal.SIGKILL
            case _:
                pass  # PARENT_DIED is looked at above: the parent's thread may have died, not the parent


def reap(child: int) -> int | None:
    """Collect the dead; the wait status of ``child`` if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def kill_all(settings: dict) -> None:
    """Kill every descendant, also those born meanwhile; orphans come to us, so the list becomes empty."""
    below = descendants()
    if below and settings["sched"] == "idle":
        lift(below, settings)
    if below and settings["before_kill"]:
        announce(settings["before_kill"], below, settings["before_kill_s"])
    while True:
        below = descendants()
        if not below:
            return
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone, or one that changed its user
                pass
        try:
            os.waitpid(-1, 0)  # at least one direct child is dying
        except ChildProcessError:
            return


def lift(pids: list[int], settings: dict) -> None:
    """A normal share of the cores, on whichever rung the tree yields; what the kernel refuses is left as it is."""
    if settings["cgroup"] is not None:
        write(settings["cgroup"] + "/cpu.idle", "0")
    elif settings["autogroup_nice"] is not None:
        write("/proc/self/autogroup", "0", attempts=2)
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
        except OSError:  # gone, or no CAP_SYS_NICE
            continue


def announce(program: list[str], pids: list[int], limit_s: float) -> None:
    """Run ``program`` with the pids; whatever becomes of it, at most ``limit_s`` later the killing begins."""
    until_s = time.monotonic() + limit_s
    try:
        argv = [*program, *(str(pid) for pid in pids)]
        runner = os.posix_spawnp(argv[0], argv, os.environ, setsigmask=())
        while os.waitpid(runner, os.WNOHANG)[0] == 0 and time.monotonic() < until_s:
            time.sleep(0.001)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())


def descendants() -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # "pid (command) state ppid ...", where the command may contain anything
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
