"""What is recommended: rules, the simulation, and the code that trains it."""

import dataclasses

import keras
import numpy as np
import pytest

import tf_dpsub
from tests.models.checkpoints import write
from tf_dpsub import models, planning
from tf_dpsub.planning import rules

RUN = {"examples": 10_000, "epsilon": 1.0, "delta": 1e-5}
GREY, COLOURED = (8, 8, 1), (8, 8, 3)


def images(count, shape=GREY, seed=0):
    return np.random.default_rng(seed).random((count, *shape), "float32")


def vectors(count, size=6):
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 3
    x = 2 * np.eye(3, size)[labels] + generator.standard_normal((count, size))
    return x.astype("float32"), labels


class TestRules:
    """Without labels, rules alone decide."""

    @pytest.mark.parametrize(
        "inputs, representation, whiten",
        [
            (images(1000), "scattering", 1.0),
            (images(2000), "scattering", 1.0),
            (images(40), "scattering", 0.5),
            (images(1000, COLOURED), "scattering and patches", 0.5),
            (["good", "bad"] * 20, "sentence embeddings", 0.5),
            (vectors(40)[0], "inputs", 0.5),
        ],
        ids=[
            "grey",
            "more directions than features",
            "few grey",
            "coloured",
            "texts",
            "vectors",
        ],
    )
    def test_representation(self, inputs, representation, whiten):
        advice = planning.recommend(inputs, **RUN)
        chosen = advice.recommended
        assert chosen.representation == representation
        assert chosen.whiten == whiten
        assert (chosen.start, chosen.mechanism) == ("zero", "FullBatch")
        assert chosen.accuracy is advice.public_accuracy is None
        text = " ".join(advice.reasons)
        assert "no labels to simulate with" in text
        for table in (rules.REPRESENTATIONS, rules.WHITENING, rules.TRAINED):
            assert any(rule.reason in text for rule in table)

    @pytest.mark.parametrize(
        "public, labelled, noise, ranks",
        [
            (4000, 0, 1e-3, (1000,)),
            (1000, 0, 1e-3, (500,)),
            (200, 0, 1e-3, (40, 100)),
            (200, 200, 1e-3, (100, 40)),
            (200, 200, 1e-5, (None, 100)),
        ],
    )
    def test_directions(self, public, labelled, noise, ranks):
        situation = rules.Situation(
            kind="grey images", noise=noise, public=public, labelled=labelled
        )
        assert rules.ranks(situation, None) == ranks

    def test_many_labels_train_all_layers(self):
        few, many = (
            rules.Situation(
                kind="vectors",
                noise=1e-3,
                public=labelled,
                labelled=labelled,
                has_model=True,
            )
            for labelled in (999, 1000)
        )
        first = [
            rules.rule_of(rules.TRAINED, s).choices[0] for s in (few, many)
        ]
        assert first == ["head", "all layers"]

    def test_others_scale_where_own_are_few(self):
        advice = planning.recommend(
            images(10), other_public=images(1200, seed=1), **RUN
        )
        # All that there are of 8 by 8 pixels.
        assert advice.recommended.rank == 324
        assert "    other_public, kinds=('scattering',)" in advice.code
        advice = planning.recommend(
            images(1100), other_public=images(2000, seed=1), **RUN
        )
        assert advice.recommended.rank == 324
        assert "    x_public, kinds=('scattering',)" in advice.code

    def test_too_few_labels_to_simulate(self):
        advice = planning.recommend(images(30), np.arange(30) % 10, **RUN)
        assert advice.recommended.start == "ridge"
        assert (
            "30 labelled public examples are too few to simulate with, 40"
            in (" ".join(advice.reasons))
        )

    def test_settings_are_those_of_the_head(self):
        advice = planning.recommend(images(40), **RUN)
        head = tf_dpsub.heads.FullBatch(**RUN)
        assert advice.settings["noise_multiplier"] == head.noise_multiplier
        assert advice.settings["steps"] == head.steps
        assert advice.noise == head.noise


