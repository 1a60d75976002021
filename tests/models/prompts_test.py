"""Classifiers by a word, against the head written out."""

import math

import keras
import numpy as np
import pytest
from scipy import special

import tf_dpsub
from tests.models.checkpoints import (
    WORDS,
    masked_head,
    tensors_of,
    write,
    write_masked,
)
from tf_dpsub import models
from tf_dpsub.configs import default
from tf_dpsub.launchers.training import trained_parts

TEMPLATE = "a {text} film {mask} s"


def build(path, kind="bert", **changes):
    defaults = {
        "words": ("bad", "good") if kind == "bert" else ("a", "a"),
        "template": TEMPLATE if kind == "bert" else "a{text} a{mask}b",
        "sequence_length": 9,
    }
    return models.prompted_classifier(
        folder=write_masked(path, kind), **defaults | changes
    )


def ids(*words):
    return [WORDS.index(word) for word in words]


class TestPrompts:
    def test_a_text_stands_in_the_template(self, tmp_path):
        model = build(tmp_path)
        inputs = model.preprocessor(["good", "bad good"])
        expected = [
            ids("[CLS]", "a", "good", "film", "[MASK]", "##s", "[SEP]"),
            ids("[CLS]", "a", "bad", "good", "film", "[MASK]", "##s", "[SEP]"),
        ]
        # Word pieces: a lone "s" is unknown.
        expected = [
            [WORDS.index("[UNK]") if t == ids("##s")[0] else t for t in row]
            for row in expected
        ]
        tokens = inputs["token_ids"].numpy()
        for row, wanted in zip(tokens, expected):
            np.testing.assert_array_equal(row[: len(wanted)], wanted)
            assert not row[len(wanted) :].any()
        np.testing.assert_array_equal(
            inputs["padding_mask"], (tokens > 0).astype(int)
        )
        assert inputs["segment_ids"].shape == (2, 9)

    def test_a_long_text_is_cut_the_template_is_not(self, tmp_path):
        model = build(tmp_path)
        (row,) = model.preprocessor(["good " * 20])["token_ids"].numpy()
        assert list(row[-4:-2]) == ids("film", "[MASK]")
        assert list(row[2:5]) == ids("good", "good", "good")

    @pytest.mark.parametrize(
        "template", ["{text}", "{mask}", "{mask} {text}", "{text}{mask}{mask}"]
    )
    def test_a_template_without_its_places(self, tmp_path, template):
        with pytest.raises(ValueError, match="one {text} and then one {mask}"):
            build(tmp_path, template=template)

    def test_no_room_for_a_text(self, tmp_path):
        with pytest.raises(ValueError, match="leaves room.*got 6"):
            build(tmp_path, sequence_length=6)


class TestClassifier:
    @pytest.mark.parametrize("kind", ["bert", "roberta"])
    def test_logits_are_those_of_the_words(self, tmp_path, kind):
        model = build(tmp_path, kind)
        inputs = model.preprocessor(["a", "ab a"])
        hidden = model.backbone(inputs)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        mask = model.preprocessor.tokenizer.mask_token_id
        where = np.argmax(inputs["token_ids"].numpy() == mask, 1)
        x = hidden.numpy()[np.arange(2), where].astype("float64")
        weight, bias, scale, shift, word_bias = (
            v.astype("float64") for v in masked_head(kind).values()
        )
        x = x @ weight.T + bias
        x = x * (1 + special.erf(x / math.sqrt(2))) / 2
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        x = x * scale + shift
        embeddings = tensors_of(kind)[0]["embeddings.word_embeddings.weight"]
        logits = x @ embeddings.T.astype("float64") + word_bias
        words = ids("bad", "good") if kind == "bert" else [10, 10]
        np.testing.assert_allclose(model(inputs), logits[:, words], atol=1e-3)

    def test_is_proved_and_trains_query_and_value_alone(self, tmp_path):
        model = build(tmp_path, dropout=0.0)
        config = default.get_config()
        config.trainable_layers = ("query", "value")
        trained_parts.prepare(model, config)
        assert len(model.trainable_variables) == 2 * 2 * 2
        private = tf_dpsub.make_private(model)
        private.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.Adam(0.05),
                noise_multiplier=0.0,
                l2_norm_clip=1.0,
                batch_size=4,
                per_example="graph",
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        x, y = ["good", "bad film", "a film good", "bad bad"], [1, 0, 1, 0]
        weights = {v.path: v.numpy() for v in model.weights}
        history = private.fit(
            np.array(x, object), np.array(y), epochs=4, verbose=0
        )
        assert private.training_step.implementation == "graph"
        assert history.history["loss"][-1] < history.history["loss"][0]
        for path, before in weights.items():
            (after,) = [v.numpy() for v in model.weights if v.path == path]
            is_trained = "/query/" in path or "/value/" in path
            assert np.any(after != before) == is_trained

    def test_saves_and_loads(self, tmp_path):
        model = build(tmp_path)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(
            tmp_path / "model.keras", compile=False
        )
        texts = ["good film", "bad"]
        np.testing.assert_array_equal(
            loaded(loaded.preprocessor(texts)), model(model.preprocessor(texts))
        )

    def test_a_word_of_several_tokens(self, tmp_path):
        with pytest.raises(ValueError, match="one token, got 'goods'"):
            build(tmp_path, words=("bad", "goods"))

    def test_an_unknown_word(self, tmp_path):
        with pytest.raises(ValueError, match="one token, got 'fine'"):
            build(tmp_path, words=("bad", "fine"))

    def test_one_word_for_each_class(self, tmp_path):
        with pytest.raises(ValueError, match="Expected 3 words"):
            build(tmp_path, num_classes=3)

    def test_a_checkpoint_without_a_head(self, tmp_path):
        folder = write_masked(tmp_path, head={})
        with pytest.raises(ValueError, match="cls.predictions.*got none"):
            models.prompted_classifier(
                folder=folder,
                words=("bad", "good"),
                template=TEMPLATE,
                sequence_length=9,
            )

    def test_another_model(self, tmp_path):
        write(tmp_path, "gpt2")
        with pytest.raises(ValueError, match="BERT or RoBERTa.*holds gpt2"):
            models.prompted_classifier(folder=tmp_path)
