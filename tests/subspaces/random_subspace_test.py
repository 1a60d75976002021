"""Random subspaces: drawn as they should be, kept, and not stored if large."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces.linear_models import (
    PARAMETERS,
    SIZES,
    attach_basis,
    flat,
    make_private,
    matrix_of,
    projected,
    stored,
)
from tf_dpsub.subspaces import RandomSubspace, random_bases, random_subspace

RANK = 4

_random = np.random.default_rng(0)
X = _random.normal(size=(8, PARAMETERS)).astype("float32")
Y = np.ones((8, 1), "float32")


@pytest.fixture
def drawn_again(monkeypatch):
    """No basis is stored, and few of its numbers are drawn at a time."""
    monkeypatch.setattr(random_subspace, "_STORED", 0)
    monkeypatch.setattr(random_bases, "_DRAWN", 3 * RANK)


@pytest.fixture(params=["stored", "drawn again"])
def storage(request):
    if request.param == "drawn again":
        request.getfixturevalue("drawn_again")
    return request.param


def attached(subspace, sizes=SIZES, **arguments):
    return attach_basis(make_private(projected(subspace, **arguments), sizes))


def basis_at(model, step=0):
    subspace = model.optimizer.subspace
    subspace.prepare(tf.constant(step))
    return matrix_of(subspace)


def basis_tensor(model, step):
    """As `basis_at`, for graphs: float32, `[parameters, rank]`."""
    subspace = model.optimizer.subspace
    subspace.prepare(step)
    columns = map(subspace.lift, tf.unstack(tf.eye(subspace.rank)))
    return tf.stack([tf.concat(column, 0)[:, 0] for column in columns], 1)


class TestBasis:
    def test_is_orthonormal(self, storage):
        subspace = RandomSubspace(RANK)
        basis = basis_at(attached(subspace))
        assert basis.shape == (PARAMETERS, RANK)
        assert np.abs(basis.T @ basis - np.eye(RANK)).max() <= 1e-5

    def test_each_group_has_a_block_of_its_own(self, storage):
        subspace = RandomSubspace(5, groups=[["part1"], ["part0"]])
        basis = basis_at(attached(subspace))
        assert subspace.ranks == [3, 2]
        assert np.abs(basis.T @ basis - np.eye(5)).max() <= 1e-5
        assert not basis[:5, :3].any() and not basis[5:, 3:].any()

    def test_all_directions_are_alike(self, storage):
        """The energy of an axis follows a Beta distribution, of mean k/p."""
        model = attached(RandomSubspace(RANK, update_every=1, seed=0))
        basis = tf.function(
            lambda step: basis_tensor(model, step), autograph=False
        )
        bases = np.stack([basis(tf.constant(t)) for t in range(40)])
        energies = np.sum(np.square(bases), 2)  # [40, parameters]
        mean = RANK / PARAMETERS
        deviation = np.sqrt(2 * mean * (1 - mean) / (PARAMETERS + 2) / 40)
        assert np.abs(energies.mean(0) - mean).max() < 4.5 * deviation
        # Different draws have no more in common than two random subspaces.
        common = np.sum(
            np.square(np.einsum("tpk,tpl->tkl", bases[1:], bases[:-1])), (1, 2)
        )
        assert abs(common.mean() / (RANK * mean) - 1) < 0.2

    def test_variables_have_numbers_of_their_own(self, storage):
        """The same rows for two variables would couple them."""
        subspace = RandomSubspace(RANK)
        basis = basis_at(attached(subspace, (6, 6)))
        # Up to R^-1, which both share, they are independent: of full rank.
        both = np.concatenate([basis[:6], basis[6:]], 1)
        assert np.linalg.svd(both)[1][-1] > 1e-3

    def test_full_rank_is_the_whole_space(self):
        subspace = RandomSubspace(PARAMETERS)
        basis = basis_at(attached(subspace))
        assert np.abs(basis @ basis.T - np.eye(PARAMETERS)).max() <= 1e-5

    def test_rank_above_the_number_of_weights(self):
        subspace = RandomSubspace(PARAMETERS + 1)
        with pytest.warns(UserWarning, match="got 13: 12 is taken"):
            attached(subspace)
        assert subspace.rank == PARAMETERS


class TestNotStored:
    def test_keeps_no_basis(self, drawn_again):
        """Only k x k numbers, however many weights there are."""
        subspace = RandomSubspace(RANK)
        model = attached(subspace, (40, 50))
        basis_at(model)
        kept = {
            id(v): int(np.prod(v.shape))
            for part in (subspace, subspace._basis)
            for v in tf.nest.flatten(list(vars(part).values()))
            if isinstance(v, (tf.Variable, tf.Tensor, np.ndarray))
        }
        assert sum(kept.values()) <= RANK**2 + 4

    def test_everything_is_of_one_basis(self, storage):
        subspace = RandomSubspace(RANK)
        model = attached(subspace)
        basis = basis_at(model)
        vector = _random.normal(size=PARAMETERS)
        for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-6)):
            parts = [
                tf.constant(p.reshape(v.shape), dtype)
                for p, v in zip(
                    np.split(vector, [SIZES[0]]), model.trainable_variables
                )
            ]
            found = subspace.coordinates(parts)
            assert found.dtype == dtype
            np.testing.assert_allclose(
                found, basis.T @ vector, rtol=tolerance, atol=tolerance
            )
            lifted = subspace.lift(found)
            assert {t.dtype.name for t in lifted} == {dtype}
            np.testing.assert_allclose(
                flat(lifted), basis @ (basis.T @ vector), atol=1e-5
            )
        found = subspace.project(stored(model, X))
        np.testing.assert_allclose(found, X @ basis, atol=1e-5)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_projects_steps(self, drawn_again, jit_compile):
        subspace = RandomSubspace(RANK)
        model = make_private(projected(subspace), jit_compile=jit_compile)
        model.fit(X, Y, verbose=0)
        self.check_moved_inside(model, subspace)

    def test_embeds_examples(self, drawn_again):
        subspace = RandomSubspace(RANK)
        optimizer = tf_dpsub.optimizers.GEP(
            keras.optimizers.SGD(0.1),
            subspace=subspace,
            residual=False,
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=4,
        )
        model = make_private(optimizer)
        model.fit(X, Y, verbose=0)
        self.check_moved_inside(model, subspace)

    def check_moved_inside(self, model, subspace):
        """The weights, which were zero, are a vector of the subspace."""
        basis, weights = matrix_of(subspace), flat(model.get_weights())
        outside = weights - basis @ (basis.T @ weights)
        assert 0 < np.linalg.norm(weights)
        assert np.linalg.norm(outside) < 1e-5 * np.linalg.norm(weights)


class TestRefresh:
    def bases(self, subspace, steps, **arguments):
        model = attached(subspace, **arguments)
        return [basis_at(model, step) for step in range(steps)]

    def test_is_never_drawn_anew_by_default(self, storage):
        first, second, third = self.bases(RandomSubspace(RANK), 3)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third)

    def test_is_drawn_anew_when_due(self, storage):
        bases = self.bases(RandomSubspace(RANK, update_every=2), 5)
        for step, is_new in ((1, False), (2, True), (3, False), (4, True)):
            changed = np.abs(bases[step] - bases[step - 1]).max()
            assert (changed > 1e-2) == is_new

    @pytest.mark.parametrize("seed", [None, 3])
    def test_is_reproducible_by_its_seed_alone(self, seed, storage):
        """Keras's seed, which is fixed, does not matter."""
        found = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            (basis,) = self.bases(RandomSubspace(RANK, seed=seed), 1)
            found.append(basis)
        assert np.array_equal(*found) == (seed is not None)


