"""Bad input raises, and says what, why, and the cure."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    EXAMPLES,
    W,
    X,
    Y,
    dpsgd,
    linear,
    loss,
    mlp,
    private,
)
from tf_dpsub import accounting, data, gradients
from tf_dpsub.training import requirements

layers = keras.layers


class TestModel:
    @pytest.mark.parametrize("not_a_model", [layers.Dense(3), None, "mlp"])
    def test_not_a_model(self, not_a_model):
        with pytest.raises(ValueError, match="Expected a keras.Model, got"):
            tf_dpsub.make_private(not_a_model)

    def test_private_already(self):
        model = tf_dpsub.make_private(linear())
        with pytest.raises(ValueError, match=r"private already.*model\.model"):
            tf_dpsub.make_private(model)

    def test_not_built(self):
        model = keras.Sequential([layers.Dense(3)], name="unfinished")
        with pytest.raises(
            ValueError, match="built model, got 'unfinished'.*keras.Input"
        ):
            tf_dpsub.make_private(model)

    def test_no_trainable_weights(self):
        model = linear()
        model.trainable = False
        with pytest.raises(
            ValueError, match="trainable weights.*none.*trainable = True"
        ):
            tf_dpsub.make_private(model)

    def test_no_trainable_weights_left(self):
        model = tf_dpsub.make_private(linear())
        model.model.trainable = False
        with pytest.raises(
            ValueError, match="trainable weights.*none.*trainable = True"
        ):
            model.compile(dpsgd(), loss())
            model.fit(X, Y, verbose=0)


class Mixes(layers.Layer):
    def call(self, inputs):
        return inputs + keras.ops.mean(inputs, 0, keepdims=True)


class Remembers(layers.Layer):
    """Keeps a mean of the batch, as BatchNormalization does."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, inputs):
        self.mean.assign(0.5 * self.mean + keras.ops.mean(inputs, 0))
        return inputs


class TestLayers:
    @pytest.mark.parametrize("when", ["wrapping", "compiling"])
    def test_trainable_batch_normalization(self, when):
        norm = layers.BatchNormalization(name="norm")
        plain = mlp(layers.Dense(4), norm)
        with pytest.raises(
            ValueError,
            match="BatchNormalization 'norm'.*replace_batch_normalization"
            r"\(model\).*trainable = False",
        ):
            if when == "wrapping":
                tf_dpsub.make_private(plain)
            else:
                norm.trainable = False
                model = tf_dpsub.make_private(plain)
                norm.trainable = True
                model.compile(dpsgd(), loss())

    def test_nested_batch_normalization(self):
        plain = mlp(mlp(layers.BatchNormalization(name="deep")))
        with pytest.raises(ValueError, match="BatchNormalization 'deep'"):
            tf_dpsub.make_private(plain)

    def test_all_batch_normalizations_are_counted(self):
        norms = [layers.BatchNormalization(name=f"norm_{i}") for i in range(5)]
        with pytest.raises(ValueError, match="'norm_0', 'norm_1', 3 more"):
            tf_dpsub.make_private(mlp(*norms))

    def test_batch_normalization_unfrozen_after_compiling(self):
        norm = layers.BatchNormalization(trainable=False)
        model = private(mlp(norm), dpsgd())
        norm.trainable = True
        with pytest.raises(ValueError, match="without noise.*trainable"):
            model.fit(X, Y, verbose=0)

    def test_frozen_batch_normalization_is_fine(self):
        norm = layers.BatchNormalization(trainable=False)
        model = private(mlp(norm), dpsgd())
        before = [w.numpy() for w in norm.weights]
        model.fit(X, Y, verbose=0)
        for weight, value in zip(norm.weights, before, strict=True):
            np.testing.assert_array_equal(weight, value)

    def test_layer_that_mixes_examples(self):
        model = private(mlp(Mixes(), layers.Dense(4)), dpsgd())
        with pytest.raises(
            gradients.MixesExamples,
            match="Mean '.*mixes.*' reduces over the batch.*Remove",
        ):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0

    @pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
    def test_layer_that_updates_state(self, per_example):
        plain = mlp(Remembers(), layers.Dense(4))
        model = private(plain, dpsgd(per_example=per_example))
        with pytest.raises(ValueError, match="updates a state.*freeze"):
            model.fit(X, Y, verbose=0)
        assert not plain.layers[0].mean.numpy().any()

    def test_graph_alone_where_nothing_is_proved(self):
        unknown = layers.Lambda(lambda x: tf.math.betainc(1.0, 1.0, x))
        model = private(mlp(unknown), dpsgd(per_example="graph"))
        with pytest.raises(gradients.Unproven):
            model.fit(X, Y, verbose=0)


