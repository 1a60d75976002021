"""Optional dependencies: the extras of the package."""

import importlib


def command(extra: str):
    """The command that installs an extra."""
    return f'pip install "tf_dpsub[{extra}]"'


def require(module: str, extra: str):
    """Imports a module that only an extra installs.

    Args:
        module: string, its name.
        extra: string, the name of the extra.

    Returns:
        The module.

    Raises:
        ImportError: if it cannot be imported; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Expected {module.partition('.')[0]} to be installed, got "
            f"{error}. Install it: `{command(extra)}`."
        ) from error
