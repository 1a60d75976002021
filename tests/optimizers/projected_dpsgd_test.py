"""PDP-SGD: what it releases, where its noise lies, and when it projects."""

import functools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_dpsub
from tests.subspaces.linear_models import (
    PARAMETERS,
    attach,
    attach_basis,
    batch_of,
    flat,
    make_private,
    matrix_of,
    network,
    orthonormal,
)
from tests.training import plain_models
from tf_dpsub import accounting
from tf_dpsub.optimizers import ProjectedDPSGD
from tf_dpsub.subspaces import FixedSubspace, PublicSubspace, RandomSubspace

RANK = 3
BATCH = 8

_random = np.random.default_rng(0)
BASIS = orthonormal(PARAMETERS, RANK)
X = _random.normal(size=(BATCH, PARAMETERS)).astype("float32")
Y = np.ones((BATCH, 1), "float32")
ROWS = X.astype("float64")  # their gradients
CLIP = float(np.median(np.linalg.norm(ROWS, axis=1)))


def fixed(basis=BASIS):
    return FixedSubspace(basis, public=True)


def pdpsgd(subspace=None, **arguments):
    """A step adds `-gradient` to the weights."""
    defaults = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": CLIP,
        "batch_size": BATCH,
    }
    return ProjectedDPSGD(
        keras.optimizers.SGD(1.0),
        subspace=fixed() if subspace is None else subspace,
        **{**defaults, **arguments},
    )


def clipped_sum(rows=ROWS, clip=CLIP):
    norms = np.linalg.norm(rows, axis=1)
    factors = np.minimum(1, clip * (1 - 1.25 * 2.0**-10) / norms)
    return factors @ rows


class TestGradient:
    def test_is_the_projected_sum_of_clipped_rows(self):
        model = make_private(pdpsgd())
        model.train_on_batch(X, Y)
        expected = -BASIS @ (BASIS.T @ clipped_sum()) / BATCH
        found = flat(model.get_weights())
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(
            expected
        )

    def test_is_clipped_before_it_is_projected(self):
        """Otherwise a row outside of the subspace would not be scaled down."""
        model = make_private(pdpsgd(l2_norm_clip=0.5))
        model.train_on_batch(X, Y)
        expected = -BASIS @ (BASIS.T @ clipped_sum(clip=0.5)) / BATCH
        found = flat(model.get_weights())
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(
            expected
        )

    def test_ambient_noise_changes_no_sum(self):
        model = make_private(pdpsgd(noise="ambient"))
        model.train_on_batch(X, Y)
        expected = -BASIS @ (BASIS.T @ clipped_sum()) / BATCH
        found = flat(model.get_weights())
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(
            expected
        )

    def test_is_divided_by_the_public_batch_size(self):
        """Not by the number that was drawn."""
        optimizer = pdpsgd(batch_size=100)
        attach_basis(make_private(optimizer))
        given = np.array([5.0, -1.0, 2.0], "float32")
        gradients = optimizer.privatize([tf.constant(given)])
        np.testing.assert_allclose(
            flat(gradients), BASIS @ given / 100, atol=1e-6
        )

    @pytest.mark.parametrize(
        "clip, noises",
        [(0.3, ("subspace", "ambient")), (math.inf, ("subspace",))],
    )
    def test_with_all_directions_is_dpsgd(self, clip, noises):
        results = []
        for make in (
            tf_dpsub.optimizers.DPSGD,
            *(
                functools.partial(
                    ProjectedDPSGD, subspace=fixed(np.eye(43)), noise=noise
                )
                for noise in noises
            ),
        ):
            keras.utils.set_random_seed(0)
            plain = plain_models.mlp()
            assert plain.count_params() == 43
            optimizer = make(
                optimizer=keras.optimizers.SGD(0.5, momentum=0.9),
                noise_multiplier=0.0,
                l2_norm_clip=clip,
                batch_size=plain_models.EXAMPLES,
                microbatch_size=7,
            )
            model = plain_models.private(plain, optimizer)
            model.fit(plain_models.X, plain_models.Y, epochs=3, verbose=0)
            results.append(plain)
        for other in results[1:]:
            plain_models.assert_same_weights(results[0], other)

    @pytest.mark.parametrize(
        "noise, sizes", [("subspace", (1, 3, 64)), ("ambient", (3,))]
    )
    def test_microbatches_never_change_it(self, noise, sizes):
        found = []
        for size in (None, *sizes):
            model = make_private(pdpsgd(microbatch_size=size, noise=noise))
            model.train_on_batch(X, Y)
            found.append(flat(model.get_weights()))
        for other in found[1:]:
            error = np.linalg.norm(other - found[0])
            assert error < 1e-6 * np.linalg.norm(found[0])

    def test_any_way_of_running(self):
        """Without noise, with momentum, over blocks of steps."""
        found = []
        for how in (
            {},
            {"steps_per_execution": 2, "jit_compile": True},
            {"run_eagerly": True},
        ):
            keras.utils.set_random_seed(0)
            plain = plain_models.mlp()
            optimizer = ProjectedDPSGD(
                keras.optimizers.Adam(0.05),
                subspace=fixed(orthonormal(43, 5)),
                noise_multiplier=0.0,
                l2_norm_clip=0.3,
                batch_size=plain_models.EXAMPLES,
                microbatch_size=7,
                start_step=1,
            )
            model = plain_models.private(plain, optimizer, **how)
            model.fit(
                plain_models.X, plain_models.Y, steps_per_epoch=4, verbose=0
            )
            found.append(plain)
        for other in found[1:]:
            plain_models.assert_same_weights(other, found[0])