class TestOptimizer:
    def test_plain_optimizer_on_a_private_model(self):
        model = tf_dpsub.make_private(linear())
        for optimizer in ("adam", keras.optimizers.SGD(0.1)):
            with pytest.raises(
                ValueError, match="private optimizer, got .*Wrap it.*DPSGD"
            ):
                model.compile(optimizer, loss())
        with pytest.raises(ValueError, match="private optimizer, got RMSprop"):
            model.compile(loss=loss())

    @pytest.mark.parametrize("how", [{}, {"run_eagerly": True}])
    def test_private_optimizer_on_a_plain_model(self, how):
        plain = linear()
        before = plain.get_weights()
        plain.compile(dpsgd(), loss(), **how)
        with pytest.raises(RuntimeError, match="outside.*Wrap the model first"):
            plain.fit(X, Y, verbose=0)
        for own, other in zip(plain.get_weights(), before, strict=True):
            np.testing.assert_array_equal(own, other)

    def test_optimizer_of_another_model(self):
        """It would move the weights of a model whose ledger knows nothing."""
        optimizer = dpsgd()
        first, second = private(linear(), optimizer), linear()
        first.fit(X, Y, verbose=0)
        before = first.get_weights()
        with pytest.raises(ValueError, match="optimizer"):
            private(second, optimizer).fit(X, Y, verbose=0)
        for own, other in zip(first.get_weights(), before, strict=True):
            np.testing.assert_array_equal(own, other)

    def test_optimizer_of_weights_that_are_frozen_since(self):
        plain, optimizer = mlp(), dpsgd()
        model = private(plain, optimizer)
        model.fit(X, Y, verbose=0)
        plain.layers[0].trainable = False
        with pytest.raises(ValueError, match="optimizer"):
            model.compile(optimizer, loss())
            model.fit(X, Y, verbose=0)

    def test_loss_scaling_of_keras(self):
        model = tf_dpsub.make_private(linear())
        with pytest.raises(ValueError, match="auto_scale_loss=False.*constant"):
            model.compile(dpsgd(), loss(), auto_scale_loss=True)

    def test_not_compiled(self):
        model = tf_dpsub.make_private(linear())
        model.model.compile(dpsgd(), loss())
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(
                ValueError, match="`compile` of the private.*not taken over"
            ):
                train(X, Y)

    def test_loop_of_ones_own(self):
        model = private(linear(), dpsgd())
        pairs = [(tf.zeros_like(w), w) for w in model.trainable_variables]
        with pytest.raises(RuntimeError, match="train by `model.fit`"):
            model.optimizer.apply_gradients(pairs)


