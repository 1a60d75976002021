"""Entry i of a per-example loss is Keras's own loss of example i alone."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.trainers.compile_utils import CompileLoss

from tf_dpsub.training.per_example_loss import PerExampleLoss

# All different, so that no two axes can be taken for each other.
BATCH, TIME, CLASSES = 4, 5, 3

REDUCTIONS = [
    "sum_over_batch_size",
    "mean",
    "sum",
    "mean_with_sample_weight",
    "none",
    None,
]

_random = np.random.default_rng(0)


def _normal(*shape):
    return _random.normal(size=shape).astype("float32")


def _uniform(*shape):
    return _random.uniform(0.05, 0.95, size=shape).astype("float32")


def _classes(*shape):
    return _random.integers(0, CLASSES, size=shape)


def _binary(*shape):
    return _random.integers(0, 2, size=shape)


def _probabilities(*shape):
    p = _uniform(*shape)
    return p / p.sum(-1, keepdims=True)


def _one_hot(*shape):
    return np.eye(CLASSES, dtype="float32")[_classes(*shape)]


# The first example is masked throughout, the second not at all.
MASK = _random.uniform(size=(BATCH, TIME)) > 0.4
MASK[0] = False
MASK[1] = True
MASK[2] = [True] + [False] * (TIME - 1)


def _tensors(structure):
    return tree.map_structure(
        lambda x: None if x is None else tf.constant(x), structure
    )


def _set_masks(y_pred, masks):
    for y, mask in zip(tree.flatten(y_pred), tree.flatten(masks)):
        if mask is not None:
            backend.set_keras_mask(y, mask)


# Tracing is most of a test's time: what does not depend on it runs eagerly.
MODES = {
    "eager": lambda function: function,
    "graph": tf.function(autograph=False),
    "xla": tf.function(autograph=False, jit_compile=True),
}


def _per_example(
    loss,
    y_true,
    y_pred,
    sample_weight=None,
    masks=None,
    mode="graph",
    **kwargs,
):
    """Returns losses, losses of the outputs, and gradients."""
    per_example = PerExampleLoss(CompileLoss(loss, **kwargs))

    @MODES[mode]
    def run(arguments):
        y_true, y_pred, sample_weight, masks = arguments
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            # The same tensors are watched and masked.
            _set_masks(y_pred, masks)
            losses, outputs = per_example(y_true, y_pred, sample_weight)
        gradients = tape.gradient(losses, y_pred, unconnected_gradients="zero")
        return losses, outputs, gradients

    losses, outputs, gradients = run(
        _tensors((y_true, y_pred, sample_weight, masks))
    )
    assert losses.shape == [len(losses)]
    assert all(x.shape == losses.shape for x in outputs)
    assert all(x.dtype == tf.float32 for x in (losses, *outputs))
    return losses, outputs, gradients


def _alone(loss, y_true, y_pred, sample_weight=None, masks=None, **kwargs):
    """Keras's loss and gradient for a batch of each example, one by one."""
    losses, gradients = [], []
    for i in range(len(tree.flatten(y_pred)[0])):
        y, p, w, m = tree.map_structure(
            lambda x: None if x is None else tf.constant(x[i : i + 1]),
            (y_true, y_pred, sample_weight, masks),
        )
        with tf.GradientTape() as tape:
            tape.watch(p)
            _set_masks(p, m)
            value = CompileLoss(loss, **kwargs)(y, p, w)
        # A loss that is not reduced is summed by the gradient.
        losses.append(tf.reduce_sum(value))
        gradients.append(tape.gradient(value, p, unconnected_gradients="zero"))
    return tf.stack(losses), tree.map_structure(
        lambda *rows: tf.concat(rows, 0), *gradients
    )


def _check(*args, **kwargs):
    """Compares both; returns the losses."""
    actual, outputs, actual_gradients = _per_example(*args, **kwargs)
    kwargs.pop("mode", None)
    expected, expected_gradients = _alone(*args, **kwargs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    tree.map_structure(
        # Rounding is of the largest: terms of a small number may cancel.
        lambda a, e: np.testing.assert_allclose(
            a, e, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(e).max())
        ),
        actual_gradients,
        expected_gradients,
    )
    assert np.all(np.isfinite(actual))
    return actual.numpy()


