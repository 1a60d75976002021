"""A clip that follows a quantile of norms, at the cost of one Gaussian."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub import accounting, optimizers
from tf_dpsub.data import given_batches

_BATCH = 16
_INPUTS, _OUTPUTS = 6, 4


def optimizer_of(inner="sgd", **arguments):
    return optimizers.AdaptiveDPSGD(
        inner,
        **{
            "noise_multiplier": 1.0,
            "l2_norm_clip": 1.0,
            "batch_size": _BATCH,
            **arguments,
        },
    )


def product(y_true, y_pred):
    return keras.ops.sum(y_true * y_pred, -1)


def compiled(loss=product, **arguments):
    """A private model; the gradient of an example does not change."""
    model = tf_dpsub.make_private(
        keras.Sequential(
            [
                keras.Input((_INPUTS,)),
                keras.layers.Dense(
                    _OUTPUTS, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
    )
    # The input, once for each output.
    model.compile(
        optimizer_of(keras.optimizers.SGD(1.0), **arguments), loss=loss
    )
    return model


def examples_of(norms):
    """Examples whose gradients have these norms, and point in one direction."""
    x = np.zeros((len(norms), _INPUTS), np.float32)
    x[:, 0] = np.asarray(norms) / math.sqrt(_OUTPUTS)
    return x, np.ones((len(norms), _OUTPUTS), np.float32)


def batch_of(model, *data):
    batch = given_batches.padded(
        given_batches.named(*data), model.microbatch_size
    )
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    return batch


def released(model, norms):
    """The norm of the sum, and the count, without noise."""
    batch = batch_of(model, *examples_of(norms))
    sums = model.optimizer.released_sums(model.training_step(batch))
    total, count = (np.asarray(s, np.float64) for s in sums)
    return np.linalg.norm(total), float(count)


class TestEvent:
    @pytest.mark.parametrize(
        ("sigma", "stddev", "expected"),
        [
            (1.0, 12.5, 1.000801),
            (4.0, 12.5, 4.052204),
            (0.7, 51.2, 0.700016),
        ],
    )
    def test_sum_pays_for_the_count(self, sigma, stddev, expected):
        optimizer = optimizer_of(
            noise_multiplier=sigma, clipped_count_stddev=stddev
        )
        optimizer.build([keras.Variable(np.zeros((3, 2), "float32"))])
        of_sum, of_count = optimizer.noise_stddevs()
        assert of_sum == pytest.approx(expected, abs=1e-6)
        assert of_count == stddev
        # One example moves them by 1 and by 1/2.
        together = math.hypot(1 / of_sum, 0.5 / of_count)
        assert 1 / together == pytest.approx(sigma, rel=1e-12)
        assert optimizer.effective_noise_multiplier == pytest.approx(
            sigma, rel=1e-12
        )

    @pytest.mark.parametrize("sigma", [1e-6, 1.0, 1.999999999, 1e3])
    def test_effective_multiplier_near_the_limit(self, sigma):
        optimizer = optimizer_of(
            noise_multiplier=sigma, clipped_count_stddev=sigma / 2 * (1 + 1e-9)
        )
        optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        assert optimizer.effective_noise_multiplier == pytest.approx(
            sigma, rel=1e-6
        )

    def test_ledger_holds_the_rule_and_the_first_clip(self):
        model = compiled(clipped_count_stddev=2.5, l2_norm_clip=0.5)
        x, y = examples_of(np.ones(64))
        model.fit(x, y, epochs=2, verbose=0)
        (entry,) = model.ledger.entries
        assert entry.steps == 8
        assert entry.l2_norm_clip == 0.5
        assert model.optimizer.current_clip != 0.5
        assert entry.mechanism == (
            "AdaptiveDPSGD, whose clip starts from C and follows the 0.5 "
            "quantile of norms at rate 0.2, by counts with noise of 2.5"
        )
        assert model.epsilon(1e-5) == pytest.approx(
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling_rate=_BATCH / 64,
                steps=8,
                delta=1e-5,
            ),
            rel=1e-9,
        )

    def test_without_noise_nothing_is_private(self):
        optimizer = optimizer_of(noise_multiplier=0.0)
        optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        assert optimizer.effective_noise_multiplier == 0.0


class TestReleases:
    def test_sum_is_in_units_of_the_clip(self):
        model = compiled(l2_norm_clip=4.0)
        share = 1 - 1.25 * 2.0**-10
        total, count = released(model, [1.0, 2.0, 3.0, 8.0, 1e6])
        assert total == pytest.approx((6 + 2 * 4 * share) / 4, rel=1e-5)
        assert count == 3 / 2 - 2 / 2

    @pytest.mark.parametrize("first", [2.0**-15, 1.0, 1e10])
    def test_one_example_moves_it_by_one_and_a_half(self, first):
        model = compiled(l2_norm_clip=first)
        norms = [1e-30, 1e-3, 0.3699, 0.37, 1.0, 1e9, 1e30, math.inf, math.nan]
        for clip in (2.0**-20, 0.37, 2.0**20):
            others = np.full(5, clip * first)
            batch_of(model, *examples_of(others))
            model.optimizer.clip_variable.assign(clip * first)
            before = released(model, others)
            for norm in norms:
                after = released(model, [*others, norm])
                assert np.isfinite(after).all(), (clip, norm)
                assert abs(after[0] - before[0]) <= 1, (clip, norm)
                assert abs(after[1] - before[1]) in (0, 0.5), (clip, norm)

    def test_what_adds_nothing_does_not_count(self):
        model = compiled()
        before = released(model, [0.5, 3.0, 3.0])
        for nothing in (0.0, math.nan, math.inf):
            after = released(model, [0.5, nothing, 3.0, 3.0, nothing])
            assert after == before, nothing

    @pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
    def test_weight_zero_is_as_if_not_there(self, per_example):
        """The neighbour that a guarantee is about is an empty example."""
        model = compiled(per_example=per_example)
        for norm in (0.5, 3.0, 1e18):
            norms, released_of = [0.5, 3.0, norm], []
            for rows, weight in ((3, 1.0), (3, 0.0), (2, 1.0)):
                x, y = examples_of(norms[:rows])
                weights = np.array([1.0, 1.0, weight], np.float32)[:rows]
                batch = batch_of(model, x, y, weights)
                sums = model.optimizer.released_sums(model.training_step(batch))
                released_of.append([np.array(s) for s in sums])
            there, empty, gone = released_of
            np.testing.assert_array_equal(empty[0], gone[0])
            assert empty[1] == gone[1]
            assert abs(there[1] - gone[1]) == 0.5

    def test_a_clip_out_of_range_is_limited(self):
        model = compiled(l2_norm_clip=3.0)
        released(model, [1.0])
        for clip in (1e30, 0.0, -1.0, math.inf):
            model.optimizer.clip_variable.assign(clip)
            assert 3 * 2.0**-20 <= model.optimizer.current_clip <= 3 * 2.0**20
            total, count = released(model, [1.0, 1e-5, 1e9])
            assert 0 < total <= 3 and abs(count) <= 1.5

    def test_gradient_is_in_units_of_the_weights(self):
        model = compiled(l2_norm_clip=4.0)
        released(model, [1.0])
        optimizer = model.optimizer
        (gradient,) = optimizer.privatize(
            [tf.constant([3.0]), tf.constant(9.0)]
        )
        np.testing.assert_allclose(gradient, [3.0 * 4.0 / _BATCH])


class TestClip:
    @pytest.mark.parametrize(
        ("count", "share"),
        # Share of 16 gradients by the noisy count, limited to [0, 1].
        [(-8.0, 0.0), (-100.0, 0.0), (0.0, 0.5), (4.0, 0.75), (100.0, 1.0)],
    )
    def test_follows_the_count(self, count, share):
        optimizer = optimizer_of(
            keras.optimizers.SGD(1.0),
            l2_norm_clip=2.0,
            target_unclipped_quantile=0.6,
            clip_learning_rate=0.3,
        )
        weights = keras.Variable(np.zeros(2, "float32"))
        optimizer.build([weights])
        optimizer.apply_noisy([tf.constant([8.0, 0.0]), tf.constant(count)])
        # The clip of the step itself, not of the next one.
        np.testing.assert_allclose(weights, [-8.0 * 2.0 / _BATCH, 0.0])
        assert optimizer.current_clip == pytest.approx(
            2.0 * math.exp(-0.3 * (share - 0.6)), rel=1e-6
        )

    # From where on as many are unclipped, to where one more is.
    @pytest.mark.parametrize(("quantile", "norm"), [(0.5, 8), (0.25, 4)])
    @pytest.mark.parametrize("first", [1e-2, 1e4])
    def test_reaches_the_quantile(self, first, quantile, norm):
        norms = np.arange(1.0, _BATCH + 1)
        model = compiled(
            l2_norm_clip=first,
            noise_multiplier=0.0,
            clipped_count_stddev=1e-6,
            target_unclipped_quantile=quantile,
        )
        x, y = examples_of(norms)
        for _ in range(150):
            model.train_on_batch(x, y)
        # The last step was of at most 0.2 / 16.
        assert 0.98 * norm < model.optimizer.current_clip < 1.02 * (norm + 1)

    def test_is_saved(self, tmp_path):
        model = compiled(loss="mse")
        x, y = examples_of(np.ones(32))
        model.fit(x, y, epochs=3, verbose=0)
        clip = model.optimizer.current_clip
        assert clip != 1.0
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert again.optimizer.current_clip == clip


def test_config_is_restored():
    optimizer = optimizer_of(
        target_unclipped_quantile=0.7,
        clip_learning_rate=0.1,
        clipped_count_stddev=3,
    )
    config = json.loads(
        json.dumps(keras.saving.serialize_keras_object(optimizer))
    )
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("target_unclipped_quantile", 0.0, "0 < target_unclipped_quantile < 1"),
        ("target_unclipped_quantile", 1.0, "got 1.0"),
        ("target_unclipped_quantile", math.nan, "got nan"),
        ("clip_learning_rate", 0.0, "clip_learning_rate > 0"),
        ("clip_learning_rate", math.nan, "clip_learning_rate > 0"),
        ("clip_learning_rate", math.inf, "a finite clip_learning_rate"),
        ("clipped_count_stddev", 0.5, "> noise_multiplier / 2 = 0.5, got 0.5"),
        ("clipped_count_stddev", math.nan, "got nan"),
        ("clipped_count_stddev", math.inf, "Expected finite"),
        ("clipped_count_stddev", "much", "got 'much'"),
        ("noise_multiplier", 1.6, "cost as much as a step may. Take larger"),
        ("l2_norm_clip", 1e-7, "1.05e-06 <= l2_norm_clip"),
        ("l2_norm_clip", 1e21, "l2_norm_clip <= 1e.20"),
        ("clipping", "automatic", "clipping='flat' where the clip follows"),
    ],
)
def test_out_of_range(name, value, told):
    with pytest.raises(ValueError, match=told):
        optimizer_of(**{name: value})


def test_infinite_clip():
    with pytest.raises(ValueError, match="the first clip, got inf"):
        optimizer_of(l2_norm_clip=math.inf, noise_multiplier=0.0)
