"""Tracing without the stack of each operation, for tests and what they start.

A module of its own, which loads TensorFlow only when it is used.
"""

import contextlib
from unittest import mock


@contextlib.contextmanager
def without_stacks():
    """Lets no operation of a graph record the functions that it was made by.

    Those of pytest are many: to extract them took a tenth of all tracing. They
    enter messages of errors in steps that run, and nothing else.
    """
    from tensorflow.python.util import tf_stack

    same = tf_stack.extract_stack()
    with mock.patch.object(
        tf_stack, "extract_stack", lambda stacklevel=1: same
    ):
        yield
