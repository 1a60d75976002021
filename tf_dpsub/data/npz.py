"""Arrays from .npz files."""

import pathlib
import zipfile

import numpy as np


def read_arrays(path, names) -> list:
    """Reads arrays from an .npz file.

    Args:
        path: string or path-like, the file.
        names: sequence of strings, the arrays it must hold.

    Returns:
        List of arrays, in the order of `names`.

    Raises:
        ValueError: if there is no such file, or an array is missing.
    """
    if not pathlib.Path(path).exists():
        raise ValueError(
            f"Expected an .npz file, got {path}, which does not exist."
        )
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"Expected an .npz file, as numpy.savez writes it, got {path}, "
            "which is none."
        )
    with np.load(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(
                f"Expected the arrays {', '.join(names)} in {path}, got "
                f"{', '.join(file) or 'none'}."
            )
        return [file[name] for name in names]
