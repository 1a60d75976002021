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


def preprocessed(preprocessor, texts):
    """The inputs that a classifier of texts takes.

    Args:
        preprocessor: `keras_hub.models.Preprocessor`.
        texts: list or array of strings, `[batch]`, or of pairs of them.

    Returns:
        Dict of arrays, `[batch, tokens]`.
    """
    texts = list(texts)
    if texts and not isinstance(texts[0], str):
        # Without y, a tuple would be taken for inputs and labels.
        return preprocessor(tuple(map(list, zip(*texts, strict=True))), y=None)
    return preprocessor(texts)
