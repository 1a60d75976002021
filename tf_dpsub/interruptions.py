"""Signals such as Ctrl-C, raised again where something drops them.

Python drops an exception that is raised in a finalizer, of which TensorFlow
runs many while it traces, and Keras has clauses that drop any: after Ctrl-C,
work would go on.
"""

import contextlib
import functools
import signal
import threading

# The exception of a handler, until it is raised again. There is one list, as
# signals are those of the process.
_raised: list = []


@contextlib.contextmanager
def kept():
    """Context that keeps the exceptions which handlers of signals raise.

    Where something drops one, `check` raises it again, and so does the end of
    the context.
    """
    handlers = {}
    # Other threads get no signals, and may not handle them.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.getsignal(number)
            if callable(previous):
                handlers[number] = functools.partial(_handle, previous)
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
    """Raises the exception of a signal's handler again, if it was dropped."""
    if _raised:
        raise _raised.pop()


def _handle(handler, number, frame):
    try:
        handler(number, frame)
    except BaseException as error:
        _raised[:] = [error]
        raise
