"""Texts that answer others, as tokens of a causal language model."""

import keras
import keras_hub
import tensorflow as tf

from tf_dpsub.models import tokenizers


@keras.saving.register_keras_serializable("tf_dpsub")
class ResponsePreprocessor(keras_hub.models.GPT2CausalLMPreprocessor):
    """Lets GPT-2 learn responses to prompts, and none of the prompts.

    Called with a dict of `prompts` and `responses`, it puts each prompt, the
    separator and the response into one sequence; sample weights are 1 where the
    next token is one of the response, or its end, and 0 elsewhere. Sequences
    that are too long are cut at the end. `generate` of the model takes prompts.
    Called with texts, it is keras_hub's.

    Args:
        tokenizer: `keras_hub.tokenizers.GPT2Tokenizer`.
        sequence_length: int, tokens of a prompt and its response.
        separator: string between both. Defaults to a line break.
    """

    def __init__(
        self, tokenizer, sequence_length: int = 1024, separator="\n", **kwargs
    ):
        super().__init__(tokenizer, sequence_length, **kwargs)
        self.separator = separator

    def call(self, x, y=None, sample_weight=None, sequence_length=None):
        if not isinstance(x, dict):
            return super().call(x, y, sample_weight, sequence_length)
        prompts = tokenizers.ragged(
            self.tokenizer, self._with_separator(x["prompts"])
        )
        responses = tokenizers.ragged(self.tokenizer, x["responses"])
        # One more: the last token is a target alone.
        token_ids, padding_mask = self.packer(
            tf.concat([prompts, responses], 1),
            sequence_length=(sequence_length or self.sequence_length) + 1,
        )
        token_ids, padding_mask = map(
            tf.convert_to_tensor, (token_ids, padding_mask)
        )
        # Targets before this one are of the prompt; its start is no target.
        first = tf.expand_dims(prompts.row_lengths(), 1)
        place = tf.range(tf.shape(token_ids, tf.int64)[1] - 1)
        inputs = {
            "token_ids": token_ids[:, :-1],
            "padding_mask": padding_mask[:, :-1],
        }
        return keras.utils.pack_x_y_sample_weight(
            inputs, token_ids[:, 1:], padding_mask[:, 1:] & (place >= first)
        )

    def generate_preprocess(self, x, sequence_length=None):
        return super().generate_preprocess(
            self._with_separator(x), sequence_length
        )

    def _with_separator(self, prompts):
        """Prompts, with the separator after them."""
        return tf.strings.join([prompts, self.separator])

    def get_config(self):
        return {**super().get_config(), "separator": self.separator}
