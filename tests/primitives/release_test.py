"""What follows from releases: their noise, and the event of a step."""

import math

import pytest

from tf_dpsub.primitives.release import Release, effective_noise_multiplier


def release(noise_multiplier, clip=0.5):
    return Release(tensors=2, clip=clip, noise_multiplier=noise_multiplier)


class TestNoise:
    def test_is_relative_to_the_clip(self):
        assert release(3.0).noise_stddev == 1.5

    def test_without_a_clip_there_is_none(self):
        """Zero times infinity would be NaN."""
        assert release(0.0, math.inf).noise_stddev == 0


class TestEffectiveNoiseMultiplier:
    @pytest.mark.parametrize("multiplier", [0.0, 1.1, 1.3, 3.73])
    def test_of_one_release_is_its_own(self, multiplier):
        """To the last bit: the ledger's event is made of it."""
        assert effective_noise_multiplier([release(multiplier)]) == multiplier

    @pytest.mark.parametrize("clip", [0.1, 10.0])
    def test_clips_do_not_matter(self, clip):
        together = effective_noise_multiplier([release(3), release(4, clip)])
        assert together == pytest.approx(2.4)

    def test_of_equal_releases(self):
        releases = [release(2.0)] * 4
        assert effective_noise_multiplier(releases) == pytest.approx(1.0)

    def test_without_noise_on_one_a_step_is_not_private(self):
        assert effective_noise_multiplier([release(3.0), release(0.0)]) == 0
