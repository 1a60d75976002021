"""One private training run, from its config to its files."""

import dataclasses
import importlib.util
import math
import os
import resource
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from tf_dpsub import (
    accounting,
    callbacks,
    data,
    extras,
    files,
    interruptions,
    layers,
)
from tf_dpsub.accounting import accountants
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.reports import folder_page, progress_figure
from tf_dpsub.launchers.terminal import durations, progress_bar
from tf_dpsub.launchers.training import (
    config_checks,
    objects,
    recipes,
    resumption,
    run_directory,
    run_recorder,
    tasks,
    tokens,
)
from tf_dpsub.planning.step_cost import measure_step
from tf_dpsub.training import workers

# By the field `sampling` of a config: in words, and as batches.
_SAMPLING = {
    "poisson": "Poisson sampling",
    "once_per_epoch": "each example once in an epoch",
}
_BATCHES = {
    "poisson": "Poisson batches",
    "once_per_epoch": "batches of epochs with each example once",
}
_SAMPLERS = {
    "poisson": data.PoissonBatches,
    "once_per_epoch": data.OncePerEpoch,
}


def train(config, workdir, resume=False, results_only=False, command=None):
    """Trains a model privately, evaluates it, and writes all files.

    Formal guarantees: what is released is the model, whose privacy
    `privacy_statement.txt` states. The test split is evaluated without noise,
    so it is taken to be public. Loss and metrics of training, in
    `metrics.csv`, `progress.png` and `tensorboard/`, are private results, which
    no epsilon covers.

    Args:
        config: `ml_collections.ConfigDict` with the fields of
            `configs/default.py`.
        workdir: string or path-like, directory for the files of the run.
        resume: bool, whether to resume the run in `workdir`, if there is one.
            Defaults to `False`.
        results_only: bool, whether to write no `model.keras`, `progress.png`,
            `report.html` and `tensorboard/`. Defaults to `False`.
        command: string, the command line, for the report. Defaults to `None`.

    Returns:
        dict, the content of `result.json`.

    Raises:
        ValueError: if the config or the directory is not fit for the run.
    """
    config_checks.check(config)
    fields = run_directory.json_fields(config)
    # With several workers, this must come before any other TensorFlow call.
    strategy = objects.strategy(config)
    workers.require_agreement(strategy, fields)
    is_chief = strategy.extended.should_checkpoint
    with run_directory.RunDirectory(
        workdir, fields, resume, writes=is_chief
    ) as directory:
        result = directory.result()
        if result is not None:
            print(f"The run in {workdir} is finished.")
            _complete_files(directory, results_only)
        else:
            run = _Run(config, strategy, directory, results_only)
            result = run.complete(command)
        if is_chief:
            print(result["summary"], flush=True)
    return result


def _complete_files(directory, results_only):
    """Writes the report and removes checkpoints, after `result.json`."""
    page = directory.path / folder_page.FILE
    if directory.writes and not results_only and not page.exists():
        folder_page.write(directory.path)
    directory.remove_checkpoints()


def announce(config, workdir, resume=False):
    """Prints what `train` would do, and measures a step; trains nothing.

    Formal guarantees: nothing is released. The steps that are measured are on
    test examples, which are taken to be public.

    Args: as `train`.

    Raises:
        ValueError: as `train`.
    """
    config_checks.check(config)
    strategy = objects.strategy(config)
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "Expected one replica for a dry run, got "
            f"{strategy.num_replicas_in_sync}. Leave config.distribution out."
        )
    with run_directory.RunDirectory(
        workdir, run_directory.json_fields(config), resume
    ) as directory:
        if directory.result() is not None:
            print(f"The run in {workdir} is finished.")
        else:
            _Run(config, strategy, directory, results_only=True).announce()


def summary(result):
    """One line with the accuracy and the privacy of a result."""
    epsilon = round_up(result["epsilon"], decimals=2)
    rows = result.get("rows_per_person")
    return (
        f"{tasks.summary(result)} at (ε = {epsilon}, δ = {result['delta']:g})"
        f"{_of_person(rows)}, {_SAMPLING[result['sampling']]}, "
        f"{result['accountant'].upper()}"
    )


def _of_person(rows_per_person):
    """Whose ε it is, where it is not that of an example."""
    if rows_per_person is None:
        return ""
    rows = f"{rows_per_person} row" + "s" * (rows_per_person > 1)
    return f" of a person with at most {rows}"


