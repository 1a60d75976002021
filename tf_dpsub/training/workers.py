"""Agreement of several workers, before they train together."""

import contextlib
import hashlib
import json
import traceback

import numpy as np
import tensorflow as tf
from keras import tree

# Errors that surviving workers see when another one dies.
LOST_WORKER = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)
# Examples that stand for all.
_ROWS = 256


def is_one_of_several(strategy) -> bool:
    """Tells whether other processes train the same model.

    Args:
        strategy: `tf.distribute.Strategy`.
    """
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.num_replicas_in_sync > 1
    )


def require_agreement(strategy, settings: dict, data=None):
    """Compares settings with those of all other workers, where there are any.

    Formal guarantees: what one worker adds to a sum is bounded by its own clip,
    and the noise is that of the first one. One account holds for all of them
    only if they agree. Settings are compared by 63 bits of a SHA-256; these
    pass between workers, as sums without noise do, and are kept nowhere.

    Args:
        strategy: `tf.distribute.Strategy`.
        settings: dict of what JSON can hold, with the same keys everywhere.
        data: structure of arrays whose axis 0 is the example, of which a sample
            is compared, and never shown. Defaults to `None`.

    Raises:
        ValueError: in all workers, naming the settings that are not the same
            everywhere.
        ConnectionError: if a worker is lost.
    """
    if not is_one_of_several(strategy):
        return
    values = {**settings, "data": None if data is None else _sample_of(data)}
    numbers = np.array([_number(value) for value in values.values()], np.int64)
    try:
        everywhere = _gathered(strategy, numbers)  # [replicas, settings]
    except LOST_WORKER as error:
        raise lost(error) from error
    differ = np.any(everywhere != everywhere[0], axis=0)
    names = [name for name, is_other in zip(values, differ) if is_other]
    if names:
        here = ", ".join(
            f"{name}={settings[name]!r:.80}" if name in settings else "own data"
            for name in names
        )
        raise ValueError(
            "Expected all workers to have the same settings and data, got "
            f"another {' and '.join(names)} on some of them than here ({here})."
            " Nothing was trained. Start all of them alike."
        )


def require_same_training(model, batches, epochs: int, initial_epoch: int):
    """Refuses to train with workers that would train otherwise.

    Args:
        model: compiled `PrivateModel`.
        batches: `PrivateBatches` of the run.
        epochs: int, as for `PrivateModel.fit`.
        initial_epoch: int, as for `PrivateModel.fit`.

    Raises:
        ValueError, ConnectionError: as `require_agreement`.
    """
    if not is_one_of_several(model.distribute_strategy):
        return
    optimizer, poisson = model.optimizer, batches.poisson
    inner = optimizer.inner_optimizer
    numbers = {
        name: value
        for name, value in optimizer.get_config().items()
        if value is None or isinstance(value, (int, float, str))
    }
    # These never change the result.
    for name in ("name", "microbatch_size", "per_example"):
        del numbers[name]
    require_agreement(
        model.distribute_strategy,
        {
            "mechanism": optimizer.mechanism,
            **numbers,
            "inner_optimizer": [
                type(inner).__name__,
                {**inner.get_config(), "name": None},
            ],
            "steps_per_execution": model.steps_per_execution,
            "weights": [list(v.shape) for v in model.trainable_variables],
            "ledger": model.ledger.steps,
            "sampler": "batches" if poisson is None else poisson.sampling,
            "examples": None if poisson is None else poisson.examples,
            "largest_rate": None if poisson is None else poisson.largest_rate,
            "steps_per_epoch": batches.steps_per_epoch,
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "views": batches.views,
            "unit": None if poisson is None else poisson.unit,
        },
        _compared_inputs(batches),
    )


def require_all_examples(strategy, poisson):
    """Refuses hosts that together hold other than all examples.

    Args:
        strategy: `tf.distribute.Strategy`.
        poisson: `data.PoissonBatches` of the run, or None.

    Raises:
        ValueError: in all workers, if examples of all hosts do not add up to
            the number by which the sampling rate is computed.
        ConnectionError: if a worker is lost.
    """
    if poisson is None or not poisson.is_part:
        return
    examples = poisson.own_examples
    if is_one_of_several(strategy):
        resolver = strategy.cluster_resolver
        numbers = np.array([resolver.task_id, examples], np.int64)
        try:
            everywhere = _gathered(strategy, numbers)  # [replicas, 2]
        except LOST_WORKER as error:
            raise lost(error) from error
        # Replicas of a host send the same.
        examples = sum(dict(everywhere.tolist()).values())
    if examples != poisson.examples:
        raise ValueError(
            f"Expected total_examples={examples}, the sum of all hosts, got "
            f"{poisson.examples}. Nothing was trained. Count the examples of "
            "each host, give the sum to all of them, and start a worker on "
            "each."
        )


def _compared_inputs(batches):
    """Inputs that all workers have alike: raw ones, not their features."""
    if batches.poisson is not None and batches.poisson.is_part:
        return None
    inputs = batches.raw_inputs
    if batches.poisson is not None and inputs is None:
        inputs = batches.poisson.inputs
    person_ids = getattr(batches.poisson, "person_ids", None)
    return inputs if person_ids is None else (inputs, person_ids)


@contextlib.contextmanager
def lost_worker_named(strategy):
    """A context that names the loss of a worker, if there are several.

    Args:
        strategy: `tf.distribute.Strategy`.

    Raises:
        ConnectionError: if a worker is lost.
    """
    try:
        yield
    except LOST_WORKER as error:
        if not is_one_of_several(strategy):
            raise
        # They hold a pool of threads that complains if Python ends first.
        traceback.clear_frames(error.__traceback__)
        raise lost(error) from error


def lost(error):
    """The `ConnectionError` that stands for an error of TensorFlow."""
    first = (error.message.splitlines() or [""])[0]
    return ConnectionError(
        "Expected all workers to train to the end, got an error of one that is "
        f"lost: {first} Start all of them again, from the last checkpoint."
    )


def _sample_of(data):
    """A digest of some examples, by which data sets are told apart."""
    digest = hashlib.sha256()
    for part in tree.flatten(data):
        step = max(1, len(part) // _ROWS)
        rows = np.asarray(part[::step])
        digest.update(f"{rows.dtype} {rows.shape}".encode())
        digest.update(
            repr(rows.tolist()).encode()
            if rows.dtype.hasobject
            else np.ascontiguousarray(rows).tobytes()
        )
    return digest.hexdigest()


def _gathered(strategy, numbers):
    of_replicas = strategy.run(lambda: tf.constant(numbers)[tf.newaxis])
    return strategy.gather(of_replicas, axis=0).numpy()


def _number(value):
    text = json.dumps(value, sort_keys=True, default=lambda v: type(v).__name__)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
