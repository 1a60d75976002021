"""The E2E NLG data: restaurants, as attributes and as sentences."""

import csv
import os
import pathlib

import numpy as np

# The files of the release; the split without texts is of no use.
_TRAIN, _TEST = "trainset.csv", "testset_w_refs.csv"
_SOURCE = "https://github.com/tuetschek/e2e-dataset"


def read(folder):
    """Reads descriptions of restaurants, and texts that people wrote of them.

    Most descriptions come several times, each time with another text.

    Args:
        folder: string or path-like, with trainset.csv and testset_w_refs.csv;
            None for that in the environment variable `E2E_DATA_DIR`.

    Returns:
        Tuple `(train, test)` of tuples `(descriptions, texts)`, object arrays
        of `str`.

    Raises:
        ValueError: if the folder has no such files, or they are not the
            release's.

    Reference:
        - [Novikova, Dušek, Rieser, 2017](https://arxiv.org/abs/1706.09254)
    """
    folder = folder or os.environ.get("E2E_DATA_DIR")
    if not folder:
        raise ValueError(
            "Expected data_dir or E2E_DATA_DIR, the folder of 'e2e' with "
            f"{_TRAIN} and {_TEST} from {_SOURCE}, got none."
        )
    folder = pathlib.Path(folder)
    return _columns(folder / _TRAIN), _columns(folder / _TEST)


def _columns(path):
    if not path.is_file():
        raise ValueError(
            f"Expected {path.name} from {_SOURCE} in the folder of 'e2e', got "
            f"{str(path.parent)!r}, which has none."
        )
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not all(row.get("mr") and row.get("ref") for row in rows):
        raise ValueError(
            f"Expected a text in the columns 'mr' and 'ref' of all rows of "
            f"{path}, got others."
        )
    return tuple(
        np.array([row[name] for row in rows], dtype=object)
        for name in ("mr", "ref")
    )