class TestData:
    def test_batch_size_of_another_optimizer(self):
        model = private(linear(), dpsgd(batch_size=4))
        with pytest.raises(
            ValueError, match="batch_size=4.*calibrated.*got 5.*Leave it out"
        ):
            model.fit(X, Y, batch_size=5)
        batches = data.PoissonBatches(X, Y, batch_size=5)
        with pytest.raises(ValueError, match="Expected batch_size=4.*got 5"):
            model.fit(batches)
        model.fit(X, Y, batch_size=4, verbose=0)

    def test_batch_size_beyond_the_data(self):
        model = private(linear(), dpsgd(batch_size=EXAMPLES + 1))
        with pytest.raises(
            ValueError, match="batch_size <= 20.*got 21.*smaller batch"
        ):
            model.fit(X, Y)

    def test_batch_size_beyond_what_the_split_leaves(self):
        model = private(linear(), dpsgd(batch_size=16))
        with pytest.raises(ValueError, match="batch_size <= 15.*got 16"):
            model.fit(X, Y, validation_split=0.25)

    def test_arrays_of_different_lengths(self):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="same number of examples"):
            model.fit(X, Y[:-1])

    def test_no_targets(self):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="Expected targets for the loss"):
            model.fit(X)

    @pytest.mark.parametrize("weights", [{"sample_weight": W}, {"y": None}])
    def test_class_weight_with_other_weights_or_no_targets(self, weights):
        model = private(linear(), dpsgd())
        arguments = {"x": X, "y": Y, **weights}
        with pytest.raises(ValueError, match="class_weight.*sample_weight"):
            model.fit(**arguments, class_weight={0: 1.0, 1: 1.0, 2: 2.0})

    def test_train_on_batch_with_both_weights(self):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="without sample_weight. Put"):
            model.train_on_batch(X, Y, W, class_weight={0: 1, 1: 1, 2: 2})

    def test_lengths_that_are_not_known(self):
        sequences = keras.Sequential(
            [
                keras.Input((None, 2)),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        model = private(sequences, dpsgd())
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([(np.zeros([4, 5, 2]), Y[:4])]),
            output_signature=(
                tf.TensorSpec([None, None, 2]),
                tf.TensorSpec([None], tf.int64),
            ),
        )
        with pytest.raises(
            ValueError, match="shape is known.*Pad.*ensure_shape"
        ):
            model.fit(dataset)

    def test_shapes_that_are_not_known(self):
        model = private(linear(), dpsgd())
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([(X[:4], Y[:4])]), output_types=(tf.float32, tf.int64)
        )
        with pytest.raises(ValueError, match="shape is known.*ensure_shape"):
            model.fit(dataset)

    def test_single_examples(self):
        model = private(linear(), dpsgd())
        dataset = tf.data.Dataset.from_tensor_slices((X, Y))
        with pytest.raises(ValueError, match=r"of batches.*batch\(size\)"):
            model.fit(dataset)

    @pytest.mark.parametrize("size, told", [(4, False), (5, True)])
    def test_batches_of_a_dataset_are_dear(self, size, told, caplog):
        model = private(linear(), dpsgd(batch_size=4))
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(
            size, drop_remainder=True
        )
        model.fit(batches, verbose=0)
        (record,) = [r for r in caplog.records if "without amplif" in r.msg]
        assert record.levelname == "WARNING"
        text = "batches have 5 examples, and sums are divided by batch_size=4"
        assert (text in record.getMessage()) == told
        # Both figures, and what gives the smaller one.
        steps, examples = (5, 20) if size == 4 else (4, 20)
        given, drawn = (
            accounting.epsilon(
                noise_multiplier=1.0, sampling_rate=q, steps=steps, delta=1e-5
            )
            for q in (1.0, 4 / examples)
        )
        text = f"{steps} steps cost epsilon = {given:.3g} at delta = 1e-05"
        assert f"{text}, and {drawn:.3g} if" in record.getMessage()
        assert "PoissonBatches(rows, map=...)" in record.getMessage()

    def test_arrays_are_not(self, caplog):
        private(linear(), dpsgd()).fit(X, Y, verbose=0)
        assert "without amplification" not in caplog.text

    def test_a_batch_of_all_examples_is_not(self, caplog):
        model = private(linear(), dpsgd(batch_size=len(X)))
        batch = tf.data.Dataset.from_tensors((X, Y))
        model.fit(batch, epochs=2, verbose=0)
        assert "without amplification" not in caplog.text

    def test_batches_that_are_neither_arrays_nor_a_dataset(self):
        model = private(linear(), dpsgd())
        with pytest.raises(
            ValueError, match=r"x to be made of arrays.*generator.*map=\.\.\."
        ):
            model.fit((X[:4], Y[:4]) for _ in range(3))

    def test_split_declared_public(self):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="split off is private"):
            model.fit(
                X, Y, validation_split=0.2, validation_data_is_public=True
            )


