"""The directory that holds all files of a run."""

import fcntl
import json
import math
import os
import pathlib
import shutil

from tf_dpsub import accounting, files
from tf_dpsub.configs import default

# The folder of checkpoints, and the first files of a run.
CHECKPOINTS = "checkpoint"
LEDGER, DATA = "ledger.json", "data.json"


def json_fields(config):
    """The fields of a config, as a dict that JSON can hold.

    Args:
        config: `ml_collections.ConfigDict`.

    Returns:
        dict. Infinite numbers, which JSON lacks, are strings.
    """
    return json.loads(config.to_json(), parse_constant=str)


def json_number(value):
    """A number that JSON can hold, or its name: `"inf"`, `"nan"`."""
    return value if math.isfinite(value) else str(value)


def require_counted(ledger, steps: int, evidence):
    """Checks that a ledger has not lost steps.

    Args:
        ledger: `tf_dpsub.accounting.PrivacyLedger` of the run.
        steps: int, number of steps taken at least.
        evidence: string or path, what counts these steps, for the message.

    Raises:
        ValueError: if the ledger has fewer.
    """
    if ledger.steps < steps:
        raise ValueError(
            f"Expected a ledger of at least {steps} steps, as {evidence} has "
            f"them, got one of {ledger.steps}: it is not the latest one of "
            "this run, and epsilon would be too low. Restore it, or start "
            "another run in another workdir."
        )


def require_own(path, name):
    """Checks that a directory is new, empty, or of this program.

    Args:
        path: string or path-like, a workdir.
        name: string, a file or folder that the program itself writes there.

    Raises:
        ValueError: if it holds other files, or is a file.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"Expected a folder as workdir, got the file {path}.")
    if _is_taken(path) and not (path / name).exists():
        raise ValueError(
            f"Expected a new or empty workdir, got {path}, which holds other "
            "files. Name another one."
        )


def _is_taken(path):
    return path.is_dir() and not (files.is_empty(path) or _never_began(path))


def _never_began(path):
    """Returns whether a run in a folder was killed before it wrote a config."""
    if {p.name for p in files.complete(path)} - {LEDGER, DATA}:
        return False
    try:
        return not accounting.PrivacyLedger(path / LEDGER).entries
    except ValueError:
        return False


class RunDirectory:
    """The directory of one run's files.

    Its context locks the directory: no other process can resume the same run.
    Files are replaced as a whole, so a killed program leaves complete files.
    `result.json` is written last: a run with it is finished.

    Args:
        path: string or path-like, the directory. It is made when the run
            begins.
        config: dict that JSON can hold, the fields of the config.
        resume: bool, whether to go on with the run that the directory holds,
            if it holds one. Defaults to `False`.
        writes: bool, whether this process locks the directory and writes to
            it: of several workers, only the chief does. Defaults to `True`.

    Attributes:
        path: `pathlib.Path` of the directory.
        exists: bool, whether it holds this run already.
        writes: bool, whether this process writes.

    Raises:
        ValueError: if the directory holds another run, other files, or is in
            use by another process.
    """

    def __init__(self, path, config, resume=False, writes=True):
        self.path = pathlib.Path(path)
        self.writes = writes
        self._config = config
        self._lock = None
        self.exists = (self.path / "config.json").exists()
        if self.exists:
            self._check_same_run(resume)
        else:
            require_own(self.path, "config.json")

    def _check_same_run(self, resume):
        if not resume:
            state = "a finished run" if self.result() else "an unfinished run"
            raise ValueError(
                f"Expected a new or empty workdir, got {self.path}, which "
                f"holds {state}. Name another one, or go on with --resume."
            )
        saved_config = files.read_json(self.path / "config.json")
        # The run had the default of a field that was added later.
        defaults = json_fields(default.get_config())
        for name in self._config.keys() & defaults.keys() - saved_config.keys():
            saved_config[name] = defaults[name]
        changes = [
            f"{name} is {saved_config.get(name)!r} there and "
            f"{self._config.get(name)!r} here"
            for name in sorted({*saved_config, *self._config})
            if saved_config.get(name) != self._config.get(name)
        ]
        if changes:
            raise ValueError(
                f"Expected the config of the run in {self.path} to resume it, "
                f"got another one: {', '.join(changes)}. Give the same config, "
                "or another workdir."
            )

    def __enter__(self):
        if self.writes and self.exists:
            self._acquire_lock()
        return self

    def __exit__(self, *exception):
        if self._lock is not None:
            os.close(self._lock)

    def begin(self, write_first=None):
        """Creates the directory and writes the config, if not done before.

        Args:
            write_first: function without arguments, called before the config is
                written: with a config, the run has begun. Defaults to `None`.

        Raises:
            ValueError: if another process has begun a run in it meanwhile.
        """
        if self.writes and not self.exists:
            files.make_folder(self.path)
            self._acquire_lock()
            if _is_taken(self.path):
                raise ValueError(
                    f"Expected a new or empty workdir, got {self.path}, in "
                    "which another process has begun a run meanwhile. Name "
                    "another one."
                )
            if write_first is not None:
                write_first()
            self.write_json("config.json", self._config)
            self.exists = True

    def _acquire_lock(self):
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Expected a workdir that no other process uses, got "
                f"{self.path}, in which one is training. Wait for its end."
            ) from error
        for folder in (self.path, self.path / CHECKPOINTS):
            files.remove_incomplete(folder)

    def result(self):
        """Content of `result.json`; None if the run is not finished.

        Raises:
            ValueError: if it is damaged.
        """
        file = self.path / "result.json"
        if not file.exists():
            return None
        result = files.read_json(file)
        if "summary" not in result:
            raise files.damaged(file)
        return result

    def remove_checkpoints(self):
        """Removes the files that a finished run no longer needs."""
        if self.writes:
            (self.path / DATA).unlink(missing_ok=True)
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def write_text(self, name, text):
        """Writes a text file, replacing it as a whole."""
        if self.writes:
            files.write_text(self.path / name, text)

    def write_json(self, name, value):
        """Writes a JSON file, replacing it as a whole."""
        if self.writes:
            files.write_json(self.path / name, value, allow_nan=False)