def _sequence(reduction, **kwargs):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **kwargs
    )


KERAS_LOSSES = {
    "BinaryCrossentropy": (_binary(BATCH, 3), _uniform(BATCH, 3)),
    "BinaryFocalCrossentropy": (_binary(BATCH, 3), _uniform(BATCH, 3)),
    "CategoricalCrossentropy": (
        _one_hot(BATCH),
        _probabilities(BATCH, CLASSES),
    ),
    "CategoricalFocalCrossentropy": (
        _one_hot(BATCH),
        _probabilities(BATCH, CLASSES),
    ),
    "CategoricalGeneralizedCrossEntropy": (
        _classes(BATCH),
        _probabilities(BATCH, CLASSES),
    ),
    "CategoricalHinge": (_one_hot(BATCH), _normal(BATCH, CLASSES)),
    "CosineSimilarity": (_normal(BATCH, 3), _normal(BATCH, 3)),
    "CTC": (
        _random.integers(1, CLASSES, (BATCH, 2)),
        _normal(BATCH, TIME, CLASSES),
    ),
    "Dice": (_uniform(BATCH, 2, 3, 1), _uniform(BATCH, 2, 3, 1)),
    "Hinge": (_binary(BATCH, 3), _normal(BATCH, 3)),
    "Huber": (3 * _normal(BATCH, 3), _normal(BATCH, 3)),
    "KLDivergence": (_probabilities(BATCH, 3), _probabilities(BATCH, 3)),
    "LogCosh": (_normal(BATCH, 3), _normal(BATCH, 3)),
    "MeanAbsoluteError": (_normal(BATCH, 3), _normal(BATCH, 3)),
    "MeanAbsolutePercentageError": (_normal(BATCH, 3), _normal(BATCH, 3)),
    "MeanSquaredError": (_normal(BATCH, 3), _normal(BATCH, 3)),
    "MeanSquaredLogarithmicError": (_uniform(BATCH, 3), _uniform(BATCH, 3)),
    "Poisson": (_uniform(BATCH, 3), _uniform(BATCH, 3)),
    "SparseCategoricalCrossentropy": (
        _classes(BATCH),
        _probabilities(BATCH, CLASSES),
    ),
    "SquaredHinge": (_binary(BATCH, 3), _normal(BATCH, 3)),
    "Tversky": (_uniform(BATCH, 2, 3, 1), _uniform(BATCH, 2, 3, 1)),
}


class TestKerasLosses:
    @pytest.mark.parametrize("name", KERAS_LOSSES)
    def test_class(self, name):
        loss = getattr(keras.losses, name)()
        losses = _check(loss, *KERAS_LOSSES[name], mode="eager")
        # A loss that mixed its examples would give the same to all of them.
        assert len(set(losses)) == BATCH

    @pytest.mark.parametrize(
        "name, y_true, y_pred",
        [
            ("mse", _normal(BATCH, 3), _normal(BATCH, 3)),
            ("kld", _probabilities(BATCH, 3), _probabilities(BATCH, 3)),
            ("Huber", _normal(BATCH, 3), _normal(BATCH, 3)),
            ("ce", _classes(BATCH), _probabilities(BATCH, CLASSES)),
            ("ce", _one_hot(BATCH), _probabilities(BATCH, CLASSES)),
            ("crossentropy", _binary(BATCH, 1), _uniform(BATCH, 1)),
        ],
    )
    def test_string(self, name, y_true, y_pred):
        _check(name, y_true, y_pred)

    @pytest.mark.parametrize(
        "y_shape, p_shape",
        [((BATCH,), (BATCH, 1)), ((BATCH, 1), (BATCH,)), ((BATCH,), (BATCH,))],
    )
    def test_targets_of_another_rank(self, y_shape, p_shape):
        # Where both are [batch], Keras's mean over features is over the batch.
        _check("mse", _normal(*y_shape), _normal(*p_shape))

    @pytest.mark.parametrize("name", ["ce", "bce"])
    def test_logits_are_found_behind_an_activation(self, name):
        # Keras takes the logits where an activation made the predictions; from
        # the probabilities it would clip the losses at 16.
        logits = tf.constant([[90.0, 0.0], [60.0, 0.0]])
        y_true = tf.constant([[0.0, 1.0], [0.0, 1.0]])
        activation = {"ce": tf.nn.softmax, "bce": tf.nn.sigmoid}[name]

        @tf.function
        def run():
            y_pred = activation(logits)
            return PerExampleLoss(CompileLoss(name))(y_true, y_pred)[0]

        from_logits = {
            "ce": keras.losses.CategoricalCrossentropy(from_logits=True),
            "bce": keras.losses.BinaryCrossentropy(from_logits=True),
        }[name]
        expected, _ = _alone(from_logits, y_true, logits)
        assert min(expected) > 17
        np.testing.assert_allclose(run(), expected, rtol=1e-5)

    @pytest.mark.parametrize("axis", [(1, 2, 3), (1, 2), -1])
    def test_dice_over_axes(self, axis):
        y_true, y_pred = KERAS_LOSSES["Dice"]
        _check(keras.losses.Dice(axis=axis), y_true, y_pred, _uniform(BATCH))

    def test_label_smoothing_and_one_example(self):
        loss = keras.losses.BinaryCrossentropy(label_smoothing=0.1)
        _check(loss, _binary(1, 3), _uniform(1, 3), _uniform(1))
        _check(keras.losses.Dice(), _uniform(1, 3), _uniform(1, 3))


