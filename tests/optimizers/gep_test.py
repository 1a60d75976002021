"""GEP: embedding and residual, each clipped and perturbed by its own."""

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
from tf_dpsub import accounting, gradients
from tf_dpsub.optimizers import GEP
from tf_dpsub.subspaces import (
    FixedSubspace,
    PublicSubspace,
    RandomSubspace,
    random_bases,
    random_subspace,
)

RANK = 3
BATCH = 8

_random = np.random.default_rng(0)
BASIS = orthonormal(PARAMETERS, RANK)
X = _random.normal(size=(BATCH, PARAMETERS)).astype("float32")
Y = np.ones((BATCH, 1), "float32")
ROWS = X.astype("float64")  # their gradients
# Half of the embeddings, and half of the residuals, are clipped.
EMBEDDINGS = ROWS @ BASIS
RESIDUALS = ROWS - EMBEDDINGS @ BASIS.T
CLIPS = [
    float(np.median(np.linalg.norm(part, axis=1)))
    for part in (EMBEDDINGS, RESIDUALS)
]


def fixed(basis=BASIS):
    return FixedSubspace(basis, public=True)


def gep(subspace=None, residual=True, **arguments):
    """A step adds `-gradient` to the weights."""
    defaults = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": CLIPS[0],
        "batch_size": BATCH,
    }
    if residual:
        defaults["residual_norm_clip"] = CLIPS[1]
    return GEP(
        keras.optimizers.SGD(1.0),
        subspace=fixed() if subspace is None else subspace,
        residual=residual,
        **{**defaults, **arguments},
    )


