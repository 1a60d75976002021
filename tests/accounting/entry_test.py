import math

import dp_accounting
import pytest

from tests.accounting.entries import (
    ALLOCATION,
    BATCHES,
    ONCE,
    PLAIN,
    POISSON,
    changed,
)
from tf_dpsub.accounting import random_allocation


class TestLedgerEntry:
    @pytest.mark.parametrize(
        "entry, steps, epochs, event, unamplified",
        [
            (
                POISSON,
                30,
                2,
                dp_accounting.SelfComposedDpEvent(
                    dp_accounting.PoissonSampledDpEvent(
                        150 / 60000, dp_accounting.GaussianDpEvent(1.3)
                    ),
                    30,
                ),
                (1.3, 30),
            ),
            (BATCHES, 30, 2, (18.0, 30), (18.0, 30)),
            (ONCE, 30, 2, (18.0, 2), (18.0, 30)),
            (ONCE, 30, 0, (18.0, 30), (18.0, 30)),
        ],
    )
    def test_event(self, entry, steps, epochs, event, unamplified):
        def gaussians(noise_multiplier, count):
            return dp_accounting.SelfComposedDpEvent(
                dp_accounting.GaussianDpEvent(noise_multiplier), count
            )

        entry = changed(entry, steps=steps, epochs=epochs)
        if isinstance(event, tuple):
            event = gaussians(*event)
        assert entry.event() == event
        assert entry.event_without_amplification() == gaussians(*unamplified)

    def test_event_without_noise(self):
        entry = changed(PLAIN, steps=1)
        assert entry.event() == dp_accounting.NonPrivateDpEvent()
        assert (
            entry.event_without_amplification()
            == dp_accounting.NonPrivateDpEvent()
        )

    @pytest.mark.parametrize(
        "steps, epochs, counted",
        [
            (800, 2, 2),
            # An epoch that has begun counts whole.
            (401, 2, 2),
            # No epoch is longer than it says.
            (801, 2, 3),
            # No epoch was counted: any two steps may share an example.
            (3, 0, 3),
        ],
    )
    def test_event_of_allocations(self, steps, epochs, counted):
        entry = changed(ALLOCATION, steps=steps, epochs=epochs)
        assert entry.event() == dp_accounting.SelfComposedDpEvent(
            random_allocation.RandomAllocationDpEvent(1.3, 400), counted
        )
        assert (
            entry.event_without_amplification()
            == dp_accounting.SelfComposedDpEvent(
                dp_accounting.GaussianDpEvent(1.3), steps
            )
        )

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"epoch_steps": None}, "epoch_steps"),
            ({"epoch_steps": 0}, "epoch_steps"),
            ({"each_example_once_per_epoch": False}, "once_per_epoch=True"),
            ({"examples": None}, "Expected examples with sampler='allocation'"),
            (
                {"sampler": "poisson", "each_example_once_per_epoch": False},
                "Expected epoch_steps=None with sampler='poisson', got 400",
            ),
            ({"sampler": "batches"}, "Expected epoch_steps=None"),
        ],
    )
    def test_invalid_allocation(self, changes, message):
        with pytest.raises(ValueError, match=message):
            changed(ALLOCATION, **changes)

    @pytest.mark.parametrize("entry", [POISSON, BATCHES, ONCE, ALLOCATION])
    def test_event_with_private_state(self, entry):
        """Noise does not cover what a basis of private gradients tells."""
        entry = changed(entry, private_state=True, steps=1)
        assert entry.event() == dp_accounting.NonPrivateDpEvent()
        assert (
            entry.event_without_amplification()
            == dp_accounting.NonPrivateDpEvent()
        )

    @pytest.mark.parametrize("entry", [POISSON, BATCHES, ONCE, PLAIN])
    def test_event_of_no_steps(self, entry):
        assert entry.event() == dp_accounting.NoOpDpEvent()

    def test_whole_data_set_in_every_batch(self):
        entry = changed(POISSON, batch_size=60000, steps=2)
        assert entry.event() == entry.event_without_amplification()

    def test_sampling_rate(self):
        assert POISSON.sampling_rate == 150 / 60000
        assert BATCHES.sampling_rate is None

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"mechanism": ""}, "mechanism to be a name, got ''"),
            ({"noise_multiplier": -1}, "0 <= noise_multiplier < inf, got -1"),
            ({"noise_multiplier": math.nan}, "noise_multiplier < inf, got nan"),
            ({"l2_norm_clip": 0}, "l2_norm_clip > 0, got 0"),
            ({"l2_norm_clip": math.nan}, "l2_norm_clip > 0, got nan"),
            ({"l2_norm_clip": math.inf}, "finite l2_norm_clip .* got inf"),
            (
                {"batch_size": 0},
                "1 <= batch_size <= examples, got batch_size=0",
            ),
            ({"batch_size": 60001}, "batch_size=60001, examples=60000"),
            ({"examples": None}, "Expected examples with sampler='poisson'"),
            ({"sampler": "shuffled"}, r"one of \('poisson', 'batches', "),
            ({"steps": -1}, "steps >= 0 and epochs >= 0, got -1 and 0"),
            ({"fixed_seed": 3}, "Expected True or False, got 3"),
            ({"private_state": "no"}, "Expected True or False, got 'no'"),
        ],
    )
    def test_invalid(self, changes, message):
        with pytest.raises(ValueError, match=message):
            changed(POISSON, **changes)

    @pytest.mark.parametrize("field", ["batch_size", "examples", "steps"])
    def test_counts_are_whole(self, field):
        with pytest.raises(TypeError):
            changed(POISSON, **{field: 1000.5})
