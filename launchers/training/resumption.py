"""Conditions for resuming a run: its ledger and the same data."""

import hashlib

import numpy as np
from keras import tree

from tf_dpsub import files
from tf_dpsub.launchers.training import run_directory

# Number of input rows in the digest; it contains all labels.
_ROWS = 4096


def described(x, y):
    """Digest of private data, to compare them between runs.

    Formal guarantees: the digest tells whether a guess of the data is right. It
    is private, as the data are: a run keeps it in a file that its owner alone
    reads, and removes it at its end.

    Args:
        x: structure of arrays, inputs.
        y: the same for labels.

    Returns:
        dict that JSON can hold.
    """
    parts = tree.flatten(x)
    step = max(1, len(parts[0]) // _ROWS)
    digest = hashlib.sha256()
    for part in [*(part[::step] for part in parts), *tree.flatten(y)]:
        part = np.asarray(part)
        digest.update(
            repr(part.tolist()).encode()
            if part.dtype.hasobject
            else np.ascontiguousarray(part).tobytes()
        )
    return {
        "examples": len(parts[0]),
        "shapes": [
            f"{part.dtype}{list(part.shape[1:])}"
            for part in [*parts, *tree.flatten(y)]
        ],
        "sha256": digest.hexdigest(),
    }


def begin(directory, ledger, data):
    """Writes the ledger and the data's digest, the first files of a run.

    Args:
        directory: `RunDirectory`, of a run that has not begun.
        ledger: `tf_dpsub.accounting.PrivacyLedger` of the run.
        data: dict, as `described` returns it.
    """
    ledger.create()
    directory.write_json(run_directory.DATA, data)


def require_same(directory, ledger, data):
    """Checks that a run is resumed with its ledger and the same data.

    Args: as `begin`, of a run that may have begun.

    Raises:
        ValueError: if the ledger is gone, or counts steps on other data.
    """
    if not directory.exists:
        return
    path = directory.path / run_directory.LEDGER
    if not path.exists():
        raise ValueError(
            f"Expected {path}, the ledger of the run, got none: steps that it "
            "has counted would be forgotten. Restore it, or start another run "
            "in another workdir."
        )
    there = {"examples": entry.examples for entry in ledger.entries}
    file = directory.path / run_directory.DATA
    # Runs of earlier versions have no digest.
    if file.exists():
        there |= files.read_json(file)
    changes = [
        "other values"
        if name == "sha256"
        else f"{name} {there[name]} there and {data[name]} here"
        for name in there
        if there[name] != data.get(name)
    ]
    if changes:
        raise ValueError(
            f"Expected the data of the run in {directory.path} to resume it, "
            f"got others: {', '.join(changes)}. Give it the same data, or "
            "start another run in another workdir."
        )