def clip(rows, norm):
    """Clips rows as the paper does, without a margin for rounding."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, norm / norms)


def expected_gradient(rows, basis, clips, residual=True):
    """The equations of the paper, without noise."""
    embeddings = rows @ basis
    residuals = rows - embeddings @ basis.T
    total = basis @ clip(embeddings, clips[0]).sum(0)
    if residual:
        total = total + clip(residuals, clips[1]).sum(0)
    return total / len(rows)


# The margins take 1.25 * 2^-10 and 2^-11 of a clip; a row of which only a part
# is the residual has more: 2^-11 of the whole, squared, against that part.
MARGIN = 1.25 * 2.0**-10 + 2.0**-11 * np.max(
    np.sum(ROWS**2, 1) / np.sum(RESIDUALS**2, 1)
)


class TestGradient:
    @pytest.mark.parametrize("residual", [True, False])
    @pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
    def test_follows_the_paper(self, factor, residual):
        clips = [factor * c for c in CLIPS]
        arguments = {"residual_norm_clip": clips[1]} if residual else {}
        model = make_private(
            gep(residual=residual, l2_norm_clip=clips[0], **arguments)
        )
        model.train_on_batch(X, Y)
        expected = -expected_gradient(ROWS, BASIS, clips, residual)
        found = flat(model.get_weights())
        error = np.linalg.norm(found - expected)
        # Where nothing is clipped, there is no margin.
        tolerance = 1e-5 if factor == 10 else MARGIN
        scale = np.linalg.norm(expected) if factor == 10 else sum(clips)
        assert error < tolerance * scale

    def test_clips_embedding_and_residual_separately(self):
        """One factor for both would shrink the one for the other."""
        inside = BASIS[:, 0]
        outside = np.linalg.svd(BASIS)[0][:, -1]
        optimizer = gep(l2_norm_clip=1.0, residual_norm_clip=0.5, batch_size=1)
        model = make_private(optimizer)
        for a, b in ((100.0, 10.0), (0.1, 100.0), (0.1, 0.1)):
            before = flat(model.get_weights())
            model.train_on_batch((a * inside + b * outside)[None], Y[:1])
            found = before - flat(model.get_weights())
            assert found @ inside == pytest.approx(min(a, 1.0), rel=2e-3)
            # The margin grows with the part in the subspace.
            bound = math.hypot(b, 2**-5 * math.hypot(a, b))
            expected = b * min(1, 0.5 / bound)
            assert found @ outside == pytest.approx(expected, rel=2e-3)

    def test_residual_is_of_the_unclipped_embedding(self):
        """Otherwise what was clipped of the embedding would come back."""
        optimizer = gep(
            l2_norm_clip=0.1, residual_norm_clip=math.inf, batch_size=1
        )
        model = make_private(optimizer)
        model.train_on_batch(10 * BASIS[None, :, 0], Y[:1])
        found = np.linalg.norm(flat(model.get_weights()))
        assert found == pytest.approx(0.1, rel=2e-3)

    def test_groups_are_clipped_together(self):
        """Not each to the clip by its own."""
        basis = np.zeros((PARAMETERS, 2))
        basis[0, 0] = basis[7, 1] = 1
        subspace = PublicSubspace(
            basis.T, np.ones((2, 1)), rank=2, groups=2, method="gram"
        )
        optimizer = gep(
            subspace, residual=False, l2_norm_clip=1.0, batch_size=1
        )
        model = make_private(optimizer)
        model.train_on_batch(5 * basis.sum(1)[None], Y[:1])
        assert subspace.ranks == [1, 1]
        found = -flat(model.get_weights())
        np.testing.assert_allclose(found[[0, 7]], 0.5**0.5, rtol=2e-3)

    @pytest.mark.parametrize("residual", [True, False])
    def test_without_clips_is_the_sum_or_its_projection(self, residual):
        arguments = {"residual_norm_clip": math.inf} if residual else {}
        model = make_private(
            gep(residual=residual, l2_norm_clip=math.inf, **arguments)
        )
        model.train_on_batch(X, Y)
        expected = -ROWS.mean(0)
        if not residual:
            expected = BASIS @ (BASIS.T @ expected)
        found = flat(model.get_weights())
        error = np.linalg.norm(found - expected)
        assert error < 1e-5 * np.linalg.norm(expected)

    def test_without_clips_trains_as_keras(self):
        plain = plain_models.mlp()
        expected = plain_models.twin(plain)
        optimizer = GEP(
            keras.optimizers.Adam(0.05),
            subspace=RandomSubspace(5, groups="layers"),
            noise_multiplier=0.0,
            l2_norm_clip=math.inf,
            residual_norm_clip=math.inf,
            batch_size=plain_models.EXAMPLES,
            microbatch_size=7,
        )
        model = plain_models.private(plain, optimizer)
        model.fit(plain_models.X, plain_models.Y, epochs=3, verbose=0)
        plain_models.fit_plainly(expected, keras.optimizers.Adam(0.05))
        plain_models.assert_same_weights(plain, expected)

    @pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
    def test_follows_the_paper_on_a_network(self, per_example):
        """Against rows that TensorFlow computes one example at a time."""
        plain = plain_models.mlp()
        basis = orthonormal(plain.count_params(), 6)
        optimizer = gep(
            fixed(basis),
            l2_norm_clip=0.05,
            residual_norm_clip=0.2,
            batch_size=plain_models.EXAMPLES,
            microbatch_size=6,
            per_example=per_example,
        )
        model = plain_models.private(plain, optimizer)
        variables = [v.value for v in plain.trainable_variables]

        def losses(batch):
            x, y = batch
            return keras.ops.sparse_categorical_crossentropy(
                y, plain(x), from_logits=True
            ), None

        @tf.function(autograph=False)
        def rows_of(x, y):
            found, _ = gradients.per_example_gradients(
                losses, (x, y), variables, "vectorized_map"
            )
            return [found.rows(v) for v in variables]

        rows = np.concatenate(
            [
                np.reshape(r, [plain_models.EXAMPLES, -1])
                for r in rows_of(
                    tf.constant(plain_models.X), tf.constant(plain_models.Y)
                )
            ],
            1,
        ).astype("float64")
        before = flat(plain.get_weights())
        model.train_on_batch(plain_models.X, plain_models.Y)
        found = before - flat(plain.get_weights())
        expected = expected_gradient(rows, basis, (0.05, 0.2))
        assert np.linalg.norm(found - expected) < 2.0**-9 * 0.25

    @pytest.mark.parametrize(
        "residual, sizes", [(True, (1, 3, 64)), (False, (3,))]
    )
    def test_microbatches_never_change_it(self, residual, sizes):
        found = []
        for size in (None, *sizes):
            model = make_private(gep(residual=residual, microbatch_size=size))
            model.train_on_batch(X, Y)
            found.append(flat(model.get_weights()))
        for other in found[1:]:
            error = np.linalg.norm(other - found[0])
            assert error < 1e-5 * np.linalg.norm(found[0])

    def test_any_way_of_running(self):
        found = []
        for arguments in (
            {},
            {"jit_compile": True},
            {"steps_per_execution": 2},
            {"run_eagerly": True},
        ):
            keras.utils.set_random_seed(0)
            plain = plain_models.mlp()
            optimizer = gep(
                fixed(orthonormal(43, 5)),
                l2_norm_clip=0.1,
                residual_norm_clip=0.2,
                batch_size=plain_models.EXAMPLES,
                microbatch_size=7,
            )
            model = plain_models.private(plain, optimizer, **arguments)
            model.fit(plain_models.X, plain_models.Y, epochs=3, verbose=0)
            found.append(plain)
        for other in found[1:]:
            plain_models.assert_same_weights(found[0], other)

    def test_is_divided_by_the_public_batch_size(self):
        optimizer = gep(batch_size=100)
        attach_basis(make_private(optimizer))
        given = np.array([5.0, -1.0, 2.0], "float32")
        rest = _random.normal(size=PARAMETERS).astype("float32")
        parts = [tf.constant(p[:, None]) for p in np.split(rest, [5])]
        gradient = optimizer.privatize([tf.constant(given), *parts])
        np.testing.assert_allclose(
            flat(gradient), (BASIS @ given + rest) / 100, atol=1e-6
        )


# For noise alone: targets of zero have no gradient.
SIZES = (130, 170)
LARGE = orthonormal(sum(SIZES), 100)
SIGMA, RESIDUAL_SIGMA = 3.0, 0.5


def noise_of_steps(steps=3, **arguments):
    """Changes of the weights by steps, negated, `[steps, parameters]`."""
    optimizer = gep(fixed(LARGE), noise_multiplier=SIGMA, seed=0, **arguments)
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
    @pytest.mark.parametrize("residual_sigma", [None, RESIDUAL_SIGMA])
    def test_inside_and_outside_of_the_subspace(self, residual_sigma):
        """Inside, that of embedding and residual both; outside, the latter."""
        noise = noise_of_steps(residual_noise_multiplier=residual_sigma)
        first = SIGMA * CLIPS[0] / BATCH
        second = (residual_sigma or SIGMA) * CLIPS[1] / BATCH
        complement = np.linalg.svd(LARGE)[0][:, LARGE.shape[1] :]
        for step in noise:
            check_normal(step @ LARGE / math.hypot(first, second))
            check_normal(step @ complement / second)
        correlations = np.corrcoef(noise) - np.eye(3)
        assert np.abs(correlations).max() < 4 / np.sqrt(sum(SIZES))

    def test_without_a_residual_lies_in_the_subspace(self):
        noise = noise_of_steps(residual=False)
        stddev = SIGMA * CLIPS[0] / BATCH
        coordinates = noise @ LARGE
        for step in coordinates:
            check_normal(step / stddev)
        assert np.abs(noise - coordinates @ LARGE.T).max() < 1e-5 * stddev

    def test_of_embedding_and_residual_is_not_the_same(self):
        """Drawn from one key twice, the one would tell the other."""
        optimizer = gep(
            fixed(np.eye(PARAMETERS)[:, :5]),
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            residual_norm_clip=1.0,
        )
        attach_basis(make_private(optimizer))
        key = tf.constant([1, 2], tf.int64)
        sums = [tf.zeros(shape) for shape in ([5], [5, 1], [7, 1])]
        draws = optimizer.add_noise(key, sums, "float32")
        assert np.unique(np.round(flat(draws), 5)).size == 17

    def test_without_a_multiplier_there_is_none(self):
        model = make_private(
            gep(l2_norm_clip=math.inf, residual_norm_clip=math.inf)
        )
        model.train_on_batch(X, Y)
        assert np.isfinite(flat(model.get_weights())).all()
        assert not any(model.optimizer.noise_stddevs())

    def test_one_multiplier_may_be_zero(self):
        """Not private, for analysis: the other part has its noise."""
        noise = noise_of_steps(1, residual_noise_multiplier=0.0)
        inside = noise @ LARGE
        assert np.abs(noise - inside @ LARGE.T).max() < 1e-5
        check_normal(inside / (SIGMA * CLIPS[0] / BATCH))


class TestAccounting:
    @pytest.mark.parametrize(
        ("residual", "sigmas", "expected"),
        [
            (True, (2.09, None), 2.09 / 2**0.5),
            (True, (2.0, 2.0), 2**0.5),
            (True, (3.0, 4.0), 2.4),
            (True, (1.0, 1e6), 1.0),
            (False, (2.09, None), 2.09),
            (True, (0.0, 2.0), 0.0),
            (True, (2.0, 0.0), 0.0),
            (True, (0.0, None), 0.0),
            (False, (0.0, None), 0.0),
        ],
    )
    def test_one_gaussian_for_both(self, residual, sigmas, expected):
        optimizer = gep(
            residual=residual,
            noise_multiplier=sigmas[0],
            residual_noise_multiplier=sigmas[1],
        )
        assert optimizer.effective_noise_multiplier == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("accountant", "expected"), [("rdp", 7.853), ("pld", 7.277)]
    )
    def test_of_the_papers_setting(self, accountant, expected):
        """Two events, each sampled by its own, would give 8.61 with RDP."""
        epsilon = accounting.epsilon(
            noise_multiplier=gep(
                noise_multiplier=2.09
            ).effective_noise_multiplier,
            sampling_rate=0.02,
            steps=10000,
            delta=1e-5,
            accountant=accountant,
        )
        assert epsilon == pytest.approx(expected, abs=6e-4)

    @pytest.mark.parametrize("residual", [True, False])
    def test_of_a_run(self, residual):
        optimizer = gep(residual=residual, noise_multiplier=3.0, batch_size=2)
        model = make_private(optimizer)
        model.fit(X, Y, verbose=0)
        sigma = 3.0 / 2**0.5 if residual else 3.0
        assert model.epsilon(1e-5) == pytest.approx(
            accounting.epsilon(
                noise_multiplier=sigma,
                sampling_rate=2 / BATCH,
                steps=4,
                delta=1e-5,
            )
        )
        text = " ".join(model.privacy_statement(1e-5).split())
        assert f"noise multiplier σ = {sigma:.6g}, " in text
        assert "NOT PRIVATE" not in text
        if residual:
            assert (
                f"GEP, with a residual clipped at {CLIPS[1]:g} and multipliers "
                "3 and 3," in text
            )
        else:
            assert "GEP without residual: 4 steps" in text

    @pytest.mark.parametrize("sigmas", [(0.0, 2.0), (2.0, 0.0)])
    def test_without_either_noise_is_not_private(self, sigmas):
        optimizer = gep(
            noise_multiplier=sigmas[0], residual_noise_multiplier=sigmas[1]
        )
        model = make_private(optimizer)
        model.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) == math.inf
        assert "NOT PRIVATE" in model.privacy_statement(1e-5)

    def test_of_a_basis_that_is_not_public(self):
        subspace = FixedSubspace(BASIS)
        model = make_private(gep(subspace, noise_multiplier=5.0))
        model.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) == math.inf
        assert "computed from private data" in " ".join(
            model.privacy_statement(1e-5).split()
        )

    def test_coordinates_are_no_larger_than_what_is_released(self):
        """Nothing but noisy embedding and residual leaves a step."""
        optimizer = gep()
        model = attach(make_private(optimizer))
        sums = optimizer.released_sums(model.training_step(batch_of(model, X)))
        assert [tuple(s.shape) for s in sums] == [(RANK,), (5, 1), (7, 1)]
        residual = flat(sums[1:])
        # The residual has no part in the subspace.
        assert np.abs(BASIS.T @ residual).max() < 1e-5
        assert len(optimizer.noise_stddevs()) == 3
        only = gep(residual=False)
        model = attach(make_private(only))
        sums = only.released_sums(model.training_step(batch_of(model, X)))
        assert [tuple(s.shape) for s in sums] == [(RANK,)]
        assert len(only.noise_stddevs()) == 1


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"residual_norm_clip": None}, "residual_norm_clip with residual"),
            ({"residual_norm_clip": 0.0}, "residual_norm_clip > 0, got 0.0"),
            ({"residual_norm_clip": -1.0}, "residual_norm_clip > 0"),
            ({"residual_norm_clip": math.nan}, "residual_norm_clip > 0"),
            ({"residual_norm_clip": 1e-13}, "residual_norm_clip >= 1e-12"),
            (
                {"residual_noise_multiplier": -1.0},
                "finite residual_noise_multiplier >= 0, got -1.0",
            ),
            (
                {"residual_noise_multiplier": math.inf},
                "finite residual_noise_multiplier",
            ),
            (
                {"residual_norm_clip": math.inf, "noise_multiplier": 1.0},
                "finite residual_norm_clip with residual_noise_multiplier > 0",
            ),
            (
                {"residual": False, "residual_norm_clip": 1.0},
                "neither residual_norm_clip nor.*got 1.0 and None",
            ),
            (
                {"residual": False, "residual_noise_multiplier": 1.0},
                "neither residual_norm_clip nor",
            ),
            ({"noise_multiplier": -1.0}, "finite noise_multiplier >= 0"),
            ({"l2_norm_clip": 0.0}, "l2_norm_clip > 0"),
            ({"subspace": BASIS}, "Subspace, got ndarray"),
            ({"microbatch_size": 4096}, "microbatch_size <= .*got 4096"),
        ],
    )
    def test_invalid(self, arguments, message):
        with pytest.raises(ValueError, match=f"Expected.*{message}"):
            gep(**arguments)

    @pytest.mark.parametrize(
        "name",
        [
            "noise_multiplier",
            "l2_norm_clip",
            "residual_norm_clip",
            "residual_noise_multiplier",
            "residual",
        ],
    )
    def test_are_frozen(self, name):
        """The ledger has recorded them."""
        with pytest.raises(AttributeError):
            setattr(gep(), name, 1)


class TestSerialisation:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"noise_multiplier": 1.5},
            {"noise_multiplier": 1.5, "residual_noise_multiplier": 0.5},
            {"noise_multiplier": 1.5, "residual": False},
            {"l2_norm_clip": math.inf, "residual_norm_clip": math.inf},
        ],
    )
    def test_config_round_trip(self, arguments):
        subspace = PublicSubspace(X, Y, rank=2, groups=2)
        optimizer = gep(subspace, seed=3, name="mine", **arguments)
        config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        loaded = keras.optimizers.deserialize(config)
        assert type(loaded) is GEP
        assert loaded.get_config() == optimizer.get_config()
        for name in (
            "residual",
            "residual_norm_clip",
            "residual_noise_multiplier",
            "effective_noise_multiplier",
        ):
            assert getattr(loaded, name) == getattr(optimizer, name)

    def test_saved_model_goes_on(self, tmp_path):
        model = tf_dpsub.make_private(network())
        subspace = PublicSubspace(X, Y, rank=4, groups="layers", seed=1)
        model.compile(
            gep(subspace, noise_multiplier=1.0, residual_noise_multiplier=2.0),
            loss="mse",
        )
        model.fit(X + 1, Y, epochs=2, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is GEP
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert loaded.ledger.entries == model.ledger.entries
        loaded.fit(X + 1, Y, verbose=0)
        assert loaded.ledger.steps == 3
        assert len(loaded.ledger.entries) == 1
        basis = matrix_of(loaded.optimizer.subspace)
        assert np.abs(basis.T @ basis - np.eye(4)).max() <= 1e-5


def _loops(graph):
    """Loops of a graph: how many passes may run at once, and their ops."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    bodies = [definition.node, *(f.node_def for f in functions.values())]
    for node in (node for body in bodies for node in body):
        if node.op in ("While", "StatelessWhile"):
            body = functions[node.attr["body"].func.name]
            yield (
                node.attr["parallel_iterations"].i,
                {n.op for n in body.node_def},
            )


@pytest.mark.parametrize("kind", ["public", "random"])
def test_one_microbatch_is_in_memory_at_a_time(monkeypatch, kind):
    """Neither do several chunks of public examples, or of a basis, meet."""
    if kind == "public":
        x = np.tile(X, [100, 1])
        subspace = PublicSubspace(x, np.ones((len(x), 1)), rank=RANK)
    else:
        monkeypatch.setattr(random_subspace, "_STORED", 0)
        monkeypatch.setattr(random_bases, "_DRAWN", RANK)
        subspace = RandomSubspace(rank=RANK)
    model = make_private(
        GEP(
            keras.optimizers.SGD(0.1),
            subspace=subspace,
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            residual_norm_clip=1.0,
            batch_size=BATCH,
            microbatch_size=2,
        )
    )
    attach(model)
    batch = batch_of(model, X, Y)

    @tf.function
    def step():
        model.optimizer.prepare()
        return model.training_step(batch)

    loops = list(_loops(step.get_concrete_function().graph))
    # Passes of Cholesky QR need each other's results.
    heavy = [at_once for at_once, ops in loops if "Cholesky" not in ops]
    assert len(heavy) >= 2
    assert set(heavy) == {1}