# For noise alone: targets of zero have no gradient.
SIZES = (130, 170)
LARGE = orthonormal(sum(SIZES), 100)
SIGMA = 3.0
STDDEV = SIGMA * CLIP / BATCH


def noise_of_steps(steps=3, **arguments):
    """Changes of the weights by steps, negated, `[steps, parameters]`."""
    optimizer = pdpsgd(
        fixed(LARGE), noise_multiplier=SIGMA, seed=0, **arguments
    )
    model = make_private(optimizer, SIZES)
    moved, before = [], np.zeros(sum(SIZES))
    for _ in range(steps):
        model.train_on_batch(np.zeros((4, sum(SIZES))), np.zeros((4, 1)))
        after = flat(model.get_weights())
        moved.append(before - after)
        before = after
    return np.stack(moved)


def check_normal(z):
    """Independent standard normal numbers, as far as one in 1e4 tells."""
    z = np.ravel(z)
    total = np.sum(np.square(z))
    assert 1e-4 < stats.chi2.cdf(total, z.size) < 1 - 1e-4
    assert stats.kstest(z, "norm").pvalue > 1e-4


class TestNoise:
    def test_lies_in_the_subspace(self):
        noise = noise_of_steps()
        coordinates = noise @ LARGE
        outside = noise - coordinates @ LARGE.T
        assert np.abs(outside).max() < 1e-5 * STDDEV
        for step in coordinates:
            check_normal(step / STDDEV)
        # No step repeats another's.
        correlations = np.corrcoef(coordinates) - np.eye(3)
        assert np.abs(correlations).max() < 4 / np.sqrt(100)

    def test_ambient_lies_everywhere(self):
        noise = noise_of_steps(noise="ambient")
        for step in noise:
            check_normal(step / STDDEV)
        check_normal(noise @ LARGE / STDDEV)
        correlations = np.corrcoef(noise) - np.eye(3)
        assert np.abs(correlations).max() < 4 / np.sqrt(sum(SIZES))

    @pytest.mark.parametrize("noise", ["subspace", "ambient"])
    def test_before_the_first_projection_lies_everywhere(self, noise):
        moved = noise_of_steps(steps=4, noise=noise, start_step=2)
        for step in moved[:2]:
            check_normal(step / STDDEV)
        for step in moved[2:]:
            if noise == "ambient":
                check_normal(step / STDDEV)
            else:
                coordinates = step @ LARGE
                check_normal(coordinates / STDDEV)
                outside = step - LARGE @ coordinates
                assert np.abs(outside).max() < 1e-5 * STDDEV
        correlations = np.corrcoef(moved @ LARGE) - np.eye(4)
        assert np.abs(correlations).max() < 4 / np.sqrt(100)

    def test_has_as_many_numbers_as_there_are_directions(self):
        """The numbers that are drawn cost time, and are accounted for."""
        optimizer = pdpsgd(noise_multiplier=2.0)
        model = attach(make_private(optimizer))
        released = optimizer.released_sums(
            model.training_step(batch_of(model, X))
        )
        assert [tuple(s.shape) for s in released] == [(RANK,)]
        assert optimizer.noise_stddevs() == [2.0 * CLIP]
        np.testing.assert_allclose(
            released[0], BASIS.T @ clipped_sum(), rtol=1e-5
        )
        ambient = pdpsgd(noise_multiplier=2.0, noise="ambient")
        attach_basis(make_private(ambient))
        assert ambient.noise_stddevs() == [2.0 * CLIP] * 2

    def test_without_a_multiplier_there_is_none(self):
        for noise in ("subspace", "ambient"):
            optimizer = pdpsgd(l2_norm_clip=math.inf, noise=noise, start_step=1)
            model = make_private(optimizer)
            for _ in range(2):
                model.train_on_batch(X, Y)
            assert np.isfinite(flat(model.get_weights())).all()
            assert not any(optimizer.noise_stddevs())


