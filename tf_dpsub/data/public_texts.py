"""Public texts from a file."""

import pathlib


def load_texts(path) -> list:
    """Loads texts, one from each line that is not empty.

    Args:
        path: str or path, a file of UTF-8 text.

    Returns:
        List of strings.

    Raises:
        ValueError: if there is no such file, or it holds no text.
    """
    try:
        lines = pathlib.Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"Expected a file of UTF-8 text, got {path}: {error}."
        ) from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"Expected a text in each line of {path}, got none.")
    return texts
