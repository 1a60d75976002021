"""Waits for the garbage collector."""

import gc
import time

# A collection that another thread has begun may free much.
_SECONDS = 120
_COLLECTIONS = 3


def ends(reference) -> bool:
    """Whether what a weak reference is of is collected.

    A call of the collector does nothing while another thread is in one, which
    may take seconds: it is called until it has worked a few times.
    """
    worked = 0

    def count(phase, info):
        nonlocal worked
        worked += phase == "stop" and info["generation"] == 2

    gc.callbacks.append(count)
    try:
        end = time.monotonic() + _SECONDS
        while reference() is not None and worked < _COLLECTIONS:
            if time.monotonic() > end:
                break
            gc.collect()
            time.sleep(0.02)
    finally:
        gc.callbacks.remove(count)
    return reference() is None