class TestDelta:
    def test_outside_of_its_range(self):
        model = private(linear(), dpsgd())
        model.train_on_batch(X[:4], Y[:4])
        for method in (model.epsilon, model.privacy_statement):
            for delta in (0.0, 1.0, -1e-5, 2.0, float("nan")):
                message = r"[Ee]xpected .*delta.*got"
                with pytest.raises(ValueError, match=message):
                    method(delta)

    def test_not_below_one_in_n_is_warned_of(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        warning = "is not below 1/n = 0.05"
        assert warning in model.privacy_statement(delta=0.05)
        assert warning not in model.privacy_statement(delta=0.049)


# No machine holds so many numbers of each example.
TOO_MANY = 2**20, 2**24


@keras.saving.register_keras_serializable("tests")
class Widens(layers.Layer):
    """Needs more memory than there is, on the way to what it returns."""

    def call(self, x):
        wide = tf.broadcast_to(x[:, :1, None], [x.shape[0] or 1, *TOO_MANY])
        return x + tf.reduce_mean(tf.sin(wide), axis=[1, 2])[:, None]


class TestMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "microbatch_size", "advice"),
        [
            ("fit", 4, r"microbatch_size=2 to the optimizer"),
            ("train_on_batch", 2, "Freeze layers"),
        ],
    )
    def test_too_little(self, method, microbatch_size, advice):
        # TensorFlow waits for ten seconds before it gives up.
        model = private(mlp(Widens()), dpsgd(microbatch_size=microbatch_size))
        expected = f"{microbatch_size} examples at a time, got.*OOM.*{advice}"
        with pytest.raises(MemoryError, match=expected):
            getattr(model, method)(X[:4], Y[:4])

    def test_a_full_disk_is_another_matter(self):
        class Full(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise tf.errors.ResourceExhaustedError(
                    None, None, "weights.index; No space left on device"
                )

        model = private(linear(), dpsgd())
        with pytest.raises(tf.errors.ResourceExhaustedError, match="No space"):
            model.fit(X, Y, verbose=0, callbacks=[Full()])


class TestNarrowedFloat32:
    """By TensorFlow's rewriting of graphs, after the step was proved."""

    @pytest.fixture(name="model")
    def _model(self):
        return private(linear(), dpsgd())

    @pytest.mark.parametrize(
        "option",
        [
            "auto_mixed_precision",
            "auto_mixed_precision_onednn_bfloat16",
            "debug_stripper",
        ],
    )
    def test_options(self, model, option):
        tf.config.optimizer.set_experimental_options({option: True})
        try:
            for train in (model.fit, model.train_on_batch):
                with pytest.raises(ValueError, match=f"the option {option}"):
                    train(X[:4], Y[:4])
            with pytest.raises(ValueError, match="set_dtype_policy"):
                private(linear(), dpsgd())
        finally:
            tf.config.optimizer.set_experimental_options({option: False})
        assert model.ledger.steps == 0
        model.train_on_batch(X[:4], Y[:4])

    @pytest.mark.parametrize(
        "name, value, is_on",
        [
            ("TF_ENABLE_AUTO_MIXED_PRECISION", "1", True),
            ("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE", "1", True),
            ("TF_SET_ONEDNN_FPMATH_MODE", "BF16", True),
            ("ONEDNN_DEFAULT_FPMATH_MODE", "any", True),
            ("TF_ENABLE_AUTO_MIXED_PRECISION", "0", False),
            ("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", False),
            # XLA of parts that nobody names, and fast math of XLA.
            ("TF_XLA_FLAGS", "--a=1 --tf_xla_auto_jit=2 --b=0", True),
            ("TF_XLA_FLAGS", "--tf_xla_auto_jit=single-gpu(1)", True),
            ("TF_XLA_FLAGS", "--tf_xla_auto_jit=0", False),
            ("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit", False),
            ("XLA_FLAGS", "--xla_cpu_enable_fast_math", True),
            ("XLA_FLAGS", "--xla_gpu_enable_fast_min_max=true", True),
            ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false", False),
            ("XLA_FLAGS", "--xla_dump_to=folder", False),
        ],
    )
    def test_environment(self, monkeypatch, name, value, is_on):
        monkeypatch.setenv(name, value)
        if not is_on:
            requirements.require_full_precision()
            return
        with pytest.raises(ValueError, match=f"{name}.* the env"):
            requirements.require_full_precision()

    def test_flags_in_a_file(self, monkeypatch, tmp_path):
        flags = tmp_path / "flags"
        monkeypatch.setenv("XLA_FLAGS", str(flags))
        requirements.require_full_precision()
        flags.write_text("--xla_cpu_enable_fast_math\n", "utf-8")
        with pytest.raises(ValueError, match="xla_cpu_enable_fast_math"):
            requirements.require_full_precision()

    def test_xla_of_parts_that_nobody_names(self, monkeypatch):
        """It may compute rows twice, and round them otherwise."""
        monkeypatch.setattr(tf.config.optimizer, "get_jit", lambda: "on")
        with pytest.raises(ValueError, match="set_jit.*jit_compile=True"):
            requirements.require_full_precision()
