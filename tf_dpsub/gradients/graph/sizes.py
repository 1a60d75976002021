"""Proof that rows do not depend on the size of the batch that they are in.

A step works through its examples in passes of a few static sizes. How many were
drawn is private, and decides in which pass an example is. So it must not matter
for its gradient: a model may use the size of a batch as a shape, never as a
number, as in a loss that is divided by it.

Two graphs of one model, traced for two sizes, are compared operation by
operation. Every tensor is of one of these kinds:

- `SAME`: public, and equal in both graphs;
- `ALIKE`: public, with one axis that follows the size; where the slices along
  it are all equal, they are those of the other graph;
- `BATCHED`: computed from the batch, or random numbers for it; one axis follows
  the size;
- `SIZED`: whatever else differs, as the size itself, and what follows from it.

What is sized may tell an operation a shape, and nothing else. An operation that
is not known makes its outputs sized: the proof can be incomplete, which costs
speed.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import constants, draws, effects, functions, rules
from tf_dpsub.gradients.graph.provenance import PUBLIC, Provenance
from tf_dpsub.gradients.graph.sources import origin
from tf_dpsub.gradients.graph.states import PerExample, Unproven

SAME, ALIKE, BATCHED, SIZED = "same", "alike", "batched", "sized"

# Inputs that choose the shape of the output, given those that must agree.
_SHAPES = {
    "BroadcastTo": (1,),
    "Conv2DBackpropInput": (0,),
    "Conv3DBackpropInputV2": (0,),
    "EmptyTensorList": (0,),
    "Fill": (0,),
    "Reshape": (1,),
    "Slice": (2,),
    "StridedSlice": (2,),
    "TensorListFromTensor": (1,),
    "TensorListGetItem": (2,),
    "TensorListReserve": (0,),
    "TensorListStack": (1,),
    "Tile": (1,),
}
_LISTS = ("EmptyTensorList", "TensorListReserve")
_FILLS = frozenset("Fill OnesLike ZerosLike".split())
_MEASURES = frozenset("Rank Shape ShapeN Size".split())
# Slices that are alike stay so.
_KEEPING = frozenset(
    """
    BroadcastTo ConcatV2 ExpandDims Fill Identity Pack Reshape Split Squeeze
    StopGradient Tile Transpose
    """.split()
)
# What they add up is not the axis that follows the size.
_OF_ROWS = ("BiasAdd", "MatMul")
# Within functions, batches are not told apart from what only has their shape.
_NOT_WITHIN = (
    _FILLS
    | _MEASURES
    | effects.DRAWS
    | frozenset(
        "BroadcastTo Range TensorListElementShape Tile VariableShape".split()
    )
    | frozenset(_LISTS)
)
# Attributes that hold shapes, or names that are given once.
_FREE = frozenset(
    """
    _class _gradient_op_type _output_shapes output_shapes shape value
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A loss that was traced for a batch of one size.

    Attributes:
        losses: tensor `[batch]`.
        inputs: list of the tensors, batch in front, that make the batch.
    """

    losses: tf.Tensor
    inputs: list

    @property
    def batch_size(self):
        """The static size of the batch."""
        return self.losses.shape[0]


def require_same_rows(one: Traced, other: Traced, may_read=None):
    """Checks that a row is the same function in batches of two sizes.

    Formal guarantees: if it returns, and if each graph is proved to have rows
    that depend on their own examples alone, then the loss of an example, and so
    its gradient, is the same function of the example, of public values and of
    its random numbers in both graphs. Rounding is not covered: a kernel may add
    in another order for another size.

    Args:
        one, other: `Traced`, of the same model.
        may_read: `Sources`, as for `Provenance`. Defaults to `None`.

    Raises:
        Unproven: names the operation by which they may differ.
    """
    _Comparison(one, other, may_read).require()


class _Comparison:
    def __init__(self, one, other, may_read):
        self._traced = (one, other)
        self._sizes = (one.batch_size, other.batch_size)
        self._proofs = [
            Provenance(t.losses.graph, t.inputs, t.batch_size, may_read)
            for t in self._traced
        ]
        self._constants = [constants.ConstantFolder() for _ in range(2)]
        self._inputs = [{t.ref() for t in made.inputs} for made in self._traced]
        self._captured = [
            {
                inner.ref(): origin(outer)
                for outer, inner in getattr(made.losses.graph, "captures", [])
            }
            for made in self._traced
        ]
        self._kinds: dict = {}
        self._have_equal_bodies: dict = {}
        self._reasons: dict = {}
        self._places: list[dict] = [{}, {}]

    def require(self):
        pairs = _pairs(*(t.losses.graph for t in self._traced))
        for k, pair in enumerate(pairs):
            for places, op in zip(self._places, pair):
                places[op] = k
            self._compare(*pair)
        ends = [t.losses for t in self._traced]
        if self._places[0][ends[0].op] != self._places[1][ends[1].op]:
            raise Unproven("the loss is computed otherwise in another size")
        if self._kinds[ends[0].ref()] != BATCHED:
            raise Unproven(
                self._reasons.get(ends[0].ref(), "the loss has no batch")
            )
        uses = []
        for proof, end in zip(self._proofs, ends):
            proof(end)
            uses.append(proof.draws.uses())
        if uses[0] != uses[1]:
            raise Unproven("random numbers are used otherwise in another size")

    def _compare(self, op, twin):
        _require_alike_attributes(op, twin)
        if len(op.inputs) != len(twin.inputs) or not all(
            self._places[0][a.op] == self._places[1][b.op]
            and a.value_index == b.value_index
            for a, b in zip(op.inputs, twin.inputs)
        ):
            raise Unproven(f"{op.type} '{op.name}' has other inputs")
        kinds = [self._kinds[i.ref()] for i in op.inputs]
        if op.type.startswith(effects.ASSIGNMENTS) and set(kinds) - {SAME}:
            raise Unproven(f"{op.type} '{op.name}' keeps what follows the size")
        for k, (output, other) in enumerate(zip(op.outputs, twin.outputs)):
            kind = self._kind(op, twin, kinds, k)
            if kind == SIZED and self._is_known(op, output, other, kinds):
                kind = SAME
            self._kinds[output.ref()] = kind
            if kind == SIZED:
                self._reasons[output.ref()] = self._reason(op, kinds)

    def _is_known(self, op, output, other, kinds):
        """Returns whether integers, as entries of shapes, are equal."""
        is_measure = op.type in _MEASURES
        if not output.dtype.is_integer or (
            set(kinds) - {SAME, SIZED} and not is_measure
        ):
            return False
        try:
            return np.array_equal(*self._values(output, other))
        except Unproven:
            return False

    def _values(self, output, other):
        pairs = zip(self._constants, (output, other))
        return [fold(tensor) for fold, tensor in pairs]

    def _reason(self, op, kinds):
        slots = _shape_slots(op)
        for k, (tensor, kind) in enumerate(zip(op.inputs, kinds)):
            if kind == SIZED and k not in slots and BATCHED not in kinds:
                return self._reasons[tensor.ref()]
        return (
            f"{op.type} '{op.name}' may use the size of the batch as a number"
        )

    def _kind(self, op, twin, kinds, k):
        """The kind of output `k` of an operation and its twin."""
        output, other = op.outputs[k], twin.outputs[k]
        growth = self._growth(output, other)
        if output.ref() in self._inputs[0]:
            return BATCHED
        if op.type == "Placeholder":
            one, two = (
                captured.get(t.ref())
                for captured, t in zip(self._captured, (output, other))
            )
            return SAME if one is not None and one is two else SIZED
        if op.type == "Const":
            return self._of_constants(output, other, growth)
        if op.type in _MEASURES:
            return SIZED
        if growth == SIZED:
            return SIZED
        if op.type in ("OnesLike", "ZerosLike"):
            return growth
        slots = _shape_slots(op)
        needed = [kind for j, kind in enumerate(kinds) if j not in slots]
        if SIZED in needed:
            return SIZED
        if functions.has_custom_gradient(op):
            # Its gradient is Python code, which may look at shapes.
            return SAME if set(kinds) <= {SAME} else SIZED
        if op.type in functions.CONTROL_FLOW:
            return self._of_function(op, twin, kinds, k)
        if BATCHED in needed:
            return self._of_batch(output, other, growth)
        if op.type in _LISTS and SIZED in kinds:
            # The list tells the shape of its elements.
            return ALIKE if set(needed) <= {SAME} else SIZED
        if draws.is_draw(op) and growth == ALIKE:
            return BATCHED if set(needed) <= {SAME} else SIZED
        if set(kinds) <= {SAME} or (growth == SAME and set(needed) <= {SAME}):
            return SAME if growth == SAME else SIZED
        is_keeping = (
            op.type in _KEEPING
            or rules.is_elementwise(op)
            or (op.type in _OF_ROWS and kinds == [ALIKE, SAME])
        )
        return ALIKE if growth == ALIKE and is_keeping else SIZED

    def _growth(self, output, other):
        """`SAME` for equal shapes, `ALIKE` where one axis follows the size."""
        try:
            one, two = map(constants.static_shape, (output, other))
        except Unproven:
            return SIZED
        if one == two:
            return SAME
        if len(one) != len(two):
            return SIZED
        axes = [axis for axis in range(len(one)) if one[axis] != two[axis]]
        small, large = self._sizes
        follows = len(axes) == 1 and (
            one[axes[0]] * large == two[axes[0]] * small
        )
        return ALIKE if follows else SIZED

    def _of_constants(self, output, other, growth):
        if output.dtype == tf.string:
            values = [t.op.get_attr("value") for t in (output, other)]
            return SAME if values[0] == values[1] else SIZED
        one, two = self._values(output, other)
        if growth == SAME:
            return SAME if one.tobytes() == two.tobytes() else SIZED
        if growth == SIZED:
            return SIZED
        axis = next(
            k for k, (a, b) in enumerate(zip(one.shape, two.shape)) if a != b
        )
        first = np.take(one, [0], axis)
        is_one = np.all(one == first) and np.all(two == first)
        return ALIKE if is_one else SIZED

    def _of_batch(self, output, other, growth):
        """Kind of what is computed from the batch: public results have none."""
        states = [proof(t) for proof, t in zip(self._proofs, (output, other))]
        if any(state is PUBLIC for state in states) or growth != ALIKE:
            is_list = output.dtype == tf.variant and all(
                isinstance(state, PerExample) for state in states
            )
            return BATCHED if is_list else SIZED
        return BATCHED

    def _of_function(self, op, twin, kinds, k):
        """Kind of an output of a function, whose body is the same."""
        growth = self._growth(op.outputs[k], twin.outputs[k])
        if op not in self._have_equal_bodies:
            bodies = [functions.called(made) for made in (op, twin)]
            self._have_equal_bodies[op] = _are_equal(*bodies)
        if SIZED in kinds or not self._have_equal_bodies[op]:
            return SIZED
        if set(kinds) <= {SAME}:
            return SAME if growth == SAME else SIZED
        if op.type not in ("StatelessWhile", "While"):
            return SIZED
        states = [
            [proof(t) for t in made.outputs]
            for proof, made in zip(self._proofs, (op, twin))
        ]

        def is_everywhere(j, kind):
            return all(isinstance(of[j], kind) for of in states)

        if not all(
            kind == SAME or is_everywhere(j, PerExample)
            for j, kind in enumerate(kinds)
        ):
            return SIZED
        if is_everywhere(k, PerExample):
            is_list = op.outputs[k].dtype == tf.variant
            return BATCHED if growth == ALIKE or is_list else SIZED
        is_public = all(of[k] is PUBLIC for of in states)
        return SAME if is_public and growth == SAME else SIZED


def _shape_slots(op):
    if draws.is_draw(op):
        return (0,)
    return _SHAPES.get(op.type, ())


def _pairs(one, other):
    """Operations of two graphs, in the order in which they were traced."""
    first, second = (g.get_operations() for g in (one, other))
    if [op.type for op in first] != [op.type for op in second]:
        raise Unproven("other operations are traced for another batch size")
    return list(zip(first, second))


def _require_alike_attributes(op, twin):
    for node, other in ((op.node_def.attr, twin.node_def.attr),):
        for name in (set(node) | set(other)) - _FREE:
            if node[name].HasField("func") and other[name].HasField("func"):
                continue
            if node[name] != other[name]:
                raise Unproven(f"{op.type} '{op.name}' has another {name}")


def _are_equal(definitions, others):
    """Returns whether functions are equal, but for names and shapes."""
    if len(definitions) != len(others):
        return False
    return all(map(_is_equal, definitions, others))


def _is_equal(definition, other):
    if len(definition.node_def) != len(other.node_def):
        return False
    numbers, returned = zip(*map(_numbered, (definition, other)))
    if returned[0] != returned[1]:
        return False
    shapes_alone = _shapes_alone(definition)
    for node, twin in zip(definition.node_def, other.node_def):
        if node.op != twin.op or _is_of_size(node.op):
            return False
        if "_gradient_op_type" in node.attr:
            # Its gradient is Python code, which may look at shapes.
            return False
        inputs = [
            [_renamed(places, name) for name in each.input]
            for places, each in zip(numbers, (node, twin))
        ]
        if inputs[0] != inputs[1]:
            return False
        for name in set(node.attr) | set(twin.attr):
            one, two = node.attr[name], twin.attr[name]
            is_free = name in _FREE and (
                name != "value" or node.name in shapes_alone
            )
            if not is_free and not one.HasField("func") and one != two:
                return False
    return True


def _shapes_alone(definition):
    """Names of the nodes that tell lists the shape of elements, and no more."""
    told, others = set(), set()
    for node in definition.node_def:
        slots = _SHAPES.get(node.op, ()) if "TensorList" in node.op else ()
        for k, name in enumerate(node.input):
            (told if k in slots else others).add(name.split(":")[0])
    others |= {name.split(":")[0] for name in definition.ret.values()}
    return told - others


def _is_of_size(kind):
    """Returns whether an operation may make a public value of a shape."""
    return kind in _NOT_WITHIN or (
        kind.startswith("Stateless") and "Random" in kind
    )


def _numbered(definition):
    """Places of the names in a function, and what it returns by them."""
    arguments = definition.signature.input_arg
    places = {argument.name: -1 - k for k, argument in enumerate(arguments)}
    places |= {node.name: k for k, node in enumerate(definition.node_def)}
    returned = [
        _renamed(places, definition.ret[argument.name])
        for argument in definition.signature.output_arg
    ]
    return places, returned


def _renamed(places, name):
    node, *output = name.removeprefix("^").split(":")
    return places[node], name.startswith("^"), output
