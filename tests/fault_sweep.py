"""Stops training runs at random moments, and has each of them go on.

    python -m tests.fault_sweep --out=out/faults --kills=200 --signals=50

A run of a few steps is killed at a random moment or at a random operation on
one of its files, interrupted, terminated, or finds no room on the disk. Then
every file is whole, and the ledger holds at least the steps that began. The
run, resumed, ends with the files, the epochs and the epsilon that it should
have, and leaves nothing else. The program ends with 1 if one did not.
"""

import argparse
import csv
import json
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import signal
import stat
import sys
import time
import zipfile

from absl import flags

from tf_dpsub import accounting
from tf_dpsub.configs import default
from tf_dpsub.launchers.terminal import program
from tf_dpsub.launchers.training import run_recorder, training_run
from tf_dpsub.training import run

# Modules are loaded once, TensorFlow begins in each process.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.fault_sweep"])

_EPOCHS, _STEPS_PER_EPOCH = 2, 3
_STEPS = _EPOCHS * _STEPS_PER_EPOCH
_SECONDS = 300
# Bytes; the largest file of a run has fewer.
_LARGEST_ROOM = 200_000
_FINISHED = 0
# In the same folder, before a run is let go on to its end.
_FAULTS = 4


def _config():
    config = default.get_config()
    config.model_kwargs = {"hidden": (32,), "activation": "tanh"}
    config.inner_optimizer = "Adam"
    config.learning_rate = 1e-3
    config.noise_multiplier = 2.0
    config.batch_size = 480
    config.epochs = _EPOCHS
    return config


class _Run:
    """A run in a process of its own, whose steps are counted as they begin."""

    def __init__(self, folder, prepare=None):
        folder.mkdir(exist_ok=True)
        self.workdir = folder / "run"
        self._marks = folder / "steps", folder / "phase"
        self._marks[1].unlink(missing_ok=True)
        # Where there is no room, there is none for a log either.
        self._said, out = multiprocessing.Pipe(duplex=False)
        self.process = _PROCESSES.Process(
            target=_train, args=(self.workdir, *self._marks, out, prepare)
        )
        self.process.start()
        out.close()

    @property
    def steps(self):
        """Number of steps that began, in this process and in earlier ones."""
        return _size(self._marks[0])

    @property
    def is_training(self):
        """True between the start of the program and the end of training."""
        return _size(self._marks[1]) == 1

    @property
    def is_finished(self):
        return (self.workdir / "result.json").exists()

    def code(self):
        """The exit code, once it has ended."""
        self.process.join(_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"no end after {_SECONDS} s")
        return self.process.exitcode

    def said(self):
        """The last line of what the process wrote."""
        with open(self._said.fileno(), encoding="utf-8", closefd=False) as file:
            lines = file.read().strip().splitlines()
        return lines[-1] if lines else ""


def _size(file):
    return file.stat().st_size if file.exists() else 0


def _appending(file):
    return os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def _train(workdir, steps, phase, out, prepare):
    for stream in (1, 2):
        os.dup2(out.fileno(), stream)
    flags.FLAGS.mark_as_parsed()
    # A background process of a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    steps, phase = _appending(steps), _appending(phase)
    charge = run.Run.charge
    on_train_end = run_recorder.RunRecorder.on_train_end

    def counted(current_run, count):
        charge(current_run, count)
        # They begin now.
        os.write(steps, b"x" * count)

    def ended(recorder, logs=None):
        on_train_end(recorder, logs)
        os.write(phase, b"x")

    def main():
        os.write(phase, b"x")
        training_run.train(_config(), workdir, resume=True)

    run.Run.charge = counted
    run_recorder.RunRecorder.on_train_end = ended
    if prepare is not None:
        prepare(workdir)
    sys.exit(program.exit_code_of(main))


_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir")


class _AtFiles:
    """Acts at each operation on a file of the run."""

    def __call__(self, workdir):
        def look(event, arguments):
            if event in _OPERATIONS and str(arguments[0]).startswith(
                str(workdir)
            ):
                self.at_operation()

        sys.addaudithook(look)


class _Count(_AtFiles):
    """Counts the operations, in the size of a file."""

    def __init__(self, file):
        self._file = file

    def at_operation(self):
        with open(self._file, "ab") as file:
            file.write(b"x")


class _Kill(_AtFiles):
    """Kills the process at the n-th operation."""

    def __init__(self, operation):
        self._left = operation

    def at_operation(self):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _LittleRoom:
    """Lets writes to files beyond some size fail, as on a full disk."""

    def __init__(self, room):
        self._room = room

    def __call__(self, workdir):
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (self._room, resource.RLIM_INFINITY)
        )


def _check_files(workdir, steps):
    """Checks a run after it was stopped."""
    if not workdir.exists():
        assert steps == 0, f"{steps} steps began in no folder"
        return
    for file in workdir.rglob("*"):
        if not file.is_file() or "tensorboard" in file.parts:
            continue
        mode = stat.S_IMODE(file.stat().st_mode)
        assert mode == 0o600, f"{file.name} has mode {mode:o}"
        if file.name.startswith(".incomplete-"):
            continue
        _check_whole(file)
    ledger = workdir / "ledger.json"
    held = accounting.PrivacyLedger(ledger).steps if ledger.exists() else 0
    assert held >= steps, f"the ledger holds {held} of {steps} steps"


