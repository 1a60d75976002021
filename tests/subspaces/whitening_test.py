"""Scales of the coordinates of public subspaces, and where they belong."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces.linear_models import (
    ScaledSubspace,
    attach,
    attach_basis,
    flat,
    make_private,
    matrix_of,
    network_of_rows,
    orthonormal,
    product,
    projected,
)
from tf_dpsub.optimizers import GEP, ProjectedDPSGD
from tf_dpsub.subspaces import PublicSubspace
from tf_dpsub.subspaces.groups import Group
from tf_dpsub.subspaces.rank_selection import RankSelection

SIZES = (5, 7)
PARAMETERS, EXAMPLES, RANK = 12, 40, 4
METHODS = ("power", "gram", "lanczos")
FLOOR = 1e-3

_random = np.random.default_rng(0)
# Singular values of which each is far above the next.
VALUES = np.array([9, 3, 1, 0.3, *[0.01] * (PARAMETERS - 4)])
ROWS = (
    orthonormal(EXAMPLES, PARAMETERS, 1)
    * VALUES
    @ orthonormal(PARAMETERS, PARAMETERS, 2).T
).astype("float32")
ONES = np.ones((EXAMPLES, 1), "float32")
# Private data.
X = _random.normal(size=(8, PARAMETERS)).astype("float32")
Y = np.ones((8, 1), "float32")


def public(rows=ROWS, **arguments):
    defaults = {"rank": RANK, "method": "gram", "whiten": 1.0, "seed": 0}
    labels = np.ones((len(rows), 1), "float32")
    return PublicSubspace(rows, labels, **{**defaults, **arguments})


def refreshed(
    subspace, sizes=SIZES, jit_compile=False, refreshes=1, **arguments
):
    """The scales after the refresh of a first step."""
    model = make_private(
        projected(subspace, **arguments), sizes, jit_compile=jit_compile
    )
    attach(model, 1)
    for _ in range(refreshes):
        model.optimizer.prepare()
    return scales_of(subspace)


def scales_of(subspace):
    ones = tf.ones([subspace.rank], tf.float64)
    return subspace.scaled(ones).numpy()


def expected_scales(eigenvalues, exponent):
    """Scales of one group, by the formula."""
    shares = np.square(eigenvalues) / np.square(eigenvalues[0])
    return (shares + FLOOR) ** (-exponent / 2)


def normalized(scales):
    return scales / np.sqrt(np.mean(np.square(scales)))


class GivenRows:
    """A subspace of rows that may change, all refreshed in one graph.

    Args:
        examples: int, number of rows.
        arguments: of `PublicSubspace`.
        noise: dict, arguments of the optimizer.
    """

    def __init__(self, examples, parameters, arguments, **noise):
        self.subspace = public(np.eye(examples), **arguments)
        plain = network_of_rows(examples, parameters)
        self._rows = plain.get_layer("rows")
        self._model = tf_dpsub.make_private(plain)
        self._model.compile(projected(self.subspace, **noise), loss=product)
        attach(self._model, 1)

    def scales(self, rows, refreshes=1):
        """The scales of rows, with an exponent of their own."""
        self._rows.set_weights([rows])
        if self.subspace._whitening.is_chosen:
            self.subspace._whitening._choice.assign(-1)
        for _ in range(refreshes):
            self._model.optimizer.prepare()
        return scales_of(self.subspace)

    def exponent(self, rows):
        self.scales(rows)
        return self.subspace.exponent

    def check_difficult_rows(self, rows):
        """Rows without gradients, and of sizes that overflow in squares."""
        np.testing.assert_allclose(self.scales(0 * rows), 1, rtol=1e-6)
        for scale in (1e-15, 1e11, 1e30):
            scales = self.scales(np.float32(scale) * rows)
            assert np.isfinite(scales).all() and (scales > 0).all()


class TestScales:
    @pytest.mark.parametrize(
        "method, exponent",
        [*((method, 0.25) for method in METHODS), ("gram", 1)],
    )
    def test_follow_the_spectrum(self, method, exponent):
        given = GivenRows(
            EXAMPLES, PARAMETERS, {"method": method, "whiten": exponent}
        )
        expected = normalized(expected_scales(VALUES[:RANK], exponent))
        # Energies of single precision, beside the largest one.
        np.testing.assert_allclose(
            given.scales(ROWS, refreshes=6), expected, rtol=1e-3
        )
        assert given.subspace.exponent == exponent
        given.check_difficult_rows(ROWS)

    def test_chunks_and_compilation_change_nothing(self, monkeypatch):
        """Energies are sums over chunks, whatever made the basis."""
        monkeypatch.setattr("tf_dpsub.subspaces.public_subspace._CHUNK", 6)
        subspace = public(method="power")
        found = refreshed(subspace, jit_compile=True, refreshes=6)
        expected = normalized(expected_scales(VALUES[:RANK], 1))
        np.testing.assert_allclose(found, expected, rtol=1e-3)

    def test_each_group_has_a_spectrum_of_its_own(self):
        subspace = public(groups="layers", rank=5)
        found = refreshed(subspace)
        parts = [
            expected_scales(np.linalg.svd(ROWS[:, part])[1][:rank], 1)
            for part, rank in zip(
                (slice(5), slice(5, None)), subspace.ranks, strict=True
            )
        ]
        expected = normalized(np.concatenate(parts))
        np.testing.assert_allclose(found, expected, rtol=1e-3)

    def test_have_a_mean_square_of_1_over_directions_in_use(self):
        subspace = public(rank="auto", max_rank=8, horizon=1)
        scales = refreshed(subspace, noise_multiplier=0.01)
        in_use = np.any(matrix_of(subspace) != 0, 0)
        assert in_use.sum() == 4
        assert np.mean(np.square(scales[in_use])) == pytest.approx(1, abs=1e-5)

    def test_follow_the_weights(self):
        """They are computed with the basis, at each refresh."""
        keras.utils.set_random_seed(0)
        plain = keras.Sequential(
            [
                keras.Input((PARAMETERS,)),
                keras.layers.Dense(3, activation="tanh"),
                keras.layers.Dense(4),
            ]
        )
        labels = _random.integers(0, 4, EXAMPLES)
        subspace = PublicSubspace(
            ROWS, labels, rank=3, method="gram", whiten=1.0, update_every=2
        )
        model = tf_dpsub.make_private(plain)
        model.compile(
            projected(subspace, inner=keras.optimizers.SGD(5.0)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        found = []
        for _ in range(3):
            model.train_on_batch(X, np.arange(8) % 4)
            found.append(scales_of(subspace))
        np.testing.assert_array_equal(found[0], found[1])
        assert np.abs(found[2] - found[1]).max() > 1e-3


BASIS = orthonormal(PARAMETERS, 3)
SCALES = np.array([0.1, 1.0, 1.4])
ARGUMENTS = {"noise_multiplier": 0.0, "l2_norm_clip": 0.5, "batch_size": 8}
CLIP = 0.5 * (1 - 1.25 * 2.0**-10)


def embedded(rows):
    """Scaled coordinates of rows, each clipped; their sum, in weights."""
    scaled = SCALES * (rows @ BASIS)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    total = np.sum(scaled * np.minimum(1, CLIP / norms), 0)
    return BASIS @ (SCALES * total)


def moved(optimizer, steps=1):
    """Minus the steps that are made on the private data."""
    model = make_private(optimizer)
    found, before = [], flat(model.get_weights())
    for _ in range(steps):
        model.train_on_batch(X, Y)
        after = flat(model.get_weights())
        found.append(before - after)
        before = after
    return found


class TestMechanisms:
    @pytest.mark.parametrize("kind", ["ProjectedDPSGD", "B-GEP"])
    def test_clip_scaled_coordinates(self, kind):
        inner = keras.optimizers.SGD(1.0)
        subspace = ScaledSubspace(BASIS, SCALES)
        if kind == "B-GEP":
            optimizer = GEP(
                inner, subspace=subspace, residual=False, **ARGUMENTS
            )
        else:
            optimizer = ProjectedDPSGD(inner, subspace=subspace, **ARGUMENTS)
        (found,) = moved(optimizer)
        np.testing.assert_allclose(found, embedded(X) / 8, atol=1e-6)

    def test_a_residual_has_no_scales(self):
        optimizer = GEP(
            keras.optimizers.SGD(1.0),
            subspace=ScaledSubspace(BASIS, SCALES),
            residual_norm_clip=1e3,
            **ARGUMENTS,
        )
        (found,) = moved(optimizer)
        residual = X.sum(0) - BASIS @ (BASIS.T @ X.sum(0))
        np.testing.assert_allclose(
            found, (embedded(X) + residual) / 8, atol=1e-6
        )

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_before_it_projects_it_is_dpsgd(self, jit_compile):
        optimizer = ProjectedDPSGD(
            keras.optimizers.SGD(1.0),
            subspace=ScaledSubspace(BASIS, SCALES),
            start_step=2,
            **ARGUMENTS,
        )
        model = make_private(
            optimizer, steps_per_execution=3, jit_compile=jit_compile
        )
        model.fit(X, Y, steps_per_epoch=3, verbose=0)
        norms = np.linalg.norm(X, axis=1, keepdims=True)
        plain = np.sum(X * np.minimum(1, CLIP / norms), 0)
        expected = -(2 * plain + embedded(X)) / 8
        np.testing.assert_allclose(
            flat(model.get_weights()), expected, atol=1e-5
        )

    @pytest.mark.parametrize("groups, start_step", [(1, 1), ("layers", 0)])
    def test_directions_outside_have_the_last_scale(self, groups, start_step):
        """It is the last scale of their group, before the clip and after."""
        subspace = public(groups=groups)
        optimizer = ProjectedDPSGD(
            keras.optimizers.SGD(1.0),
            subspace=subspace,
            start_step=start_step,
            truncate=False,
            **ARGUMENTS,
        )
        found = moved(optimizer, steps=start_step + 1)[-1]
        basis, scales = matrix_of(subspace), scales_of(subspace)
        outer = np.zeros(PARAMETERS)
        for group, part in zip(
            subspace.groups, np.split(scales, np.cumsum(subspace.ranks)[:-1])
        ):
            for k in group.indices:
                outer[slice(0, 5) if k == 0 else slice(5, None)] = part[-1]
        whole = np.diag(outer) @ (np.eye(PARAMETERS) - basis @ basis.T)
        whole += basis * scales @ basis.T
        rows = X @ whole.T
        sq_norms = np.sum(np.square(rows), 1) + 2.0**-10 * np.sum(
            np.square(outer * X), 1
        )
        factors = np.minimum(1, CLIP / np.sqrt(sq_norms))
        assert factors.min() < 1
        expected = whole @ (factors @ rows) / 8
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_noise_is_scaled_on_the_way_back(self):
        """Noise that is the same in each scaled coordinate."""
        optimizer = ProjectedDPSGD(
            keras.optimizers.SGD(1.0),
            subspace=ScaledSubspace(BASIS, SCALES),
            **ARGUMENTS | {"noise_multiplier": 2.0},
        )
        attach_basis(make_private(optimizer))
        assert optimizer.noise_stddevs() == [1.0]
        noise = np.array([1.0, -2.0, 0.5], "float32")
        gradient = flat(optimizer.privatize([tf.constant(noise)]))
        np.testing.assert_allclose(
            gradient, BASIS @ (SCALES * noise) / 8, atol=1e-6
        )

    @pytest.mark.parametrize("make", [ProjectedDPSGD, GEP])
    def test_without_an_exponent_nothing_changes(self, make):
        """Bit for bit, noise included; and scales cost no privacy."""
        changes = {} if make is ProjectedDPSGD else {"residual_norm_clip": 0.1}
        weights, epsilons = [], []
        for whiten in ({}, {"whiten": 0}, {"whiten": 1.0}):
            subspace = PublicSubspace(
                ROWS, ONES, rank=RANK, method="gram", seed=0, **whiten
            )
            optimizer = make(
                keras.optimizers.SGD(1.0),
                subspace=subspace,
                seed=0,
                **ARGUMENTS | {"noise_multiplier": 2.0} | changes,
            )
            model = make_private(optimizer)
            for _ in range(2):
                model.train_on_batch(X, Y)
            weights.append(flat(model.get_weights()))
            epsilons.append(model.epsilon(1e-5))
            is_whitened = whiten == {"whiten": 1.0}
            assert ("whitened" in optimizer.description) == is_whitened
            text = " ".join(model.privacy_statement(1e-5).split())
            assert ("scale its coordinates" in text) == is_whitened
        np.testing.assert_array_equal(weights[0], weights[1])
        assert np.abs(weights[2] - weights[0]).max() > 1e-3
        assert epsilons[0] == epsilons[1] == epsilons[2]

    def test_directions_outside_need_scales_and_a_rank(self):
        for changes, message in (
            ({"whiten": 0.0}, "whitened subspace with truncate=False"),
            ({"rank": "auto", "max_rank": 4}, "fixed rank with truncate=False"),
        ):
            with pytest.raises(ValueError, match=f"Expected a {message}"):
                projected(public(**changes), truncate=False)
        optimizer = projected(public(), truncate=False)
        assert optimizer.get_config()["truncate"] is False
        assert optimizer.description.endswith("coordinates of all dimensions")

    def test_noise_in_all_dimensions_is_refused(self):
        for whiten in (1.0, "auto"):
            with pytest.raises(ValueError, match="Expected noise='subspace'"):
                projected(public(whiten=whiten), noise="ambient")
        projected(public(whiten=0), noise="ambient")


def with_mean(axes, energies, seed=0):
    """Rows with such energies along axes, of which the mean has a share.

    Args:
        axes: dict of axes and shares.
    """
    random = np.random.default_rng(seed)
    shares = np.array([axes.get(k, 0.0) for k in range(len(energies))])
    rows = random.normal(size=(200, len(shares))) * np.sqrt(1 - shares)
    rows = (rows + np.sqrt(shares)) * np.sqrt(energies)
    rotation = orthonormal(len(shares), len(shares), 3)
    return (rows @ rotation.T).astype("float32")


FALLING = np.logspace(0, -3, 6)
FLAT = np.ones(6)


def choosing(noise, method="gram", batch_size=100):
    """Chooses exponents for rows, for the noise of a mean gradient."""
    return GivenRows(
        200,
        6,
        {"rank": 6, "whiten": "auto", "method": method},
        l2_norm_clip=1.0,
        noise_multiplier=noise * batch_size,
        batch_size=batch_size,
    )


class TestChoice:
    def test_of_a_flat_spectrum_is_0(self):
        """Unless the noise drowns the signal: scales are then about 1."""
        choice = choosing(1e-3)
        for seed in range(4):
            assert choice.exponent(with_mean({0: 0.5}, FLAT, seed)) == 0

    @pytest.mark.parametrize("method", METHODS)
    def test_follows_the_mean(self, method):
        """Scales of loud directions would buy noise with the signal."""
        choice = choosing(0.1, method)
        assert choice.exponent(with_mean({0: 0.9}, FALLING)) == 0
        # Where loud directions have none of it, they only bring noise.
        rows = with_mean({3: 0.9}, FALLING)
        assert choice.exponent(rows) == 1
        choice.check_difficult_rows(rows)

    def test_follows_the_noise(self):
        """Quiet directions count as soon as their noise is bearable."""
        rows = with_mean({0: 0.5, 3: 0.9}, FALLING)
        loud, quiet = choosing(1.0), choosing(1e-4)
        assert [c.exponent(rows) for c in (loud, quiet)] == [0, 1]
        assert loud.exponent(with_mean({0: 0.9}, FALLING)) == 0

    def test_is_made_once_and_saved(self, tmp_path, caplog):
        caplog.set_level("INFO", logger="absl")
        rows = with_mean({3: 0.9}, FALLING)

        def compiled():
            subspace = public(rows, rank=6, whiten="auto")
            optimizer = projected(
                subspace,
                noise_multiplier=10.0,
                batch_size=100,
                microbatch_size=None,
            )
            return attach(make_private(optimizer, (6,)))

        model = compiled()
        assert model.optimizer.subspace.exponent == 0
        for _ in range(2):
            model.optimizer.prepare()
        assert model.optimizer.subspace.exponent == 1
        model.save_weights(tmp_path / "w.weights.h5")
        resumed = compiled()
        resumed.load_weights(tmp_path / "w.weights.h5")
        assert resumed.optimizer.subspace.exponent == 1
        resumed.optimizer.prepare()
        lines = [r.getMessage() for r in caplog.records]
        assert sum("whiten='auto' takes 1" in line for line in lines) == 1

    def test_is_left_alone_before_the_first_projection(self):
        rows = with_mean({3: 0.9}, FALLING)
        subspace = public(rows, rank=6, whiten="auto")
        optimizer = projected(
            subspace,
            noise_multiplier=10.0,
            batch_size=100,
            microbatch_size=None,
            start_step=1,
        )
        model = make_private(optimizer, (6,))
        found = []
        for _ in range(2):
            model.train_on_batch(X[:, :6], Y)
            found.append(subspace.exponent)
        assert found == [0, 1]


class _AsItIs:
    """Stands for an optimizer that clips nothing."""

    coordinate_stddev = 0.0132**0.5

    def preview(self, coordinates, sq_norms, scales):
        return coordinates, 0.0


class TestRank:
    def test_sees_scaled_coordinates(self):
        """Loud directions do not use up the clip of the others."""
        energies = np.array([1, 0.5, 1e-3, 1e-4, 1e-6, 1e-6])
        rows = 1e3 * with_mean({2: 0.9}, energies)
        found = []
        for whiten in (0.0, 1.0):
            subspace = public(
                rows, rank="auto", max_rank=6, horizon=1, whiten=whiten
            )
            refreshed(
                subspace,
                sizes=(6,),
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                batch_size=100,
            )
            found.append(int(np.any(matrix_of(subspace) != 0, 0).sum()))
        # For noise of 1e-4 and a coherence of about 1 %, a direction has to
        # have 1 % of the clip's energy.
        assert found == [2, 4]

    @pytest.mark.parametrize(
        "scales, rank", [(None, 1), ([1, 1, 1], 1), ([1, 1, 2], 3)]
    )
    def test_counts_energy_and_noise_on_the_way_back(self, scales, rank):
        """The second of three directions has no energy at all."""
        selection = RankSelection([Group("all", (0,), 3)], [3], 1)
        selection.optimizer = _AsItIs()
        selection.begin_run(1)
        rows = tf.constant([[1.0, 0, 1]] * 5)
        if scales is not None:
            scales = tf.constant(scales, tf.float32)
        # In units of the noise, they gain 1/2, -1 and 1/2: four times as much
        # where the scale is 2.
        mask, *_ = selection.updated(rows, tf.fill([5], 2.0), scales)
        assert int(tf.reduce_sum(mask)) == rank


class TestArguments:
    @pytest.mark.parametrize(
        "whiten",
        [-0.1, 1.1, 2, float("nan"), float("inf"), "half", "", True, None, []],
    )
    def test_invalid(self, whiten):
        with pytest.raises(ValueError, match=r"Expected whiten in \[0, 1\]"):
            public(whiten=whiten)

    def test_a_choice_needs_four_examples(self):
        public(ROWS[:4], whiten="auto", rank=2)
        public(ROWS[:3], rank=2)
        with pytest.raises(ValueError, match="Expected 4 public .*got 3"):
            public(ROWS[:3], whiten="auto", rank=2)

    @pytest.mark.parametrize("whiten", [0.0, 0.5, "auto"])
    def test_round_trip(self, whiten):
        subspace = public(whiten=whiten)
        text = json.dumps(keras.saving.serialize_keras_object(subspace))
        loaded = keras.saving.deserialize_keras_object(json.loads(text))
        assert loaded.get_config() == subspace.get_config()
        assert loaded.get_config()["whiten"] == whiten
        assert loaded.is_whitened == (whiten != 0)