class TestStartStep:
    @pytest.mark.parametrize(
        "start_step, noise",
        [
            *((start_step, "subspace") for start_step in (0, 1, 2, 3, 5)),
            (2, "ambient"),
        ],
    )
    def test_steps_before_it_are_of_dpsgd(self, start_step, noise):
        model = make_private(pdpsgd(start_step=start_step, noise=noise))
        before = flat(model.get_weights())
        total = clipped_sum()
        for step in range(4):
            model.train_on_batch(X, Y)
            after = flat(model.get_weights())
            expected = total / BATCH
            if step >= start_step:
                expected = BASIS @ (BASIS.T @ expected)
            np.testing.assert_allclose(before - after, expected, atol=1e-5)
            before = after

    @pytest.mark.parametrize(
        "start_step, jit_compile", [(1, False), (2, True), (3, False)]
    )
    def test_inside_of_a_block_of_steps(self, start_step, jit_compile):
        model = make_private(
            pdpsgd(start_step=start_step),
            steps_per_execution=4,
            jit_compile=jit_compile,
        )
        # All examples are in each batch.
        model.fit(X, Y, steps_per_epoch=4, verbose=0)
        total = -clipped_sum() / BATCH
        expected = start_step * total
        expected += (4 - start_step) * BASIS @ (BASIS.T @ total)
        np.testing.assert_allclose(
            flat(model.get_weights()), expected, atol=1e-5
        )

    def test_counts_from_where_training_goes_on(self, tmp_path):
        path = tmp_path / "w.weights.h5"
        model = make_private(pdpsgd(start_step=3))
        for _ in range(2):
            model.train_on_batch(X, Y)
        model.save_weights(path)
        resumed = attach(make_private(pdpsgd(start_step=3)))
        resumed.load_weights(path)
        for each in (model, resumed):
            for _ in range(2):
                each.train_on_batch(X, Y)
        np.testing.assert_allclose(
            flat(resumed.get_weights()), flat(model.get_weights()), rtol=1e-6
        )

    def test_nothing_is_refreshed_before_it(self):
        """Public gradients would be computed for nothing."""
        subspace = PublicSubspace(X + 1, Y, rank=2, method="power")
        model = make_private(pdpsgd(subspace, start_step=2))
        bases = []
        for _ in range(4):
            model.train_on_batch(X, Y)
            bases.append(matrix_of(subspace))
        np.testing.assert_array_equal(bases[0], bases[1])
        assert np.abs(bases[2] - bases[1]).max() > 1e-3


