"""Classifiers that ask a masked language model for a word."""

import functools

import keras
import keras_hub
import tensorflow as tf
from keras import ops

from tf_dpsub.models import tokenizers

# Places in a template of the text, and of the word that is asked for.
TEXT, MASK = "{text}", "{mask}"


@keras.saving.register_keras_serializable("tf_dpsub")
class PromptPreprocessor(keras_hub.models.Preprocessor):
    """Puts texts into a template, as tokens.

    Texts that are too long are cut; the template stays whole.

    Args:
        tokenizer: `keras_hub.tokenizers.Tokenizer` with `start_token_id`,
            `end_token_id`, `pad_token_id` and `mask_token_id`.
        sequence_length: int, tokens of a prompt, which is padded to it.
        template: string with `{text}` and, after it, `{mask}`.
        has_segments: bool, whether the model takes `segment_ids`.

    Raises:
        ValueError: if the template has not both, in this order.
    """

    def __init__(
        self,
        tokenizer,
        sequence_length: int,
        template: str,
        has_segments: bool,
        **kwargs,
    ):
        super().__init__(**kwargs)
        before, text, remainder = template.partition(TEXT)
        between, mask, after = remainder.partition(MASK)
        if not (text and mask) or TEXT in remainder or MASK in after:
            raise ValueError(
                f"Expected a template with one {TEXT} and then one {MASK}, got "
                f"{template!r}."
            )
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.template = template
        self.has_segments = has_segments
        self._parts = (before, between, after)

    @functools.cached_property
    def affixes(self):
        """Tokens before and after a text: two lists of int.

        Raises:
            ValueError: if they leave no room for a text.
        """
        tokenizer = self.tokenizer
        before, between, after = (
            [int(t) for t in tokenizer(part)] if part.strip() else []
            for part in self._parts
        )
        before = [tokenizer.start_token_id, *before]
        after = [
            *between,
            tokenizer.mask_token_id,
            *after,
            tokenizer.end_token_id,
        ]
        if len(before) + len(after) >= self.sequence_length:
            raise ValueError(
                "Expected a sequence_length that leaves room for a text, got "
                f"{self.sequence_length}, of which the template takes "
                f"{len(before) + len(after)}."
            )
        return before, after

    def call(self, x, y=None, sample_weight=None):
        tokens = tokenizers.ragged(self.tokenizer, x)
        before, after = self.affixes
        room = self.sequence_length - len(before) - len(after)
        before, after = (
            tf.tile(tf.constant([part], tokens.dtype), [tf.shape(x)[0], 1])
            for part in (before, after)
        )
        prompt = tf.concat([before, tokens[:, :room], after], 1)
        shape = [None, self.sequence_length]
        inputs = {
            "token_ids": prompt.to_tensor(
                self.tokenizer.pad_token_id, shape=shape
            ),
            "padding_mask": tf.ones_like(prompt).to_tensor(0, shape=shape),
        }
        if self.has_segments:
            inputs["segment_ids"] = tf.zeros_like(inputs["token_ids"])
        return keras.utils.pack_x_y_sample_weight(inputs, y, sample_weight)

    def get_config(self):
        return {
            **super().get_config(),
            "tokenizer": keras.layers.serialize(self.tokenizer),
            "sequence_length": self.sequence_length,
            "template": self.template,
            "has_segments": self.has_segments,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if isinstance(config["tokenizer"], dict):
            config["tokenizer"] = keras.layers.deserialize(config["tokenizer"])
        return cls(**config)


@keras.saving.register_keras_serializable("tf_dpsub")
class PromptedClassifier(keras_hub.models.Task):
    """The head of a masked language model, for one word of each class.

    Args:
        backbone: `keras_hub.models.Backbone` of an encoder.
        num_classes: int, number of logits.
        mask_token_id: int, of the token that stands for the word.
        activation: string, of the head.
        layer_norm_epsilon: float, of the head.
        preprocessor: `PromptPreprocessor`. Defaults to `None`: inputs are
            tokens, each with one mask.
    """

    def __init__(
        self,
        backbone,
        num_classes: int,
        mask_token_id: int,
        activation: str,
        layer_norm_epsilon: float,
        preprocessor=None,
        **kwargs,
    ):
        self.backbone = backbone
        self.preprocessor = preprocessor
        inputs = backbone.input
        hidden = backbone(inputs)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        # A sum over one place: each example has one mask.
        is_mask = ops.cast(
            ops.equal(inputs["token_ids"], mask_token_id), hidden.dtype
        )
        x = ops.sum(hidden * ops.expand_dims(is_mask, -1), axis=1)
        x = keras.layers.Dense(
            x.shape[-1],
            activation=activation,
            dtype=backbone.dtype_policy,
            name="head_dense",
        )(x)
        x = keras.layers.LayerNormalization(
            epsilon=layer_norm_epsilon,
            dtype=backbone.dtype_policy,
            name="head_layer_norm",
        )(x)
        outputs = keras.layers.Dense(
            num_classes, dtype=backbone.dtype_policy, name="words"
        )(x)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        self._head = {
            "num_classes": num_classes,
            "mask_token_id": mask_token_id,
            "activation": activation,
            "layer_norm_epsilon": layer_norm_epsilon,
        }

    def set_words(self, token_ids: list, bias):
        """Makes the logits those of words, one for each class.

        Args:
            token_ids: list of int, of the words.
            bias: array, the bias of each word.
        """
        embeddings = self.backbone.token_embedding.embeddings
        words = ops.convert_to_numpy(embeddings)[list(token_ids)]
        self.get_layer("words").kernel.assign(words.T)
        self.get_layer("words").bias.assign(bias)

    def get_config(self):
        return {**super().get_config(), **self._head}


def word_id(tokenizer, word):
    """The token of a word.

    Raises:
        ValueError: if the word is not one token.
    """
    tokens = [int(t) for t in tokenizer(word)]
    unknown = getattr(tokenizer, "oov_token", None)
    if len(tokens) != 1 or tokenizer.id_to_token(tokens[0]) == unknown:
        raise ValueError(
            f"Expected words that are one token, got {word!r}, which is "
            f"{len(tokens)} or unknown."
        )
    return tokens[0]
