"""The ledger of a private model, in all that its weights are kept in."""

import collections
import hashlib
import json
import weakref

import numpy as np
import tensorflow as tf

from tf_dpsub import accounting

# Of larger variables, numbers at equal distances stand for all.
_NUMBERS = 2**14
_LISTS = 1024
_KEY = "tf_dpsub_ledger"

_BETWEEN = (
    "changes of the weights between private steps, outside of private training"
)
_BEFORE = (
    "what the weights tell of data that they had seen before the first private "
    "step: they were loaded, or trained otherwise, after the model was made "
    "private"
)

# Accounts of lists of weights that private models gave away.
_taken: collections.OrderedDict[str, str] = collections.OrderedDict()


class CarriedLedger(tf.train.experimental.PythonState):
    """The ledger of a private model, in all that its weights are kept in.

    It is part of Keras's files, of `tf.train.Checkpoint`, of state trees, and,
    within a process, of what `get_weights` returns. Whatever takes weights up
    from there adds the steps that trained them to the ledger of the model.

    Formal guarantees: nothing is released but a digest of weights, which
    private steps have released. What is taken up never lowers epsilon. Steps
    that the optimizer has taken, and the ledger does not know of, raise. A
    change of the weights before the first private step, between runs or between
    epochs is noticed by the digest, as far as it reaches: of a variable of more
    than 16,384 numbers, it reads so many at equal distances. A change between
    two steps of one epoch is not noticed.

    Args:
        model: `tf_dpsub.PrivateModel`.
    """

    def __init__(self, model):
        self._model = model
        # Of the weights that the model was made private with.
        self._initial = _digest_of_variables(model.weights)
        # Of the weights that the last private step left; None if not known.
        self._digest = None
        # Of the moving average that the inner optimizer has made of them.
        self._averaged = None
        self._is_training = False
        self._warned = None
        self._optimizer = lambda: None
        self._iterations_before = 0

    # Steps that are not in the ledger.

    def begin_counting(self, optimizer):
        """Leaves out the steps that an optimizer has taken before."""
        if self._optimizer() is not optimizer:
            self._optimizer = weakref.ref(optimizer)
            self._iterations_before = int(optimizer.iterations.numpy())

    def require_all_steps(self):
        """Raises if the optimizer has taken more steps than were counted.

        Raises:
            ValueError: if it has.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        taken = int(optimizer.iterations.numpy()) - self._iterations_before
        counted = sum(
            entry.steps_of_optimizer for entry in self._model.ledger.entries
        )
        if taken > counted:
            raise ValueError(
                "Expected a ledger that counts all steps of the optimizer, got "
                f"{counted} steps in the ledger and {taken} of the optimizer: "
                "its state comes from a checkpoint without the ledger, or it "
                "was used elsewhere, and epsilon would be too low. Restore the "
                "private model as a whole, by `load_weights` or "
                "`tf.train.Checkpoint(model=model)`, or take the steps over: "
                "`model.ledger.merge(ledger)`."
            )

    # Weights that were changed elsewhere.

    def begin_step(self):
        """Called before each private step, once it is in the ledger."""
        self._is_training = True

    def end_epoch(self):
        """Called after the last private step of an epoch."""
        self._digest, self._is_training = self._present(), False
        self._averaged = None
        optimizer = getattr(self._model, "optimizer", None)
        # A head may be solved for without one.
        if optimizer is not None and optimizer.inner_optimizer.use_ema:
            self._averaged = _digest_of_variables(self._averaged_weights())

    def end_run(self):
        """Called when a run is over."""
        if self._is_training:
            self.end_epoch()

    def _averaged_weights(self):
        inner = self._model.optimizer.inner_optimizer
        averages = {
            id(variable): average
            for variable, average in zip(
                inner._trainable_variables,
                inner._model_variables_moving_average,
            )
            if average is not None
        }
        return [averages.get(id(v), v) for v in self._model.weights]

    def uncovered(self):
        """Names what a step would build on that no guarantee covers.

        Returns:
            List of string, nouns. Empty if all is known to the ledger.
        """
        if self.is_changed():
            return [_BETWEEN]
        return self.uncovered_before()

    def uncovered_before(self):
        """Names what is `uncovered` before the first private step."""
        if self._is_training or self._digest or self._initial is None:
            return []
        if self._initial == _digest_of_variables(self._model.weights):
            return []
        return [_BEFORE]

    def is_changed(self):
        """Tells whether weights have changed since the last private step."""
        if self._is_training or self._digest is None:
            return False
        present = _digest_of_variables(self._model.weights)
        return present not in (self._digest, self._averaged)

    def is_newly_changed(self):
        """Tells the same as `is_changed`, but once for the same weights."""
        if not self.is_changed() or self._warned == self._digest:
            return False
        self._warned = self._digest
        return True

    def _present(self):
        present = _digest_of_variables(self._model.weights)
        if self._is_training or present == self._averaged:
            return present
        return self._digest

    # What weights are kept in.

    def serialize(self):
        return json.dumps(
            {
                "ledger": self._model.ledger.to_json(),
                "weights": self._present(),
                "initial": self._initial,
                "iterations_before": self._iterations_before,
            }
        )

    def deserialize(self, string_value):
        kept = json.loads(string_value)
        self._take_up(kept)
        self._iterations_before = max(
            self._iterations_before, kept["iterations_before"]
        )

    def _take_up(self, kept):
        ledger = accounting.PrivacyLedger.from_json(kept["ledger"])
        self._model.ledger.merge(ledger)
        self._digest, self._is_training = kept["weights"], False
        self._averaged = None
        # Earlier versions did not keep it.
        self._initial = kept.get("initial")

    def save(self, store):
        """Writes to a store of Keras."""
        kept = json.loads(self.serialize())
        store["ledger"] = _bytes(kept.pop("ledger"))
        store["state"] = _bytes(json.dumps(kept))

    def load(self, store):
        """Reads what `save` has written; earlier versions wrote a ledger."""
        kept = {"weights": None, "iterations_before": 0}
        if "state" in store:
            kept = json.loads(_text(store["state"]))
        ledger = _text(store["ledger"])
        self.deserialize(json.dumps({**kept, "ledger": ledger}))

    def put_into(self, tree, value_format):
        """Adds itself to a state tree of Keras."""
        value = _bytes(self.serialize())
        if value_format == "backend_tensor":
            value = tf.convert_to_tensor(value)
        tree["non_trainable_variables"][_KEY] = value

    def take_from(self, tree):
        """Reads what `put_into` has added; returns the tree without it."""
        variables = dict(tree.get("non_trainable_variables", {}))
        value = variables.pop(_KEY, None)
        if value is None:
            return tree
        self.deserialize(_text(value))
        return {**tree, "non_trainable_variables": variables}

    def give(self, weights):
        """Called with a list of weights that leaves the model."""
        if self._model.ledger.steps:
            digest = _digest(weights)
            _taken[digest] = self.serialize()
            _taken.move_to_end(digest)
            if len(_taken) > _LISTS:
                _taken.popitem(last=False)

    def take(self, weights):
        """Called with a list of weights that the model receives."""
        account = _taken.get(_digest(weights))
        if account is not None:
            # The state of the optimizer does not come with them.
            self._take_up(json.loads(account))


def _digest_of_variables(variables):
    return _digest([_some(tf.reshape(v.value, [-1])) for v in variables])


def _digest(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        some = _some(np.ravel(np.asarray(array)))
        digest.update(f"{some.dtype.name} {some.size} ".encode())
        digest.update(np.ascontiguousarray(some).tobytes())
    return digest.hexdigest()


def _some(flat):
    return flat[:: -(-int(flat.shape[0]) // _NUMBERS) or 1]


def _bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def _text(array):
    return bytes(np.asarray(array, np.uint8)).decode()