class TestAccounting:
    @pytest.mark.parametrize(
        ("arguments", "described"),
        [
            ({}, ""),
            ({"start_step": 2}, " from step 2 on, DPSGD before"),
            ({"noise": "ambient"}, ", with noise in all dimensions"),
        ],
    )
    def test_is_that_of_dpsgd(self, arguments, described):
        """A basis of public gradients costs nothing."""
        subspace = PublicSubspace(X + 1, Y, rank=2)
        optimizer = pdpsgd(
            subspace, noise_multiplier=2.0, batch_size=2, **arguments
        )
        assert optimizer.effective_noise_multiplier == 2.0
        model = make_private(optimizer)
        model.fit(X, Y, epochs=2, verbose=0)
        assert model.ledger.steps == 8
        for accountant in ("rdp", "pld"):
            assert model.epsilon(1e-5, accountant) == pytest.approx(
                accounting.epsilon(
                    noise_multiplier=2.0,
                    sampling_rate=2 / BATCH,
                    steps=8,
                    delta=1e-5,
                    accountant=accountant,
                )
            )
        text = " ".join(model.privacy_statement(1e-5).split())
        described = f"{optimizer.description}: 8 steps with noise multiplier"
        assert f"{described} σ = 2" in text
        assert ("from step 2 on, DPSGD before" in text) == bool(
            arguments.get("start_step")
        )
        assert ("noise in all dimensions" in text) == ("noise" in arguments)

    def test_without_noise_is_not_private(self):
        model = make_private(pdpsgd())
        model.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) == math.inf
        assert "NOT PRIVATE" in model.privacy_statement(1e-5)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"start_step": -1}, "start_step >= 0 .int., got -1"),
            ({"start_step": 1.5}, "start_step >= 0 .int., got 1.5"),
            ({"start_step": None}, "start_step >= 0"),
            ({"start_step": True}, "start_step >= 0"),
            (
                {"noise": "full"},
                "noise to be one of .'subspace', 'ambient'.*got 'full'",
            ),
            ({"noise": None}, "noise to be one of"),
            ({"noise_multiplier": -1.0}, "noise_multiplier >= 0"),
            ({"noise_multiplier": 1.0, "l2_norm_clip": math.inf}, "finite"),
            ({"l2_norm_clip": 0.0}, "l2_norm_clip > 0"),
            ({"batch_size": 0}, "batch_size >= 1"),
            ({"subspace": BASIS}, "Subspace, got ndarray"),
            ({"subspace": 50}, "Subspace, got int"),
        ],
    )
    def test_invalid(self, arguments, message):
        with pytest.raises(ValueError, match=f"Expected.*{message}"):
            pdpsgd(**arguments)

    def test_subspace_is_required(self):
        with pytest.raises(TypeError, match="subspace"):
            ProjectedDPSGD(
                "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=4
            )

    @pytest.mark.parametrize(
        "name", ["start_step", "noise", "noise_multiplier", "l2_norm_clip"]
    )
    def test_are_frozen(self, name):
        """The ledger has recorded them."""
        with pytest.raises(AttributeError):
            setattr(pdpsgd(), name, 1)


SUBSPACES = {
    "public": lambda: PublicSubspace(
        X, Y, rank=2, method="gram", update_every=3, seed=1
    ),
    "public, random labels": lambda: PublicSubspace(X, rank=2, seed=1),
    "random": lambda: RandomSubspace(4, groups=2, update_every=2),
    "fixed": fixed,
}


class TestSerialisation:
    @pytest.mark.parametrize("name", SUBSPACES)
    def test_config_round_trip(self, name):
        optimizer = pdpsgd(
            SUBSPACES[name](),
            noise_multiplier=1.5,
            start_step=7,
            noise="ambient",
            microbatch_size=4,
            per_example="vectorized_map",
            seed=3,
            name="mine",
        )
        config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        loaded = keras.optimizers.deserialize(config)
        assert type(loaded) is ProjectedDPSGD
        assert (loaded.start_step, loaded.noise) == (7, "ambient")
        assert type(loaded.subspace) is type(optimizer.subspace)
        assert loaded.get_config() == optimizer.get_config()

    @pytest.mark.parametrize("name", ["public", "fixed"])
    def test_saved_model_goes_on(self, name, tmp_path):
        model = tf_dpsub.make_private(network())
        optimizer = pdpsgd(
            SUBSPACES[name](), noise_multiplier=1.0, start_step=1
        )
        model.compile(optimizer, loss="mse")
        # The public examples are other ones.
        model.fit(X + 1, Y, epochs=2, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded) is tf_dpsub.PrivateModel
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert loaded.ledger.entries == model.ledger.entries
        np.testing.assert_array_equal(
            flat(loaded.get_weights()), flat(model.get_weights())
        )
        loaded.fit(X + 1, Y, epochs=1, verbose=0)
        assert loaded.ledger.steps == 3
        assert np.isfinite(flat(loaded.get_weights())).all()
