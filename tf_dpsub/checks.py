"""Checks of arguments."""


def is_int(value):
    """Whether a value is a whole number, which True and False are not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_count(name: str, value):
    """Raises unless a value is a positive number of something.

    Args:
        name: string, for the message.
        value: what was given.

    Raises:
        ValueError: if it is no int, or below 1.
    """
    if not (is_int(value) and value >= 1):
        raise ValueError(f"Expected {name} >= 1 (int), got {value!r}.")
