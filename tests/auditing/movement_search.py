"""A search for neighbouring batches that move a released sum too far."""

import hypothesis
import numpy as np
from hypothesis import strategies
from hypothesis.extra import numpy as arrays

_ROWS = 16


def _numbers(columns):
    """Rows of float32 numbers: any, or near one another; few of them differ."""
    any_number = strategies.floats(width=32)
    sizes = strategies.floats(-3, 3, width=32)
    return strategies.one_of(
        arrays.arrays(np.float32, (_ROWS, columns), elements=elements, fill=f)
        for elements in (any_number, sizes)
        for f in (strategies.just(0), elements)
    )


def nothing_moves_it_further(audit):
    """Checks that no neighbouring batches move a sum further than is claimed.

    Hypothesis looks for them, of numbers of every kind, and goes on from those
    that move it most.

    Args:
        audit: `tf_dpsub.auditing.step_audit.StepAudit`, without views.
    """
    inputs, targets = (a.shape[1] for a in audit.nothing())
    seen = []

    @hypothesis.settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(x=_numbers(inputs), y=_numbers(targets))
    def search(x, y):
        moved = audit.movement((x, y))
        assert moved <= 1
        hypothesis.target(moved)
        seen.append(moved)

    search()
    # What moves nothing would pass too.
    assert max(seen) > 0.3
