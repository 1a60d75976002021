"""Processes that train on this machine, several together or one alone."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import socket
import sys
import tempfile

from tests.stacks import without_stacks

# Modules are loaded once, TensorFlow begins in each process.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tf_dpsub.launchers.training.training_run"])
_ROOT = pathlib.Path(__file__).parents[1]


class _Worker:
    """A process that calls a function, with the methods of `Popen`.

    Args:
        function: callable, of a module.
        arguments: sequence of its arguments.
        cluster: dict, for `TF_CONFIG`; None without others.
    """

    def __init__(self, function, arguments, cluster=None):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [
            pathlib.Path(self._folder.name) / name for name in ("out", "err")
        ]
        for file in self._files:
            file.touch()
        self._process = _PROCESSES.Process(
            target=_call, args=(function, arguments, cluster, self._files)
        )
        self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        """What it wrote, once it has ended: output and errors."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"no end after {timeout} s")
        return tuple(file.read_text("utf-8") for file in self._files)

    def close(self):
        """Kills it, and removes what it wrote."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def _call(function, arguments, cluster, files):
    for descriptor, file in enumerate(files, start=1):
        with open(file, "w", encoding="utf-8") as opened:
            os.dup2(opened.fileno(), descriptor)
    os.chdir(_ROOT)
    if cluster is not None:
        os.environ["TF_CONFIG"] = json.dumps(cluster)
    with without_stacks():
        function(*arguments)


def program(*argv):
    """Trains as `launchers/train.py` does when it is called with these."""
    from tf_dpsub.launchers import train

    sys.argv = ["launchers/train.py", *argv]
    train.run()


@contextlib.contextmanager
def alone(function, *arguments):
    """Starts one process, which sets up devices of its own.

    Args:
        function: callable, of a module, that it calls.
        *arguments: for it.

    Yields:
        The process, with texts.
    """
    process = _Worker(function, arguments)
    try:
        yield process
    finally:
        process.close()


@contextlib.contextmanager
def started(count, function, *arguments):
    """Starts processes that find each other by `TF_CONFIG`.

    Args:
        count: int, how many.
        function: callable, of a module, that each of them calls.
        *arguments: strings for it; `{index}` in them is that of the worker.

    Yields:
        List of processes, with texts, the chief first. Those that are left are
        killed at the end.
    """
    workers = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    processes = []
    try:
        for index in range(count):
            cluster = {
                "cluster": {"worker": workers},
                "task": {"type": "worker", "index": index},
            }
            own = [str(a).format(index=index) for a in arguments]
            processes.append(_Worker(function, own, cluster))
        yield processes
    finally:
        for process in processes:
            process.close()


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
