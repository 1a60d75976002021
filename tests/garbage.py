"""Waits for the garbage collector."""

import gc
import time


def ends(reference) -> bool:
    """Whether what a weak reference is of is collected.

    A call of the collector does nothing while another thread is in one.
    """
    for _ in range(10):
        gc.collect()
        if reference() is None:
            return True
        time.sleep(0.1)
    return False
