"""How far the last example of a batch moves what a step releases."""

import numpy as np
import pytest

from tests.auditing.audited_mechanisms import (
    KINDS_OF_SUMS,
    MECHANISMS,
    audit_of,
)
from tests.auditing.movement_search import nothing_moves_it_further


@pytest.fixture(name="audits", scope="module")
def _audits():
    """Made as they are asked for: each takes a second."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = audit_of(MECHANISMS[name], name)
        return made[name]

    return get


# In float32, `test_mechanism_passes` searches further, of each mechanism.
@pytest.mark.parametrize("name", KINDS_OF_SUMS)
def test_nothing_moves_it_further_in_half_precision(name):
    nothing_moves_it_further(
        audit_of(MECHANISMS[name], name, dtype_policy="mixed_float16")
    )


def test_movement_is_the_distance_of_sums(audits):
    audit = audits("DPSGD")
    batch = audit.random(np.random.default_rng(0))
    with_it, without = (
        np.concatenate(audit.sums(batch, rows))
        for rows in (None, audit.batch_size - 1)
    )
    moved = np.linalg.norm(with_it - without) / audit.optimizer.l2_norm_clip
    assert 0.3 < moved == pytest.approx(audit.movement(batch), rel=1e-6)


class TestAscent:
    def test_climbs_to_what_moves_it_most(self, audits):
        """In a subspace of 5 of 39 directions random gradients move little."""
        audit = audits("ProjectedDPSGD")
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
        audit = audits("DPSGD")
        for gradient in audit.ascent(audit.nothing()):
            np.testing.assert_array_equal(gradient, 0)
