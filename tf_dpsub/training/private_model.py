"""Private training of any Keras model, by composition."""

import copy

import keras
import tensorflow as tf
from keras import tree

from tf_dpsub import accounting, interruptions
from tf_dpsub.checks import check_count
from tf_dpsub.training import (
    calibration,
    carried_ledger,
    execution,
    fit_callbacks,
    kept_features,
    loss_scales,
    microbatches,
    own_loss,
    planned_runs,
    preprocessing,
    private_batches,
    private_evaluation,
    private_step,
    reported_privacy,
    requirements,
    run,
    saving,
    step_errors,
    tallies,
    workers,
)
from tf_dpsub.training.claims import claims_of
from tf_dpsub.training.public_updates import reading_public_values


def make_private(model, *, ledger_path: str | None = None):
    """Makes a Keras model private.

    The model is not changed, only its weights are trained; it goes on working
    as the plain model it is. Privacy is counted from now on: what its weights
    tell about data they have seen before is not covered.

    Args:
        model: built `keras.Model`.
        ledger_path: string, a file in which steps are recorded before they
            run, so that a crash loses none, before a run goes on from a
            checkpoint or `BackupAndRestore` too. An existing file is continued.
            Defaults to `None`.

    Returns:
        A `PrivateModel`.

    Raises:
        ValueError: names what cannot be trained privately, and the cure.

    Example:

    ```python
    model = tf_dpsub.make_private(plain_model)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            epsilon=2.0, delta=1e-5, l2_norm_clip=1.0, batch_size=256,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, epochs=15)
    print(model.privacy_statement(delta=1e-5))
    ```
    """
    return PrivateModel(model, ledger_path=ledger_path)


