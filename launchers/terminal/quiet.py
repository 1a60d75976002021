"""Silence of the libraries below Python."""

import contextlib
import os
import sys
import tempfile
import warnings

from absl import logging

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def load_tensorflow():
    """Loads TensorFlow, and lets it say no more than what is wrong."""
    logging.get_absl_handler().setFormatter(None)
    warnings.formatwarning = lambda text, *_: f"warning: {text}\n"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with stderr_dropped():
        import tensorflow as tf

        # The drivers of GPUs have messages of their own.
        tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def stderr_dropped():
    """Drops what is written to standard error, unless something is raised.

    TensorFlow's libraries greet before they read the level of their logs.
    `TF_CPP_MIN_LOG_LEVEL=0` in the environment lets all of it through.
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
