"""Ctrl-C that is not lost.

Python drops an exception that is raised in a finalizer, of which TensorFlow
runs many while it traces, and Keras has clauses that drop any: after Ctrl-C,
work would go on.
"""

import contextlib
import functools
import signal
import threading

# Signals are of the process. What a handler raised, until it got through.
_raised: list = []


@contextlib.contextmanager
def kept():
    """The context in which what handlers of signals raise is kept.

    Where something drops it, `check` raises it again, and so does the end of
    the context.
    """
    handlers = {}
    # Other threads get no signals, and may not handle them.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            earlier = signal.getsignal(number)
            if callable(earlier):
                handlers[number] = functools.partial(_handle, earlier)
                signal.signal(number, handlers[number])
    try:
        yield
        check()
    finally:
        _raised.clear()
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handler.args[0])


def check():
    """Raises what a handler of a signal raised, if it was dropped."""
    if _raised:
        raise _raised.pop()


def _handle(handler, number, frame):
    try:
        handler(number, frame)
    except BaseException as error:
        _raised[:] = [error]
        raise
