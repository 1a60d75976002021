"""Several sources of rows, as one."""

from collections.abc import Sequence

import keras
import numpy as np

from tf_dpsub.data import row_gathers, row_sources
from tf_dpsub.data.stored_rows import StoredRows


class ShardedRows(StoredRows):
    """Several sources of rows as one, a source for `PoissonBatches`.

    Rows are numbered from one source to the next. A batch asks each source that
    holds a drawn row once.

    Args:
        sources: sequence of sources as `PoissonBatches` takes them, or of
            arrays `[rows, ...]`, or of tuples `(x, y)` of such, memory maps
            among them. All give the same parts, with the same shapes and
            dtypes.

    Raises:
        ValueError: if there are none, if one has no rows, or if their parts
            differ.

    Example:

    ```python
    shards = [
        (np.load(path / "x.npy", mmap_mode="r"), np.load(path / "y.npy"))
        for path in folders
    ]
    batches = tf_dpsub.data.PoissonBatches(
        tf_dpsub.data.ShardedRows(shards), batch_size=4096
    )
    ```
    """

    def __init__(self, sources: Sequence):
        self._sources = [_source_of(source) for source in sources]
        lengths = [len(source) for source in self._sources]
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"Expected sources with rows, got {len(lengths)} sources with "
                f"{min(lengths, default=0)} rows in the smallest. Leave empty "
                "ones out."
            )
        self._ends = np.cumsum([0, *lengths])  # [sources + 1]
        self.assumptions = tuple(
            dict.fromkeys(
                assumption
                for source in self._sources
                for assumption in getattr(source, "assumptions", ())
            )
        )
        kinds = [_kind_of(source) for source in self._sources]
        for k, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"Expected sources of like rows, got {kinds[0]} from the "
                    f"first and {kind} from number {k}."
                )

    def __len__(self):
        return int(self._ends[-1])

    def __getitem__(self, indices):
        """Reads rows.

        Args:
            indices: int64 array, ascending.

        Returns:
            What the sources give, of all these rows.

        Raises:
            IndexError: if there are not so many rows.
        """
        indices = np.asarray(indices, np.int64)
        self.require_range(indices)
        numbers = np.searchsorted(self._ends, indices, "right") - 1
        parts = [
            self._sources[k][indices[numbers == k] - self._ends[k]]
            for k in np.unique(numbers).tolist()
        ]
        return keras.tree.map_structure(
            lambda *rows: None if rows[0] is None else np.concatenate(rows),
            *parts,
        )

    def require_unchanged(self):
        """Refuses sources that are not as they were.

        Raises:
            ValueError: if one has another number of rows, or says so itself.
        """
        for source, rows in zip(self._sources, np.diff(self._ends).tolist()):
            row_gathers.require_unchanged(source, rows)


def _source_of(source):
    if isinstance(source, tuple) or hasattr(source, "__array__"):
        return row_gathers.MemoryMapReader(source)
    return row_sources.as_source(source)


def _kind_of(source):
    """Description of the rows of a source, by its first one."""
    rows = source[np.zeros(1, np.int64)]
    return keras.tree.map_structure(
        lambda part: (
            None
            if part is None
            else (np.asarray(part).dtype.name, np.asarray(part).shape[1:])
        ),
        rows,
    )
