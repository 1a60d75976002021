"""Tokenizers of keras_hub, inside and outside of graphs."""

import tensorflow as tf


def ragged(tokenizer, texts: list):
    """The tokens of texts.

    Args:
        tokenizer: `keras_hub.tokenizers.Tokenizer`.
        texts: list, array or tensor of strings, `[batch]`.

    Returns:
        A `tf.RaggedTensor` of int32, `[batch, None]`.
    """
    tokens = tokenizer(tf.convert_to_tensor(texts, tf.string))
    if isinstance(tokens, list):
        # So keras_hub returns rows of several lengths, outside of a graph.
        tokens = tf.ragged.constant(tokens, tf.int32, ragged_rank=1)
    return tokens
