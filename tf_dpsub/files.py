"""Files that are replaced as a whole, and that their owner alone reads."""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import secrets
import tempfile

_INCOMPLETE = ".incomplete-"


def replace(path, write):
    """Replaces a file as a whole, durably.

    Whatever stops the program or fills the disk leaves the earlier file, or
    this one. `remove_incomplete` removes what a killed process has left.

    Formal guarantees: nothing is released. Others than the owner of the file
    can read neither it nor what is written of it until then.

    Args:
        path: string or path-like, the file.
        write: function of a `pathlib.Path`, the file to write instead, in the
            same folder and with the same ending.
    """
    path = pathlib.Path(path)
    incomplete = path.with_name(
        f"{_INCOMPLETE}{secrets.token_hex(4)}-{path.name}"
    )
    os.close(os.open(incomplete, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        write(incomplete)
        _make_durable(incomplete)
        os.replace(incomplete, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            incomplete.unlink()
        raise
    _make_durable(path.parent)


def write_bytes(path, content: bytes):
    """Replaces a file as a whole by bytes."""
    replace(path, lambda incomplete: incomplete.write_bytes(content))


def write_text(path, text: str):
    """Replaces a file as a whole by a text."""
    write_bytes(path, text.encode())


def write_json(path, content, **options):
    """Replaces a file as a whole by JSON that people can read, too.

    Args:
        path: string or path-like, the file.
        content: what the file is to hold.
        **options: further arguments of `json.dumps`.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, **options)
    write_text(path, text + "\n")


def damaged(path):
    """The error of a file that does not hold what was written to it."""
    return ValueError(
        f"Expected {path} as it was written, got something else. Restore it."
    )


def read_json(path, kind=dict):
    """Reads a file of JSON that a program has written.

    Args:
        path: string or path-like, the file.
        kind: type of the content. Defaults to `dict`.

    Returns:
        The content. Its dicts raise `ValueError` for a field they do not have.

    Raises:
        ValueError: if the file holds something else.
    """
    path = pathlib.Path(path)
    try:
        content = json.loads(
            path.read_text("utf-8"),
            object_hook=functools.partial(_Fields, path),
        )
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    if not isinstance(content, kind):
        raise damaged(path)
    return content


class _Fields(dict):
    """A dict from a file, which is named where a field is missing."""

    def __init__(self, path, fields):
        super().__init__(fields)
        self._path = path

    def __missing__(self, name):
        raise ValueError(
            f"Expected {self._path} to have the field {name!r}, got none: it "
            "was damaged, or another version has written it. Restore it."
        )


def opener(path, flags):
    """Opens a file, for `open(..., opener=opener)`: a new one is private."""
    return os.open(path, flags, 0o600)


def make_folder(path):
    """Makes a folder that its owner alone reads, unless it exists.

    Args:
        path: string or path-like.

    Returns:
        `pathlib.Path` of the folder.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path):
    """Keeps out whoever locks the same path, in any process, meanwhile.

    The lock is an empty file among the temporary ones, as long as it is held:
    the folder of the path may have a lock of its own, and holds no file that is
    not asked for. Where the file system knows no locks, nobody is kept out.

    Args:
        path: string or path-like, which need not exist.
    """
    name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]
    lock = os.path.join(tempfile.gettempdir(), f"tf_dpsub-{os.getuid()}-{name}")
    handle = _locked_file(lock)
    try:
        yield
    finally:
        # While it is held: whoever waits for it finds that it is gone.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)
        os.close(handle)


def _locked_file(path):
    """Locks a file that is made if need be: its open handle."""
    import fcntl  # which Windows lacks

    while True:
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        # Another one has held it, and removed it since.
        os.close(handle)


def is_empty(folder) -> bool:
    """Returns whether a folder has no files, or incomplete ones alone."""
    return not complete(folder)


def complete(folder):
    """Lists the content of a folder, without incomplete files.

    Args:
        folder: `pathlib.Path`.

    Returns:
        List of `pathlib.Path`.
    """
    return [p for p in folder.iterdir() if not p.name.startswith(_INCOMPLETE)]


def remove_incomplete(folder):
    """Removes incomplete files, which killed processes have left.

    Args:
        folder: `pathlib.Path`, which no other process writes to.
    """
    for path in folder.glob(f"{_INCOMPLETE}*"):
        path.unlink()


def _make_durable(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
