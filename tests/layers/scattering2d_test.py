import math

import keras
import numpy as np
import pytest
from kymatio.scattering2d.filter_bank import filter_bank
from kymatio.scattering2d.frontend.numpy_frontend import ScatteringNumPy2D

from tf_dpsub.layers import Scattering2D
from tf_dpsub.layers.scattering2d import wavelets

# Kymatio rounds pi in the norm of each filter.
_KYMATIO_PI = 3.1415 / math.pi


@pytest.mark.parametrize("J, L", [(2, 8), (3, 4), (1, 6)])
def test_wavelets_are_those_of_kymatio(J, L):
    size = (40, 48)
    published = filter_bank(*size, J, L)["psi"]
    for scale in range(J):
        of_scale = [psi for psi in published if psi["j"] == scale]
        for resolution in range(min(scale + 1, max(J - 1, 1))):
            expected = [psi["levels"][resolution] for psi in of_scale]
            bank = wavelets(size, J, L, scale, resolution)
            # They sum waves in single precision.
            np.testing.assert_allclose(
                bank, np.stack(expected) * _KYMATIO_PI, atol=1e-6
            )


@pytest.mark.parametrize(
    "J, L, max_order, size",
    [
        (2, 8, 2, (28, 28)),
        (3, 4, 2, (30, 45)),
        (2, 6, 1, (28, 31)),
        (1, 8, 2, (9, 9)),
    ],
)
def test_coefficients_are_those_of_kymatio(J, L, max_order, size):
    images = np.random.default_rng(0).random((3, *size, 2))
    layer = Scattering2D(J, L, max_order)
    coefficients = layer(images.astype("float32")).numpy()
    assert coefficients.shape == layer.compute_output_shape(images.shape)
    published = ScatteringNumPy2D(J, size, L=L, max_order=max_order)
    second = layer.paths - 1 - J * L
    filters = np.repeat([1, 2, 3], [1, J * L, second])
    for channel in range(2):
        expected = published(images[..., channel])  # [images, paths, ...]
        expected *= (_KYMATIO_PI**filters)[:, None, None]
        first = channel * layer.paths
        np.testing.assert_allclose(
            np.moveaxis(coefficients, 3, 1)[:, first : first + layer.paths],
            expected,
            atol=3e-6,
        )


def test_coefficients_of_a_constant_image():
    coefficients = Scattering2D()(np.full((1, 16, 16, 1), 0.5, "float32"))
    # Wavelets have mean zero, and the blur has the sum one.
    np.testing.assert_allclose(coefficients[..., 0], 0.5, rtol=1e-3)
    np.testing.assert_allclose(coefficients[..., 1:], 0, atol=1e-5)


def test_precision_of_the_model():
    layer = Scattering2D(dtype="mixed_bfloat16")
    images = np.random.default_rng(0).random((2, 12, 12, 1), "float32")
    coefficients = layer(images)
    assert coefficients.dtype == "bfloat16"
    exact = Scattering2D()(images)
    np.testing.assert_allclose(
        keras.ops.cast(coefficients, "float32"), exact, rtol=2**-8
    )


def test_config():
    layer = Scattering2D(J=3, L=4, max_order=1)
    copy = Scattering2D.from_config(layer.get_config())
    assert (copy.J, copy.L, copy.max_order) == (3, 4, 1)


@pytest.mark.parametrize(
    "arguments, shape, message",
    [
        ({"J": 0}, None, "J >= 1"),
        ({"L": 2.5}, None, "L >= 1"),
        ({"max_order": 3}, None, "max_order 1 or 2"),
        ({}, (None, 28, 28), "Reshape"),
        ({}, (None, None, 28, 1), "known size"),
        ({}, (None, 28, 4, 1), "Take fewer scales"),
    ],
)
def test_errors(arguments, shape, message):
    with pytest.raises(ValueError, match=message):
        Scattering2D(**arguments).build(shape)