class TestSimulation:
    @pytest.fixture(scope="class")
    @classmethod
    def advice(cls):
        return planning.recommend(*vectors(60), **RUN)

    def test_simulates_all(self, advice):
        assert all(a.accuracy > 0.34 for a in advice.approaches)
        assert {a.mechanism for a in advice.approaches} == {
            "FullBatch",
            "PrivateRidge",
        }
        # Of six numbers there are no thirty directions.
        assert {a.rank for a in advice.approaches} == {6, None}
        assert advice.public_accuracy > 0.5

    def test_is_repeatable(self, advice):
        assert planning.recommend(*vectors(60), **RUN) == advice

    def test_reads_labels(self, advice):
        x, y = vectors(60)
        shuffled = planning.recommend(
            x, np.random.default_rng(0).permutation(y), **RUN
        )
        assert shuffled.recommended.accuracy < advice.recommended.accuracy - 0.2

    def test_noise_lowers_what_is_simulated(self, advice):
        noisy = planning.recommend(
            *vectors(60), **RUN | {"examples": 60, "epsilon": 0.05}
        )
        ridge, noisy_ridge = (
            next(a for a in one.approaches if a.mechanism == "PrivateRidge")
            for one in (advice, noisy)
        )
        assert noisy_ridge.accuracy < ridge.accuracy - 0.2

    def test_a_decided_simulation_overrules(self):
        """Classes along the loudest direction, which whitening weakens."""
        labels = np.arange(600) % 2
        x = np.random.default_rng(0).standard_normal((600, 100))
        x += labels[:, None] - 0.5
        advice = planning.recommend(
            x,
            labels,
            starts=("zero",),
            **RUN | {"examples": 600, "epsilon": 0.1},
        )
        assert advice.approaches[0].whiten == 0.5
        assert advice.recommended.whiten == 0.0
        assert "the simulation overrules them" in " ".join(advice.reasons)

    def test_rules_stand_where_it_is_not_decided(self, advice):
        assert advice.recommended == advice.approaches[0]

    def test_public_training_of_all_layers(self, monkeypatch):
        x, y = vectors(1000)
        plain = models.mlp((6,), (8,), 3)
        before = plain.get_weights()
        advice = planning.recommend(x, y, model=plain, **RUN)
        chosen = advice.recommended
        assert (chosen.start, chosen.trained) == ("fit_public", "all layers")
        assert chosen.accuracy == advice.public_accuracy > 0.7
        for old, new in zip(before, plain.get_weights()):
            np.testing.assert_array_equal(old, new)
        spent = tf_dpsub.accounting.epsilon(
            noise_multiplier=advice.settings["noise_multiplier"],
            sampling_rate=0.1,
            steps=150,
            delta=1e-5,
            accountant="pld",
        )
        assert 0.99 < spent <= 1.0

    def test_given_features(self):
        features = keras.Sequential(
            [keras.Input(GREY), keras.layers.Conv2D(2, 3)]
        )
        y = np.arange(60) % 3
        x = images(60) + y[:, None, None, None] / 3
        advice = planning.recommend(x / 2, y, features=features, **RUN)
        assert {a.representation for a in advice.approaches} == {
            "given features"
        }
        assert advice.recommended.accuracy > 0.5

    def test_texts(self, tmp_path):
        encoder = {
            "folder": str(write(tmp_path, "bert")),
            "sequence_length": 12,
        }
        texts = ["good film", "bad a e", "film good e", "bad film"] * 12
        advice = planning.recommend(
            texts, [1, 0, 1, 0] * 12, text_encoder=encoder, **RUN
        )
        assert advice.recommended.accuracy > 0.8
        assert "sentence_classifier" in advice.code


def _trained(advice, x_public, y_public, x, y, **names):
    """The model that the recommended code trains."""
    namespace = {
        "x_public": x_public,
        "y_public": y_public,
        "x": x,
        "y": y,
        "num_classes": 3,
        **names,
    }
    exec(advice.code.replace("head.steps", "1"), namespace)
    return namespace["model"]