@keras.saving.register_keras_serializable("tf_dpsub")
class PrivateModel(
    reported_privacy.ReportsPrivacy,
    private_evaluation.EvaluatedPrivately,
    saving.SavedWithLedger,
):
    """Trains the weights of a plain model privately.

    `compile` takes a private optimizer; `fit` draws Poisson batches from
    arrays, or takes the batches of a `tf.data.Dataset` as they come;
    `evaluate`, `predict` and `save` work as for any model, and
    `model.model.save` saves the plain one. Where no class of tf_dpsub is part
    of it, it loads without this package.

    Formal guarantees: what is released is the weights of the model at every
    step. Each step is a release of its optimizer, which accounts for it; the
    ledger records it before it runs, with the sampling that really drew its
    batch, and is saved with the model. Training metrics are computed from
    private data without noise, and not covered.

    Args:
        model: built `keras.Model`.
        ledger_path: string or None, as for `make_private`.
        name: string. Defaults to `None`.

    Attributes:
        model: the plain model.
        ledger: `tf_dpsub.accounting.PrivacyLedger`, all steps so far.
        current_run: `training.run.Run`, the call of `fit` in progress, or None.
        kept_features: `training.kept_features.KeptFeatures` of that call, or
            None.
    """

    def __init__(
        self, model, ledger_path: str | None = None, name: str | None = None
    ):
        if isinstance(model, PrivateModel):
            raise ValueError(
                f"Expected a plain model, got '{model.name}', which is private "
                "already. Compile it, or wrap `model.model` again."
            )
        requirements.check_model(model)
        with model.distribute_strategy.scope():
            super().__init__(
                name=name or f"private_{model.name}",
                dtype=model.dtype_policy,
                autocast=False,
            )
        self.model = model
        self.ledger = accounting.PrivacyLedger(ledger_path)
        if not model.distribute_strategy.extended.should_checkpoint:
            # Of several workers the chief alone writes: a copy has no file.
            self.ledger = copy.copy(self.ledger)
        self._carried_ledger = carried_ledger.CarriedLedger(self)
        self.built = True
        self.current_run: run.Run | None = None
        self.kept_features: kept_features.KeptFeatures | None = None
        self.training_step: private_step.PrivateStep | None = None
        # Of the examples last seen: `microbatches.places_of`.
        self._places: int | None = None

    # As the plain model.

    def call(self, inputs, training=None, mask=None):
        if isinstance(inputs, dict) and set(inputs) == {kept_features.KEY}:
            return self.kept_features.head(inputs[kept_features.KEY], training)
        if self.model._call_has_training_arg:
            return self.model(inputs, training=training)
        return self.model(inputs)

    @property
    def output_names(self):
        return getattr(self.model, "output_names", None)

    @property
    def input_shape(self):
        return self.model.input_shape

    @property
    def output_shape(self):
        return self.model.output_shape

    def compute_output_shape(self, input_shape):
        return self.model.compute_output_shape(input_shape)

    def compute_output_spec(self, inputs, training=None, mask=None):
        return self.model.compute_output_spec(inputs)

    def summary(self, *args, **kwargs):
        return self.model.summary(*args, **kwargs)

    # Compiling.

    def compile(self, optimizer="rmsprop", loss=None, *args, **kwargs):
        """Configures the model for private training.

        Args: as `keras.Model.compile`, with a private optimizer.

        Raises:
            ValueError: if the optimizer is not private, or scales the loss.
        """
        optimizer = keras.optimizers.get(optimizer)
        requirements.check_compile(optimizer, kwargs)
        requirements.check_layers(self.model)
        requirements.require_full_precision()
        kwargs["auto_scale_loss"] = False
        super().compile(optimizer, loss, *args, **kwargs)
        self._carried_ledger.begin_counting(optimizer)
        self._tallies = tallies.Tallies(self)
        self.forget_steps()

    def forget_steps(self):
        """Builds the next step anew, whatever was built for such batches."""
        self._steps = private_step.StepCache(self, self._tallies.dropped)
        self.training_step = None

    def _assert_compile_called(self, method_name=None):
        if not self.compiled:
            raise ValueError(
                "Expected a compiled model, got one that is not. Call "
                "`compile` of the private model, with a private optimizer: "
                "what the plain model was compiled with is not taken over."
            )

    # Training.

    @step_errors.explained
    @kept_features.forgotten_afterwards
    def fit(
        self,
        x=None,
        y=None,
        batch_size: int | None = None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
        *,
        sampling: str | None = None,
        views: int = 1,
        each_example_once_per_epoch: bool = False,
        allow_private_selection: bool = False,
        validation_data_is_public: bool = False,
        keep_features: bool = True,
        person_ids=None,
        rows_per_person_per_step: int | None = None,
    ):
        """Trains the model privately.

        Arrays are sampled by `tf_dpsub.data.PoissonBatches`: every step draws
        each example independently with probability `batch_size / n`, and an
        epoch is `ceil(n / batch_size)` steps. A `tf.data.Dataset` of batches is
        trained on as it comes, and accounted for without amplification.

        Formal guarantees: what a step releases, its sensitivity and its event
        do not depend on `views`. Each view is made of its own example and of
        random numbers that are independent of all examples, drawn for a step or
        for the run, and the mean of the gradients of all views of an example
        is clipped as one. With `person_ids` the same holds of the rows of a
        person: persons are drawn, each is clipped as one, and neighbours differ
        in all rows of one person.

        Args: as `keras.Model.fit`; `shuffle` has no effect.
            x: arrays, a `keras.utils.PyDataset` for its rows,
                `tf_dpsub.data.PoissonBatches`, `tf_dpsub.data.OncePerEpoch`,
                or a `tf.data.Dataset`.
            batch_size: int, the expected batch size, which must be that of the
                optimizer. Defaults to `None`, that of the optimizer.
            sampling: string, how the rows of arrays are drawn: `"poisson"`,
                as above, or `"once_per_epoch"`, each at one step of every
                epoch, chosen at random (`tf_dpsub.data.OncePerEpoch`). An
                epoch that has begun counts whole. Defaults to `None`,
                `"poisson"` for arrays.
            views: int, how many views of each drawn example enter the step:
                its gradient is the mean of those of its views. The `map` of
                `PoissonBatches` makes each of them anew, and so do random
                layers of the model; those before frozen features make them
                once, see `keep_features`. A step costs as many times as much.
                Defaults to `1`.
            each_example_once_per_epoch: bool, states that the dataset gives
                each example at most once per epoch: the smaller epsilon of so
                many epochs then counts. Defaults to `False`.
            allow_private_selection: bool, lets callbacks steer by private
                results, which epsilon does not cover. Defaults to `False`.
            validation_data_is_public: bool, states that `validation_data` is
                public. Defaults to `False`.
            keep_features: bool, whether features that a
                `tf_dpsub.layers.FrozenFeatures` makes of arrays are computed
                once and kept until the call ends, from 2 GiB on in a temporary
                file. With random numbers before them, of the `map` of
                `PoissonBatches` or of layers, all `views` are drawn once; a
                single view is drawn at each step. Defaults to `True`.
            person_ids: array of ints or strings, `[rows]`, the person of each
                row. Every step then draws persons instead of rows, `batch_size`
                and `n` count them, and epsilon is that of all rows of a person,
                however many there are. Defaults to `None`.
            rows_per_person_per_step: int, how many rows of a drawn person enter
                a step, fewer where there are fewer: its gradient is the sum of
                theirs divided by this number. Defaults to `None`, one.

        Returns:
            A `keras.callbacks.History`.

        Raises:
            ValueError: if the data, the batch size, the number of views or a
                callback do not fit.
            ConnectionError: if one of several workers is lost.
            MemoryError: if memory does not suffice for a microbatch.
        """
        self._assert_compile_called("fit")
        run.require_none(self)
        check_count("views", views)
        private_batches.check_persons(
            person_ids, rows_per_person_per_step, x, views, validation_split
        )
        self._carried_ledger.require_all_steps()
        batch_size = private_batches.checked_batch_size(
            self.optimizer, batch_size
        )
        (x, y, sample_weight), validation_data = (
            private_batches.split_validation(
                (x, y, sample_weight),
                validation_data,
                validation_split,
                validation_data_is_public,
            )
        )
        is_public = validation_data_is_public and validation_data is not None
        requirements.check_callbacks(
            self, callbacks, is_public, allow_private_selection
        )
        loss_scales.warn_of_small_weights(class_weight, sample_weight)
        sample_weight = loss_scales.weights_of_examples(
            y, class_weight, sample_weight
        )
        if validation_data is not None:
            validation_data = self.preprocessed(validation_data)
        batches = private_batches.PrivateBatches.of(
            self,
            x,
            y,
            sample_weight,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            initial_epoch=initial_epoch,
            views=views,
            each_example_once_per_epoch=each_example_once_per_epoch,
            keep_features=keep_features,
            person_ids=person_ids,
            rows_per_person_per_step=rows_per_person_per_step,
            sampling=sampling,
        )
        current_run = planned_runs.planned(
            self,
            batches,
            epochs=epochs,
            initial_epoch=initial_epoch,
            verbose=verbose,
            callbacks=callbacks,
            public_data=validation_data if is_public else None,
            allow_private_selection=allow_private_selection,
        )
        with current_run, workers.lost_worker_named(self.distribute_strategy):
            self.optimizer.public_state.begin_run(current_run.steps)
            with interruptions.kept():
                return super().fit(
                    batches.dataset,
                    epochs=epochs,
                    verbose=verbose,
                    callbacks=fit_callbacks.completed(callbacks, verbose),
                    validation_data=self.with_features(validation_data),
                    shuffle=False,
                    initial_epoch=initial_epoch,
                    steps_per_epoch=batches.steps_to_take,
                    validation_steps=validation_steps,
                    validation_batch_size=validation_batch_size or batch_size,
                    validation_freq=validation_freq,
                )

    @step_errors.explained
    def train_on_batch(
        self,
        x,
        y=None,
        sample_weight=None,
        class_weight=None,
        return_dict=False,
    ):
        """Makes one private step on a batch, accounted without amplification.

        Args: as `keras.Model.train_on_batch`.

        Returns:
            Training metrics, as Keras does.

        Raises:
            ValueError: on more than one replica, or if the data do not fit.
        """
        self._assert_compile_called("train_on_batch")
        run.require_none(self)
        requirements.check_one_replica(self)
        self._carried_ledger.require_all_steps()
        sample_weight = loss_scales.weights_of_examples(
            y, class_weight, sample_weight
        )
        data = self.preprocessed((x, y, sample_weight))
        overlap = requirements.stated_overlap(self, data[0])
        batch = private_batches.padded(self, data)
        self.prepare_training(
            tree.map_structure(tf.type_spec_from_value, batch)
        )
        self.make_train_function()
        self.reset_metrics()
        entry = run.entry_of(self, **overlap)
        calibration.require_one_step(self.optimizer, self.ledger, entry)
        with run.Run(self, entry, steps_per_epoch=1) as current_run:
            current_run.begin_epoch(0)
            self.optimizer.public_state.begin_run(None)
            current_run.expect_step(0)
            logs = self.train_function(iter([batch]))
        logs = {k: float(v) for k, v in logs.items()}
        if return_dict:
            return logs
        return self._flatten_metrics_in_order(logs)

    @step_errors.explained
    def evaluate(self, x=None, y=None, batch_size=None, **kwargs):
        """Evaluates the model, as `keras.Model.evaluate` does."""
        weight = kwargs.pop("sample_weight", None)
        data = self.preprocessed((x, y, weight))
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        return super().evaluate(
            x, y, batch_size=batch_size, sample_weight=weight, **kwargs
        )

    def predict(self, x, *args, **kwargs):
        """Predicts, as `keras.Model.predict` does."""
        return super().predict(self.preprocessed((x,))[0], *args, **kwargs)

    # Data.

    def preprocessed(self, data):
        """Applies the plain model's preprocessing, if it has any."""
        return preprocessing.preprocessed(self.model, data)

    def with_features(self, data):
        """Replaces the inputs of `(x, ...)` by their features, if kept."""
        if self.kept_features is None or not isinstance(data, (tuple, list)):
            return data
        return (self.kept_features.of(data[0]), *data[1:])

    @property
    def microbatch_size(self):
        """Number of examples that a step works through at a time."""
        return self.microbatch_size_of(views=1)

    def microbatch_size_of(self, views: int) -> int:
        """The microbatch size of a run.

        Args:
            views: int, views of each example.
        """
        if self.optimizer.microbatch_size is not None:
            # A batch of one has no axis to follow.
            return max(2, self.optimizer.microbatch_size)
        return self._steps.default_microbatch_size(views, self._places)

    # What `current_run` has, by its names until version 0.2.

    steps_within = run.moved("steps_within", "steps_within")
    limit_steps = run.moved("limit_steps", "limit")
    observe_sums = run.moved("observe_sums", "observe_sums")

    @property
    def planned_steps(self):
        """`current_run.steps`. Without a warning: Keras reads it in saving."""
        return None if self.current_run is None else self.current_run.steps

    # One step.

    def prepare_training(self, spec, views: int = 1):
        """Builds all state, and the step, once for batches of one kind.

        Args:
            spec: structure of `tf.TensorSpec` of a batch: a dict of `x`, `y`,
                `w` where there are weights, and `real`.
            views: int, views of each example, as for `fit`. With more than
                one, `x`, `y` and `w` have an axis of them behind that of the
                batch: of this size, or of 1 where the model augments.
                Defaults to `1`.
        """
        requirements.require_full_precision()
        with self.distribute_strategy.scope():
            self.optimizer.build_for(self)
            requirements.check_optimizer(self)
            size = self.microbatch_size_of(views)
            spec = microbatches.spec_of(spec, size)
            self.training_step = self._steps.of(spec, views)
            self.optimizer.public_state.attach(self)

    def make_train_function(self, force=False):
        function = self.train_function
        if (
            force
            or function is None
            or function.claims != claims_of(self.optimizer)
        ):
            self.train_function = execution.train_function(self)

    def make_test_function(self, force=False):
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = execution.test_function(self)
        return self.test_function

    def train_step(self, data):
        run.take_step(self.current_run)
        self.current_run.require_claims()
        # Neither waits for the other, unless a mechanism makes it.
        with tf.control_dependencies(self.optimizer.prepare() or []):
            sums = self.training_step(data)
        if self.current_run.observer is not None:
            self.current_run.observer(sums)
        noisy_sums = self.optimizer.noisy(sums)
        # Code of the user that was traced meanwhile may have changed them.
        self.current_run.require_claims()
        requirements.require_full_precision()
        with reading_public_values(self, *self._tallies.of_weights):
            self.optimizer.apply_noisy(
                noisy_sums, self._tallies.regularization_gradients()
            )
        return self._tallies.added_to(self.get_metrics_result())

    def reset_metrics(self):
        super().reset_metrics()
        self._tallies.reset_state()

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        """The loss of a batch in evaluation, as Keras's or the plain model's.

        Args: as `keras.Model.compute_loss`.

        Returns:
            Scalar tensor.
        """
        if not own_loss.has_own_loss(self.model):
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        data = (x, y, y_pred, sample_weight)
        loss = own_loss.of_batch(
            self.model, self._compile_loss, *data, training
        )
        added = [self._aggregate_additional_loss(part) for part in self.losses]
        return keras.ops.sum([loss, *added])

    def _aggregate_additional_loss(self, loss):
        # Evaluation takes the mean of what `add_loss` has for each example,
        # as training does; Keras alone takes the sum.
        return super()._aggregate_additional_loss(keras.ops.mean(loss))

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # Training has built everything by then, without drawing a batch.
        if self.training_step is None:
            super()._maybe_symbolic_build(iterator, data_batch)
