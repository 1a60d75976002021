"""Subspaces that are given: what spans them, and whether they are public."""

import json
import math

import keras
import numpy as np
import pytest

import tf_dpsub
from tests.subspaces.linear_models import (
    PARAMETERS,
    attach_basis,
    largest_sine,
    make_private,
    matrix_of,
    orthonormal,
    projected,
)
from tf_dpsub.subspaces import FixedSubspace

RANK = 3

_random = np.random.default_rng(0)
BASIS = _random.normal(size=(PARAMETERS, RANK))
X = _random.normal(size=(8, PARAMETERS)).astype("float32")
Y = np.ones((8, 1), "float32")


def matrix(basis):
    subspace = FixedSubspace(basis)
    attach_basis(make_private(projected(subspace)))
    return matrix_of(subspace)


class TestBasis:
    @pytest.mark.parametrize(
        "basis",
        [
            BASIS,
            BASIS.astype("float32"),
            orthonormal(PARAMETERS, RANK),
            BASIS[:, :1],
            1e15 * BASIS,
            1e-15 * BASIS,
            BASIS * [1e-12, 1.0, 1e12],
            np.eye(PARAMETERS),
            np.eye(PARAMETERS, dtype="int32")[:, [4, 2]],
        ],
    )
    def test_is_an_orthonormal_one_of_the_same_span(self, basis):
        found = matrix(basis)
        rank = basis.shape[1]
        assert found.shape == basis.shape
        assert np.abs(found.T @ found - np.eye(rank)).max() <= 1e-5
        unit = basis / np.linalg.norm(basis, axis=0)
        assert largest_sine(found, unit) < 1e-5

    def test_keeps_the_order_of_directions(self):
        found = matrix(BASIS)
        for k in range(1, RANK + 1):
            assert largest_sine(found[:, :k], BASIS[:, :k]) < 1e-5

    def test_does_not_change(self):
        subspace = FixedSubspace(BASIS)
        model = make_private(projected(subspace))
        model.fit(X, Y, steps_per_epoch=1, verbose=0)
        before = matrix_of(subspace)
        model.fit(X, Y, verbose=0)
        np.testing.assert_array_equal(matrix_of(subspace), before)

    @pytest.mark.parametrize(
        ("basis", "message"),
        [
            (BASIS[:, 0], r"shape \[parameters, k\] .*got shape \(12,\)"),
            (BASIS[:, :0], r"1 <= k <= parameters, got shape \(12, 0\)"),
            (BASIS.T, r"1 <= k <= parameters, got shape \(3, 12\)"),
            (np.where(BASIS > 1, np.nan, BASIS), "finite basis"),
            (np.where(BASIS > 1, np.inf, BASIS), "finite basis"),
            (BASIS * [1, 0, 1], "3 independent directions, got 2"),
            (BASIS[:, [0, 1, 0]], "3 independent directions, got 2"),
            (np.zeros((PARAMETERS, 2)), "2 independent directions, got 0"),
        ],
    )
    def test_invalid(self, basis, message):
        with pytest.raises(ValueError, match=f"Expected.*{message}"):
            FixedSubspace(basis)

    @pytest.mark.parametrize("rows", [PARAMETERS - 1, PARAMETERS + 1])
    def test_of_another_number_of_weights(self, rows):
        basis = _random.normal(size=(rows, 2))
        with pytest.raises(
            ValueError, match=f"basis of 12 rows, one for each.*got {rows}"
        ):
            matrix(basis)


class TestPrivacy:
    """A basis of private gradients has not paid for what it tells."""

    def trained(self, **arguments):
        model = make_private(projected(FixedSubspace(BASIS, **arguments)))
        model.fit(X, Y, verbose=0)
        return model, " ".join(model.privacy_statement(1e-5).split())

    @pytest.mark.parametrize("arguments", [{}, {"public": False}])
    def test_is_none_unless_the_basis_is_public(self, arguments):
        model, text = self.trained(**arguments)
        assert model.epsilon(1e-5) == math.inf
        assert model.epsilon(1e-5, "pld") == math.inf
        assert "NOT PRIVATE: 2 steps of ProjectedDPSGD used a basis" in text
        assert "computed from private data" in text

    def test_is_that_of_the_noise_if_the_basis_is_public(self):
        model, text = self.trained(public=True)
        assert math.isfinite(model.epsilon(1e-5))
        assert "NOT PRIVATE" not in text
        taken = text.split("Taken as public:")[1]
        assert "the basis of the fixed subspace" in taken

    def test_one_private_basis_spoils_all(self):
        """Steps with it are in the ledger, whatever is compiled later."""
        model, _ = self.trained()
        public = FixedSubspace(BASIS, public=True)
        model.compile(projected(public), loss="mse")
        model.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) == math.inf
        assert [e.private_state for e in model.ledger.entries] == [True, False]

    def test_is_remembered_by_a_saved_ledger(self):
        model, _ = self.trained()
        ledger = tf_dpsub.accounting.PrivacyLedger.from_json(
            model.ledger.to_json()
        )
        assert ledger.entries[0].private_state
        assert ledger.epsilon(1e-5) == math.inf

    def test_no_step_is_within_a_budget(self):
        model = make_private(projected(FixedSubspace(BASIS)))
        budget = tf_dpsub.callbacks.PrivacyBudget(epsilon=5.0, delta=1e-5)
        with pytest.raises(ValueError):
            model.fit(X, Y, callbacks=[budget], verbose=0)
        assert model.ledger.steps == 0


@pytest.mark.parametrize("public", [False, True])
def test_serialisation(public):
    subspace = FixedSubspace(BASIS, public=public)
    text = json.dumps(keras.saving.serialize_keras_object(subspace))
    loaded = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(loaded) is FixedSubspace
    assert loaded.is_public == public
    assert loaded.get_config() == subspace.get_config()
    found = [
        attach_basis(make_private(projected(s))) for s in (subspace, loaded)
    ]
    np.testing.assert_array_equal(
        *(matrix_of(model.optimizer.subspace) for model in found)
    )


def test_is_not_public_by_default():
    assert not FixedSubspace(BASIS).is_public
