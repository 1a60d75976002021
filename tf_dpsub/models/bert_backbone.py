"""The BERT encoder with the activation that it was trained with."""

import keras
import keras_hub


@keras.saving.register_keras_serializable("tf_dpsub")
class BertBackbone(keras_hub.models.BertBackbone):
    """`keras_hub.models.BertBackbone` with a choice of the activation.

    keras_hub's has the tanh form of GELU, where most checkpoints were trained
    with the exact one.

    Args: as `keras_hub.models.BertBackbone`.
        activation: string, of the feed-forward layers. Defaults to `"gelu"`,
            the exact form; `"gelu_approximate"` for the other one.
    """

    def __init__(self, *args, activation: str = "gelu", **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = activation
        if activation == "gelu_approximate":
            return
        function = keras.activations.get(activation)
        for layer in self.transformer_layers:
            layer.activation = function
            layer._feedforward_intermediate_dense.activation = function

    def get_config(self):
        return {**super().get_config(), "activation": self.activation}
