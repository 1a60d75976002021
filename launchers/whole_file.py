"""Files that are written as a whole."""

import os


def replace(path, write):
    """Writes a file as a whole: whatever stops it leaves the earlier one.

    Args:
        path: `pathlib.Path`.
        write: function of the path to write to.
    """
    # Others may write it, too.
    incomplete = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    write(incomplete)
    os.replace(incomplete, path)


def write_text(path, text):
    """Writes a text as a whole file."""
    replace(path, lambda incomplete: incomplete.write_text(text, "utf-8"))