SAMPLE_WEIGHTS = {
    "unweighted": None,
    "[B]": _uniform(BATCH),
    "[B, 1]": _uniform(BATCH, 1),
    "[B, T]": _uniform(BATCH, TIME),
    "[B, T, 1]": _uniform(BATCH, TIME, 1),
    "with zeros": (MASK[::-1] * _uniform(BATCH, TIME)),
}


class TestReductions:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("weight", SAMPLE_WEIGHTS)
    @pytest.mark.parametrize("masked", [False, True])
    def test_sequences(self, reduction, weight, masked):
        losses = _check(
            _sequence(reduction),
            _classes(BATCH, TIME),
            _normal(BATCH, TIME, CLASSES),
            SAMPLE_WEIGHTS[weight],
            masks=MASK if masked else None,
            mode="eager",
        )
        if masked:
            assert losses[0] == 0

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("masked", [False, True])
    def test_mask_made_by_the_loss(self, reduction, masked):
        y_true = _classes(BATCH, TIME)
        y_true[3] = 1
        losses = _check(
            _sequence(reduction, ignore_class=1),
            y_true,
            _normal(BATCH, TIME, CLASSES),
            _uniform(BATCH, TIME),
            masks=MASK if masked else None,
            mode="eager",
        )
        assert losses[3] == 0

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_images_with_weights_for_each_pixel(self, reduction):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        y_true, y_pred = _normal(BATCH, 3, 2, 5), _normal(BATCH, 3, 2, 5)
        for shape in ((BATCH, 3, 2), (BATCH, 3, 2, 1), (BATCH,)):
            _check(loss, y_true, y_pred, _uniform(*shape), mode="eager")

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_one_loss_for_each_example(self, reduction):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        y_true, y_pred = _normal(BATCH, 3), _normal(BATCH, 3)
        weights = _uniform(BATCH, TIME)
        for sample_weight, mask in (
            (weights[:, 0], None),
            (weights[:, :1], None),
            (weights[:, 0], MASK[:, 1]),
            # Alone, Keras takes these for weights of one loss.
            (weights, None),
            (weights, MASK),
        ):
            _check(
                loss, y_true, y_pred, sample_weight, masks=mask, mode="eager"
            )

    @pytest.mark.parametrize("reduction", REDUCTIONS[1:5])
    @pytest.mark.parametrize("weight", ["[B]", "[B, T]"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_loss_that_is_one_number(self, reduction, weight, masked):
        _check(
            keras.losses.Dice(reduction=reduction),
            _uniform(BATCH, TIME),
            _uniform(BATCH, TIME),
            SAMPLE_WEIGHTS[weight],
            masks=MASK if masked else None,
            mode="eager",
        )

    @pytest.mark.parametrize("masked", [False, True])
    def test_unknown_number_of_tokens(self, masked):
        y_true, y_pred = _classes(BATCH, TIME), _normal(BATCH, TIME, CLASSES)
        loss = _sequence("sum_over_batch_size")
        per_example = PerExampleLoss(CompileLoss(loss))

        @tf.function(
            input_signature=[
                tf.TensorSpec([BATCH, None], tf.int64),
                tf.TensorSpec([BATCH, None, CLASSES]),
                tf.TensorSpec([BATCH, None], tf.bool),
            ]
        )
        def run(y_true, y_pred, mask):
            if masked:
                backend.set_keras_mask(y_pred, mask)
            return per_example(y_true, y_pred)[0]

        expected, _ = _alone(
            loss, y_true, y_pred, masks=MASK if masked else None
        )
        np.testing.assert_allclose(
            run(y_true, y_pred, MASK), expected, rtol=1e-5
        )


class _NoReduction(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        loss = tf.reduce_mean(tf.square(y_true - y_pred))
        if sample_weight is not None:
            loss *= tf.reduce_mean(sample_weight)
        return loss


class _Weighted(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2 * super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)


USER_LOSSES = {
    "one for each": lambda y, p: tf.reduce_mean(tf.square(y - p), -1),
    "one number": lambda y, p: tf.reduce_mean(tf.square(y - p)),
    "keras.ops": lambda y, p: keras.ops.sum(keras.ops.abs(y - p)),
    "not reduced": lambda y, p: tf.square(y - p),
    "root of a mean": lambda y, p: tf.sqrt(tf.reduce_mean((y - p) ** 2)),
    "overrides __call__": _NoReduction(),
    "extends __call__": _Weighted(),
    "extends __call__, sum": _Weighted(reduction="sum"),
}


class TestUserLosses:
    @pytest.mark.parametrize("name", USER_LOSSES)
    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_user_loss(self, name, mode):
        y_true, y_pred = _normal(BATCH, 3), _normal(BATCH, 3)
        for weight in (None, _uniform(BATCH)):
            losses = _check(
                USER_LOSSES[name], y_true, y_pred, weight, mode=mode
            )
            assert len(set(losses)) == BATCH

    def test_extended_call_sees_the_mask(self):
        y_true, y_pred = _normal(BATCH, TIME, 2), _normal(BATCH, TIME, 2)
        _check(_Weighted(), y_true, y_pred, _uniform(BATCH, TIME), masks=MASK)

    def test_mixing_of_examples_is_kept_for_the_proof_to_see(self):
        def centred(y_true, y_pred):
            loss = tf.reduce_mean(tf.square(y_true - y_pred), -1)
            return loss - tf.reduce_mean(loss)

        y_true, y_pred = _normal(BATCH, 3), _normal(BATCH, 3)
        losses, _, _ = _per_example(centred, y_true, y_pred)
        np.testing.assert_allclose(
            losses, centred(y_true, y_pred), rtol=1e-5, atol=1e-6
        )

    def test_circle_with_public_references(self):
        labels = np.array([0, 1, 2, 0, 1, 2], "int32")
        references = tf.math.l2_normalize(_normal(6, 3), -1)

        def loss(y_true, y_pred):
            return keras.losses.circle(
                y_true, y_pred, labels, references, remove_diagonal=False
            )

        y_pred = tf.math.l2_normalize(_normal(BATCH, 3), -1).numpy()
        losses = _check(loss, _classes(BATCH), y_pred)
        assert np.all(losses > 0)


Y = {"a": _normal(BATCH, 3), "b": _classes(BATCH, TIME)}
P = {"a": _normal(BATCH, 3), "b": _normal(BATCH, TIME, CLASSES)}
W = {"a": _uniform(BATCH), "b": _uniform(BATCH, TIME)}
SEQUENCE = _sequence("sum_over_batch_size")
NAMES = {"output_names": ["a", "b"]}


def _list(structure):
    return [structure["a"], structure["b"]]


class TestOutputs:
    @pytest.mark.parametrize(
        "loss, y_true, y_pred, sample_weight, loss_weights",
        [
            pytest.param(
                ["mse", SEQUENCE], _list(Y), _list(P), None, None, id="list"
            ),
            pytest.param(
                ["mse", SEQUENCE],
                _list(Y),
                _list(P),
                _list(W),
                [0.3, 2.0],
                id="list with weights",
            ),
            pytest.param(
                {"a": "mse", "b": SEQUENCE},
                Y,
                P,
                W,
                {"a": 0.3, "b": 2.0},
                id="dict with weights",
            ),
            pytest.param(
                {"a": "mse", "b": SEQUENCE},
                _list(Y),
                _list(P),
                [W["a"], None],
                {"a": 0.3, "b": 2.0},
                id="losses by name, outputs in a list",
            ),
            pytest.param(
                ["mse", SEQUENCE],
                Y,
                _list(P),
                W["a"],
                None,
                id="targets by name, one weight for both",
            ),
            pytest.param(
                [None, SEQUENCE],
                _list(Y),
                _list(P),
                None,
                None,
                id="one loss",
            ),
            pytest.param(
                {"a": "mse", "b": None},
                Y,
                P,
                None,
                None,
                id="one loss by name",
            ),
            pytest.param(
                [None, SEQUENCE],
                [Y["b"]],
                _list(P),
                None,
                None,
                id="targets for the one loss",
            ),
            pytest.param(
                "mse",
                [Y["a"], P["b"] + 1],
                tuple(_list(P)),
                None,
                None,
                id="one loss for all outputs",
            ),
            pytest.param(
                ["mse", "mae"],
                Y["a"],
                P["a"],
                None,
                None,
                id="two losses of one output, of which Keras takes the first",
            ),
            pytest.param(
                ["mse", keras.losses.Dice()],
                [Y["a"], Y["a"] ** 2],
                [P["a"], P["a"] ** 2],
                None,
                None,
                id="one of them a single number",
            ),
        ],
    )
    def test_structure(self, loss, y_true, y_pred, sample_weight, loss_weights):
        names = ["a", "b"][: len(tree.flatten(y_pred))]
        _check(
            loss,
            y_true,
            y_pred,
            sample_weight,
            loss_weights=loss_weights,
            output_names=names,
        )

    def test_masks_of_the_outputs_stay_apart(self):
        y_true = [_classes(BATCH, TIME), _classes(BATCH, TIME)]
        y_pred = [_normal(BATCH, TIME, CLASSES), _normal(BATCH, TIME, CLASSES)]
        _check(
            [SEQUENCE, SEQUENCE],
            y_true,
            y_pred,
            masks=[MASK, MASK[::-1].copy()],
            **NAMES,
        )

    def test_losses_of_the_outputs_are_unweighted(self):
        total, outputs, _ = _per_example(
            {"b": SEQUENCE, "a": "mse"},
            Y,
            P,
            loss_weights={"b": 2.0, "a": 0.3},
            **NAMES,
        )
        compile_loss = CompileLoss({"b": SEQUENCE, "a": "mse"}, **NAMES)
        compile_loss(_tensors(Y), _tensors(P))
        values = dict(zip([m.name for m in compile_loss.metrics], outputs))
        a, _ = _alone("mse", Y["a"], P["a"])
        b, _ = _alone(SEQUENCE, Y["b"], P["b"])
        np.testing.assert_allclose(values["a_loss"], a, rtol=1e-5)
        np.testing.assert_allclose(values["b_loss"], b, rtol=1e-5)
        np.testing.assert_allclose(total, 0.3 * a + 2 * b, rtol=1e-5)

    def test_outputs_that_are_not_reduced_are_summed_one_by_one(self):
        losses, (a, b), _ = _per_example(
            ["mse", _sequence("none")], _list(Y), _list(P), **NAMES
        )
        np.testing.assert_allclose(losses, a + b, rtol=1e-6)
        np.testing.assert_allclose(
            b, _alone(_sequence("none"), Y["b"], P["b"])[0], rtol=1e-5
        )


class TestCompileLoss:
    def _values(self, compile_loss):
        value = compile_loss(_tensors(Y), _tensors(P), _tensors(W))
        return value, [m.result() for m in compile_loss.metrics]

    def test_is_unchanged(self):
        expected = self._values(
            CompileLoss({"a": "mse", "b": SEQUENCE}, **NAMES)
        )
        compile_loss = CompileLoss({"a": "mse", "b": SEQUENCE}, **NAMES)
        per_example = PerExampleLoss(compile_loss)
        per_example.build(Y, P)
        before = dict(vars(compile_loss))
        flat, trackers = compile_loss._flat_losses[:], compile_loss.metrics[:]
        per_example(_tensors(Y), _tensors(P), _tensors(W))
        assert vars(compile_loss) == before
        assert compile_loss._flat_losses == flat
        assert compile_loss.metrics == trackers
        assert [float(m.count.value) for m in trackers] == [0, 0]
        np.testing.assert_array_equal(
            tree.flatten(self._values(compile_loss)), tree.flatten(expected)
        )

    def test_is_unchanged_by_an_error(self):
        def fails(y_true, y_pred):
            if y_pred.shape[0] is not None:
                raise RuntimeError("a loss of the user")
            return tf.reduce_sum(tf.square(y_true - y_pred), -1)

        compile_loss = CompileLoss(["mse", fails], **NAMES)
        per_example = PerExampleLoss(compile_loss)
        spec = keras.KerasTensor((None, 3))
        per_example.build([spec, spec], [spec, spec])
        before = dict(vars(compile_loss))
        flat = compile_loss._flat_losses[:]
        y = tf.constant(Y["a"])
        with pytest.raises(RuntimeError, match="a loss of the user"):
            per_example([y, y], [y, y])
        assert vars(compile_loss) == before
        assert compile_loss._flat_losses == flat

    @pytest.mark.parametrize(
        "spec",
        [
            lambda x: x,
            tf.constant,
            lambda x: keras.KerasTensor((None, *x.shape[1:]), x.dtype),
            lambda x: tf.TensorSpec(x.shape, x.dtype),
        ],
        ids=["array", "tensor", "KerasTensor", "TensorSpec"],
    )
    def test_build(self, spec):
        compile_loss = CompileLoss([None, "mse", SEQUENCE])
        per_example = PerExampleLoss(compile_loss)
        y = [None, spec(Y["a"]), spec(Y["b"])]
        per_example.build(y, [spec(P["a"]), spec(P["a"]), spec(P["b"])])
        assert compile_loss.built
        assert len(compile_loss.metrics) == 2
        built = compile_loss._flat_losses
        per_example.build(y, y)
        assert compile_loss._flat_losses is built

    def test_compiled_model(self):
        inputs = keras.Input((3,))
        model = keras.Model(
            inputs,
            [
                keras.layers.Dense(3, name="a")(inputs),
                keras.layers.Dense(CLASSES, name="b")(inputs),
            ],
        )
        model.compile("sgd", {"a": "mse", "b": SEQUENCE}, loss_weights=[1, 3])
        x, y = _normal(BATCH, 3), [_normal(BATCH, 3), _classes(BATCH)]
        y_pred = model(x)
        losses, _ = PerExampleLoss(model._compile_loss)(_tensors(y), y_pred)
        values = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        np.testing.assert_allclose(tf.reduce_mean(losses), values[0], rtol=1e-5)


class TestPlaces:
    """In loops, under XLA, in low precision and on several replicas."""

    @pytest.mark.parametrize("jit_compile", [False, True])
    @pytest.mark.parametrize("built", [False, True])
    def test_loop(self, jit_compile, built):
        losses = ["mse", SEQUENCE, keras.losses.Dice()]
        y_true = [*_list(Y), Y["a"] ** 2]
        y_pred = [*_list(P), P["a"] ** 2]
        compile_loss = CompileLoss(losses, output_names=["a", "b", "c"])
        per_example = PerExampleLoss(compile_loss)
        if built:
            per_example.build(y_true, y_pred)

        @tf.function(autograph=False, jit_compile=jit_compile)
        def run(y_true, y_pred, mask):
            def body(i, total):
                y, p, m = tree.map_structure(
                    lambda x: tf.slice(
                        x,
                        [2 * i] + [0] * (x.shape.rank - 1),
                        [2, *x.shape[1:]],
                    ),
                    (y_true, y_pred, mask),
                )
                backend.set_keras_mask(p[1], m)
                losses, _ = per_example(y, p)
                return i + 1, total + losses

            return tf.while_loop(
                lambda i, _: i < BATCH // 2, body, (0, tf.zeros([2]))
            )[1]

        actual = run(*_tensors((y_true, y_pred, MASK)))
        expected, _ = _alone(
            losses,
            y_true,
            y_pred,
            masks=[None, MASK, None],
            output_names=["a", "b", "c"],
        )
        np.testing.assert_allclose(
            actual, [sum(expected[0::2]), sum(expected[1::2])], rtol=1e-5
        )
        # Keras goes on outside of the loop, with trackers that were not made
        # in it.
        compile_loss(_tensors(y_true), _tensors(y_pred))
        assert [float(m.count.value) for m in compile_loss.metrics] == (
            [BATCH] * 3
        )

    @pytest.mark.parametrize("name", ["CategoricalHinge", "CTC", "Tversky"])
    def test_xla(self, name):
        _check(
            getattr(keras.losses, name)(),
            *KERAS_LOSSES[name],
            _uniform(BATCH),
            mode="xla",
        )

    def test_xla_with_masks_and_weights(self):
        _check(
            _sequence("mean_with_sample_weight", ignore_class=1),
            _classes(BATCH, TIME),
            _normal(BATCH, TIME, CLASSES),
            _uniform(BATCH, TIME),
            masks=MASK,
            mode="xla",
        )

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_predictions_are_cast_to_the_dtype_of_the_loss(self, dtype):
        y_true, y_pred = _classes(BATCH), tf.constant(_normal(BATCH, CLASSES))
        y_pred = tf.cast(y_pred, dtype)
        losses, _ = PerExampleLoss(CompileLoss(SEQUENCE))(
            tf.constant(y_true), y_pred
        )
        expected, _ = _alone(SEQUENCE, y_true, tf.cast(y_pred, "float32"))
        assert losses.dtype == tf.float32
        np.testing.assert_allclose(losses, expected, rtol=1e-5)

    def test_loss_in_float64(self):
        loss = keras.losses.MeanSquaredError(dtype="float64")
        _check(loss, Y["a"], P["a"], _uniform(BATCH))

    def test_replicas_do_not_scale_the_loss(self, monkeypatch):
        expected, _ = _alone(SEQUENCE, Y["b"], P["b"])
        dice = keras.losses.Dice(), Y["a"], P["a"], _uniform(BATCH, 1)
        expected_dice, _ = _alone(*dice)
        monkeypatch.setattr(
            tf.distribute,
            "get_strategy",
            lambda: types.SimpleNamespace(num_replicas_in_sync=2),
        )
        # Keras's own loss is what the replicas sum.
        halved, _ = _alone(SEQUENCE, Y["b"], P["b"])
        np.testing.assert_allclose(2 * halved, expected, rtol=1e-5)
        losses, _, _ = _per_example(SEQUENCE, Y["b"], P["b"])
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        losses, _, _ = _per_example(*dice)
        np.testing.assert_allclose(losses, expected_dice, rtol=1e-5)
        with pytest.raises(ValueError, match="Override `call` to train on"):
            _per_example(_Weighted(), Y["a"], P["a"])

    def test_graph_has_static_shapes_and_no_control_flow(self):
        per_example = PerExampleLoss(
            CompileLoss(_sequence("sum_over_batch_size", ignore_class=1))
        )

        @tf.function(autograph=False)
        def run(y_true, y_pred, weight, mask):
            backend.set_keras_mask(y_pred, mask)
            return per_example(y_true, y_pred, weight)[0]

        graph = run.get_concrete_function(
            *_tensors((Y["b"], P["b"], W["b"], MASK))
        ).graph
        for operation in graph.get_operations():
            assert operation.type not in (
                "If",
                "StatelessIf",
                "While",
                "StatelessWhile",
                "PartitionedCall",
                "StatefulPartitionedCall",
                "EnsureShape",
            )
            for x in operation.outputs:
                assert x.shape.is_fully_defined(), operation


class TestErrors:
    @pytest.mark.parametrize(
        "loss", [keras.losses.Circle(), "circle", keras.losses.circle]
    )
    def test_circle(self, loss):
        with pytest.raises(ValueError, match="compares the examples"):
            _per_example(loss, _classes(BATCH), _normal(BATCH, 3))

    @pytest.mark.parametrize(
        "loss",
        [
            keras.losses.Dice(axis=(0, 1)),
            lambda y, p: tf.reduce_mean(tf.square(y - p), 0),
            lambda y, p: tf.reshape(tf.square(y - p), [-1]),
        ],
    )
    def test_loss_without_batch_axis(self, loss):
        name = getattr(loss, "name", "lambda")
        y_true, y_pred = _uniform(BATCH, 2, 3), _uniform(BATCH, 2, 3)
        with pytest.raises(ValueError, match=f"Expected the loss '.*{name}"):
            _per_example(loss, y_true, y_pred)

    def test_loss_of_unknown_rank(self):
        def loss(y_true, y_pred):
            return tf.squeeze(tf.boolean_mask(y_pred, y_true[:, 0] > 0))

        compile_loss = CompileLoss(loss)
        compile_loss(tf.constant(Y["a"]), tf.constant(P["a"]))
        run = tf.function(PerExampleLoss(compile_loss), autograph=False)
        with pytest.raises(ValueError, match="got shape <unknown>"):
            run(Y["a"], P["a"])

    def test_loss_that_loses_the_batch_size(self):
        def loss(y_true, y_pred):
            # [?]
            return tf.boolean_mask(y_pred[:, 0], y_true[:, 0] > -9)

        losses, _, _ = _per_example(loss, Y["a"], P["a"])
        np.testing.assert_allclose(losses, P["a"][:, 0])
        assert losses.shape == [BATCH]
        y_true = Y["a"].copy()
        y_true[0, 0] = -10
        with pytest.raises(tf.errors.InvalidArgumentError):
            _per_example(loss, y_true, P["a"])

    @pytest.mark.parametrize(
        "what, y_true, y_pred, sample_weight",
        [
            ("predictions", Y["a"], P["a"][:-1], None),
            ("predictions", Y["a"], P["a"][:1], None),
            ("sample weights", Y["a"], P["a"], _uniform(1)),
            ("sample weights", Y["b"], P["b"], _uniform(TIME)),
            ("sample weights", Y["a"], P["a"], np.float32(2.0)),
        ],
    )
    def test_no_common_batch_axis(self, what, y_true, y_pred, sample_weight):
        y_true, y_pred = _tensors((y_true, y_pred))
        per_example = PerExampleLoss(CompileLoss("mse"))
        spec = keras.KerasTensor((None, 3))
        per_example.build(spec, spec)
        with pytest.raises(ValueError, match=f"Expected {what} with first"):
            per_example(y_true, y_pred, _tensors(sample_weight))

    def test_mask_without_batch_axis(self):
        y_pred = tf.constant(P["b"])
        backend.set_keras_mask(y_pred, tf.constant(MASK[:1]))
        with pytest.raises(ValueError, match="Expected a mask with first"):
            PerExampleLoss(CompileLoss(SEQUENCE))(tf.constant(Y["b"]), y_pred)

    def test_unknown_batch_size(self):
        per_example = PerExampleLoss(CompileLoss("mse"))

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def run(y):
            return per_example(y, y)[0]

        with pytest.raises(ValueError, match="Expected a static batch"):
            run(Y["a"])

    def test_ambiguous_weights(self):
        y_true, y_pred = _normal(BATCH, 3, 3, 2), _normal(BATCH, 3, 3, 2)
        with pytest.raises(ValueError, match="add the missing axes"):
            _per_example("mse", y_true, y_pred, _uniform(BATCH, 3))

    @pytest.mark.parametrize("loss", [[None], {"a": None, "b": None}])
    def test_no_loss(self, loss):
        with pytest.raises(ValueError, match="at least one loss"):
            PerExampleLoss(CompileLoss(loss))
