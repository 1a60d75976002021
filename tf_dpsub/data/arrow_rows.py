"""Rows of tables: Parquet files, Arrow tables, data sets of Hugging Face."""

from collections.abc import Sequence

import numpy as np

from tf_dpsub.data.stored_rows import FileStates, StoredRows


def is_table(x) -> bool:
    """Tells whether an object is one that `TableRows` reads."""
    return (
        hasattr(x, "column_names")
        and hasattr(x, "__getitem__")
        and not isinstance(x, dict)
    )


class TableRows(StoredRows):
    """Reads rows of a table that can be read anywhere.

    Of a table in a memory map of an Arrow file the drawn rows alone are read.

    Args:
        table: `pyarrow.Table`; or `datasets.Dataset` of Hugging Face, which is
            read in its own format, or as Arrow where it has none.

    Attributes:
        are_stored: bool, whether rows are those of the table, and not what the
            user's function for a format makes of several of them.
    """

    def __init__(self, table):
        self._is_arrow = not hasattr(table, "with_format")
        self.are_stored = True
        if not self._is_arrow:
            kind = table.format["type"]
            self.are_stored = kind != "custom"
            if kind is None:
                table = table.with_format("arrow")
        self._table = table

    def __len__(self):
        return len(self._table)

    def __getitem__(self, indices):
        """Reads rows: a dict of arrays `[len(indices), ...]`, by columns.

        Raises:
            ValueError: as `columns_of`.
        """
        if self._is_arrow:
            return columns_of(self._table.take(indices))
        rows = self._table[indices.tolist()]
        return rows if isinstance(rows, dict) else columns_of(rows)


class ParquetRows(StoredRows):
    """Rows of Parquet files, as a source for `PoissonBatches`.

    A Parquet file is compressed in row groups, of which no single row can be
    read. A batch reads each row group once in which a row was drawn, one after
    another, and keeps its drawn rows alone. Unless batches take a row of nearly
    every group anyway, write the files in small row groups, or turn them once
    into Arrow files, of which single rows are read: `datasets.load_dataset(
    "parquet", ...)` does so.

    Rows are dicts of their columns. The `map` of `PoissonBatches` makes inputs
    and targets of them.

    Args:
        files: path of a file, or a sequence of paths: rows are numbered in
            their order.
        columns: sequence of strings, the columns to read: others are skipped.
            Defaults to `None`, all of them.

    Raises:
        ValueError: if a file is none of Parquet, or has no such columns.

    Example:

    ```python
    rows = tf_dpsub.data.ParquetRows(paths, columns=["features", "label"])
    batches = tf_dpsub.data.PoissonBatches(
        rows, batch_size=4096, map=lambda row: (row["features"], row["label"])
    )
    ```
    """

    def __init__(self, files, columns: Sequence[str] | None = None):
        from pyarrow import ArrowInvalid, parquet

        self._files = FileStates(files)
        self._columns = None if columns is None else list(columns)
        # Of each row group of all files: its file and its number in it.
        self._groups: list[tuple[str, int]] = []
        rows = [0]
        names: set = set()
        for path in self._files.paths:
            try:
                metadata = parquet.read_metadata(path)
            except ArrowInvalid as error:
                raise ValueError(
                    f"Expected a Parquet file, got {path}: {error}"
                ) from error
            names = set(metadata.schema.to_arrow_schema().names)
            missing = sorted(set(self._columns or ()) - names)
            if missing:
                raise ValueError(
                    f"Expected the columns {self._columns} in {path}, got "
                    f"{sorted(names)}, without {missing}."
                )
            for k in range(metadata.num_row_groups):
                self._groups.append((path, k))
                rows.append(metadata.row_group(k).num_rows)
        self._ends = np.cumsum(rows)  # [groups + 1]

    def __len__(self):
        return int(self._ends[-1])

    def __getitem__(self, indices):
        """Reads rows.

        Args:
            indices: int64 array, ascending.

        Returns:
            dict of arrays `[len(indices), ...]`, one for each column.

        Raises:
            IndexError: if there are not so many rows.
            ValueError: if a file was changed, or a column cannot be an array.
        """
        import pyarrow
        from pyarrow import parquet

        self.require_range(indices)
        groups = np.searchsorted(self._ends, indices, "right") - 1
        tables, path, file = [], None, None
        try:
            for k in np.unique(groups).tolist():
                if self._groups[k][0] != path:
                    if file is not None:
                        file.close()
                    path = self._groups[k][0]
                    self._files.require_unchanged(path)
                    file = parquet.ParquetFile(path)
                group = file.read_row_group(self._groups[k][1], self._columns)
                within = indices[groups == k] - self._ends[k]
                tables.append(group.take(within))
        finally:
            if file is not None:
                file.close()
        return columns_of(pyarrow.concat_tables(tables))

    def require_unchanged(self):
        """Refuses files that were changed since the source was made.

        Raises:
            ValueError: if one was.
        """
        self._files.require_all_unchanged()


def columns_of(table):
    """dict of NumPy arrays, one for each column of a table.

    Numbers become arrays `[rows]`, lists of equal length `[rows, length]`,
    texts and bytes object arrays `[rows]`.

    Args:
        table: `pyarrow.Table`.

    Raises:
        ValueError: if values are missing, or are of another type.
    """
    return {
        name: _array(name, table.column(name)) for name in table.column_names
    }


def _array(name, column):
    import pyarrow
    from pyarrow import types

    if column.null_count:
        raise ValueError(
            f"Expected a value in each row of the column {name!r}, got rows "
            "without one. Fill them beforehand, by a public value."
        )
    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        rows = len(column)
        lengths = column.combine_chunks()
        if isinstance(lengths, pyarrow.ChunkedArray):
            lengths = pyarrow.concat_arrays(lengths.chunks)
        values = _array(name, pyarrow.chunked_array([lengths.flatten()]))
        if types.is_fixed_size_list(kind):
            length = kind.list_size
        else:
            counts = set(lengths.value_lengths().to_pylist())
            if len(counts) > 1:
                raise ValueError(
                    f"Expected lists of one length in the column {name!r}, got "
                    "several. Pad them beforehand, to a public length."
                )
            length = counts.pop() if counts else 0
        return values.reshape(rows, length, *values.shape[1:])
    if (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
    ):
        return column.to_numpy()
    if (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    ):
        values = np.empty(len(column), object)
        values[:] = column.to_pylist()
        return values
    raise ValueError(
        f"Expected numbers, texts, bytes or lists of numbers in the column "
        f"{name!r}, got {kind}. Leave it out, or convert it."
    )
