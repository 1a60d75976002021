"""Features of an example that are not trained."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("tf_dpsub")
class FrozenFeatures(keras.layers.Layer):
    """Applies a layer or a model that is not trained, always as in inference.

    Within it dropout and augmentation are off, also in training, and no
    gradient is computed. Where it takes the inputs of a model,
    `PrivateModel.fit` computes the features of each example once, and not at
    each step.

    Args:
        features: layer or model, such as `tf_dpsub.layers.Scattering2D`, or a
            pretrained backbone.
        **kwargs: as `keras.layers.Layer`.

    Attributes:
        features: as given, frozen.

    Raises:
        ValueError: if `features` is no layer.

    Example:

    ```python
    inputs = keras.Input((28, 28, 1))
    features = tf_dpsub.layers.FrozenFeatures(tf_dpsub.layers.Scattering2D())
    x = keras.layers.Flatten()(features(inputs))
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    ```
    """

    def __init__(self, features, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(features, keras.layers.Layer):
            raise ValueError(
                "Expected features to be a Keras layer or model, got "
                f"{type(features).__name__}."
            )
        self.features = features
        self.trainable = False

    def build(self, input_shape):
        if not self.features.built:
            self.features.build(input_shape)
        # What a layer creates when it is built is frozen, too.
        self.features.trainable = False
        self.built = True

    def call(self, inputs, training=None):
        if self.features._call_has_training_arg:
            outputs = self.features(inputs, training=False)
        else:
            outputs = self.features(inputs)
        return keras.tree.map_structure(tf.stop_gradient, outputs)

    def get_config(self):
        return {
            **super().get_config(),
            "features": keras.saving.serialize_keras_object(self.features),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        config["features"] = keras.saving.deserialize_keras_object(
            config["features"], custom_objects=custom_objects
        )
        return cls(**config)
