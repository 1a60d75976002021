"""Suppresses the log lines of TensorFlow's libraries."""

import contextlib
import os
import sys
import tempfile
import warnings

from absl import logging

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def load_tensorflow():
    """Loads TensorFlow; afterwards it logs warnings and errors only."""
    logging.get_absl_handler().setFormatter(None)
    warnings.formatwarning = lambda text, *_: f"warning: {text}\n"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with stderr_dropped():
        import tensorflow as tf

        # GPU drivers print messages when devices are first listed.
        tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def stderr_dropped():
    """Context that drops standard error, unless an exception is raised.

    TensorFlow's libraries print lines before they read their log level.
    `TF_CPP_MIN_LOG_LEVEL=0` in the environment keeps all output.
    """
    os.environ.setdefault(_LEVEL, "2")
    if os.environ[_LEVEL] in ("0", "1"):
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception:
            file.seek(0)
            os.write(stderr, file.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
