import math

import numpy as np
import pytest

from tf_dpsub import checks


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_counts(value):
    checks.check_count("steps", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", math.nan, None])
def test_what_is_no_count(value):
    with pytest.raises(ValueError, match="Expected steps >= 1 .int., got"):
        checks.check_count("steps", value)


def test_optional_arguments():
    checks.check_count("groups", None, optional=True)
    checks.check_seed(None)
    with pytest.raises(ValueError, match="groups >= 1 .int. or None, got 0"):
        checks.check_count("groups", 0, optional=True)


@pytest.mark.parametrize("value", [-1, 1.0, False])
def test_seed(value):
    checks.check_seed(0)
    with pytest.raises(ValueError, match="seed >= 0 .int. or None, got"):
        checks.check_seed(value)


@pytest.mark.parametrize("value", [0, 1, -0.5, math.nan])
def test_delta(value):
    checks.check_delta(1e-5)
    with pytest.raises(ValueError, match="0 < delta < 1, got .* well below 1"):
        checks.check_delta(value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_epsilon(value):
    checks.check_epsilon(2)
    with pytest.raises(ValueError, match="Expected 0 < epsilon < inf, got"):
        checks.check_epsilon(value)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_noise_multiplier(value):
    checks.check_noise_multiplier(0)
    with pytest.raises(ValueError, match="0 <= noise_multiplier < inf, got"):
        checks.check_noise_multiplier(value)


def test_positive():
    checks.check_positive("distance", math.inf)
    for value in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="Expected distance > 0, got"):
            checks.check_positive("distance", value)


@pytest.mark.parametrize(
    "value, message",
    [
        ("rpd", r"one of \('rdp', 'pld'\), got 'rpd'. Did you mean 'rdp'\?$"),
        ("gauss", "got 'gauss'.$"),
        (None, "got None.$"),
        ([], r"got \[\].$"),
    ],
)
def test_choice(value, message):
    checks.check_choice("accountant", "pld", ("rdp", "pld"))
    with pytest.raises(ValueError, match=message):
        checks.check_choice("accountant", value, ("rdp", "pld"))
