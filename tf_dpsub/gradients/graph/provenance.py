"""Proof that a tensor depends on one example only.

Every tensor of a traced graph gets one of these states:

- `PUBLIC`: it does not depend on the batch (weights, constants, random
  numbers that all examples share, and whatever is computed from them);
- `PerExample`: along one axis, each slice depends on one example of the batch,
  on random numbers of its own and on public tensors, in the same way at every
  place of the batch;
- `Key`: it was computed from a secret key of the step, to draw from;
- `Drawn`: random numbers, of which it is open still whether all examples share
  them or each has its own;
- `Mixed`: none of these has been proved.

States are computed operation by operation, by the rules in
`tf_dpsub.gradients.graph.rules`. What has no rule is mixed: the proof can
be incomplete, which costs speed, but a state other than mixed is always right,
which is what privacy rests on.
"""

import itertools

import tensorflow as tf

from tf_dpsub.gradients.graph import (
    alike,
    constants,
    draws,
    effects,
    functions,
    loops,
    rules,
    shapes,
    sources,
)
from tf_dpsub.gradients.graph.states import (
    PUBLIC,
    Drawn,
    Key,
    Mixed,
    MixesExamples,
    PerExample,
    Unproven,
)
from tf_dpsub.gradients.per_example import tf_variable

# Random numbers stay what they are, in another shape.
_VIEWS = ("ExpandDims", "Reshape", "Squeeze")
# The most combinations of states of random numbers that are tried.
_MOST_CHOICES = 64


