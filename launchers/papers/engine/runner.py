"""Processes that run trials in parallel.

Not a ProcessPoolExecutor, nor joblib's loky: there, a process that dies breaks
the pool and fails the trials beside it. Here its own trial fails alone, each
trial has its log, and Ctrl-C lets all of them finish a step.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback

from tf_dpsub import files
from tf_dpsub.launchers.terminal import quiet

# A process finishes its step before it stops.
_SECONDS_TO_STOP = 120
_SECONDS_TO_LOOK = 2.0


@dataclasses.dataclass(kw_only=True)
class Finished:
    """The outcome of a trial.

    Attributes:
        trial: `trials.Trial`.
        seconds: float, time that this process spent on it.
        error: string, one line; None if it succeeded.
    """

    trial: object
    seconds: float
    error: str | None


class Runner:
    """Runs trials in a pool of processes, one trial at a time in each.

    On leaving its context, it stops all processes; unfinished trials can be
    resumed.

    Args:
        trials: list of `trials.Trial`, run in this order.
        folder: `pathlib.Path`; trial `t` runs in `folder / "trials" / t.name`
            and its output goes to `folder / "logs"`.
        jobs: int, number of processes.

    Attributes:
        running: dict from the names of running trials to their start times.
        waiting: list of the trials that have not begun.
        jobs: int, how many trials run at a time.
    """

    def __init__(self, trials, folder, jobs):
        self.waiting = list(trials)
        self.running = {}
        self._folder = folder
        self.jobs = max(1, min(jobs, len(self.waiting)))
        self._workers = []

    def __enter__(self):
        for folder in ("trials", "logs"):
            files.make_folder(self._folder / folder)
        return self

    def __exit__(self, *exception):
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()

    def __iter__(self):
        """Yields a `Finished` for each trial, and None every few seconds."""
        while self.waiting or self.running:
            self._start()
            busy = [worker for worker in self._workers if worker.trial]
            ready = multiprocessing.connection.wait(
                [worker.connection for worker in busy], _SECONDS_TO_LOOK
            )
            for worker in busy:
                if worker.connection in ready:
                    yield self._finish(worker)
            yield None

    def _start(self):
        idle = [w for w in self._workers if not (w.trial or w.is_dead)]
        while self.waiting and len(self.running) < self.jobs:
            if not idle:
                idle.append(_Worker(_threads(self.jobs)))
                self._workers.append(idle[-1])
            trial = self.waiting.pop(0)
            self.running[trial.name] = time.monotonic()
            idle.pop().start(trial, self._folder)

    def _finish(self, worker):
        trial = worker.trial
        error = worker.outcome()
        if worker.is_dead:
            self._workers.remove(worker)
        seconds = time.monotonic() - self.running.pop(trial.name)
        return Finished(trial=trial, seconds=seconds, error=error)


class _Worker:
    """A process that runs one trial after another."""

    def __init__(self, threads):
        # A forked process would inherit the state of TensorFlow's threads.
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(worker_end, threads)
        )
        self._process.start()
        worker_end.close()
        self.trial = None

    def start(self, trial, folder):
        self.trial = trial
        self.connection.send(
            (
                trial.config,
                str(folder / "trials" / trial.name),
                str(folder / "logs" / f"{trial.name}.log"),
            )
        )

    def outcome(self):
        """Error message of the trial; None if it succeeded."""
        self.trial = None
        try:
            return self.connection.recv()
        except EOFError:
            self.join()
            return f"its process died with exit code {self._process.exitcode}"

    @property
    def is_dead(self):
        return not self._process.is_alive()

    def stop(self):
        self.connection.close()
        if self.trial:
            self._process.terminate()

    def join(self):
        self._process.join(_SECONDS_TO_STOP)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _threads(jobs):
    """Number of threads per process: the cores, divided among the jobs."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def _serve(connection, threads):
    """Runs each trial received, until the connection is closed."""
    # Ctrl-C reaches all processes; the parent alone reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # TensorFlow may turn an interrupt into an error of the trial; its outcome
    # is then sent over a closed connection.
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            config, folder, log = connection.recv()
            connection.send(_run(config, folder, log, threads))


def _interrupt(*_):
    raise KeyboardInterrupt


def _stop_with_parent():
    parent = multiprocessing.parent_process()
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _run(config, folder, log, threads):
    """Runs a trial; returns its error in one line, or None."""
    with _output_in(log):
        try:
            _train(config, folder, threads)
        except Exception as error:
            # Any error ends this trial alone; the others continue.
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            return f"{type(error).__name__}: {first_line}"
    return None


def _train(config, folder, threads):
    with quiet.stderr_dropped():
        import keras
        import tensorflow as tf

        from tf_dpsub.launchers.training import training_run

        tf.config.list_physical_devices("GPU")
    if not tf.config.threading.get_intra_op_parallelism_threads():
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    keras.utils.clear_session()
    training_run.train(config, folder, resume=True, results_only=True)


@contextlib.contextmanager
def _output_in(log):
    """Context that appends all output, also of C++ libraries, to a file."""
    with open(log, "ab", opener=files.opener) as file:
        copies = [os.dup(stream) for stream in (1, 2)]
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, copy in zip((1, 2), copies):
                os.dup2(copy, stream)
                os.close(copy)