class TestResume:
    @pytest.mark.parametrize("update_every", [None, 2])
    def test_goes_on_in_the_same_subspace(
        self, update_every, storage, tmp_path
    ):
        """Momentum, and what was learned, belong to it."""

        def make():
            return attached(RandomSubspace(RANK, update_every=update_every))

        path = tmp_path / "model.weights.h5"
        model = make()
        bases = [basis_at(model, step) for step in range(3)]
        model.optimizer.inner_optimizer.iterations.assign(3)
        model.save_weights(path)
        resumed = make()
        resumed.load_weights(path)
        for each in (model, resumed):
            each.optimizer.prepare()
            bases.append(matrix_of(each.optimizer.subspace))
        np.testing.assert_array_equal(bases[3], bases[4])
        # The basis of the first step, or of a refresh at the third.
        np.testing.assert_array_equal(bases[2], bases[4])
        is_new = np.abs(bases[1] - bases[4]).max() > 1e-2
        assert is_new == (update_every is not None)

    def test_goes_on_in_a_saved_model(self, tmp_path):
        subspace = RandomSubspace(RANK, update_every=2)
        plain = keras.Sequential(
            [keras.Input((PARAMETERS,)), keras.layers.Dense(1)]
        )
        model = tf_dpsub.make_private(plain)
        model.compile(projected(subspace), loss="mse")
        model.fit(X, Y, steps_per_epoch=3, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.optimizer.subspace is not subspace
        loaded.fit(X, Y, steps_per_epoch=1, verbose=0)
        np.testing.assert_array_equal(
            matrix_of(loaded.optimizer.subspace), matrix_of(subspace)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank >= 1 .int., got 0"),
        ({"rank": 1.5}, "rank >= 1"),
        ({"rank": "auto"}, "rank >= 1 .*got 'auto'"),
        ({"rank": True}, "rank >= 1"),
        ({"rank": 2, "update_every": 0}, "update_every >= 1 .int. or None"),
        ({"rank": 2, "update_every": 2.5}, "update_every >= 1"),
        ({"rank": 2, "groups": 0}, "groups >= 1"),
        ({"rank": 2, "groups": "layer"}, "groups to be a number, 'layers'"),
    ],
)
def test_invalid(arguments, message):
    with pytest.raises(ValueError, match=f"Expected.*{message}"):
        RandomSubspace(**arguments)


def test_fewer_directions_than_groups():
    with pytest.raises(ValueError, match="rank >= 2, one for each group"):
        attached(RandomSubspace(1, groups=2))


def test_serialisation():
    subspace = RandomSubspace(
        RANK, groups=[["part0"], ["part1"]], update_every=7, seed=5
    )
    text = json.dumps(keras.saving.serialize_keras_object(subspace))
    loaded = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(loaded) is RandomSubspace
    assert loaded.get_config() == subspace.get_config()
    np.testing.assert_array_equal(
        basis_at(attached(loaded)),
        basis_at(attached(subspace)),
    )


def test_needs_no_public_data():
    subspace = RandomSubspace(RANK)
    model = make_private(projected(subspace))
    model.fit(X, Y, verbose=0)
    assert subspace.public_inputs is None
    text = " ".join(model.privacy_statement(1e-5).split())
    assert "Taken as public: the initial weights." in text
    assert "NOT PRIVATE" not in text