@pytest.mark.slow
class TestCode:
    """It runs, and keeps the budget."""

    @pytest.mark.parametrize("count", [40, 400])
    def test_vectors(self, count):
        x, y = vectors(440)
        x_public, y_public, x, y = x[:count], y[:count], x[count:], y[count:]
        advice = planning.recommend(
            x_public, y_public, **RUN | {"examples": len(x)}
        )
        model = _trained(advice, x_public, y_public, x, y)
        assert 0 < model.epsilon(delta=1e-5, accountant="pld") <= 1.0

    def test_ridge_of_one_release(self):
        x, y = vectors(200)
        advice = planning.recommend(x[:40], **RUN)
        chosen = dataclasses.replace(
            advice.recommended, mechanism="PrivateRidge", rank=3
        )
        from tf_dpsub.planning import recommendation

        head = tf_dpsub.heads.FullBatch(**RUN)
        code = recommendation._code(chosen, head, "x_public", (6,), None)
        model = _trained(
            dataclasses.replace(advice, code=code), x[:40], None, x[40:], y[40:]
        )
        assert 0.9 < model.epsilon(delta=1e-5, accountant="pld") <= 1.0

    def test_images(self):
        x, y = images(100), np.arange(100) % 3
        advice = planning.recommend(x[:40], y[:40], **RUN | {"examples": 60})
        model = _trained(advice, x[:40], y[:40], x[40:], y[40:])
        assert model.epsilon(delta=1e-5, accountant="pld") <= 1.0

    def test_given_features(self):
        features = keras.Sequential(
            [keras.Input(GREY), keras.layers.Conv2D(2, 3)]
        )
        x, y = images(100), np.arange(100) % 3
        advice = planning.recommend(
            x[:40], features=features, **RUN | {"examples": 60}
        )
        model = _trained(
            advice, x[:40], None, x[40:], y[40:], features=features
        )
        assert model.epsilon(delta=1e-5, accountant="pld") <= 1.0

    def test_all_layers(self):
        x, y = vectors(1100)
        plain = models.mlp((6,), (4,), 3)
        advice = planning.recommend(
            x[:1000], y[:1000], model=plain, **RUN | {"examples": 100}
        )
        model = _trained(
            advice, x[:1000], y[:1000], x[1000:], y[1000:], plain=plain
        )
        assert 0.9 < model.epsilon(delta=1e-5, accountant="pld") <= 1.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"x_public": None}, "Expected public examples, got none"),
        ({"x_public": images(0)}, "Expected public examples, got none"),
        ({"x_public": 255 * images(4)}, "in .0, 1.*Divide bytes by 255"),
        ({"x_public": images(4, (8, 8, 2))}, "compare mechanisms by"),
        ({"x_public": images(4, (5, 8, 1))}, "8 pixels on each side"),
        ({"x_public": np.full((4, 3), np.nan)}, "vectors that are finite"),
        ({"x_public": [1.0, 2.0]}, "Expected public texts, vectors"),
        ({"x_public": np.array([1, "a"], object)}, "texts that are strings"),
        ({"other_public": images(4, (9, 9, 1))}, "shape of x_public"),
        ({"other_public": ["a", "b"]}, "shape of x_public"),
        ({"y_public": np.zeros(3, int)}, "label for each of 4 x_public"),
        ({"y_public": np.zeros(4)}, "labels that are integers"),
        ({"y_public": np.arange(4) - 1}, "labels that are integers from 0"),
        ({"y_public": np.arange(4), "num_classes": 3}, "num_classes = 3"),
        ({"starts": ("ridge",)}, "labels of public examples for the start"),
        (
            {"y_public": np.arange(4), "starts": ("fit_public",)},
            "Expected a model whose layers are trained",
        ),
        ({"starts": ("rigde",)}, "Did you mean 'ridge'"),
        ({"starts": ()}, "as starts, got none"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 2.0}, "delta"),
        ({"examples": 0}, "examples >= 1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        planning.recommend(**{"x_public": images(4)} | RUN | arguments)


def test_features_that_are_not_built():
    with pytest.raises(ValueError, match="built Keras model of one input"):
        planning.recommend(
            images(60),
            np.arange(60) % 3,
            features=keras.layers.Conv2D(2, 3),
            **RUN,
        )
