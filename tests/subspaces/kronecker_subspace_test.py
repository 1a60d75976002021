"""Pairs of directions: what they span, what they move, and when they raise."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests import graphs
from tests.optimizers import hostile_steps
from tests.subspaces.linear_models import flat, matrix_of
from tf_dpsub import gradients
from tf_dpsub.gradients.graph import convolutions, sites
from tf_dpsub.optimizers import GEP, ProjectedDPSGD
from tf_dpsub.subspaces import (
    FixedSubspace,
    KroneckerSubspace,
    carrier_bases,
    kronecker_basis,
    linear_algebra,
    residuals,
)
from tf_dpsub.subspaces.kernel_matrices import kernel_matrices

layers = keras.layers

BATCH, EXAMPLES, WORDS, LENGTH = 8, 11, 9, 5
RANK, SIDE = 40, 4

_random = np.random.default_rng(0)
X = _random.integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
Y = _random.integers(0, 3, BATCH)
PUBLIC = _random.integers(0, WORDS, (EXAMPLES, LENGTH)).astype("int32")
LABELS = _random.integers(0, 3, EXAMPLES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    """An embedding, heads of attention, a normalization, and a filter."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8, name="table")(inputs)
    x = layers.EinsumDense("btd,dhe->bthe", (None, 2, 4), bias_axes="he")(x)
    x = layers.EinsumDense("bthe,dhe->btd", (None, 10), bias_axes="d")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Reshape((5, 5, 2))(x)
    x = layers.Conv2D(6, 2, name="filter")(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


def small_network():
    """Two kernels and a bias, for what is not about kinds of layers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 4, name="table")(inputs)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


def kronecker(**arguments):
    defaults = {"rank": RANK, "side_rank": SIDE, "seed": 0, "update_every": 1}
    labels = arguments.pop("labels", LABELS)
    return KroneckerSubspace(PUBLIC, labels, **{**defaults, **arguments})


def small(**arguments):
    return kronecker(**{"rank": 12, "side_rank": 3, **arguments})


def private(subspace, plain=None, method=ProjectedDPSGD, **arguments):
    compiled = {"jit_compile": arguments.pop("jit_compile", False)}
    defaults = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": 0.5,
        "batch_size": BATCH,
        "microbatch_size": 4,
    }
    model = tf_dpsub.make_private(small_network() if plain is None else plain)
    inner = arguments.pop("inner", None) or keras.optimizers.SGD(1.0)
    optimizer = method(inner, subspace=subspace, **{**defaults, **arguments})
    model.compile(optimizer, LOSS, **compiled)
    return model


def attached(model):
    """A model whose step is built, without a step."""
    model.prepare_training(
        {
            "x": tf.TensorSpec(X.shape, tf.int32),
            "y": tf.TensorSpec(Y.shape, tf.int64),
            "real": tf.TensorSpec([BATCH], tf.float32),
        }
    )
    model.optimizer.public_state.begin_run(100)
    return model


def rows_of(model, x, y):
    """Gradients of each variable for each example, `[examples, *shape]`."""
    variables = [v.value for v in model.trainable_variables]

    @tf.function(autograph=False)
    def row(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y[None], model.model(x[None], training=False))
        gradients = tape.gradient(loss, variables)
        return [tf.convert_to_tensor(g) for g in gradients]

    rows = [row(*map(tf.constant, pair)) for pair in zip(x, y)]
    return [np.stack(r).astype("float64") for r in zip(*rows)]


def projector(columns):
    return np.asarray(columns) @ np.transpose(columns)


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.slow), False],
    ids=["kept", "never formed"],
)
def rows_kept(request, monkeypatch):
    """Keeps rows wherever there is a choice, or never."""
    if not request.param:
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)


class TestBasis:
    def test_is_the_product_of_both_sides_written_out(self, rows_kept):
        """Of kernels of all kinds, in an orthonormal basis of their weights."""
        model = attached(private(kronecker(), network()))
        subspace = model.optimizer.subspace
        model.optimizer.prepare()
        basis = matrix_of(subspace)  # [weights, k]
        error = basis.T @ basis - np.eye(RANK)
        assert np.linalg.norm(error, 2) <= 2.0**-13

        @tf.function(autograph=False)
        def coordinates(x, y):
            batch = {"x": x, "y": y, "real": tf.ones([BATCH])}
            rows, _ = model.training_step.per_example_gradients(batch)
            ones = tf.ones([BATCH], tf.float64)
            return [
                subspace.project(rows),
                subspace.coordinates(rows.weighted_sum(ones)),
                [rows.rows(v) for v in rows.variables],
            ]

        projected, of_sum, rows = coordinates(X, Y)
        rows = np.concatenate([np.reshape(r, (BATCH, -1)) for r in rows], 1)
        expected = rows @ basis
        scale = np.linalg.norm(rows, axis=1).max()
        np.testing.assert_allclose(projected, expected, atol=1e-6 * scale)
        np.testing.assert_allclose(
            of_sum, expected.sum(0), atol=BATCH * 1e-7 * scale
        )

    @pytest.mark.parametrize(
        "method, settings",
        [
            pytest.param(ProjectedDPSGD, {}, id="pdp"),
            pytest.param(GEP, {"residual_norm_clip": 0.2}, id="gep"),
        ],
    )
    def test_a_step_is_that_of_the_basis_written_out(
        self, method, settings, monkeypatch
    ):
        """In microbatches, if both leave as much of the clip for rounding."""
        monkeypatch.setattr(residuals.KroneckerResiduals, "parts", 1)
        model = private(small(), method=method, **settings)
        before = flat(model.get_weights())
        model.train_on_batch(X, Y)
        moved = flat(model.get_weights()) - before
        basis = matrix_of(model.optimizer.subspace)
        explicit = FixedSubspace(basis, public=True)
        other = private(explicit, method=method, **settings)
        np.testing.assert_array_equal(flat(other.get_weights()), before)
        other.train_on_batch(X, Y)
        expected = flat(other.get_weights()) - before
        assert np.linalg.norm(expected) > 0.03
        # Rounding of float32 weights of about one.
        np.testing.assert_allclose(moved, expected, atol=3e-7)

    @pytest.mark.parametrize(
        "jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)]
    )
    def test_follows_second_moments_and_energies(self, jit_compile):
        """In chunks of four examples, of which the last one is padded."""
        model = attached(private(small(), jit_compile=jit_compile))
        assert model.training_step.is_compiled == jit_compile
        rows = rows_of(model, PUBLIC, LABELS)
        for _ in range(40):
            model.optimizer.prepare()
        pairs = model.optimizer.subspace._pairs
        table, kernel, bias = rows
        energies = []
        for g, (left, right) in zip((table, kernel), pairs.sides):
            for basis, moment in (
                (left.numpy(), np.einsum("npd,nqd->pq", g, g)),
                (right.numpy(), np.einsum("npd,npe->de", g, g)),
            ):
                best = np.linalg.eigvalsh(moment)[::-1][: basis.shape[1]].sum()
                kept = np.trace(basis.T @ moment @ basis)
                assert 0.999 * best < kept < 1.0001 * best
            core = np.einsum("pr,npd,ds->nrs", left, g, right)
            energies.append(np.sum(core**2, 0).ravel())
        energies.append(np.sum((bias @ pairs.blocks[0].numpy()) ** 2, 0))
        energies = np.concatenate(energies)
        assert len(energies) == pairs.candidates == 3 * 3 + 3 * 3 + 3
        chosen = energies[pairs.chosen.numpy()]
        best = np.sort(energies)[::-1][:12]
        np.testing.assert_allclose(chosen, best, rtol=1e-3)

    @pytest.mark.slow
    def test_does_not_depend_on_chunks(self):
        found = []
        for size in (4, EXAMPLES):
            model = attached(private(small(), microbatch_size=size))
            model.optimizer.prepare()
            found.append(matrix_of(model.optimizer.subspace))
        np.testing.assert_allclose(*map(projector, found), atol=1e-4)

    @pytest.mark.slow
    def test_keeps_more_than_as_many_eigenvectors(self):
        """Of the mean gradient of other digits, with ten examples in public."""
        data = tf_dpsub.data.load("digits", public=10)
        kept = {}
        for name, subspace in (
            (
                "pairs",
                KroneckerSubspace(
                    data.x_public, data.y_public, rank=200, side_rank=16
                ),
            ),
            (
                "eigenvectors",
                tf_dpsub.subspaces.PublicSubspace(
                    data.x_public, data.y_public, rank=10, method="gram"
                ),
            ),
        ):
            keras.utils.set_random_seed(0)
            plain = tf_dpsub.models.mlp(data.input_shape, (16,), 10)
            model = private(subspace, plain)
            model.train_on_batch(data.x_train[:BATCH], data.y_train[:BATCH])
            mean = [
                rows.mean(0)
                for rows in rows_of(model, data.x_test[:200], data.y_test[:200])
            ]
            mean = [tf.constant(g, tf.float64) for g in mean]
            inside = np.linalg.norm(subspace.coordinates(mean))
            kept[name] = inside / np.linalg.norm(flat(mean))
        assert kept["pairs"] > 0.85 > 0.8 > kept["eigenvectors"]

    @pytest.mark.slow
    def test_sides_of_a_vocabulary_are_orthonormal(self):
        """By float32 reflections they would be ten times too far off."""
        rows = np.random.default_rng(0).normal(size=(300_000, 4))
        rows = tf.constant(rows, tf.float32)
        basis = carrier_bases.orthonormal(rows, tf.zeros_like(rows))
        error = linear_algebra.orthonormality_error([basis])
        assert error <= linear_algebra.ORTHONORMALITY_OF_SIDES / 4
        by_reflections = tf.linalg.qr(rows).q
        error = linear_algebra.orthonormality_error([by_reflections])
        assert error > linear_algebra.ORTHONORMALITY_OF_SIDES

    def test_zero_gradients_leave_it_orthonormal(self):
        model = attached(private(small()))
        model.model.get_layer("table").trainable = True
        for v in model.trainable_variables:
            v.assign(0 * v)
        for _ in range(2):
            model.optimizer.prepare()
        basis = matrix_of(model.optimizer.subspace)
        assert np.abs(basis.T @ basis - np.eye(12)).max() < 1e-5


def hostile_step(model, dtype):
    """The released sums of GEP, each part with a half of the square of CLIP."""
    plain = model(dtype)
    clip = hostile_steps.CLIP / math.sqrt(2)
    subspace = KroneckerSubspace(np.zeros((4, 1)), rank=8, side_rank=3, seed=0)
    optimizer = GEP(
        "sgd",
        subspace=subspace,
        noise_multiplier=0.0,
        l2_norm_clip=clip,
        residual_norm_clip=clip,
        batch_size=hostile_steps.BATCH,
    )
    wrapped = tf_dpsub.make_private(plain)
    optimizer.build_for(wrapped)
    subspace.ranks, subspace._basis = [8], subspace._pairs
    subspace._pairs.chosen.assign(
        np.random.default_rng(0).permutation(subspace._pairs.candidates)[:8]
    )
    losses, scale = hostile_steps.losses_of(plain, dtype)

    @tf.function(autograph=False)
    def sums(x, t, keep):
        rows, _ = gradients.per_example_gradients(
            losses,
            {"x": x, "t": t},
            plain.trainable_variables,
            loss_scale=scale,
        )
        found = optimizer.released_sums(optimizer.clipped_sums(rows, keep))
        return [[*found, rows.valid]]

    (step,) = hostile_steps.steps_of(plain, sums, 1)
    return step


class TestSensitivity:
    @pytest.mark.parametrize(
        "model, dtype",
        [
            (hostile_steps.dense_by_gram, "float32"),
            *(
                pytest.param(model, dtype, marks=pytest.mark.slow)
                for model, dtype in (
                    (hostile_steps.tied_embedding, "float32"),
                    (hostile_steps.conv, "float32"),
                    (hostile_steps.embedding, "float32"),
                    (hostile_steps.dense_by_rows, "float32"),
                    (hostile_steps.dense_by_gram, "mixed_bfloat16"),
                    (hostile_steps.tied_embedding, "mixed_float16"),
                )
            ),
        ],
    )
    def test_neither_part_moves_too_far(self, model, dtype, monkeypatch):
        """Of embedding and residual, where thin products cancel too."""
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
        reached = hostile_steps.check_sensitivity(hostile_step(model, dtype))
        assert reached["ordinary"][0] > 0.9

    @pytest.mark.parametrize(
        "side", ["a side", pytest.param("vectors", marks=pytest.mark.slow)]
    )
    def test_bases_that_are_not_orthonormal_raise(self, side, monkeypatch):
        made = kronecker_basis.KroneckerBasis.orthonormal

        def slightly_off(self, matrices, fills):
            (sides, blocks), *_ = made(self, matrices, fills)
            if side == "a side":
                sides[0][1] *= 1 + 2.0**-14
            else:
                blocks = [(1 + 2.0**-12) * b for b in blocks]
            return (
                (sides, blocks),
                tf.reduce_max(
                    [
                        linear_algebra.orthonormality_error([b])
                        for pair in sides
                        for b in pair
                    ]
                ),
                linear_algebra.orthonormality_error(blocks),
            )

        model = private(small(), noise_multiplier=1.0)
        monkeypatch.setattr(
            kronecker_basis.KroneckerBasis, "orthonormal", slightly_off
        )
        before = flat(model.get_weights())
        limit = {"a side": "-15", "vectors": "-13"}[side]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"V - I\|\|_F <= 2\^" + limit
        ):
            model.train_on_batch(X, Y)
        np.testing.assert_array_equal(flat(model.get_weights()), before)

    @pytest.mark.parametrize(
        "part",
        [
            "choice",
            *(
                pytest.param(part, marks=pytest.mark.slow)
                for part in ("a side", "vectors")
            ),
        ],
    )
    def test_bases_of_any_file_are_made_anew(self, part):
        """If they are not orthonormal, or a pair is there twice."""
        model = private(small(update_every=100))
        model.train_on_batch(X, Y)
        pairs = model.optimizer.subspace._pairs
        variable = {
            "a side": pairs.sides[1][0],
            "vectors": pairs.blocks[0],
            "choice": pairs.chosen,
        }[part]
        before = variable.numpy()
        if part == "choice":
            variable.assign([*before[:-1], before[0]])
        else:
            variable.assign(2 * before)
        model.train_on_batch(X, Y)
        assert pairs.is_sound()
        basis = matrix_of(model.optimizer.subspace)
        assert np.linalg.norm(basis.T @ basis - np.eye(12)) < 2.0**-13

    def test_no_private_example_moves_the_bases(self):
        found = []
        for x in (X, X[::-1]):
            model = private(small())
            model.train_on_batch(x, Y)
            found.append(matrix_of(model.optimizer.subspace))
        np.testing.assert_array_equal(*found)


class TestRefresh:
    def test_comes_as_often_as_it_is_asked_for(self):
        model = private(small(update_every=3))
        seen = []
        for _ in range(6):
            model.train_on_batch(X, Y)
            seen.append(matrix_of(model.optimizer.subspace))
        for step, (before, after) in enumerate(zip(seen, seen[1:]), start=1):
            assert np.array_equal(before, after) == (step % 3 != 0)

    @pytest.mark.parametrize(
        "method", [ProjectedDPSGD, pytest.param(GEP, marks=pytest.mark.slow)]
    )
    def test_chooses_a_rank(self, method):
        """Fewer where there is more noise."""
        chosen = []
        for noise in (1e-3, 1e3):
            arguments = {"residual": False} if method is GEP else {}
            model = private(
                small(rank="auto", max_rank=12, horizon=10),
                method=method,
                noise_multiplier=noise,
                **arguments,
            )
            model.train_on_batch(X, Y)
            chosen.append(model.optimizer.subspace.selection.ranks[0])
            # What is not in use is no part of the step.
            basis = matrix_of(model.optimizer.subspace)
            assert np.sum(np.any(basis != 0, 0)) == chosen[-1]
        assert 12 >= chosen[0] > chosen[1] == 1

    @pytest.mark.slow
    def test_labels_are_drawn_if_none_are_given(self):
        found = []
        for seed in (0, 0, 1):
            model = attached(private(small(labels=None, seed=seed)))
            model.optimizer.prepare()
            found.append(projector(matrix_of(model.optimizer.subspace)))
        np.testing.assert_array_equal(found[0], found[1])
        assert np.abs(found[0] - found[2]).max() > 0.01

    @pytest.mark.slow
    def test_belongs_to_an_optimizer_that_is_compiled_later(self):
        subspace = small(update_every=100)
        model = private(subspace)
        for _ in range(2):
            attached(model).optimizer.prepare()
            basis = matrix_of(subspace)
            assert np.abs(basis.T @ basis - np.eye(12)).max() < 1e-5
            model.compile(private(subspace).optimizer, LOSS)

    @pytest.mark.slow
    def test_follows_a_loss_that_is_compiled_later(self):
        model = private(small(update_every=100))
        found = []
        for loss in (LOSS, lambda y, p: keras.ops.sum(p, -1)):
            model.compile(model.optimizer, loss=loss)
            attached(model).optimizer.prepare()
            found.append(projector(matrix_of(model.optimizer.subspace)))
        assert np.abs(found[0] - found[1]).max() > 0.01

    def test_a_step_waits_for_it(self, monkeypatch):
        """Both at once take the memory of both, and no less time."""
        steps = graphs.recorded_steps(monkeypatch)
        model = private(kronecker(), network())
        model.train_on_batch(X, Y)
        operations = steps[0].get_operations()
        refresh, step = (op for op in operations if "Partitioned" in op.type)
        assert refresh in graphs.ancestors(step)


class TestState:
    @pytest.mark.slow
    def test_a_resumed_run_goes_on_as_it_would_have(self, tmp_path):
        """Between two refreshes, and at the next."""

        def made():
            return private(
                small(labels=None, update_every=3),
                inner=keras.optimizers.Adam(0.1),
            )

        whole = made()
        for _ in range(2):
            whole.train_on_batch(X, Y)
        whole.save_weights(tmp_path / "m.weights.h5")
        whole.save(tmp_path / "m.keras")
        resumed = made()
        resumed.optimizer.build_for(resumed)
        resumed.load_weights(tmp_path / "m.weights.h5")
        again = keras.saving.load_model(tmp_path / "m.keras")
        for _ in range(2):
            for model in (whole, resumed, again):
                model.train_on_batch(X, Y)
            for model in (resumed, again):
                for a, b in zip(
                    whole.get_weights(), model.get_weights(), strict=True
                ):
                    np.testing.assert_array_equal(a, b)

    def test_config_is_whole(self):
        subspace = kronecker(
            labels=None,
            rank="auto",
            max_rank=7,
            held_out=3,
            horizon=5,
            side_ranks={"table": (2, 3)},
            splits={"filter/kernel": 3},
            iterations=2,
            update_every=4,
            allow_private=True,
        )
        config = json.loads(json.dumps(subspace.get_config()))
        again = KroneckerSubspace.from_config(config)
        assert json.loads(json.dumps(again.get_config())) == config
        np.testing.assert_array_equal(again.public_inputs, PUBLIC)

    @pytest.mark.slow
    def test_the_statement_names_the_examples(self):
        model = private(small(), noise_multiplier=1.0)
        model.train_on_batch(X, Y)
        assert np.isfinite(model.epsilon(1e-5))
        text = " ".join(model.privacy_statement(1e-5).split())
        taken = text.split("Taken as public:")[1]
        assert "11 examples with their labels, whose gradients span" in taken


def with_layer(layer, shape):
    return keras.Sequential(
        [keras.Input(shape), layer, layers.Flatten(), layers.Dense(3)]
    )


class TestErrors:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"rank": 22}, "Expected rank <= 21, the pairs of directions of"),
            ({"rank": "auto", "max_rank": 22}, "Expected max_rank <= 21"),
            ({"side_rank": 21}, "Expected side_rank <= 20, the widest side"),
            (
                {"side_ranks": {"logits": (3, 4)}},
                r"Expected side_ranks <= \(20, 3\) of logits/kernel, .* got "
                r"\(3, 4\)",
            ),
            ({"side_ranks": {"no": (1, 1)}}, "match a kernel .* got 'no'"),
            ({"splits": {"no": 1}}, "Expected patterns of splits that match"),
            ({"splits": {"table": 2}}, "a split of table/embeddings below 2"),
        ],
    )
    def test_do_not_fit_the_model(self, arguments, message):
        """Before anything is charged."""
        model = private(small(**arguments), noise_multiplier=1.0)
        before = flat(model.get_weights())
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0
        np.testing.assert_array_equal(flat(model.get_weights()), before)

    @pytest.mark.slow
    def test_a_model_trains_with_one_that_fits_thereafter(self):
        model = private(small(rank=22), noise_multiplier=1.0)
        with pytest.raises(ValueError, match="Expected rank <= 21"):
            model.fit(X, Y, verbose=0)
        fits = private(small(), noise_multiplier=1.0).optimizer
        model.compile(fits, LOSS)
        model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 1

    @pytest.mark.parametrize(
        "layer, shape",
        [
            (layers.DepthwiseConv2D(2, name="odd"), (4, 4, 2)),
            (layers.Conv2D(4, 2, groups=2, name="odd"), (4, 4, 2)),
            (layers.EinsumDense("bnd,ndh->bnh", (3, 2), name="odd"), (3, 4)),
        ],
        ids=lambda v: type(v).__name__,
    )
    def test_no_split_is_known(self, layer, shape):
        layer = type(layer).from_config(layer.get_config())
        plain = with_layer(layer, shape)
        model = tf_dpsub.make_private(plain)
        x = np.zeros((4, *shape), "float32")

        optimizer = ProjectedDPSGD(
            "sgd",
            subspace=KroneckerSubspace(x + 1, LABELS[:4], rank=4, side_rank=2),
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=4,
        )
        model.compile(optimizer, LOSS)
        with pytest.raises(
            ValueError, match=r"got .*odd/\w+ of shape .*Pass splits={'.*odd/"
        ):
            model.fit(x, Y[:4], verbose=0)
        assert model.ledger.steps == 0
        variables = plain.trainable_variables
        axes = len(variables[0].shape)
        matrices = [
            kernel_matrices(plain, variables, {"odd/": split})[0]
            for split in (1, 0)
        ]
        assert matrices[0].inputs == variables[0].shape[0]
        assert matrices[1] is None
        with pytest.raises(ValueError, match=f"below {axes}, its number of"):
            kernel_matrices(plain, variables, {"odd/kernel": axes})

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"rank": 0}, "rank"),
            ({"side_rank": 0}, "side_rank"),
            ({"iterations": 0}, "iterations"),
            ({"max_rank": 3}, "Expected max_rank=None"),
            ({"side_ranks": {"table": 3}}, "Expected side_ranks from regular"),
            ({"side_ranks": {"table": (0, 1)}}, "Expected side_ranks from"),
            ({"splits": {"table": -1}}, "Expected splits from regular"),
            ({"splits": ["table"]}, "Expected splits from regular"),
        ],
    )
    def test_arguments_out_of_range(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            kronecker(**arguments)

    def test_private_examples_among_the_public_ones_raise(self):
        subspace = KroneckerSubspace(X[:3], Y[:3], rank=12, side_rank=3)
        model = private(subspace, noise_multiplier=1.0)
        with pytest.raises(ValueError, match="that are not private"):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0
