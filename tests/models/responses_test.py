"""GPT-2 learns responses, and writes them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.checkpoints import write_gpt2_of_bytes
from tf_dpsub import models


@pytest.fixture
def model(tmp_path):
    return models.gpt2(folder=write_gpt2_of_bytes(tmp_path), sequence_length=10)


def words(model, tokens):
    vocabulary = list(model.preprocessor.tokenizer.get_vocabulary())
    return [vocabulary[int(t)] for t in np.asarray(tokens)]


EXAMPLES = {"prompts": ["a", "abc"], "responses": ["th é", "this is too long"]}


class TestPreprocessor:
    def test_a_prompt_and_its_response_in_one_sequence(self, model):
        x, y, w = model.preprocessor(EXAMPLES)
        end = "<|endoftext|>"
        # A line break, a space and é, as bytes of GPT-2.
        whole = [end, "a", "Ċ", "th", "Ġ", "Ã", "©", end]
        assert words(model, x["token_ids"][0])[:8] == whole
        assert words(model, y[0])[:7] == whole[1:]
        learned = [1 if 2 <= k <= 6 else 0 for k in range(10)]
        assert np.asarray(w[0]).astype(int).tolist() == learned
        assert np.asarray(x["padding_mask"][0]).sum() == 8

    def test_long_sequences_are_cut(self, model):
        x, y, w = model.preprocessor(EXAMPLES)
        assert words(model, x["token_ids"][1])[5:] == [*"th i s Ġ i".split()]
        assert words(model, y[1])[-1] == "<|endoftext|>"
        assert np.asarray(w[1]).astype(int).tolist() == [0] * 4 + [1] * 6

    def test_in_a_pipeline(self, model):
        data = tf.data.Dataset.from_tensor_slices(EXAMPLES).batch(2)
        (actual,) = data.map(model.preprocessor)
        expected = model.preprocessor(EXAMPLES)
        for one, other in zip(*map(keras.tree.flatten, (actual, expected))):
            np.testing.assert_array_equal(one, other)

    def test_texts_alone_are_learned_as_a_whole(self, model):
        _, _, w = model.preprocessor(["a b"])
        assert np.asarray(w).sum() == 4


def test_prompts_are_those_of_training(model):
    inputs = model.preprocessor.generate_preprocess(["abc"], 10)
    actual = words(model, np.asarray(inputs["token_ids"])[0])
    assert actual[:5] == ["<|endoftext|>", *"abc", "Ċ"]
    assert np.asarray(inputs["padding_mask"]).sum() == 5


def test_a_saved_model_answers_alike(model, tmp_path):
    model.compile(sampler="greedy")
    first = model.generate(["abc", "a"], strip_prompt=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    loaded.compile(sampler="greedy")
    assert loaded.preprocessor.separator == "\n"
    assert loaded.generate(["abc", "a"], strip_prompt=True) == first
