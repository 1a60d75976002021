"""Persons are drawn, and the rows of each are clipped as one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    W,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    linear,
    loss,
    mlp,
    private,
    twin,
)
from tf_dpsub import accounting
from tf_dpsub.data import PoissonBatches

layers = keras.layers

# Of five persons: 1, 2, 4, 6 and 7 rows, in no order.
COUNTS = np.array([1, 2, 4, 6, 7])
IDS = np.random.default_rng(3).permutation(np.repeat(np.arange(5), COUNTS))
IMPLEMENTATIONS = ("graph", "vectorized_map")


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def drawing_all(**settings):
    """An optimizer whose batches are all persons, without noise."""
    return dpsgd(
        **{"batch_size": 5, "microbatch_size": None, **EXACT, **settings}
    )


class TestGradient:
    @pytest.mark.parametrize("per_example", IMPLEMENTATIONS)
    def test_is_the_sum_of_all_rows_over_public_numbers(self, per_example):
        """Of those with fewer rows, the missing ones have no gradient."""
        plain = mlp()
        expected = twin(plain)
        model = private(plain, drawing_all(per_example=per_example))
        history = model.fit(
            X,
            Y,
            sample_weight=W,
            person_ids=IDS,
            rows_per_person_per_step=7,
            steps_per_epoch=1,
            verbose=0,
        ).history
        with tf.GradientTape() as tape:
            losses = loss("none")(Y, expected(X)) * W
            total = tf.reduce_sum(losses) / (5 * 7)
        inner = keras.optimizers.SGD(0.1)
        variables = expected.trainable_variables
        inner.apply(tape.gradient(total, variables), variables)
        assert_same_weights(plain, expected)
        assert model.training_step.implementation == per_example
        # The loss that is shown is that of a row.
        np.testing.assert_allclose(
            history["loss"], np.mean(losses.numpy()), rtol=1e-5
        )

    def test_metrics_count_the_rows_that_are_given(self):
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        model = private(linear(), drawing_all(), metrics=[accuracy])
        expected = np.mean(model.model(X).numpy().argmax(1) == Y)
        history = model.fit(
            X,
            Y,
            person_ids=IDS,
            rows_per_person_per_step=7,
            steps_per_epoch=1,
            verbose=0,
        ).history
        np.testing.assert_allclose(history["accuracy"], expected, rtol=1e-5)

    @pytest.mark.parametrize("per_example", IMPLEMENTATIONS)
    def test_a_person_moves_the_sum_by_one_clip(self, per_example):
        """However many rows it has, and whatever they are."""
        plain = linear()
        optimizer = drawing_all(l2_norm_clip=0.5, per_example=per_example)
        model = private(plain, optimizer)
        moved = []
        for value in (1.0, 1e6, np.nan):
            plain.set_weights([np.zeros((4, CLASSES)), np.zeros(CLASSES)])
            x = np.where(IDS == 4, value, 0.0)[:, None] * np.ones(4)
            model.fit(
                x.astype("float32"),
                np.zeros(EXAMPLES, int),
                sample_weight=(IDS == 4).astype("float32"),
                person_ids=IDS,
                rows_per_person_per_step=3,
                steps_per_epoch=1,
                verbose=0,
            )
            weights = np.concatenate([np.ravel(w) for w in plain.get_weights()])
            # A step of 0.1 along the sum over five persons.
            moved.append(np.linalg.norm(weights) * 5 / 0.1)
        assert all(0.499 < distance <= 0.5 for distance in moved[:2])
        assert moved[2] == 0

    def test_one_row_of_each_is_plain_sampling(self):
        """The rows are the persons."""
        plain = mlp()
        expected = twin(plain)
        optimizer = drawing_all(batch_size=EXAMPLES)
        model = private(plain, optimizer)
        model.fit(X, Y, person_ids=np.arange(EXAMPLES), verbose=0)
        reference = private(expected, drawing_all(batch_size=EXAMPLES))
        reference.fit(X, Y, verbose=0)
        assert_same_weights(plain, expected)


def of_public_examples():
    return tf_dpsub.subspaces.PublicSubspace(
        X[:8] + 1, Y[:8], rank=2, method="gram"
    )


MECHANISMS = {
    "AdaptiveDPSGD": lambda: {"clipped_count_stddev": 2.0},
    "GEP": lambda: {
        "subspace": of_public_examples(),
        "residual_norm_clip": 1.0,
    },
    "RGP": lambda: {"warmup_steps": 1},
}


class TestFit:
    @pytest.mark.parametrize("name", MECHANISMS)
    def test_works_with_each_kind_of_mechanism(self, name):
        optimizer = getattr(tf_dpsub.optimizers, name)(
            "sgd",
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=2,
            **MECHANISMS[name](),
        )
        plain = mlp(layers.Dense(5, activation="tanh"))
        if name == "RGP":
            tf_dpsub.layers.reparametrize(plain, 1)
        model = private(plain, optimizer)
        model.fit(X, Y, person_ids=IDS, rows_per_person_per_step=3, verbose=0)
        assert model.training_step.implementation == "graph"
        assert model.epsilon(1e-5, "rdp") == pytest.approx(
            accounting.epsilon(
                noise_multiplier=optimizer.effective_noise_multiplier,
                sampling_rate=2 / 5,
                steps=3,
                delta=1e-5,
                accountant="rdp",
            )
        )

    def test_ledger_and_statement_are_of_persons(self):
        optimizer = tf_dpsub.optimizers.DPSGD(
            "sgd", epsilon=0.5, delta=1e-5, l2_norm_clip=1.0, batch_size=2
        )
        model = private(linear(), optimizer)
        model.fit(
            X,
            Y,
            person_ids=IDS,
            rows_per_person_per_step=2,
            epochs=2,
            verbose=0,
        )
        (entry,) = model.ledger.entries
        assert (entry.unit, entry.examples, entry.steps) == ("person", 5, 6)
        assert 0.499 < model.epsilon(1e-5) <= 0.5
        assert model.epsilon(1e-5, rows_per_person=7) == model.epsilon(1e-5)
        text = " ".join(model.privacy_statement(1e-5).split())
        assert "What is protected is one person: all rows with one id" in text
        assert "a step takes at most 2 rows of a person" in text

    def test_rows_of_persons_in_epsilon_and_statement(self):
        model = private(linear(), dpsgd(noise_multiplier=8.0))
        model.fit(X, Y, verbose=0)
        spent = model.epsilon(1e-5, rows_per_person=3)
        assert spent == accounting.epsilon(
            noise_multiplier=8.0,
            sampling_rate=4 / EXAMPLES,
            steps=5,
            delta=1e-5,
            rows_per_person=3,
        )
        assert spent > 3 * model.epsilon(1e-5)
        text = model.privacy_statement(1e-5, rows_per_person=3)
        assert "at most 3 rows, together" in " ".join(text.split())

    def test_rows_of_a_map_and_of_frozen_features(self):
        def noisy(x, y, seed):
            return x + tf.random.stateless_normal([4], seed), y

        inputs = keras.Input((4,))
        features = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        frozen = tf_dpsub.layers.FrozenFeatures(features)(inputs)
        head = keras.Model(inputs, layers.Dense(CLASSES)(frozen))
        rows = PoissonBatches(X, Y, batch_size=2, map=noisy)
        for plain, data in ((linear(), (rows,)), (head, (X, Y))):
            model = private(plain, dpsgd(batch_size=2))
            model.fit(
                *data, person_ids=IDS, rows_per_person_per_step=2, verbose=0
            )
            (entry,) = model.ledger.entries
            assert (entry.unit, entry.examples) == ("person", 5)

    def test_rates_of_rows_are_in_the_ledger(self):
        rates = np.where(Y == 0, 0.5, 0.1)
        batches = PoissonBatches(X, Y, batch_size=4, sampling_rates=rates)
        model = private(linear(), dpsgd(noise_multiplier=8.0))
        model.fit(batches, verbose=0)
        assert model.ledger.entries[0].largest_rate == 0.5
        assert model.epsilon(1e-5) == accounting.epsilon(
            noise_multiplier=8.0, sampling_rate=0.5, steps=5, delta=1e-5
        )
        text = model.privacy_statement(1e-5)
        assert "with probability 0.5 at most" in " ".join(text.split())


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"person_ids": IDS[:-1]}, "one id for each of 20 rows, got 19"),
            ({"person_ids": IDS / 2}, "whole numbers or strings"),
            ({"person_ids": IDS - 1}, "negative number"),
            (
                {"person_ids": IDS, "rows_per_person_per_step": 0},
                "rows_per_person_per_step >= 1",
            ),
            ({"rows_per_person_per_step": 2}, "Expected person_ids with"),
            ({"person_ids": IDS, "views": 2}, "Expected views=1"),
            ({"person_ids": IDS, "validation_split": 0.2}, "whole persons"),
            ({"person_ids": IDS % 2}, "<= 2, the number of persons"),
            (
                {"person_ids": IDS, "each_example_once_per_epoch": True},
                "each_example_once_per_epoch=False",
            ),
        ],
    )
    def test_nothing_is_charged(self, arguments, message):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, verbose=0, **arguments)
        assert model.ledger.steps == 0

    def test_batches_of_a_dataset(self):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="no person can be drawn"):
            model.fit(dataset, person_ids=IDS, verbose=0)

    def test_rates_of_rows(self):
        batches = PoissonBatches(
            X, Y, batch_size=4, sampling_rates=np.full(EXAMPLES, 0.2)
        )
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="person_ids or sampling_rates"):
            model.fit(batches, person_ids=IDS, verbose=0)

    def test_rates_that_draw_more_than_clipping_leaves_room_for(self):
        x = np.zeros((1000, 4), "float32")
        model = private(linear(), dpsgd(microbatch_size=448))
        batches = PoissonBatches(
            x, np.zeros(1000), batch_size=4, sampling_rates=np.full(1000, 0.2)
        )
        with pytest.raises(ValueError, match="sum is about batch_size=4, got"):
            model.fit(batches, verbose=0)
        assert model.ledger.steps == 0

    def test_steps_that_protect_rows_and_persons_do_not_mix(self):
        of_persons, of_rows = ({"person_ids": IDS}, {})
        for first, second in ((of_persons, of_rows), (of_rows, of_persons)):
            model = private(linear(), dpsgd())
            model.fit(X, Y, verbose=0, **first)
            steps = model.ledger.steps
            with pytest.raises(ValueError, match="no epsilon covers both"):
                model.fit(X, Y, verbose=0, **second)
            if first is of_persons:
                with pytest.raises(ValueError, match="no epsilon covers both"):
                    model.train_on_batch(X[:4], Y[:4])
            assert model.ledger.steps == steps