def devices():
    """Names of all GPUs, or of the CPU if there are none."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return [f"CPU ({len(os.sched_getaffinity(0))} cores)"]
    details = map(tf.config.experimental.get_device_details, gpus)
    return [
        f"GPU:{i} ({detail.get('device_name', 'unnamed')})"
        for i, detail in enumerate(details)
    ]


class _Run:
    """A run, restored from its latest checkpoint if there is one."""

    def __init__(self, config, strategy, directory, results_only):
        self._directory = directory
        self._results_only = results_only
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.dtype_policy)
        loaded = objects.dataset(config)
        config = recipes.with_recipe(config, len(loaded.y_train))
        self._config = config
        with strategy.scope():
            plain = objects.plain_model(config, loaded)
        self._task = tasks.of(loaded)
        self._loaded, self._data = loaded, tokens.tokenized(loaded, plain)
        # Inputs are tokens from here on; the saved model takes texts again.
        self._preprocessor = getattr(plain, "preprocessor", None)
        if self._preprocessor is not None:
            plain.preprocessor = None
        with strategy.scope():
            objects.start_head(config, plain, self._data)
        self._batches = _SAMPLERS[config.sampling](
            self._data.x_train,
            self._data.y_train,
            batch_size=config.batch_size,
            seed=config.fixed_noise_seed,
        )
        subspace = objects.subspace(config, self._data)
        carrier_examples = objects.carrier_examples(config, self._data)
        digest = resumption.digest_of(self._data.x_train, self._data.y_train)
        self._recorder = run_recorder.RunRecorder(directory, digest)
        self._gradient_recorders = objects.recorders(
            config, directory.path, self._data
        )
        with strategy.scope():
            self._model = tf_dpsub.make_private(
                plain,
                ledger_path=directory.path / run_directory.LEDGER,
            )
            resumption.require_same(directory, self._model.ledger, digest)
            self._model.compile(
                objects.private_optimizer(
                    config, self._batches, subspace, carrier_examples
                ),
                loss=self._task.loss(),
                metrics=self._task.metrics(),
                steps_per_execution=config.steps_per_execution,
                jit_compile=(
                    "auto" if config.jit_compile is None else config.jit_compile
                ),
            )
            self._check_that_workers_agree(strategy)
            self._recorder.restore(self._model, self._batches.steps_per_epoch)
        if config.fixed_noise_seed is not None and self._model.ledger.steps:
            raise ValueError(
                "Expected fixed_noise_seed=None to resume a run, got "
                f"{config.fixed_noise_seed}: the same noise would be drawn "
                "again, and cancel in the difference of two steps. Start "
                "another one, in another workdir."
            )

    def _check_that_workers_agree(self, strategy):
        """Raises if workers find other files: one would wait forever."""
        progress = np.array([self._recorder.epochs, self._model.ledger.steps])
        total = strategy.reduce(
            "SUM", strategy.run(lambda: tf.constant(progress)), axis=None
        )
        if np.any(total.numpy() != strategy.num_replicas_in_sync * progress):
            epochs, steps = progress
            raise ValueError(
                "Expected a workdir that all workers share, got "
                f"{self._directory.path}, where this one finds {epochs} epochs "
                f"and {steps} steps, and another one does not. Name a folder "
                "on a file system that all of them see."
            )

    def complete(self, command):
        """Trains the remaining epochs, writes all files, returns the result."""
        epochs = self._last_epoch()
        self._announce(epochs)
        interruptions.check()
        if self._recorder.epochs < epochs:
            try:
                self._fit(epochs)
            except KeyboardInterrupt:
                print(
                    f"\nInterrupted after {self._recorder.epochs} of {epochs} "
                    "epochs; --resume goes on from there."
                )
                raise
        return self._write_result(command)

    def announce(self):
        """Prints the remaining work, with its time and memory."""
        epochs = self._last_epoch()
        self._announce(epochs)
        steps = self._remaining_steps(epochs)
        cost = measure_step(self._model, self._data.x_test, self._data.y_test)
        seconds = cost.seconds(self._batches.batch_size)
        print(
            f"{'time':<10} about {durations.text(steps * seconds)}: "
            f"{steps:,} steps of {seconds:.3g} s, without evaluation"
        )
        if cost.memory_bytes is not None:
            print(
                f"{'memory':<10} about {cost.memory_bytes / 2**20:,.0f} MiB "
                "that a step works in"
            )

    def _last_epoch(self):
        """The last epoch that the budget allows.

        An interrupted run ends sooner, since its lost steps count as spent. For
        a new run, a budget that is too small raises.
        """
        config, ledger = self._config, self._model.ledger
        if config.epsilon is None:
            return config.epochs
        steps = ledger.steps_within(
            self._entry(),
            epsilon=config.epsilon,
            delta=config.delta,
            accountant=config.accountant,
            rows_per_person=config.rows_per_person,
        )
        fitting = steps
        if not self._entry().each_example_once_per_epoch:
            fitting //= self._batches.steps_per_epoch
        last = min(config.epochs, self._recorder.epochs + fitting)
        if ledger.steps == 0 and last < config.epochs:
            raise ValueError(
                f"Expected a run that keeps the budget ε = {config.epsilon:g}, "
                f"got {config.epochs} epochs with noise multiplier "
                f"{self._entry().noise_multiplier:g}: {fitting} epochs "
                f"{self._in_steps(steps)}fit. Train for fewer epochs, with "
                "more noise, or give epsilon alone: the noise is then "
                "calibrated."
            )
        if last == 0:
            raise ValueError(
                f"Expected a budget ε = {config.epsilon:g} that lasts for an "
                f"epoch, got too little: the run in {self._directory.path} "
                "was interrupted before its first checkpoint, and what had "
                "begun counts as spent. Start another one, in another workdir."
            )
        return last

    def _in_steps(self, fitting):
        """What fits in a budget, where that is counted by steps."""
        by_epoch = self._entry().each_example_once_per_epoch
        return "" if by_epoch else f"({fitting} steps) "

    def _entry(self):
        """The ledger's entry for a step of this run, without its notes."""
        optimizer = self._model.optimizer
        return accounting.LedgerEntry(
            mechanism=self._config.optimizer,
            noise_multiplier=optimizer.effective_noise_multiplier,
            l2_norm_clip=optimizer.l2_norm_clip,
            batch_size=optimizer.batch_size,
            **self._batches.ledger_fields,
            private_state=not optimizer.public_state.is_public,
            bands=optimizer.bands,
        )

    def _epsilon(self, accountant):
        """Epsilon spent so far: that of a person, if the config says so."""
        config = self._config
        return self._model.epsilon(
            config.delta, accountant, config.rows_per_person
        )

    def _bounding_accountant(self, further_steps=0):
        """The accountant by whose bound ε is, after further steps."""
        rows = self._config.rows_per_person
        events = self._model.ledger.events(rows)
        if further_steps:
            entry = dataclasses.replace(self._entry(), steps=further_steps)
            events.append(entry.event(rows or 1))
        return accountants.bounding_accountant(
            events,
            delta=self._config.delta,
            accountant=self._config.accountant,
        )

    def _remaining_steps(self, epochs):
        remaining_epochs = epochs - self._recorder.epochs
        return remaining_epochs * self._batches.steps_per_epoch

    def _announce(self, epochs):
        config, examples = self._config, self._data
        optimizer, ledger = self._model.optimizer, self._model.ledger
        epochs_before = self._recorder.epochs
        bands = f"{optimizer.bands} bands, " if optimizer.bands > 1 else ""
        steps = self._remaining_steps(epochs)
        epsilon = ledger.epsilon_after(
            self._entry(),
            steps,
            config.delta,
            epochs=epochs - epochs_before,
            accountant=config.accountant,
            rows_per_person=config.rows_per_person,
        )
        lines = {
            "data": f"{config.dataset}: {len(examples.y_train):,} private, "
            f"{len(examples.y_public):,} public, {len(examples.y_test):,} test "
            "examples (taken as public)",
            "model": f"{config.model}, {self._model.count_params():,} "
            "parameters",
            "mechanism": f"{config.optimizer} around {config.inner_optimizer}, "
            f"{bands}noise multiplier {optimizer.noise_multiplier:.4g}, clip "
            f"{optimizer.l2_norm_clip:g}, {_BATCHES[config.sampling]} of "
            f"{optimizer.batch_size:,} expected",
            "privacy": f"ε = {epsilon:.4g} at δ = {config.delta:g}"
            f"{_of_person(config.rows_per_person)} "
            f"({self._bounding_accountant(steps).upper()}) after {epochs} "
            "epochs, "
            f"{ledger.steps + steps:,} steps",
            "devices": ", ".join(devices()),
            "files": f"{self._directory.path}/",
        }
        if config.delta >= 1 / self._batches.examples:
            lines["warning"] = (
                f"δ = {config.delta:g} is not below 1 / n = "
                f"{1 / self._batches.examples:.3g}: publishing one example "
                "drawn at random would satisfy it"
            )
        advice = recipes.advice(config, self._loaded, epsilon)
        if advice is not None:
            lines["advice"] = advice
        notes = optimizer.public_state.notes
        if config.subspace is not None:
            lines["subspace"] = ", ".join([config.subspace, *notes])
        elif notes:
            lines["carriers"] = ", ".join(notes)
        if ledger.steps:
            lines["resumed"] = (
                f"after {epochs_before} of {config.epochs} epochs, with ε = "
                f"{self._epsilon(config.accountant):.4g} spent"
            )
        if not (self._results_only or _has_tensorboard()):
            lines["logs"] = (
                "none for TensorBoard, which is not installed: "
                f"{extras.command('tensorboard')}"
            )
        if epochs < config.epochs:
            lines["budget"] = (
                f"ends the run after {epochs} of {config.epochs} epochs: what "
                "was interrupted counts as spent"
            )
        if self._directory.writes:
            for name, text in lines.items():
                print(f"{name:<10} {text}")
            sys.stdout.flush()

    def _fit(self, epochs):
        config, examples = self._config, self._data
        self._model.fit(
            self._batches,
            initial_epoch=self._recorder.epochs,
            epochs=epochs,
            verbose=0,
            validation_data=(examples.x_test, examples.y_test),
            validation_batch_size=self._task.evaluation_batch,
            validation_data_is_public=True,
            callbacks=[
                callbacks.PrivacyBudget(
                    math.inf if config.epsilon is None else config.epsilon,
                    config.delta,
                    config.accountant,
                    config.rows_per_person,
                ),
                self._recorder,
                *self._gradient_recorders,
                *self._progress_bars(),
                *self._tensorboards(),
            ],
        )

    def _progress_bars(self):
        if not self._directory.writes:
            return []
        config = self._config
        return [
            progress_bar.ProgressBar(
                config.delta, config.epsilon, config.rows_per_person
            )
        ]

    def _tensorboards(self):
        if self._results_only or not self._directory.writes:
            return []
        if not _has_tensorboard():
            return []
        folder = self._directory.path / "tensorboard"
        return [keras.callbacks.TensorBoard(folder, write_graph=False)]

    def _write_result(self, command):
        result = self._result()
        result |= {"summary": summary(result), "command": command}
        self._directory.write_text(
            "privacy_statement.txt",
            self._model.privacy_statement(
                self._config.delta,
                self._config.accountant,
                self._config.rows_per_person,
            ),
        )
        if not self._results_only and self._directory.writes:
            self._write_model_and_figure(result)
        self._directory.write_json("result.json", result)
        _complete_files(self._directory, self._results_only)
        return result

    def _write_model_and_figure(self, result):
        config, path = self._config, self._directory.path
        files.replace(path / "model.keras", self._plain().save)
        progress_figure.save_progress(
            path / "progress.png",
            self._recorder.rows,
            title=f"{config.dataset}: {config.optimizer}, {config.model}",
            subtitle=result["summary"],
            metric=self._task.metric,
            is_share=self._task.is_share,
            delta=config.delta,
            budget=config.epsilon,
        )

    def _plain(self):
        """The trained model as a plain Keras model."""
        plain = layers.merge(self._model.model)
        if self._preprocessor is not None:
            plain.preprocessor = self._preprocessor
        return plain

    def _result(self):
        config, model, batches = self._config, self._model, self._batches
        measured = model.evaluate(
            self._data.x_test,
            self._data.y_test,
            batch_size=self._task.evaluation_batch,
            verbose=0,
            return_dict=True,
        )
        seconds = self._recorder.step_seconds
        epsilon = {
            accountant: run_directory.json_number(self._epsilon(accountant))
            for accountant in ("rdp", "pld")
        }
        metric = self._task.metric
        return {
            f"test_{metric}": run_directory.json_number(measured[metric]),
            **self._task.last_result(
                self._plain(), self._loaded, self._directory
            ),
            "test_loss": run_directory.json_number(measured["loss"]),
            "epsilon": epsilon[config.accountant],
            "epsilon_rdp": epsilon["rdp"],
            "epsilon_pld": epsilon["pld"],
            "delta": config.delta,
            "rows_per_person": config.rows_per_person,
            "accountant": self._bounding_accountant(),
            "noise_multiplier": model.optimizer.noise_multiplier,
            "l2_norm_clip": run_directory.json_number(
                model.optimizer.l2_norm_clip
            ),
            "sampling": batches.sampling,
            "sampling_rate": batches.sampling_rate,
            "private_examples": batches.examples,
            "test_examples": len(self._data.y_test),
            "batch_size": batches.batch_size,
            "epochs": self._recorder.epochs,
            "steps": model.ledger.steps,
            "parameters": model.count_params(),
            "step_milliseconds": seconds and seconds * 1e3,
            "peak_memory_mib": _peak_memory_mib(),
            "devices": devices(),
            "versions": folder_page.versions(),
            "seed": config.seed,
            "config": run_directory.json_fields(config),
        }


def _has_tensorboard():
    return importlib.util.find_spec("tensorboard") is not None


def _peak_memory_mib():
    """Peak memory of the process and of each GPU, in MiB."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    gpus = [
        tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"] / 2**20
        for i in range(len(tf.config.list_logical_devices("GPU")))
    ]
    return {"host": round(resident, 1), "gpus": [round(g, 1) for g in gpus]}