def _check_whole(file):
    if file.suffix == ".json":
        json.loads(file.read_text("utf-8"))
    elif file.suffix == ".csv":
        with open(file, encoding="utf-8", newline="") as opened:
            rows = [*csv.DictReader(opened)]
        assert rows and all(None not in row.values() for row in rows), file.name
    elif file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None, file.name
    elif file.suffix == ".h5":
        # Before the first superblock is written, and after it is closed.
        assert file.read_bytes()[:4] == b"\x89HDF", file.name
    elif file.suffix in (".html", ".svg"):
        end = f"</{file.suffix[1:]}>"
        assert file.read_text("utf-8").rstrip().endswith(end), file.name
    elif file.suffix == ".png":
        assert file.read_bytes().endswith(b"IEND\xaeB`\x82"), file.name


def _check_resumed(run, whole):
    """Checks a run that was resumed to its end."""
    code = run.code()
    assert code == _FINISHED, f"resumed, it ends with {code}: {run.said()}"
    _check_files(run.workdir, run.steps)
    names = {path.name for path in run.workdir.iterdir()}
    assert names == whole, f"files differ: {sorted(names ^ whole)}"
    result = json.loads((run.workdir / "result.json").read_text("utf-8"))
    assert result["epochs"] == _EPOCHS, f"{result['epochs']} epochs"
    assert result["steps"] >= max(run.steps, _STEPS), f"{result['steps']} steps"
    expected = accounting.epsilon(
        noise_multiplier=2.0,
        sampling_rate=480 / 1438,
        steps=result["steps"],
        delta=1e-5,
    )
    assert abs(result["epsilon"] - expected) < 1e-9 * expected, (
        f"ε = {result['epsilon']} after {result['steps']} steps"
    )


class Sweep:
    """Faults of a run, one after the other.

    Args:
        folder: `pathlib.Path`, which is emptied.
        seed: int, of the moments.
    """

    def __init__(self, folder, seed=0):
        self._folder = folder
        self._random = random.Random(seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        operations = folder / "operations"
        self._cases = 0
        began = time.monotonic()
        run = _Run(folder / "whole", _Count(operations))
        assert run.code() == _FINISHED, run.said()
        self._seconds = time.monotonic() - began
        self._operations = operations.stat().st_size
        self._whole = {path.name for path in run.workdir.iterdir()}

    def faults(self, kinds):
        """Stops a run in several ways in turn, and has it go on.

        Args:
            kinds: list of names of the methods below, of which those are taken
                that come before the end of the run.
        """
        self._cases += 1
        folder = self._folder / f"case_{self._cases}"
        for _ in range(min(_FAULTS, len(kinds))):
            kind = kinds.pop()
            try:
                run = getattr(self, kind)(folder)
                _check_files(run.workdir, run.steps)
            except AssertionError as error:
                raise AssertionError(f"{kind}: {error}") from error
            if run.is_finished:
                break
        _check_resumed(_Run(folder), self._whole)
        shutil.rmtree(folder)

    def kill_at_a_moment(self, folder):
        return self._send_at_a_moment(folder, signal.SIGKILL)

    def interrupt(self, folder):
        return self._send_at_a_moment(folder, signal.SIGINT)

    def terminate(self, folder):
        return self._send_at_a_moment(folder, signal.SIGTERM)

    def _send_at_a_moment(self, folder, number):
        run = _Run(folder)
        run.process.join(self._random.uniform(0, self._seconds))
        trains, sent = run.is_training, run.process.exitcode is None
        if sent:
            os.kill(run.process.pid, number)
        trains = trains and sent and run.is_training
        code = run.code()
        assert not (trains and code == _FINISHED), "the signal was lost"
        return run

    def kill_at_a_file(self, folder):
        operation = self._random.randint(1, self._operations)
        run = _Run(folder, _Kill(operation))
        code = run.code()
        assert code in (-signal.SIGKILL, _FINISHED), f"{code}: {run.said()}"
        return run

    def fill_the_disk(self, folder):
        room = int(_LARGEST_ROOM ** self._random.uniform(0.3, 1))
        run = _Run(folder, _LittleRoom(room))
        code = run.code()
        assert code in (program.REFUSED, _FINISHED), (
            f"{code} with room for {room} bytes: {run.said()}"
        )
        return run


def sweep(folder, counts, seed=0):
    """Stops runs, and reports what went wrong.

    Args:
        folder: `pathlib.Path`; runs that went wrong stay there.
        counts: dict from names of methods of `Sweep` to how many of each.
        seed: int, of the moments and of the order. Defaults to `0`.

    Returns:
        List of strings, one for each run that went wrong.
    """
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    runs, wrong = Sweep(folder, seed), []
    total = len(kinds)
    while kinds:
        try:
            runs.faults(kinds)
        except AssertionError as error:
            wrong.append(str(error))
            print(f"wrong: {error}", flush=True)
        print(f"{total - len(kinds)} faults, {len(wrong)} wrong", flush=True)
    return wrong


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="out/faults")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--full_disks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = dict(
        kill_at_a_file=args.kills // 2,
        kill_at_a_moment=args.kills - args.kills // 2,
        interrupt=args.signals,
        terminate=args.signals,
        fill_the_disk=args.full_disks,
    )
    sys.exit(1 if sweep(args.out.absolute(), counts, args.seed) else 0)


if __name__ == "__main__":
    main()
