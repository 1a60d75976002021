"""States of a model while a private step works through a batch."""

import contextlib
import secrets

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_dpsub.gradients.graph import effects, functions, seeds, sources
from tf_dpsub.gradients.graph.states import UpdatesState
from tf_dpsub.primitives import threefry

# What the key of a step is used for: the next one, keys for all passes, and,
# from 1 on, those of a pass of a replica.
_FOLLOWING, _SHARED = -1, 0
_PASSES = 2**40


class StepStates:
    """Makes every pass of a step begin alike, and with secret keys.

    A step takes a batch in several passes, one for each microbatch or example.
    Which pass an example is in depends on who else was drawn, and must not
    show. So states that a forward pass changes have, at the start of each, the
    values that they had at the start of the step; and seed generators get
    keys: a new one in each pass, or one for all passes of a step.

    Formal guarantees: keys come from the operating system and live in memory
    only, in variables that nothing tracks. They are replaced at each step by
    ones that do not tell their predecessors. After a pass, the states of seed
    generators are what they were before, and hence public. A key has 128
    secret bits, of which Keras takes 62 for each draw.

    Args:
        model: `keras.Model`. To be called in the scope of its strategy.

    Attributes:
        seeds: list of variables, the states of its seed generators.
        variables: list of `tf.Variable`, those it needs for itself.
    """

    def __init__(self, model):
        generators = {
            id(generator.state): generator.state
            for layer in model._flatten_layers()
            for generator in layer._seed_generators
        }
        self.seeds = list(generators.values())
        self.variables = []
        self._starts = []
        self._changed = []
        self._each = np.ones(len(self.seeds), bool)
        if self.seeds:
            entropy = [secrets.randbits(64) - 2**63 for _ in range(2)]
            self._secret = _variable(tf.constant(entropy, tf.int64))
            self._passes = _variable(tf.constant(0, tf.int64))
            self.variables = [self._secret, self._passes]

    def keep(self, changed: list):
        """Takes note of states that a forward pass changes.

        Args:
            changed: list of variables; seeds and its own are left out.
        """
        excluded = {id(v) for v in (*self.seeds, *self.variables)}
        self._changed = [v for v in changed if id(v) not in excluded]
        self._starts = [
            _variable(tf.convert_to_tensor(v)) for v in self._changed
        ]
        self.variables += self._starts

    def require_kept(self, operations: list):
        """Checks that forward passes write nothing that was not found before.

        A state that a layer began to write since, at the word of a callback,
        would tell how many passes there were, and so how many examples.

        Args:
            operations: list of `tf.Operation`, those of a step so far.

        Raises:
            UpdatesState: if another variable is written.
        """
        kept = set().union(
            *(
                sources.handles(v)
                for v in (*self.seeds, *self.variables, *self._changed)
            )
        )
        for written in effects.written_by(operations):
            handle = written.deref()
            if id(functions.origin(handle)) not in kept:
                raise UpdatesState(
                    "Expected a model that writes in a step what it wrote when "
                    f"it was checked, got one that writes '{handle.op.name}' "
                    "as well. Change no layer while a model trains: compile "
                    "it again."
                )

    def share(self, shared: list):
        """Sets which seeds have one key for all passes of a step.

        Args:
            shared: list of positions in `seeds`.
        """
        self._each = np.array(
            [k not in shared for k in range(len(self.seeds))], bool
        )

    def begin_step(self):
        """Called where a step begins, before its first pass."""
        for start, state in zip(self._starts, self._changed):
            start.assign(tf.convert_to_tensor(state))
        if self.seeds:
            self._secret.assign(self._random(_FOLLOWING, 1)[0])
            self._passes.assign(0)

    @contextlib.contextmanager
    def one_pass(self):
        """A context for one forward pass of the model."""
        for start, state in zip(self._starts, self._changed):
            state.assign(start.read_value())
        public = [tf.identity(tf.convert_to_tensor(s)) for s in self.seeds]
        if self.seeds:
            keys = tf.unstack(self._keys())
            with seeds.own_writes():
                for seed, key in zip(self.seeds, keys):
                    seed.assign(tf.cast(key, seed.dtype))
        with _no_public_seed():
            yield
        with seeds.own_writes():
            for seed, value in zip(self.seeds, public):
                seed.assign(value)

    def _keys(self):
        """A key for each seed, int64 `[seeds, 2]`."""
        count = len(self.seeds)
        keys = shared = of_pass = None
        if not self._each.all():
            keys = shared = self._random(_SHARED, count)
        if self._each.any():
            passes = self._passes.assign_add(1, read_value=True)
            # Replicas work through batches of their own.
            replica = tf.cast(_replica(), tf.int64)
            keys = of_pass = self._random(passes + replica * _PASSES, count)
        if shared is not None and of_pass is not None:
            keys = tf.where(self._each[:, None], of_pass, shared)
        return keys

    def _random(self, number, count):
        """Random int64 `[count, 2]`, of the step's key.

        Args:
            number: int64, from -1 on: others are drawn for each.
            count: int.
        """
        one, other = tf.unstack(self._secret.read_value())
        number = tf.cast(number, tf.int64)
        graph = tf.compat.v1.get_default_graph()
        if not control_flow_util.GraphOrParentsInXlaContext(graph):
            return tf.random.stateless_uniform(
                [count, 2], [one, other + number], None, None, tf.int64
            )
        # XLA's own draws keep but 32 bits of each half of a key. Here one half
        # is the cipher's, the other is where it counts from.
        cipher = tf.unstack(tf.bitcast(one, tf.uint32))
        low, high = tf.unstack(tf.bitcast(other, tf.uint32))
        of_number = tf.unstack(tf.bitcast(number, tf.uint32))
        block = tf.range(2 * count, dtype=tf.int32)
        words = threefry.encrypt(
            threefry.encrypt(cipher, [low + of_number[0], high + of_number[1]]),
            [tf.cast(block, tf.uint32), tf.zeros([2 * count], tf.uint32)],
        )
        pairs = tf.reshape(tf.stack(words, 1), [count, 2, 2])
        return tf.bitcast(pairs, tf.int64)


def _variable(value):
    with tf.init_scope():
        return tf.Variable(value, trainable=False)


def _replica():
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


@contextlib.contextmanager
def _no_public_seed():
    """Lets operations with no seed of their own draw from fresh entropy.

    Where `tf.random.set_seed` was called, whoever knows the program would know
    what they draw.
    """
    graph = tf.compat.v1.get_default_graph()
    seed, graph.seed = graph.seed, None
    try:
        yield
    finally:
        graph.seed = seed


def uses_of(implementation: str, uses, count: int) -> list:
    """Seeds that have one key for all passes of a step.

    Args:
        implementation: string, of per-example gradients.
        uses: dict, as `Sources.uses`, where the graph was walked.
        count: int, the number of seeds.

    Returns:
        List of positions.
    """
    if implementation == "vectorized_map":
        # All examples have the draws of one trace.
        return list(range(count))
    if implementation == "map_fn":
        return []
    return [k for k, use in (uses or {}).items() if use == sources.ALL]
