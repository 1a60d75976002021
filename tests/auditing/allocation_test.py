"""Samplers of epochs: one that keeps its claim, and broken twins of it."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.auditing import check_allocation
from tf_dpsub.data import OncePerEpoch, PoissonBatches

EXAMPLES, STEPS = 1000, 25
CHECKS = ["once per epoch", "random steps", "epsilon of epochs"]


class FixedOrder(OncePerEpoch):
    """Takes the examples in their order, in each epoch."""

    def _draws(self, index, replicas, keys):
        size = -(-self.examples // self.steps_per_epoch)

        def draw(step, key):
            first = step % self.steps_per_epoch * size
            last = tf.minimum(first + size, self.examples)
            return tf.range(first, last), key, step

        return keys.enumerate().map(draw)


class OneAllocation(OncePerEpoch):
    """Draws an allocation for the first epoch, and keeps it."""

    def _draws(self, index, replicas, keys):
        draws = super()._draws(index, replicas, keys)
        return draws.take(self.steps_per_epoch).cache().repeat()


class DrawnByPoisson(OncePerEpoch):
    _draws = PoissonBatches._draws


def findings_of(sampler):
    batches = sampler(
        np.zeros([EXAMPLES, 1], "float32"),
        np.arange(EXAMPLES),
        batch_size=EXAMPLES // STEPS,
        seed=0,
    )
    findings = check_allocation(batches)
    assert [finding.check for finding in findings] == CHECKS
    return findings


def test_the_sampler_keeps_its_claims():
    findings = findings_of(OncePerEpoch)
    assert all(finding.passed for finding in findings), findings
    # The attack is one that finds something.
    assert findings[2].value > 0.1


@pytest.mark.parametrize("broken", [FixedOrder, OneAllocation])
def test_steps_that_stay_the_same_are_caught(broken):
    once, steps, epsilon = findings_of(broken)
    assert once.passed
    assert not steps.passed
    assert not epsilon.passed
    assert "an attacker proves ε ≥" in epsilon.detail


def test_another_sampler_is_caught():
    assert not findings_of(DrawnByPoisson)[0].passed
