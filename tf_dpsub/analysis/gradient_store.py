"""A tall stack of gradients, kept in a folder."""

import errno
import json
import math
import os
import pathlib

import numpy as np

from tf_dpsub import files
from tf_dpsub.checks import check_choice, check_count

_ROWS, _DESCRIPTION = "gradients.bin", "gradients.json"


class GradientStore:
    """Gradients on disk, one row each, which may exceed memory.

    A row is scaled to a largest entry of 1, so that float16 keeps its digits.
    Rows are appended as a whole: whatever stops a program, or fills the disk,
    leaves those before readable.

    Formal guarantees: none. Gradients of private examples are private, and no
    epsilon covers them: the folder must not be released.

    Args:
        folder: string or path-like, which holds a store.

    Attributes:
        folder: `pathlib.Path`.
        variables: list of dicts with the `path` and the `shape` of the
            variables of the gradients, in the order of the columns.
        shape: tuple of ints, `(rows, columns)`.
        dtype: `numpy.dtype` of the file.
        max_bytes: int, the largest size of the file; None for no bound.
        steps: int array, the step of each row.

    Raises:
        ValueError: if there is no store in the folder.

    Example:

    ```python
    store = tf_dpsub.analysis.GradientStore.create(
        "gradients", model.trainable_variables, dtype="float16"
    )
    store.append(gradients, step=0)
    spectrum = tf_dpsub.analysis.top_singular_values(store, 100)
    ```
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        file = self.folder / _DESCRIPTION
        if not file.is_file():
            raise ValueError(
                f"Expected a folder with gradients, got {str(folder)!r}, which "
                f"has no {_DESCRIPTION}."
            )
        description = files.read_json(file)
        self.variables = description["variables"]
        self.dtype = np.dtype(description["dtype"])
        self.max_bytes = description["max_bytes"]
        self._columns = sum(math.prod(v["shape"]) for v in self.variables)
        self._record = np.dtype(
            [
                ("step", "<i8"),
                ("scale", "<f8"),
                ("row", self.dtype, (self._columns,)),
            ]
        )

    @classmethod
    def create(
        cls,
        folder,
        variables: list,
        *,
        dtype: str = "float32",
        max_bytes: int | None = None,
    ):
        """Makes an empty store, or opens the one of the same variables.

        Args:
            folder: string or path-like.
            variables: list of Keras variables, those of the gradients.
            dtype: string, `"float32"` or `"float16"`. Defaults to `"float32"`.
            max_bytes: int, the largest size of the file. Defaults to `None`:
                no bound.

        Returns:
            A `GradientStore`.

        Raises:
            ValueError: if the folder holds gradients of other variables, or of
                another type, or an argument is out of range.
        """
        check_choice("dtype", dtype, ("float32", "float16"))
        if not variables:
            raise ValueError("Expected one variable at least, got none.")
        check_count("max_bytes", max_bytes, optional=True)
        folder = pathlib.Path(folder)
        if (folder / _DESCRIPTION).is_file():
            store = cls(folder)
            store.require_variables(variables)
            if store.dtype != dtype:
                raise ValueError(
                    f"Expected a folder with gradients in {dtype}, got "
                    f"{str(folder)!r} in {store.dtype}."
                )
            store.max_bytes = max_bytes
            return store
        files.make_folder(folder)
        description = {
            "variables": _described(variables),
            "dtype": dtype,
            "max_bytes": max_bytes,
        }
        files.write_text(
            folder / _DESCRIPTION, json.dumps(description, indent=2) + "\n"
        )
        return cls(folder)

    def require_variables(self, variables: list):
        """Checks that the gradients are those of given variables.

        Args:
            variables: list of Keras variables.

        Raises:
            ValueError: names the first that differs.
        """
        expected, stored = _described(variables), self.variables
        if expected == stored:
            return
        for k in range(max(len(expected), len(stored))):
            pair = [v[k] if k < len(v) else None for v in (expected, stored)]
            if pair[0] != pair[1]:
                here, there = map(_named, pair)
                raise ValueError(
                    f"Expected gradients of this model's weights, got "
                    f"{str(self.folder)!r}, which holds those of another: "
                    f"weight {k} is {there} there and {here} here."
                )

    @property
    def _file(self):
        return self.folder / _ROWS

    def __len__(self):
        if not self._file.is_file():
            return 0
        return self._file.stat().st_size // self._record.itemsize

    @property
    def shape(self):
        return len(self), self._columns

    @property
    def steps(self):
        return np.array(self._map()["step"])

    @property
    def is_full(self):
        """True if another row would exceed the bound."""
        if self.max_bytes is None:
            return False
        return (len(self) + 1) * self._record.itemsize > self.max_bytes

    def append(self, gradients: list, step: int):
        """Writes one more row.

        Args:
            gradients: list of arrays, in the order of the variables.
            step: int, at which it was computed.

        Raises:
            ValueError: if the shapes do not fit, or the store is full.
            OSError: if the disk is full; the rows before stay readable.
        """
        shapes = [list(np.shape(g)) for g in gradients]
        if shapes != [v["shape"] for v in self.variables]:
            raise ValueError(
                "Expected gradients of shapes "
                f"{[v['shape'] for v in self.variables]}, got {shapes}."
            )
        if self.is_full:
            raise ValueError(
                f"Expected room for another row in {self.folder}, got "
                f"{len(self)} rows, which fill max_bytes={self.max_bytes:,}."
            )
        flat = [np.asarray(g, np.float32).ravel() for g in gradients]
        row = np.concatenate(flat)
        largest = float(np.max(np.abs(row), initial=0.0))
        # Rows that are not finite are kept as they are: reading them raises.
        scale = largest if 0 < largest < math.inf else 1.0
        record = np.zeros((), self._record)
        record["step"], record["scale"] = step, scale
        with np.errstate(invalid="ignore"):
            record["row"] = row / np.float32(scale)
        complete = len(self) * self._record.itemsize
        try:
            # This overwrites what a failed write may have left.
            mode = "r+b" if complete else "wb"
            with open(self._file, mode, opener=files.opener) as file:
                file.seek(complete)
                file.write(record.tobytes())
                file.flush()
        except OSError as error:
            if self._file.is_file():
                os.truncate(self._file, complete)
            if error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"The disk is full: {len(self)} gradients of "
                    f"{self._record.itemsize:,} bytes each are in "
                    f"{self.folder}, and stay readable",
                ) from error
            raise

    def block(self, rows, columns):
        """A part of the stack.

        Args:
            rows: slice.
            columns: slice.

        Returns:
            Float32 array.

        Raises:
            ValueError: if an entry is not finite; names the row.
        """
        picked = range(*rows.indices(len(self)))
        first, last, _ = columns.indices(self._columns)
        values = np.empty((len(picked), last - first), np.float32)
        part, scale = np.empty(last - first, self.dtype), np.empty(1)
        offsets = {
            name: offset for name, (_, offset) in self._record.fields.items()
        }
        # Pages of a memory map would count as memory of the process.
        with open(self._file, "rb") as file:
            for out_row, row in zip(values, picked):
                start = row * self._record.itemsize
                file.seek(start + offsets["scale"])
                file.readinto(scale)
                file.seek(start + offsets["row"] + first * part.itemsize)
                file.readinto(part)
                np.multiply(part, scale.astype(np.float32), out=out_row)
                if not np.isfinite(out_row).all():
                    raise ValueError(
                        f"Expected finite gradients in {self.folder}, got NaN "
                        f"or infinity in row {row}, of step "
                        f"{int(self.steps[row])}."
                    )
        return values

    def _map(self):
        if not len(self):
            return np.zeros(0, self._record)
        return np.memmap(self._file, self._record, "r", shape=len(self))


def _described(variables):
    return [{"path": v.path, "shape": list(v.shape)} for v in variables]


def _named(variable):
    if variable is None:
        return "missing"
    return f"'{variable['path']}' {variable['shape']}"
