"""Conditions for resuming a run: its ledger and the same data."""

import hashlib

import numpy as np
from keras import tree

from tf_dpsub import files
from tf_dpsub.launchers.training import run_directory

# Number of inputs in the digest, which contains all labels.
_ROWS = 4096


def digest_of(x, y):
    """Digest of private data, by which a run recognizes them.

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
    sha256 = hashlib.sha256()
    for part in [*(part[::step] for part in parts), *tree.flatten(y)]:
        part = np.asarray(part)
        sha256.update(
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
        "sha256": sha256.hexdigest(),
    }


def begin(directory, ledger, digest):
    """Writes the ledger and the data's digest, the first files of a run.

    Args:
        directory: `RunDirectory`, of a run that has not begun.
        ledger: `tf_dpsub.accounting.PrivacyLedger` of the run.
        digest: dict, as `digest_of` returns it.
    """
    ledger.create()
    directory.write_json(run_directory.DATA, digest)


def require_same(directory, ledger, digest):
    """Checks that a run goes on with its ledger and the same data.

    Args: as `begin`, but the run may have begun.

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
    recorded = {"examples": entry.examples for entry in ledger.entries}
    file = directory.path / run_directory.DATA
    # Runs of earlier versions have no digest.
    if file.exists():
        recorded |= files.read_json(file)
    changes = [
        "other values"
        if name == "sha256"
        else f"{name} {recorded[name]} there and {digest[name]} here"
        for name in recorded
        if recorded[name] != digest.get(name)
    ]
    if changes:
        raise ValueError(
            f"Expected the data of the run in {directory.path} to resume it, "
            f"got others: {', '.join(changes)}. Give it the same data, or "
            "start another run in another workdir."
        )
