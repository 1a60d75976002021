"""The part of a training step that sees private data."""

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.models.functional import Functional

from tf_dpsub import gradients
from tf_dpsub.gradients import selection
from tf_dpsub.gradients.graph import effects, functions, sources
from tf_dpsub.gradients.rows import mask_rows, scale_rows
from tf_dpsub.gradients.tracing import trace
from tf_dpsub.layers import conversion
from tf_dpsub.primitives.public_state import public_variables
from tf_dpsub.training import ids, microbatches, own_loss, step_states
from tf_dpsub.training.claims import Claims, claims_of
from tf_dpsub.training.per_example_loss import PerExampleLoss
from tf_dpsub.training.views import Views

# float16 losses are multiplied by this constant, which is public: gradients
# would underflow. Rows are divided by it in float32, before their norms.
_FLOAT16_LOSS_SCALE = 1024.0
# Steps that are kept: for batches with sample weights and without, say.
_KINDS_OF_BATCHES = 4


class PrivateStep:
    """Computes the clipped sums of per-example gradients of a batch.

    A batch is a dict of `x`, `y`, `w` (sample weights) and `real`, which is 0
    in rows that only pad it; these come last; and of `rows` where views may be
    missing. It is worked through in microbatches of static size.

    Formal guarantees: what leaves the step is the sums, to be perturbed by the
    optimizer, and training metrics, which are private. States of the model
    that it changes, such as seeds of dropout, have public values afterwards.
    The row of an example is the mean of the gradients of its views: clipped as
    one, it moves a sum by the clip at most, however many views there are.

    Args:
        model: compiled `PrivateModel`, whose optimizer is built.
        spec: structure of `tf.TensorSpec`, those of a microbatch; of several
            views they have an axis for them.
        dropped: `keras.metrics.Sum`, counts the examples that contributed
            nothing because their gradients were not finite, or a label or an id
            was out of range.
        views: int, how many of each example there are. Defaults to `1`.

    Attributes:
        spec: structure of `tf.TensorSpec` of a microbatch, without views.
        is_random: bool, whether random numbers of the model differ from one
            view to another.
        optimizer: the private optimizer that it clips for.
        implementation: string, how per-example gradients are computed.
        is_compiled: bool, whether XLA compiles them.
        assumptions: tuple of strings, what was taken as public unchecked.

    Raises:
        RuntimeError: if TensorFlow runs functions eagerly.
        ValueError: if there is no loss of each example.
        gradients.MixesExamples, gradients.Unproven, gradients.UpdatesState,
            gradients.ReadsState: as `tf_dpsub.gradients.selection` says.
    """

    def __init__(self, model, spec, dropped, views: int = 1):
        _require_graphs()
        self._model = model
        self._dropped = dropped
        self._views = Views.of_run(views)
        self._public_views = self._views.of_public(spec)
        self.spec = self._views.without_axis(spec)
        self.optimizer = model.optimizer
        self._microbatch_size = spec["real"].shape[0]
        self._metrics = model._compile_metrics
        self._per_example_loss = None
        if model._compile_loss is not None:
            self._per_example_loss = PerExampleLoss(model._compile_loss)
        self._own_loss = None
        if own_loss.has_own_loss(model.model):
            self._own_loss = own_loss.OwnLoss(
                model.model, self._per_example_loss
            )
        self._build(spec)
        loss_fn = self._loss_fn(self._views)
        plain = model.model
        self._states = step_states.StepStates(plain)
        forward = selection.forward_pass(
            loss_fn,
            spec,
            [*plain.non_trainable_variables, *self._states.variables],
        )
        self._states.keep(forward.changed)
        self.is_random = forward.is_random
        self._draws = forward.draws
        self.assumptions = (
            ("what Python functions of the model keep, or read elsewhere",)
            if forward.calls_python
            else ()
        )
        self._may_read = gradients.Sources(
            [
                *plain.variables,
                *conversion.carrier_variables(plain),
                *self._states.variables,
            ],
            self._states.seeds,
        )
        self.implementation = selection.select_implementation(
            loss_fn,
            spec,
            self.optimizer.per_example_variables,
            requested=model.optimizer.per_example,
            states=[*forward.changed, *self._states.variables],
            may_read=self._may_read,
            compute_dtype=model.model.compute_dtype,
            name=model.model.name,
            forward=forward,
        )
        self._states.share(
            step_states.uses_of(
                self.implementation,
                self._may_read.uses,
                len(self._states.seeds),
            )
        )
        if self.implementation == "graph" and not forward.draws:
            uses = (self._may_read.uses or {}).values()
            self.is_random = sources.EACH in uses
        # XLA cannot compile a loop or map over examples around a model's loop,
        # and where no state determines what is drawn, it draws from a constant.
        self.is_compiled = (
            model.jit_compile
            and self.implementation == "graph"
            and self.optimizer.public_state.is_compilable
            and not forward.draws
        )
        self._traced_claims: list[Claims | None] = []
        self._function = tf.function(
            self._sums, autograph=False, jit_compile=self.is_compiled
        )

    def __call__(self, batch: dict) -> list:
        """Computes the sums, and updates the metrics of training.

        Args:
            batch: dict of tensors; the number of rows is a multiple of the
                size of a microbatch.

        Returns:
            List of tensors, as the optimizer's `clipped_sums`, in float64
            where several microbatches were added up.

        Raises:
            RuntimeError: if the optimizer claims something else by now than
                where the sums were traced, another clip, say.
        """
        _require_graphs()
        sums = self._function(batch)
        if not self.has_present_claims:
            raise RuntimeError(
                "Expected an optimizer that claims what it did where its sums "
                f"were traced, {self._traced_claims[0]}, got "
                f"{claims_of(self.optimizer)}: clips are constants of these. "
                "Compile the model again."
            )
        return sums

    @property
    def has_present_claims(self) -> bool:
        """Whether what was traced, if anything, is what is claimed now."""
        present = claims_of(self.optimizer)
        return all(claims == present for claims in self._traced_claims)

    def _build(self, spec):
        """Creates variables of losses and metrics outside of any step."""
        merged = trace(self._views.merged, spec).structured_outputs
        y, y_pred = tree.map_structure(
            _keras_spec, (merged.get("y"), self._outputs(merged["x"]))
        )
        if self._own_loss is not None:
            # It chooses what a loss of `compile` is given.
            trace(self._check_own_loss, spec)
        elif self._per_example_loss is not None:
            if y is None:
                raise ValueError(
                    "Expected targets for the loss, got data without y. Pass "
                    "`y`, or a dataset of `(x, y)`."
                )
            self._per_example_loss.build(y, y_pred)
        if self._metrics is not None:
            backend.compute_output_spec(self._metrics.update_state, y, y_pred)

    def _outputs(self, x):
        """Specs of what the model puts out for a batch."""
        model = self._model.model
        if type(model).call is keras.Sequential.call:
            model = model._functional
        if type(model).call is Functional.call:
            # It was called on symbolic inputs, when it was made.
            outputs, rows = model.output, tree.flatten(x)[0].shape[0]
            if not any(None in t.shape[1:] for t in tree.flatten(outputs)):
                return tree.map_structure(
                    lambda t: keras.KerasTensor((rows, *t.shape[1:]), t.dtype),
                    outputs,
                )
        call = trace(lambda x: self._model.call(x, training=True), x)
        return call.structured_outputs

    def _check_own_loss(self, batch):
        batch = self._views.merged(batch)
        y_pred = self._model.call(batch["x"], training=True)
        self._own_loss.check(batch["x"], batch.get("y"), y_pred, batch.get("w"))
        return batch["real"]

    def _loss_fn(self, views, loss_scale=1.0):
        """The loss of each example of a batch, 0 where a row only pads it."""

        def loss_fn(batch):
            real = batch["real"]
            checked = ids.IdsInRange()
            with self._states.one_pass(), checked.watched():
                y_pred, losses, outputs = self._forward(
                    views.merged(batch), real.shape[0] * views.count
                )
            y_pred = tree.map_structure(views.apart, y_pred)
            losses, *outputs = (
                views.mean(values, batch.get("rows"))
                for values in (losses, *outputs)
            )
            inputs = tree.flatten(batch)
            factors = checked.not_a_number(inputs, real.shape[0])
            if factors is not None:
                losses *= factors
            losses = tf.where(real > 0, losses, 0.0)
            aux = {"y_pred": y_pred, "losses": losses, "outputs": outputs}
            return losses * loss_scale, aux

        return loss_fn

    def _forward(self, batch, rows):
        """Predictions, the loss of each row, and those of each output."""
        y_pred = tree.map_structure(
            lambda t: _with_batch_size(t, rows),
            self._model.call(batch["x"], training=True),
        )
        losses, outputs = tf.zeros([rows]), []
        if self._own_loss is not None:
            losses = self._own_loss(
                batch["x"], batch.get("y"), y_pred, batch.get("w")
            )
        elif self._per_example_loss is not None:
            losses, outputs = self._per_example_loss(
                batch["y"], y_pred, batch.get("w")
            )
        added = _added_losses(self._model.model, losses.shape)
        return y_pred, tf.add_n([losses, *added]), outputs

    def _sums(self, batch):
        """Clipped sums over a batch, one microbatch after another.

        The number of microbatches follows the number of real rows, which come
        first: neither padding nor the capacity of a batch costs time.

        The running sums are float64. In float32, one example more can carry a
        sum over a power of two, from where on all later ones are rounded more
        coarsely: the sum would move by more than the clip.
        """
        self._traced_claims.append(claims_of(self.optimizer))
        sums = self._sums_of_passes(batch)
        # Code of the user that was traced meanwhile may have changed them.
        self._traced_claims.append(claims_of(self.optimizer))
        return sums

    def _sums_of_passes(self, batch):
        self._states.begin_step()
        size = self._microbatch_size
        parts = tree.map_structure(
            lambda t: tf.reshape(t, [-1, size, *t.shape[1:]]), batch
        )  # [passes, microbatch, ...]
        if parts["real"].shape[0] == 1:
            return self._microbatch_sums(
                tree.map_structure(lambda t: t[0], parts)
            )
        drawn = tf.cast(tf.reduce_sum(batch["real"]), tf.int32)
        passes = tf.maximum(1, -(-drawn // size))

        def body(i, sums):
            part = tree.map_structure(lambda t: t[i], parts)
            sums = [
                a + tf.cast(b, tf.float64)
                for a, b in zip(sums, self._microbatch_sums(part))
            ]
            return i + 1, sums

        shapes = [tf.TensorShape(s) for s in self.optimizer.sum_shapes()]
        first = loop = shapes
        if not self.is_compiled:
            # A sum that begins as a scalar takes no memory beside the first
            # microbatch. XLA wants shapes that stay.
            first = [tf.TensorShape([]) for _ in shapes]
            loop = [tf.TensorShape(None) for _ in shapes]
        counter = tf.constant(0)
        _, sums = tf.while_loop(
            lambda i, _: i < passes,
            body,
            [counter, [tf.zeros(shape, tf.float64) for shape in first]],
            shape_invariants=[counter.shape, loop],
            # Else up to ten microbatches are in memory at a time.
            parallel_iterations=1,
        )
        return [tf.ensure_shape(s, shape) for s, shape in zip(sums, shapes)]

    def per_example_gradients(self, part: dict, variables: list | None = None):
        """Gradients of the examples of a batch, worked through as a whole.

        Args:
            part: dict of tensors of static size, without views.
            variables: list of variables that they are with respect to. Defaults
                to `None`, those of the optimizer.

        Returns:
            A `gradients.PerExampleGradients`, and what metrics need.
        """
        views = self._public_views
        if variables is None:
            variables = self.optimizer.per_example_variables
        return self._rows(views.with_axis(part), views, variables)

    def _rows(self, part, views, variables, is_vectorizable=None):
        is_float16 = self._model.model.compute_dtype == "float16"
        loss_scale = _FLOAT16_LOSS_SCALE if is_float16 else 1.0
        return gradients.per_example_gradients(
            self._loss_fn(views, loss_scale),
            part,
            variables,
            self.implementation,
            loss_scale,
            self._may_read,
            is_vectorizable,
        )

    def _microbatch_sums(self, part):
        # It was chosen for batches of this spec.
        rows, aux = self._rows(
            part,
            self._views,
            self.optimizer.per_example_variables,
            is_vectorizable=True,
        )
        graph = tf.compat.v1.get_default_graph()
        self._require_as_checked(graph)
        sums = self.optimizer.clipped_sums(rows, part["real"])
        before = len(graph.get_operations())
        self._update_metrics(part, aux, rows.valid)
        self._require_no_weight_written(graph.get_operations()[before:])
        return sums

    def _require_as_checked(self, graph):
        """Checks that a step does nothing that it did not when it was checked.

        How keys, states and compilation are arranged follows from that.
        """
        self._states.require_kept(graph.get_operations())
        for what, has, had in (
            ("draws of random numbers", effects.draws(graph), self._draws),
            (
                "calls of Python functions",
                effects.calls_python(graph),
                bool(self.assumptions),
            ),
        ):
            if has and not had:
                raise gradients.Unproven(
                    f"Expected a model without {what}, as it was when it was "
                    "checked, got one that has some. Change no layer while a "
                    "model trains: compile it again."
                )

    def _require_no_weight_written(self, operations):
        """Checks that metrics, which see the batch, write nothing released.

        These are what the model reads, and the state of the optimizer: its
        clip, say, a moment, or the basis of its subspace.
        """
        released = self._may_read.handles.union(
            *(
                sources.handles(v)
                for v in (*self.optimizer.variables, *public_variables())
            )
        )
        written = effects.written_by(operations)
        if released & {
            id(functions.origin(handle.deref())) for handle in written
        }:
            raise gradients.UpdatesState(
                "Expected metrics that write their own variables alone, got "
                "a metric that assigns to a weight, or to a table, that the "
                "model reads, or to a variable of the optimizer: what it "
                "stores would be released without noise. Keep it in a "
                "variable of the metric (`metric.add_variable`)."
            )

    def _update_metrics(self, batch, aux, valid):
        """Updates private metrics with the examples that contributed."""
        with ids.IdsInRange().watched():
            self._update_watched_metrics(batch, aux, valid)

    def _update_watched_metrics(self, batch, aux, valid):
        real = batch["real"]
        rows = batch.get("rows")
        counted = tf.where(valid, real, 0.0)
        self._dropped.update_state(tf.reduce_sum(real - counted))
        # What is not finite would stay so with weight 0.
        targets = {k: batch[k] for k in ("y", "w") if k in batch}
        aux, targets = tree.map_structure(
            lambda t: _masked(valid, t), (aux, targets)
        )
        trackers, values = [self._model._loss_tracker], [aux["losses"]]
        if self._per_example_loss is not None:
            trackers += self._per_example_loss.compile_loss.metrics
            values += aux["outputs"]
        weights = counted
        if rows is not None:
            # A view that is missing takes no part in means.
            given = tf.reduce_mean(rows, 1)
            values = [tf.math.divide_no_nan(v, given) for v in values]
            weights = counted * given
        for tracker, means in zip(trackers, values):
            tracker.update_state(means, sample_weight=weights)
        if self._metrics is not None:
            targets = self._views.merged(targets)
            _update_compiled_metrics(
                self._metrics,
                targets.get("y"),
                tree.map_structure(self._views.together, aux["y_pred"]),
                targets.get("w"),
                # An example counts once, each of its views for a share.
                self._views.shared(counted, rows),
            )


class StepCache:
    """Steps of a compiled model, built once for each of a few kinds of batches.

    Args:
        model, dropped: as for `PrivateStep`.
    """

    def __init__(self, model, dropped):
        self._model, self._dropped = model, dropped
        self._steps: list[tuple] = []
        self._sizes: dict[tuple, int] = {}

    def default_microbatch_size(self, views: int, places: int | None) -> int:
        """The microbatch size of who chooses none: `microbatches.default_size`.

        Args:
            views, places: as for it.
        """
        if (views, places) not in self._sizes:
            self._sizes[views, places] = microbatches.default_size(
                self._model.model,
                self._model.optimizer.batch_size,
                self._model.distribute_strategy.num_replicas_in_sync,
                views,
                places,
            )
        return self._sizes[views, places]

    def of(self, spec, views: int = 1) -> PrivateStep:
        """The step for microbatches of a spec, with so many views."""
        self._steps = [(k, s) for k, s in self._steps if s.has_present_claims]
        for kind, step in self._steps:
            if kind == (spec, views):
                return step
        step = PrivateStep(self._model, spec, self._dropped, views)
        kept = [*self._steps, ((spec, views), step)]
        self._steps = kept[-_KINDS_OF_BATCHES:]
        return step


def _require_graphs():
    if tf.config.functions_run_eagerly():
        raise RuntimeError(
            "Expected tf.config.run_functions_eagerly(False), got True: that "
            "rows are private is proved from the graph of a step. Pass "
            "run_eagerly=True to `compile` to debug: the clipped sums alone "
            "are a function then."
        )


def _added_losses(model, shape):
    """Losses of `add_loss` for each example."""
    losses = []
    for layer in model._flatten_layers():
        for loss in layer._get_own_losses():
            if loss.shape != shape:
                raise ValueError(
                    f"Expected losses of shape [batch] from add_loss, got "
                    f"shape {loss.shape} from {type(layer).__name__} "
                    f"'{layer.name}': a loss of the whole batch mixes its "
                    "examples. Add one value for each example; for activity "
                    "regularizers, use `kernel_regularizer`."
                )
            losses.append(tf.cast(loss, tf.float32))
    return losses


def _keras_spec(tensor):
    if tensor is None:
        return None
    return keras.KerasTensor(
        tensor.shape, keras.backend.standardize_dtype(tensor.dtype)
    )


def _masked(valid, tensor):
    """`tensor` with zeros where an example is not valid, its mask kept."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return tensor
    (masked,) = mask_rows(valid, [tensor])
    mask = backend.get_keras_mask(tensor)
    if mask is not None:
        backend.set_keras_mask(masked, mask)
    return masked


def _update_compiled_metrics(metrics, y, y_pred, weight, counted):
    """Does what `CompileMetrics.update_state` does, for examples that count."""
    targets, predictions = metrics._flatten_y(y), metrics._flatten_y(y_pred)
    weights = [None] if weight is None else metrics._flatten_y(weight)
    if len(weights) < len(targets):
        weights = [weights[0]] * len(targets)
    for unweighted, weighted, target, prediction, output_weight in zip(
        metrics._flat_metrics,
        metrics._flat_weighted_metrics,
        targets,
        predictions,
        weights,
    ):
        # Keras wants weights of masked sequences as [batch, 1].
        masked = backend.get_keras_mask(prediction) is not None
        real = counted[:, None] if masked else counted
        if unweighted:
            unweighted.update_state(target, prediction, real)
        if weighted and output_weight is None:
            weighted.update_state(target, prediction, real)
        elif weighted:
            output_weight = (
                output_weight[:, None]
                if masked and output_weight.shape.rank == 1
                else output_weight
            )
            output_weight = scale_rows(counted, output_weight)
            weighted.update_state(target, prediction, output_weight)


def _with_batch_size(tensor, batch_size):
    """`tensor` with a static first axis, which layers of text forget."""
    if tensor.shape[0] is not None:
        return tensor
    static = tf.ensure_shape(tensor, [batch_size, *tensor.shape[1:]])
    mask = backend.get_keras_mask(tensor)
    if mask is not None:
        backend.set_keras_mask(static, mask)
    return static
