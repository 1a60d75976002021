"""The loss around weights, against a linear model's closed forms."""

import keras
import numpy as np
import pytest

from tf_dpsub import data, models
from tf_dpsub.launchers.papers.engine import local_loss

# Half of the rows are longer: at first, all classes are nearly as likely.
_CLIP = 3.8


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.fixture(name="linear", scope="module")
def _linear():
    """A linear model, whose Hessian has a closed form."""
    keras.utils.set_random_seed(0)
    loaded = data.load("digits")
    x, y = loaded.x_train[:60], loaded.y_train[:60]
    model = models.mlp(x.shape[1:], (), 10)
    flat = x.reshape(60, -1).astype(np.float64)
    inputs = np.concatenate([flat, np.ones([60, 1])], axis=1)
    p = softmax(model.predict(x, verbose=0).astype(np.float64))
    # In the order of the kernel, [inputs, classes], and the bias after it.
    hessian = sum(
        np.kron(np.outer(a, a), np.diag(q) - np.outer(q, q))
        for a, q in zip(inputs, p)
    ) / len(x)
    errors = p - np.eye(10)[y]
    rows = np.einsum("np,nd->npd", inputs, errors).reshape(60, -1)
    return model, local_loss.LocalLoss(model, x, y, _CLIP), hessian, rows


def test_products_are_those_of_the_hessian(linear):
    _, local, hessian, _ = linear
    vector = np.random.default_rng(0).normal(size=len(hessian))
    np.testing.assert_allclose(
        local.hessian_product(vector), hessian @ vector, atol=1e-5
    )


def test_gradients_and_clipped_gradients(linear):
    _, local, _, rows = linear
    factors = np.minimum(1, _CLIP / np.linalg.norm(rows, axis=1))
    assert 0.1 < np.mean(factors < 1) < 0.9
    gradient, clipped = local.gradients()
    np.testing.assert_allclose(gradient, rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(
        clipped, (factors[:, None] * rows).mean(0), atol=1e-5
    )


def test_noise_changes_the_loss_by_its_curvature(linear):
    model, local, hessian, _ = linear
    vector = 0.01 * np.random.default_rng(1).normal(size=len(hessian))
    before = model.get_weights()
    assert local.change(vector) == pytest.approx(
        vector @ hessian @ vector / 2, rel=0.02
    )
    for value, old in zip(model.get_weights(), before):
        np.testing.assert_array_equal(value, old)


def test_the_basis_is_that_of_public_gradients(linear):
    _, local, _, rows = linear
    basis = local.basis(local._x, local._y, 5)
    _, _, expected = np.linalg.svd(rows, full_matrices=False)
    np.testing.assert_allclose(basis.T @ basis, np.eye(5), atol=1e-9)
    np.testing.assert_allclose(
        np.linalg.norm(expected[:5] @ basis, axis=1), 1, atol=1e-4
    )
