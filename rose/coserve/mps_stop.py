"""Tell NVIDIA's MPS to end the work of processes that are about to be killed: ``terminate_client``, for each that is a client.

    python -I -S mps_stop.py CONTROL_PROGRAM PID...

Under MPS all clients of a device share one server, and a client that is killed with kernels in flight can upset the server and with it
production.  MPS's own way out is ``terminate_client SERVER CLIENT`` at its control program, and the kill after it.  Run by the guard of a
rollout engine (``ProcSpec.before_kill``) ahead of every SIGKILL: the agent's, the sentinel's, and that after the agent's
death.  The guard bounds its time.  Standard library only, imported by nobody: it must start in milliseconds.

Process numbers are those of the control daemon: where it runs in another process namespace no client is found, and the kill comes
unannounced.  Not run against a real MPS yet.
"""

import subprocess
import sys

ASK_S = 1.0
"""Of one question.  The guard's limit is shorter, and ends this program with the question."""


def ask(control: str, command: str) -> list[str]:
    """The first word of each line of the answer; empty where there is none."""
    try:
        done = subprocess.run(
            [control], input=command + "\n", capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [line.split()[0] for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []
    )


def main() -> int:
    control, pids = sys.argv[1], set(sys.argv[2:])
    for server in filter(str.isdigit, ask(control, "get_server_list")):
        for client in ask(control, f"get_client_list {server}"):
            if client in pids:
                ask(control, f"terminate_client {server} {client}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
