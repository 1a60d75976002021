"""Several processes on this machine that train together."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]


@contextlib.contextmanager
def started(count, *arguments):
    """Starts Python programs that find each other by `TF_CONFIG`.

    Args:
        count: int, how many.
        *arguments: of Python; `{index}` in them is that of the worker.

    Yields:
        List of `subprocess.Popen`, with texts, the chief first. Those that are
        left are killed at the end.
    """
    workers = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    processes = []
    try:
        for index in range(count):
            cluster = {
                "cluster": {"worker": workers},
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        *(str(a).format(index=index) for a in arguments),
                    ],
                    env=os.environ | {"TF_CONFIG": json.dumps(cluster)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=_ROOT,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
