"""No neighbouring batches move a released sum by more than is claimed.

Hypothesis looks for them, of numbers of every kind, and goes on from those
that move it most.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays

from tests.auditing.audited_mechanisms import MECHANISMS, audit_of

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


@pytest.fixture(name="audits", scope="module")
def _audits():
    """Made as they are asked for: each takes a second."""
    made = {}

    def get(name, dtype_policy):
        key = name, dtype_policy
        if key not in made:
            made[key] = audit_of(
                MECHANISMS[name], name, dtype_policy=dtype_policy
            )
        return made[key]

    return get


@pytest.mark.parametrize("dtype_policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_nothing_moves_it_further(name, dtype_policy, audits):
    audit = audits(name, dtype_policy)
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


def test_movement_is_the_distance_of_sums(audits):
    audit = audits("DPSGD", "float32")
    batch = audit.random(np.random.default_rng(0))
    with_it, without = (
        np.concatenate(audit.sums(batch, rows)) for rows in (None, _ROWS - 1)
    )
    moved = np.linalg.norm(with_it - without) / audit.optimizer.l2_norm_clip
    assert 0.3 < moved == pytest.approx(audit.movement(batch), rel=1e-6)


class TestAscent:
    def test_climbs_to_what_moves_it_most(self, audits):
        """In a subspace of 5 of 39 directions random gradients move little."""
        audit = audits("ProjectedDPSGD", "float32")
        generator = np.random.default_rng(0)
        batch = audit.random(generator)
        random = max(
            audit.movement(audit.random(generator)) for _ in range(100)
        )
        for _ in range(100):
            ascent = audit.ascent(batch)
            batch = tuple(
                (a + 0.1 * np.linalg.norm(a) / np.linalg.norm(g) * g).astype(
                    np.float32
                )
                for a, g in zip(batch, ascent)
            )
        assert random < 0.8 < audit.movement(batch) <= 1

    def test_nothing_to_climb(self, audits):
        audit = audits("DPSGD", "float32")
        for gradient in audit.ascent(audit.nothing()):
            np.testing.assert_array_equal(gradient, 0)
