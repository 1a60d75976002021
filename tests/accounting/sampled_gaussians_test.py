import logging

import dp_accounting
import numpy as np
import pytest

from tf_dpsub.accounting import accountants, sampled_gaussians


@pytest.mark.parametrize(
    "noise_multiplier, rate, left_out",
    [
        (0.3, 0.01, False),
        (0.4, 0.3, True),
        (1.0, 0.99, False),
        (1.3, 2.5e-3, False),
        (10.0, 0.5, True),
        (5.0, 1e-4, False),
    ],
)
def test_are_those_of_dp_accounting(noise_multiplier, rate, left_out, caplog):
    """It too leaves out small orders, whose series are long."""
    orders = accountants.RDP_ORDERS
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    with caplog.at_level(logging.ERROR):
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(
                rate, dp_accounting.GaussianDpEvent(noise_multiplier)
            )
        )
    assert np.isinf(accountant.rdp).any() == left_out
    np.testing.assert_allclose(
        sampled_gaussians.renyi_divergences(noise_multiplier, rate, orders),
        accountant.rdp,
        rtol=1e-7,
        atol=1e-12,
    )


def test_a_very_large_order():
    event = accountants.sampled_gaussian(5.0, 0.01)
    accountant = dp_accounting.rdp.RdpAccountant([2.0**15])
    accountant.compose(event)
    assert accountants._curve(event, (2.0**15,)) == accountant.rdp
