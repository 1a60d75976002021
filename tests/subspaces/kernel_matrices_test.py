"""Weights as matrices from inputs to outputs."""

import keras
import pytest

from tf_dpsub.subspaces.kernel_matrices import kernel_matrices

layers = keras.layers


def sides(model, splits=None):
    variables = model.trainable_variables
    matrices = kernel_matrices(model, variables, splits)
    return {
        v.path.split("/", 1)[-1]: m and (m.inputs, m.outputs)
        for v, m in zip(variables, matrices, strict=True)
    }


def test_texts():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 8)(tokens)
    x = layers.MultiHeadAttention(2, 3, name="heads")(x, x)
    x = layers.LSTM(4)(layers.LayerNormalization()(x))
    found = sides(keras.Model(tokens, layers.Dense(1, name="logit")(x)))
    assert found == {
        "embeddings": (9, 8),
        **{f"{k}/kernel": (8, 6) for k in ("query", "key", "value")},
        **{f"{k}/bias": None for k in ("query", "key", "value")},
        "attention_output/kernel": (6, 8),
        "attention_output/bias": None,
        "gamma": None,
        "beta": None,
        "lstm_cell/kernel": (8, 16),
        "lstm_cell/recurrent_kernel": (4, 16),
        "lstm_cell/bias": None,
        # One column is a vector.
        "kernel": None,
        "bias": None,
    }


def test_images():
    plain = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(3, 2, use_bias=False, name="a"),
            layers.Conv2DTranspose(4, 2, use_bias=False, name="b"),
            layers.EinsumDense("bhwc,dc->bhwd", (8, 8, 6), name="c"),
        ]
    )
    variables = plain.trainable_variables
    a, b, c = kernel_matrices(plain, variables)
    assert (a.inputs, a.outputs) == (8, 3)
    # From places of the output to channels of the input.
    assert (b.inputs, b.outputs) == (16, 3)
    assert (c.inputs, c.outputs, c.is_transposed) == (4, 6, True)
    a, b, c = kernel_matrices(plain, variables, {"a/": 1, "b/kernel": 0})
    assert (a.inputs, a.outputs) == (2, 12)
    assert b is None and c is not None


@pytest.mark.parametrize("split", [2, 5])
def test_a_split_out_of_range(split):
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="a")])
    with pytest.raises(
        ValueError, match="Expected a split of .*a/kernel below"
    ):
        kernel_matrices(plain, plain.trainable_variables, {"a/": split})