class Provenance:
    """States of the tensors of one graph, computed on demand and kept.

    Args:
        graph: the `tf.Graph` in which the tensors live.
        inputs: list of tensors of static shape whose axis 0 is the batch.
        batch_size: int, the number of examples, at least 2.
        may_read: `Sources`, the variables that are public, and seeds. Defaults
            to `None`: all variables are.
        caller: `Provenance` of the graph that calls this one as a function.
            Defaults to `None`.

    Attributes:
        draws: `Draws`, how random numbers are used.
    """

    def __init__(
        self,
        graph,
        inputs: list,
        batch_size: int,
        may_read: sources.Sources | None = None,
        caller=None,
    ):
        self.batch_size = batch_size
        self.draws = draws.Draws() if caller is None else caller.draws
        self._sources = may_read or sources.AnySource()
        self._is_called = caller is not None
        self._constants = constants.ConstantFolder()
        self._alike = alike.Alike(
            batch_size, self._constants, self._eager_value
        )
        self._calls: dict = {}
        self._resolved: dict = {}
        self._order: dict = {}
        self._shapes: dict = {}
        self._states = {
            t.ref(): self._consistent(t, PerExample(0, 1, 1)) for t in inputs
        }
        self._captured = {
            inner.ref(): outer
            for outer, inner in getattr(graph, "captures", [])
        }

    def __call__(self, tensor):
        """The state of `tensor`."""
        stack = [tensor.op]
        while tensor.ref() not in self._states:
            op = stack[-1]
            waiting = [i.op for i in op.inputs if i.ref() not in self._states]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            for output, state in zip(op.outputs, self._output_states(op)):
                state = self._consistent(output, state)
                self._states.setdefault(output.ref(), state)
                self._shapes.setdefault(output.ref(), output.shape)
        return self._states[tensor.ref()]

    def _output_states(self, op):
        states = [self._states[i.ref()] for i in op.inputs]
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            states = [self._placeholder_state(op)]
            return states * len(op.outputs)
        try:
            functions.require_fixed(op)
            if op.type in functions.LOOPS and any(
                isinstance(state, PerExample) for state in states
            ):
                return self.inside_loop(op)
            is_clamped = self._constants.clamped_to(op) is not None
            if is_clamped and self._has_public_shape(op):
                return [PUBLIC]
            for state in states:
                if isinstance(state, Mixed):
                    return [state] * len(op.outputs)
            shapes.require_inferred(op, self._constants)
            if any(isinstance(state, PerExample) for state in states):
                result = self._batched(op, states)
            else:
                result = self._batchless(op, states)
        except Unproven as e:
            mixes = isinstance(e, MixesExamples)
            result = Mixed(f"{op.type} '{op.name}' {e}", mixes)
        if not isinstance(result, list):
            result = [result] * len(op.outputs)
        return result

    def _has_public_shape(self, op):
        """Returns whether the shape of an elementwise operation is public.

        A static shape is no proof: `set_shape` is not checked when a graph
        runs. No rule lets the batch choose the shape of what is not mixed.
        """
        waiting, seen = [op], set()
        while waiting:
            op = waiting.pop()
            if op in seen:
                continue
            seen.add(op)
            shapes.require_inferred(op, self._constants)
            if rules.is_elementwise(op):
                inputs = list(op.inputs)
            elif rules.is_reduction(op) and self(op.inputs[1]) is PUBLIC:
                inputs = [op.inputs[0]]
            else:
                return False
            waiting += [t.op for t in inputs if isinstance(self(t), Mixed)]
        return True

    def _batched(self, op, states):
        """States of outputs where some input depends on the batch."""
        if op.type in functions.CALLS:
            return self._called(op)
        return self._resolve(op, states)

    def _called(self, op):
        body, proof = self._inside(op)
        return [proof(output) for output in body.outputs]

    def _batchless(self, op, states):
        """States of outputs where no input depends on the batch."""
        keys = [s for s in states if isinstance(s, Key)]
        drawn = [s for s in states if isinstance(s, Drawn)]
        if op.type in functions.CALLS and effects.draws_within(op):
            return self._called(op)
        if draws.is_draw(op):
            return self._drawn(op, states)
        if drawn:
            return self._of_drawn(op, states)
        self._require_known(op)
        if not keys:
            return PUBLIC
        if any(key.is_handle for key in keys):
            return self._of_key_handle(op, states)
        return self._of_keys(op, keys)

    def _require_known(self, op):
        if not self._constants.stitches_all(op):
            effects.require_known(op)

    def _of_keys(self, op, keys):
        """State of what an operation makes of keys and public values."""
        made = draws.made(op, self._constants) if len(keys) == 1 else None
        added, ways = made or (0, ())
        seeds = frozenset(
            (seed, (times, before + added, (*ways_before, *ways)))
            for key in keys
            for seed, (times, before, ways_before) in key.seeds
        )
        is_whole = (
            made is not None
            and all(key.is_whole for key in keys)
            and all(abs(n) <= draws.MOST_ADDED for _, (_, n, _) in seeds)
        )
        if draws.splits(op):
            return draws.parts(op, seeds, is_whole)
        return Key(seeds, is_whole)

    def _of_key_handle(self, op, states):
        """State of what an operation makes of the variable of a key."""
        if op.type == "ReadVariableOp":
            return self._key_read(op, states[0])
        if op.type == "VariableShape":
            return PUBLIC
        if any(output.dtype != tf.resource for output in op.outputs):
            raise Unproven("reads a seed, and is no plain read of all of it")
        return Key(
            frozenset().union(*(s.seeds for s in states if isinstance(s, Key)))
        )

    def _key_read(self, op, key):
        """State of a key that is read: how often it had been set before."""
        if self._is_called or op.inputs[0].op.type != "Placeholder":
            # Who writes it by another name would not be seen.
            raise Unproven("reads a seed within a function, or by another name")
        if op not in self._order:
            self._order = {
                other: k for k, other in enumerate(op.graph.get_operations())
            }
        times = sum(
            self._order.get(other, 0) < self._order[op]
            for other in op.inputs[0].consumers()
            if other.type.startswith("Assign")
        )
        return Key(frozenset((seed, (times, 0, ())) for seed, _ in key.seeds))

    def _drawn(self, op, states):
        """State of the random numbers that an operation draws."""
        seeds, is_own = frozenset(), True
        for name, tensor, state in zip(draws.names(op), op.inputs, states):
            if name in draws.SEEDS and isinstance(state, Key):
                seeds |= state.seeds
                # `draws.is_own_stream` looks where a counter is from.
                is_own &= state.is_whole or name == "counter"
            elif name not in draws.SEEDS:
                is_own &= state is PUBLIC and (
                    name == "shape" or self._alike.uniform(tensor)
                )
        is_stateless = op.type.startswith("Stateless")
        if not is_stateless and functions.is_compiled(op.graph):
            raise Unproven(
                "draws in a function that XLA compiles, where the numbers are "
                "those of the program"
            )
        if not is_own:
            # Of several laws, or keys: all examples have to share them.
            self.draws.share(seeds, unseeded=not (seeds or is_stateless))
            self._share(states)
            return PUBLIC
        if is_stateless and not seeds:
            return PUBLIC
        if not draws.is_own_stream(op):
            raise Unproven("draws by a counter of its own")
        return Drawn(frozenset([draws.draw(op, seeds)]))

    def _of_drawn(self, op, states):
        """States of outputs that are computed from random numbers alone."""
        drawn = [s for s in states if isinstance(s, Drawn)]
        layouts = {s.layout for s in drawn}
        draws_of_all = frozenset().union(*(s.draws for s in drawn))
        if op.type in _VIEWS and isinstance(states[0], Drawn):
            return drawn[0]
        if op.type == "Transpose" and isinstance(states[0], Drawn):
            order = tuple(int(a) for a in self._constants(op.inputs[1]))
            shape = tuple(constants.static_shape(op.inputs[0]))
            return Drawn(draws_of_all, (*drawn[0].layout, (shape, order)))
        if rules.is_elementwise(op) and len(layouts) == 1:
            out = op.outputs[0].shape
            if all(
                i.shape == out
                if isinstance(s, Drawn)
                else s is PUBLIC and self._alike.uniform(i)
                for i, s in zip(op.inputs, states)
            ):
                return Drawn(draws_of_all, *layouts)
        try:
            return self._resolve(op, states)
        except Unproven:
            self._share(states)
            self._require_known(op)
            return PUBLIC

    def _share(self, states):
        for state in states:
            if isinstance(state, Drawn):
                self.draws.share_drawn(state)
            elif isinstance(state, Key):
                self.draws.share(state.seeds)

    def _resolve(self, op, states):
        """Applies a rule, with random numbers each example's own or shared.

        Where the rule can be applied to both, they are each example's own.
        """
        choices = [
            [*self._divisions(i, states), PUBLIC]
            if isinstance(s, Drawn)
            else [PUBLIC if isinstance(s, Key) else s]
            for i, s in zip(op.inputs, states)
        ]
        error = None
        for choice in itertools.islice(
            itertools.product(*choices), _MOST_CHOICES
        ):
            if all(state is PUBLIC for state in choice):
                break
            application = rules.Application(
                op, list(choice), self.batch_size, self._constants, self._alike
            )
            try:
                result = rules.apply_rule(application)
            except Unproven as e:
                error = error or e
                continue
            self._record(op, states, choice)
            return result
        raise error or Unproven("has no rule")

    def _record(self, op, states, choice):
        for tensor, state, chosen in zip(op.inputs, states, choice):
            if isinstance(state, Drawn) and chosen is not PUBLIC:
                shape = constants.static_shape(tensor)
                self.draws.divide(state, chosen, shape)
            elif chosen is PUBLIC:
                self._share([state])
        self._resolved[op] = list(choice)

    def _divisions(self, tensor, states):
        """States in which each example has a slice of random numbers."""
        shape = constants.static_shape(tensor)
        per_example = [s for s in states if isinstance(s, PerExample)]
        divisions = []
        for like in dict.fromkeys((s.outer, s.inner) for s in per_example):
            size = like[0] * self.batch_size * like[1]
            divisions += [
                PerExample(axis, *like)
                for axis, n in enumerate(shape)
                if n == size
            ]
        if not per_example and shape and shape[0] % self.batch_size == 0:
            divisions.append(PerExample(0, 1, shape[0] // self.batch_size))
        return divisions

    def input_states(self, op) -> list:
        """States of the inputs of an operation, as its rule took them."""
        self(op.outputs[0])
        return self._resolved.get(op) or [
            self(i) if tf.is_tensor(i) else PUBLIC for i in op.inputs
        ]

    def is_alike(self, tensor, state):
        """Returns whether public or random values may be taken as per-example.

        Args:
            tensor: `tf.Tensor`, `PUBLIC` or `Drawn`.
            state: `PerExample`, of a tensor of its shape.

        Returns:
            bool. If true, its slices are of one law, each an example's own.
        """
        own_state = self(tensor)
        if isinstance(own_state, Drawn):
            shape = constants.static_shape(tensor)
            self.draws.divide(own_state, state, shape)
            return True
        return own_state is PUBLIC and self._alike(tensor, state) is True

    def taken_as_alike(self, placeholder) -> set:
        """States for which an input of a function was taken to be alike.

        Returns:
            Set of `PerExample`.
        """
        return self._alike.asked(placeholder)

    def settle(self):
        """Checks what is known at the end alone.

        Raises:
            Unproven: if random numbers are neither each example's own nor
                shared by all, or if `set_shape` was called on a tensor after
                its state had been found.
        """
        self._sources.settle(self.draws.uses())
        for tensor, shape in self._shapes.items():
            tensor = tensor.deref()
            if tensor.shape != shape:
                raise Unproven(
                    f"{tensor.op.type} '{tensor.op.name}' had its shape set, "
                    f"{tensor.shape}, after it was looked at"
                )

    def _consistent(self, tensor, state):
        """The state, or mixed where its axis cannot hold the batch."""
        # A list has the state of its elements, which are seen when taken.
        if isinstance(state, PerExample) and tensor.dtype != tf.variant:
            shape = tensor.shape
            size = state.outer * self.batch_size * state.inner
            if shape.rank is None or shape[state.axis] != size:
                return Mixed(
                    f"{tensor.op.type} '{tensor.op.name}' has shape {shape}, "
                    "which does not hold the batch where it should",
                    False,
                )
        return state

    def _inside(self, op):
        """The body of a function call, and the proof of its tensors."""
        body = functions.body(op)
        # A gradient taken later gives the call another body.
        key = (op, body)
        if key not in self._calls:
            self._calls[key] = self.within(
                body.graph,
                body.inputs,
                [self(outer) for outer in op.inputs],
                op.inputs,
            )
        return body, self._calls[key]

    def within(self, graph, inputs, states, equal_to, records=True):
        """The proof of the graph of a function that this one runs.

        Args:
            graph: `tf.Graph` of the function.
            inputs: list of its placeholders.
            states: list of their states.
            equal_to: list, for each of them the tensor here which it always
                is, or None.
            records: bool, whether it counts how it uses random numbers.
                Defaults to `True`.

        Returns:
            A `Provenance`.
        """
        proof = Provenance(
            graph, [], self.batch_size, self._sources, caller=self
        )
        if not records:
            proof.draws = draws.Draws()
        for inner, state, outer in zip(inputs, states, equal_to, strict=True):
            proof._states[inner.ref()] = proof._consistent(inner, state)
            if outer is not None:
                proof._alike.equate(inner, self._alike, outer)
        return proof

    def inside_loop(self, op):
        """States of the variables of a loop.

        Args:
            op: a `tf.Operation`, one of `functions.LOOPS`.

        Returns:
            List of the states of its outputs.
        """
        key = (op, op.get_attr("body").name)
        if key not in self._calls:
            self._calls[key] = loops.fixed_point(op, self)
        return self._calls[key]

    def _placeholder_state(self, op):
        tensor = op.outputs[0]
        if tensor.dtype == tf.resource:
            try:
                shapes.require_held(tensor)
            except Unproven as e:
                return Mixed(f"Placeholder '{op.name}' {e}", False)
            return self._sources.state(tensor)
        outer = self._captured.get(tensor.ref())
        # An eager tensor existed before the batch did.
        is_array = tensor.dtype != tf.variant
        if (
            outer is not None
            and is_array
            and (hasattr(outer, "numpy") or outer.op.type == "Const")
        ):
            return PUBLIC
        what = "a tensor" if is_array else "a list or a dataset"
        return Mixed(
            f"Placeholder '{op.name}' is {what} captured from outside", False
        )

    def _eager_value(self, tensor):
        """The eager tensor that a placeholder stands for, or None."""
        outer = self._captured.get(tensor.ref())
        return outer if hasattr(outer, "numpy") else None

    def require_per_example(self, tensor, what):
        """Returns the state of `tensor`, which must be `PerExample`.

        Raises:
            MixesExamples: if an operation before it mixes examples.
            Unproven: if an operation before it has no rule, or if the tensor
                does not depend on the batch.
        """
        state = self(tensor)
        if isinstance(state, PerExample):
            return state
        if not isinstance(state, Mixed):
            raise Unproven(f"{what} does not depend on the batch")
        raise (MixesExamples if state.mixes else Unproven)(
            f"{what}: {state.reason}"
        )

    def require_no_effect(self, graph, used_by: set | None = None):
        """Checks that nothing outlives the step that depends on the batch.

        Args:
            graph: the `tf.Graph`.
            used_by: set of the operations whose reads count, as the loss may
                be a part of the graph. Defaults to `None`, all.

        Raises:
            UpdatesState: if a variable is assigned a value that is not public.
            ReadsState: if it is not known that what is read is public.
            Unproven: if another operation with an effect reads such a value.
        """
        self._sources.require_readable(graph, used_by)
        effects.require_none(
            graph.get_operations(),
            lambda t: self(t) is PUBLIC or isinstance(self(t), Key),
            lambda t: isinstance(self(t), Key),
        )
        shapes.require_kept(graph)


def handle(variable):
    """The handle of a variable in the graph that is traced."""
    return tf.compat.v1.get_default_graph().capture(
        tf_variable(variable).handle
    )
