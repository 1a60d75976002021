"""Files of a private model, and lists of its weights, with its ledger."""

import keras
from absl import logging

from tf_dpsub.layers import conversion
from tf_dpsub.models import partial_training


class SavedWithLedger(keras.Model):
    """Keeps a ledger in all that the weights of a model are kept in.

    A subclass has the plain model in `model`, and a `CarriedLedger` in
    `_carried_ledger`.
    """

    def export(self, filepath, *args, **kwargs):
        """Exports the plain model, as `model.model.export` does."""
        self.model.export(filepath, *args, **kwargs)

    def get_config(self):
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "name": self.name,
            "carrier_ranks": conversion.carrier_ranks(self.model),
            "frozen_weights": partial_training.frozen_weights(self.model),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        conversion.set_carrier_ranks(model, config.get("carrier_ranks", {}))
        # Earlier versions did not keep them.
        partial_training.freeze_weights(model, config.get("frozen_weights", []))
        return cls(model, name=config["name"])

    def build_from_config(self, config):
        """Nothing: the plain model is built."""

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build_for(self)

    def save_weights(self, filepath, *args, **kwargs):
        """Saves weights for `load_weights` of a private model.

        The file has the ledger in it. What a plain model loads is written by
        `model.model.save_weights`.
        """
        super().save_weights(filepath, *args, **kwargs)
        if self.current_run is None:
            logging.warning(
                "%s is for load_weights of a private model, and has its "
                "ledger; model.model.save_weights writes what a plain model "
                "loads.",
                filepath,
            )

    def load_weights(self, filepath, *args, **kwargs):
        """Loads weights, and adds the steps of their ledger to those here.

        Raises:
            OSError: if the file is not whole.
            ValueError: if the weights are not those of this private model.
        """
        try:
            super().load_weights(filepath, *args, **kwargs)
        except FileNotFoundError:
            raise
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"Expected weights that a private '{self.model.name}' saved, "
                f"got {filepath}, which does not fit: {error} Weights of the "
                "plain model are loaded by `model.model.load_weights`."
            ) from error
        except OSError as error:
            raise OSError(
                f"Expected a file of weights that is whole, got {filepath}: "
                f"{error}. Go on from an earlier one, or remove it to begin "
                "anew."
            ) from error

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            # It runs without Python, and is not trained any more.
            children.pop("_carried_ledger", None)
        return children

    def save_own_variables(self, store):
        self._carried_ledger.save(store)

    def load_own_variables(self, store):
        self._carried_ledger.load(store)

    def get_state_tree(self, value_format="backend_tensor"):
        """State of the model as Keras gives it, and its ledger."""
        state_tree = super().get_state_tree(value_format)
        self._carried_ledger.put_into(state_tree, value_format)
        return state_tree

    def set_state_tree(self, state_tree):
        """Sets the state, and adds the steps of its ledger to those here."""
        super().set_state_tree(self._carried_ledger.take_from(state_tree))

    def get_weights(self):
        """Weights, whose steps a private model counts that is given them."""
        weights = super().get_weights()
        self._carried_ledger.give(weights)
        return weights

    def set_weights(self, weights):
        """Sets weights, and counts the steps that trained them.

        Weights that `get_weights` of a private model returned in this process
        bring the steps that trained them.
        """
        super().set_weights(weights)
        self._carried_ledger.take(weights)
