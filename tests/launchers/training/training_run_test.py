import csv
import functools
import json
import math
import pathlib
import platform
import shutil
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib import image
from tensorboard.backend.event_processing import event_accumulator

from tests.data.short_splits import read_at_most
from tests.launchers.digits import StopAt, digits_config
from tests.launchers.programs import contents
from tests.models import checkpoints
from tf_dpsub import accounting, data
from tf_dpsub.launchers.training import (
    objects,
    run_directory,
    run_recorder,
    training_run,
)

# Steps of an epoch of the 1,438 private digits.
STEPS_PER_EPOCH = 6


def read_metrics(workdir):
    with open(workdir / "metrics.csv", encoding="utf-8", newline="") as file:
        return [
            {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def epsilon_of(steps, noise_multiplier, batch_size=256, accountant="pld"):
    return accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=batch_size / 1438,
        steps=steps,
        delta=1e-5,
        accountant=accountant,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The workdir of a finished run, and what `train` returned."""
    workdir = tmp_path_factory.mktemp("finished") / "new" / "run"
    return workdir, training_run.train(digits_config(), workdir)


@pytest.fixture(scope="module")
def results_only(tmp_path_factory):
    """The same of a run that writes results only."""
    workdir = tmp_path_factory.mktemp("results")
    return workdir, train(digits_config(), workdir)


@pytest.fixture
def float32_again():
    yield
    keras.config.set_dtype_policy("float32")


class TestFiles:
    def test_are_these_and_no_others(self, finished):
        workdir, _ = finished
        assert {path.name for path in workdir.iterdir()} == {
            "config.json",
            "ledger.json",
            "metrics.csv",
            "model.keras",
            "privacy_statement.txt",
            "progress.png",
            "progress.svg",
            "report.html",
            "result.json",
            "tensorboard",
        }

    def test_result(self, finished):
        workdir, returned = finished
        result = json.loads((workdir / "result.json").read_text("utf-8"))
        assert result == returned
        steps = 2 * STEPS_PER_EPOCH
        sigma = result["noise_multiplier"]
        assert (result["steps"], result["epochs"]) == (steps, 2)
        for name in ("rdp", "pld"):
            assert result[f"epsilon_{name}"] == pytest.approx(
                epsilon_of(steps, sigma, accountant=name)
            )
        # The noise was calibrated: hardly any of the budget is left over.
        assert 2.999 < result["epsilon"] <= 3.0
        assert result["epsilon"] == result["epsilon_pld"]
        assert result["accountant"] == "pld"
        assert result["delta"] == 1e-5
        assert result["sampling"] == "poisson"
        assert result["sampling_rate"] == 256 / 1438
        assert result["private_examples"] == 1438
        assert result["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
        assert 0.1 < result["step_milliseconds"] < 10_000
        assert result["peak_memory_mib"]["host"] > 100
        assert result["devices"]
        assert result["versions"]["tensorflow"] == tf.__version__
        assert result["versions"]["numpy"] == np.__version__
        assert result["versions"]["keras"] == keras.__version__
        assert result["versions"]["python"] == platform.python_version()
        assert {"tf_dpsub", "dp-accounting"} < set(result["versions"])
        assert result["seed"] == 0
        assert result["config"] == json.loads(digits_config().to_json())

    def test_metrics(self, finished):
        workdir, result = finished
        rows = read_metrics(workdir)
        assert [row["epoch"] for row in rows] == [1, 2]
        columns = {"loss", "accuracy", "val_loss", "val_accuracy", "epsilon"}
        assert columns < set(rows[0])
        sigma = result["noise_multiplier"]
        assert [row["epsilon"] for row in rows] == pytest.approx(
            [epsilon_of(6, sigma), epsilon_of(12, sigma)]
        )
        assert rows[-1]["val_accuracy"] == pytest.approx(
            result["test_accuracy"]
        )

    def test_statement(self, finished):
        workdir, _ = finished
        text = (workdir / "privacy_statement.txt").read_text("utf-8")
        assert "(ε = 3, δ = 1e-05)-differentially private" in " ".join(
            text.split()
        )
        assert "12 steps" in text
        assert "Poisson sampling" in text

    def test_ledger_holds_the_steps_that_ran(self, finished):
        workdir, result = finished
        ledger = accounting.PrivacyLedger(workdir / "ledger.json")
        assert ledger.steps == 12
        assert ledger.epsilon(1e-5) == result["epsilon"]

    def test_model_is_plain_and_the_one_that_was_measured(self, finished):
        workdir, result = finished
        with zipfile.ZipFile(workdir / "model.keras") as archive:
            assert "tf_dpsub" not in archive.read("config.json").decode()
        model = keras.models.load_model(workdir / "model.keras")
        digits = data.load("digits")
        predicted = model.predict(digits.x_test, verbose=0).argmax(1)
        assert np.mean(predicted == digits.y_test) == pytest.approx(
            result["test_accuracy"]
        )

    def test_tensorboard_shows_epsilon_and_test_accuracy(self, finished):
        workdir, _ = finished
        rows = read_metrics(workdir)
        for part, tag, column in (
            ("train", "epoch_epsilon", "epsilon"),
            ("validation", "epoch_accuracy", "val_accuracy"),
        ):
            events = event_accumulator.EventAccumulator(
                str(workdir / "tensorboard" / part)
            )
            events.Reload()
            shown = [
                tf.make_ndarray(event.tensor_proto).item()
                for event in events.Tensors(tag)
            ]
            assert shown == pytest.approx([row[column] for row in rows])

    def test_figure_has_lines_on_white(self, finished):
        workdir, _ = finished
        pixels = image.imread(workdir / "progress.png")[..., :3]
        assert pixels.shape[0] > 600 and pixels.shape[1] > 800
        np.testing.assert_array_equal(pixels[-1, -1], [1, 1, 1])
        coloured = pixels.max(-1) - pixels.min(-1) > 0.3
        assert 0.001 < coloured.mean() < 0.1

    def test_without_the_extra_tensorboard(self, tmp_path, monkeypatch, capsys):
        """The run says what is missing, and leaves all other files."""
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        config = digits_config(epochs=1, epsilon=None, noise_multiplier=2.0)
        training_run.train(config, tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert {"report.html", "progress.png", "model.keras"} <= names
        assert "tensorboard" not in names
        hint = 'not installed: pip install "tf_dpsub[tensorboard]"'
        assert hint in capsys.readouterr().out

    def test_results_only(self, results_only):
        workdir, _ = results_only
        assert {path.name for path in workdir.iterdir()} == {
            "config.json",
            "ledger.json",
            "metrics.csv",
            "privacy_statement.txt",
            "result.json",
        }


class TestWorkdir:
    def test_a_finished_run_is_not_run_again(self, finished, capsys):
        workdir, result = finished
        before = contents(workdir)
        again = training_run.train(digits_config(), workdir, resume=True)
        assert again == result
        assert contents(workdir) == before
        first, last = capsys.readouterr().out.splitlines()
        assert first == f"The run in {workdir} is finished."
        assert last == training_run.summary(result)

    def test_another_run_is_refused(self, finished):
        workdir, _ = finished
        before = contents(workdir)
        message = "holds a finished run. .* --resume"
        with pytest.raises(ValueError, match=message):
            training_run.train(digits_config(), workdir)
        assert contents(workdir) == before

    def test_resuming_with_another_config_is_refused(self, finished):
        workdir, _ = finished
        with pytest.raises(ValueError, match="epochs is 2 there and 3 here"):
            training_run.train(digits_config(epochs=3), workdir, resume=True)

    def test_other_files_are_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("two years of work")
        for resume in (False, True):
            with pytest.raises(ValueError, match="which holds other files"):
                training_run.train(digits_config(), tmp_path, resume=resume)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_two_processes_do_not_share_it(self, tmp_path):
        with run_directory.RunDirectory(tmp_path, {}) as directory:
            directory.begin()
            message = "no other process uses"
            with pytest.raises(ValueError, match=message):
                with run_directory.RunDirectory(tmp_path, {}, resume=True):
                    pass
        with run_directory.RunDirectory(tmp_path, {}, resume=True) as resumed:
            assert resumed.exists


def interrupt():
    raise KeyboardInterrupt


# Without a model and figures, which are made after the last epoch.
train = functools.partial(training_run.train, results_only=True)


class TestInterruption:
    def test_ctrl_c_leaves_a_run_that_can_go_on(
        self, tmp_path, monkeypatch, capsys
    ):
        config = digits_config(epsilon=None, noise_multiplier=2.0)
        with monkeypatch.context() as patch:
            StopAt(patch, epoch=2, step=4, stop=interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(config, tmp_path)
        assert "Interrupted after 1 of 2 epochs" in capsys.readouterr().out
        assert not (tmp_path / "result.json").exists()
        ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
        assert ledger.steps == 6 + 3
        assert len(read_metrics(tmp_path)) == 1

        result = train(config, tmp_path, resume=True)
        assert (result["epochs"], result["steps"]) == (2, 6 + 3 + 6)
        assert result["epsilon"] == pytest.approx(epsilon_of(15, 2.0))
        rows = read_metrics(tmp_path)
        assert [row["epoch"] for row in rows] == [1, 2]
        assert rows[1]["epsilon"] == pytest.approx(result["epsilon"])

    def test_before_the_first_checkpoint_it_begins_again(
        self, tmp_path, monkeypatch
    ):
        config = digits_config(
            epsilon=None, noise_multiplier=2.0, epochs=1, seed=1
        )
        with monkeypatch.context() as patch:
            StopAt(patch, epoch=1, step=3, stop=interrupt)
            with pytest.raises(KeyboardInterrupt):
                # There is nothing to resume: the run begins.
                train(config, tmp_path, resume=True)
        result = train(config, tmp_path, resume=True)
        assert (result["epochs"], result["steps"]) == (1, 2 + 6)

    def test_noise_of_a_fixed_seed_is_not_drawn_again(
        self, tmp_path, monkeypatch
    ):
        config = digits_config(fixed_noise_seed=3)
        with monkeypatch.context() as patch:
            StopAt(patch, epoch=1, step=3, stop=interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(config, tmp_path)
        with pytest.raises(ValueError, match="same noise would be drawn"):
            train(config, tmp_path, resume=True)

    def test_metrics_after_the_checkpoint_are_taken_back(
        self, tmp_path, monkeypatch
    ):
        config = digits_config(epsilon=None, noise_multiplier=2.0)
        save = run_recorder.RunRecorder._save_checkpoint

        def save_the_first(recorder, epochs):
            if epochs == 2:
                raise KeyboardInterrupt
            save(recorder, epochs)

        with monkeypatch.context() as patch:
            patch.setattr(
                run_recorder.RunRecorder, "_save_checkpoint", save_the_first
            )
            with pytest.raises(KeyboardInterrupt):
                train(config, tmp_path)
        assert len(read_metrics(tmp_path)) == 2
        result = train(config, tmp_path, resume=True)
        assert (result["epochs"], result["steps"]) == (2, 18)
        rows = read_metrics(tmp_path)
        assert [row["epoch"] for row in rows] == [1, 2]

    def test_a_crash_loses_no_step_and_the_budget_is_kept(
        self, tmp_path, monkeypatch
    ):
        """A copy of the workdir is what a crash leaves; see `faults_test`."""
        config = digits_config(batch_size=16, epochs=4)
        first, workdir = tmp_path / "first", tmp_path / "crashed"

        def copy_and_stop():
            shutil.copytree(first, workdir)
            interrupt()

        # 90 steps an epoch, of which the ledger writes some ahead.
        with monkeypatch.context() as patch:
            StopAt(patch, 2, 16, copy_and_stop)
            with pytest.raises(KeyboardInterrupt):
                train(config, first)
        before = accounting.PrivacyLedger(workdir / "ledger.json")
        assert before.steps >= 90 + 15
        assert len(read_metrics(workdir)) == 1

        result = train(config, workdir, resume=True)
        more = min(3, (4 * 90 - before.steps) // 90)
        assert more > 0
        assert result["epochs"] == 1 + more
        assert result["steps"] == before.steps + 90 * more
        epsilon = epsilon_of(
            result["steps"], result["noise_multiplier"], batch_size=16
        )
        assert result["epsilon"] == pytest.approx(epsilon)
        assert result["epsilon"] <= 3.0
        rows = read_metrics(workdir)
        assert [row["epoch"] for row in rows] == list(range(1, 2 + more))
        epsilons = [row["epsilon"] for row in rows]
        assert epsilons == sorted(set(epsilons))
        assert epsilons[1] > epsilon_of(
            2 * 90 + 15, result["noise_multiplier"], batch_size=16
        )


class TestInitialWeights:
    def test_are_those_of_another_run(self, finished):
        file = finished[0] / "model.keras"
        trained = keras.models.load_model(file)
        config = digits_config(initial_weights=str(file))
        model = objects.plain_model(config, objects.dataset(config))
        for weights, expected in zip(
            model.get_weights(), trained.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(weights, expected)

    def test_are_taken_as_public(self, finished, tmp_path):
        file = finished[0] / "model.keras"
        train(
            digits_config(
                initial_weights=str(file),
                epsilon=None,
                noise_multiplier=2.0,
                epochs=1,
            ),
            tmp_path,
        )
        statement = tmp_path / "privacy_statement.txt"
        assert "Taken as public: the initial weights" in statement.read_text(
            "utf-8"
        )

    @pytest.mark.parametrize("is_there", [True, False])
    def test_of_another_model_are_refused(self, tmp_path, is_there):
        file = tmp_path / "model.keras"
        if is_there:
            keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]).save(
                file
            )
        with pytest.raises(ValueError, match="Expected initial_weights to"):
            training_run.train(
                digits_config(initial_weights=str(file)), tmp_path / "run"
            )


class TestSubspace:
    def test_pdp_sgd_goes_on_where_it_was_interrupted(
        self, tmp_path, monkeypatch, capsys
    ):
        config = digits_config(
            epsilon=None,
            noise_multiplier=4.0,
            optimizer="ProjectedDPSGD",
            subspace="PublicSubspace",
            subspace_kwargs={"rank": 10},
            public_examples=60,
            start_epoch=2,
        )
        with monkeypatch.context() as patch:
            StopAt(patch, epoch=2, step=3, stop=interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(config, tmp_path)
        result = train(config, tmp_path, resume=True)
        assert (result["epochs"], result["steps"]) == (2, 6 + 2 + 6)
        assert result["private_examples"] == 1438 - 60
        statement = (tmp_path / "privacy_statement.txt").read_text("utf-8")
        assert "60 examples with their labels" in " ".join(statement.split())
        assert (
            "subspace   PublicSubspace, 60 examples" in capsys.readouterr().out
        )

    def test_gep_keeps_its_budget_and_writes_what_it_misses(self, tmp_path):
        config = digits_config(
            optimizer="GEP",
            optimizer_kwargs={"residual_norm_clip": 0.2},
            subspace="PublicSubspace",
            subspace_kwargs={"rank": 10, "groups": "layers"},
            public_examples=60,
            recorders=("test_projection_error",),
        )
        result = training_run.train(config, tmp_path, results_only=True)
        assert 2.999 < result["epsilon"] <= 3.0
        file = tmp_path / "test_projection_error.csv"
        with open(file, encoding="utf-8", newline="") as table:
            rows = list(csv.DictReader(table))
        assert [row["epoch"] for row in rows] == ["1"] * 3 + ["2"] * 3
        assert all(0 < float(row["error"]) < 1 for row in rows)

    def test_private_spectra_are_stated_and_so_is_no_noise(
        self, tmp_path, capsys
    ):
        config = digits_config(
            epsilon=None,
            noise_multiplier=0.0,
            l2_norm_clip=math.inf,
            recorders=("private_spectrum",),
            epochs=1,
        )
        result = training_run.train(config, tmp_path, results_only=True)
        # Without a clip, which JSON has no number for.
        assert result["l2_norm_clip"] == "inf"
        assert result["epsilon"] == "inf"
        assert read_metrics(tmp_path)[0]["epsilon"] == math.inf
        last = capsys.readouterr().out.splitlines()[-1]
        assert "(ε = inf, δ = 1e-05)" in last
        with np.load(tmp_path / "private_spectrum.npz") as arrays:
            assert arrays["epochs"].tolist() == [1]
            (eigenvalues,) = arrays["eigenvalues"]
        assert len(eigenvalues) == 500
        assert (np.diff(eigenvalues) <= 0).all() and eigenvalues[0] > 0
        statement = (tmp_path / "privacy_statement.txt").read_text("utf-8")
        assert "private_spectrum.npz" in statement
        assert "not private" in statement.lower()

    def test_a_linear_model_on_features_of_a_file(self, tmp_path):
        rng = np.random.default_rng(0)
        means = rng.normal(size=(3, 12))
        y = rng.integers(0, 3, 700)
        x = means[y] + 0.1 * rng.normal(size=(700, 12))
        file = tmp_path / "features.npz"
        np.savez(
            file,
            x_train=x[:600],
            y_train=y[:600],
            x_test=x[600:],
            y_test=y[600:],
        )
        config = digits_config(
            dataset=str(file),
            model_kwargs={"hidden": ()},
            learning_rate=1.0,
            epsilon=None,
            noise_multiplier=2.0,
        )
        result = training_run.train(config, tmp_path / "run", results_only=True)
        assert result["parameters"] == 12 * 3 + 3
        assert (result["private_examples"], result["test_examples"]) == (
            600,
            100,
        )
        assert result["test_accuracy"] > 0.8


class TestConfig:
    def test_other_ways_to_train(self, tmp_path, float32_again, capsys):
        config = digits_config(
            noise_multiplier=4.0,
            accountant="pld",
            inner_optimizer="Adam",
            inner_optimizer_kwargs={},
            learning_rate=0.01,
            learning_rate_schedule="cosine",
            dtype_policy="mixed_bfloat16",
            steps_per_execution=4,
            fixed_noise_seed=7,
            private_examples=1000,
            public_examples=50,
            microbatch_size=32,
        )
        result = training_run.train(config, tmp_path)
        assert result["epsilon"] == result["epsilon_pld"] <= 3.0
        assert result["epsilon"] < result["epsilon_rdp"]
        assert result["private_examples"] == 1000
        assert result["steps"] == 2 * math.ceil(1000 / 256)
        assert result["noise_multiplier"] == 4.0
        statement = (tmp_path / "privacy_statement.txt").read_text("utf-8")
        assert "fixed seed" in statement
        out = capsys.readouterr().out
        assert "1,000 private, 50 public, 359 test examples" in out
        assert out.splitlines()[-1].endswith("Poisson sampling, PLD")

    def test_each_example_once_in_an_epoch(self, tmp_path, monkeypatch, capsys):
        """An epoch that was interrupted counts whole, and so it is one less."""
        config = digits_config(
            sampling="once_per_epoch", epochs=3, accountant="pld"
        )
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            StopAt(patch, epoch=2, step=4, stop=interrupt)
            train(config, tmp_path)
        assert "batches of epochs with each example" in capsys.readouterr().out
        result = train(config, tmp_path, resume=True)
        ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
        assert sum(entry.epochs for entry in ledger.entries) == 3
        assert {entry.sampler for entry in ledger.entries} == {"allocation"}
        assert result["epochs"] == 2
        assert result["sampling"] == "once_per_epoch"
        assert result["epsilon"] == accounting.epsilon(
            noise_multiplier=result["noise_multiplier"],
            sampling_rate=1 / STEPS_PER_EPOCH,
            steps=3 * STEPS_PER_EPOCH,
            delta=1e-5,
            sampling="once_per_epoch",
        )
        assert 2.999 < result["epsilon"] <= 3.0
        out = capsys.readouterr().out
        assert "ends the run after 2 of 3 epochs" in out
        assert out.splitlines()[-1].endswith(
            "each example once in an epoch, PLD"
        )

    def test_budget_of_a_person(self, tmp_path, capsys):
        config = digits_config(rows_per_person=2, epochs=1, accountant="pld")
        result = train(config, tmp_path)
        run = {
            "noise_multiplier": result["noise_multiplier"],
            "sampling_rate": 256 / 1438,
            "steps": STEPS_PER_EPOCH,
            "delta": 1e-5,
        }
        of_person = accounting.epsilon(**run, rows_per_person=2)
        assert result["epsilon"] == pytest.approx(of_person, rel=1e-9)
        assert 2.999 < result["epsilon"] <= 3.0 < 3 * accounting.epsilon(**run)
        (row,) = read_metrics(tmp_path)
        assert row["epsilon"] == result["epsilon"]
        statement = (tmp_path / "privacy_statement.txt").read_text("utf-8")
        assert "at most 2 rows, together" in " ".join(statement.split())
        out = capsys.readouterr().out
        privacy = next(ln for ln in out.splitlines() if ln[:7] == "privacy")
        assert "ε = 3 at δ = 1e-05 of a person with at most 2 rows" in privacy
        assert "δ = 1e-05) of a person with at most 2 rows, Poisson" in out

    def test_over_all_gpus_or_else_the_cpu(self, tmp_path):
        config = digits_config(distribution="mirrored")
        result = train(config, tmp_path)
        assert result["steps"] == 2 * STEPS_PER_EPOCH
        assert result["epsilon"] <= 3.0

    def test_seed_fixes_split_and_weights_but_not_noise(
        self, tmp_path, monkeypatch
    ):
        started = []

        def keep_weights(recorder, logs=None):
            started.append(recorder.model.get_weights())
            begin(recorder, logs)

        begin = run_recorder.RunRecorder.on_train_begin
        monkeypatch.setattr(
            run_recorder.RunRecorder, "on_train_begin", keep_weights
        )
        results = [train(digits_config(), tmp_path / str(i)) for i in range(2)]
        for first, second in zip(*started):
            np.testing.assert_array_equal(first, second)
        assert results[0]["test_loss"] != results[1]["test_loss"]

    def test_a_delta_that_is_too_large(self, tmp_path, capsys):
        config = digits_config(delta=0.1, epsilon=None, noise_multiplier=2.0)
        training_run.announce(config, tmp_path / "run")
        assert (
            "δ = 0.1 is not below 1 / n = 0.000695" in capsys.readouterr().out
        )

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"dataset": "digit"}, "'digit'. Close matches: digits"),
            ({"model": "mpl"}, "name of a model.*got 'mpl'. .*'mlp'"),
            ({"optimizer": "DP-SGD"}, "private optimizer.*'DP-SGD'.*'DPSGD'"),
            ({"inner_optimizer": "Adan"}, "inner optimizer.*'Adan'.*'Adam'"),
            ({"learning_rate_schedule": "cos"}, "schedule.*'cos'.*'cosine'"),
            ({"distribution": "mirror"}, "'mirror'. .*'mirrored'"),
            ({"accountant": "rdb"}, "'rdb'. .*'rdp'"),
            ({"dtype_policy": "float23"}, "float23"),
            ({"batch_size": 1439}, "batch_size <= 1438"),
            ({"batch_size": 0}, "Expected batch_size >= 1, got 0"),
            ({"epochs": 0}, "Expected epochs >= 1, got 0"),
            ({"steps_per_execution": 0}, "steps_per_execution >= 1, got 0"),
            ({"seed": -1}, "Expected seed >= 0, got -1"),
            ({"learning_rate": 0.0}, "Expected learning_rate > 0, got 0.0"),
            ({"delta": 1.0}, "Expected 0 < delta < 1, got 1.0"),
            ({"epsilon": -1.0}, "Expected epsilon > 0, got -1.0"),
            ({"epsilon": None}, "Expected a noise_multiplier, or an epsilon"),
            ({"noise_multiplier": -1.0}, "noise_multiplier >= 0, got -1.0"),
            ({"l2_norm_clip": 0.0}, "Expected l2_norm_clip > 0, got 0.0"),
            ({"private_examples": 2000}, "private \\+ public <= 1438"),
            ({"model_kwargs": {"hiden": ()}}, "arguments of mlp .*'hiden'"),
            ({"optimizer_kwargs": {"k": 1}}, "arguments of DPSGD .*'k'"),
            (
                {"inner_optimizer_kwargs": {"momentun": 1}},
                "not recognized: .*'momentun'",
            ),
            (
                {"noise_multiplier": 1.0},
                "budget ε = 3, got 2 epochs .* 0 epochs \\(. steps\\) fit",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_mistakes_leave_no_workdir(self, tmp_path, changes, message):
        workdir = tmp_path / "run"
        with pytest.raises(ValueError, match=message):
            training_run.train(digits_config(**changes), workdir)
        assert not workdir.exists()

    def test_a_data_dir_that_lacks_the_set(self, tmp_path):
        config = digits_config(dataset="mnist", data_dir=str(tmp_path))
        with pytest.raises(ValueError, match="to hold 'mnist/"):
            training_run.train(config, tmp_path / "run")

    def test_texts(self, tmp_path, monkeypatch):
        texts = data.Dataset(
            name="texts",
            x_train=np.array(["a"], dtype=object),
            y_train=np.zeros(1, int),
            x_public=np.array([], dtype=object),
            y_public=np.zeros(0, int),
            x_test=np.array(["a"], dtype=object),
            y_test=np.zeros(1, int),
            num_classes=2,
        )
        monkeypatch.setattr(data, "load", lambda *_, **__: texts)
        config = digits_config(dataset="glue/sst2")
        message = "got 'mlp' for 'glue/sst2', which holds texts"
        with pytest.raises(ValueError, match=message):
            training_run.train(config, tmp_path / "run")

    def test_fields_that_are_missing_or_unknown(self, tmp_path):
        config = digits_config()
        with config.unlocked():
            del config.delta
            config.dleta = 1e-5
        with pytest.raises(ValueError, match="lacks delta"):
            training_run.train(config, tmp_path / "run")
        with config.unlocked():
            config.delta = 1e-5
        with pytest.raises(ValueError, match="has unknown dleta"):
            training_run.train(config, tmp_path / "run")


class TestTexts:
    """RGP on a small checkpoint of BERT, and on real sentences."""

    @pytest.fixture
    def config(self, data_dir, tmp_path, monkeypatch):
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        checkpoints.write_bert_of_one_layer(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return digits_config(
            dataset="glue/sst2",
            data_dir=data_dir,
            private_examples=100,
            model="bert_classifier",
            model_kwargs={"folder": str(folder), "sequence_length": 12},
            trainable_layers=("transformer_layer", "logits"),
            reparametrize={"rank": 2},
            optimizer="RGP",
            optimizer_kwargs={"warmup_steps": 2},
            epsilon=None,
            noise_multiplier=2.0,
            batch_size=50,
            epochs=2,
        )

    @pytest.mark.slow
    def test_goes_on_and_saves_a_model_of_texts(
        self, config, tmp_path, monkeypatch
    ):
        """Interrupted after an epoch, as by Ctrl-C, it keeps its history."""
        monkeypatch.setattr(objects, "_load", functools.cache(data.load))
        read_at_most(monkeypatch, train=100, test=500)
        workdir = tmp_path / "run"
        with monkeypatch.context() as patch:
            original = run_recorder.RunRecorder.on_epoch_end

            def interrupt(self, epoch, logs=None):
                original(self, epoch, logs)
                raise KeyboardInterrupt

            patch.setattr(run_recorder.RunRecorder, "on_epoch_end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training_run.train(config, workdir)
        result = training_run.train(config, workdir, resume=True)
        assert (result["epochs"], result["steps"]) == (2, 4)
        assert 0.3 < result["test_accuracy"] < 0.7
        statement = (workdir / "privacy_statement.txt").read_text("utf-8")
        assert "RGP" in statement
        with zipfile.ZipFile(workdir / "model.keras") as file:
            assert b"RGP" not in file.read("config.json")
        loaded = keras.saving.load_model(workdir / "model.keras", compile=False)
        dataset = objects.dataset(config)
        logits = loaded(loaded.preprocessor(list(dataset.x_test)))
        accuracy = np.mean(np.argmax(logits, 1) == dataset.y_test)
        assert accuracy == pytest.approx(result["test_accuracy"], abs=1e-6)

    def test_a_model_of_images_for_texts(self, config, tmp_path):
        config.dataset = "digits"
        message = "got 'bert_classifier' for 'digits', which holds numbers"
        with pytest.raises(ValueError, match=message):
            training_run.train(config, tmp_path / "run")


class TestResponses:
    """GPT-2 on sentences about restaurants, whose bytes are its tokens."""

    def config(self, folder, data_dir, **changes):
        checkpoints.write_gpt2_of_bytes(folder, layers=1)
        return digits_config(
            **{
                "dataset": "e2e",
                "data_dir": str(data_dir),
                "model": "gpt2",
                "model_kwargs": {
                    "folder": str(folder),
                    "sequence_length": 128,
                },
                "inner_optimizer": "Adam",
                "inner_optimizer_kwargs": {},
                "learning_rate": 1e-3,
                "epochs": 1,
            }
            | changes
        )

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def folder(self, tmp_path):
        path = tmp_path / "checkpoint"
        path.mkdir()
        return path

    @pytest.mark.slow
    def test_of_the_release(self, e2e_dir, folder, tmp_path):
        """A few, with queries, keys and values alone trained."""
        small = tmp_path / "e2e"
        small.mkdir()
        for name, lines in (("trainset.csv", 65), ("testset_w_refs.csv", 20)):
            text = (pathlib.Path(e2e_dir) / name).read_text("utf-8")
            (small / name).write_text(
                "\n".join(text.splitlines()[:lines]), "utf-8"
            )
        config = self.config(
            folder,
            small,
            trainable_layers=("self_attention/(query|key|value)$",),
            epsilon=None,
            noise_multiplier=2.0,
            batch_size=32,
        )
        result = training_run.train(config, tmp_path / "run")
        assert result["steps"] == 2
        assert 50 < result["test_perplexity"] < 2000
        assert 0 <= result["test_bleu"] < 5
        text = (tmp_path / "run" / "responses.csv").read_text("utf-8")
        rows = list(csv.reader(text.splitlines()))
        assert rows[0] == ["prompt", "response"]
        assert rows[1][0].startswith("name[Blue Spice], eatType[coffee shop]")
        # Each description once.
        assert 1 < len(rows) < 19

    @pytest.mark.slow
    def test_what_is_learned_is_written(self, folder, tmp_path, capsys):
        """Without noise, a model learns by heart: every word must be right."""
        data = tmp_path / "e2e"
        data.mkdir()
        rows = 'mr,ref\n"name[A], pub","A, a pub."\nname[B],B is a café.\n'
        for name in ("trainset.csv", "testset_w_refs.csv"):
            (data / name).write_text(rows, "utf-8")
        config = self.config(
            folder,
            data,
            model_kwargs={"folder": str(folder), "sequence_length": 40},
            epsilon=None,
            noise_multiplier=0.0,
            learning_rate=2e-2,
            batch_size=2,
            epochs=20,
        )
        result = training_run.train(config, tmp_path / "run", results_only=True)
        assert result["test_perplexity"] < 1.05
        assert result["test_bleu"] == pytest.approx(100)
        assert "perplexity 1.0" in capsys.readouterr().out
        text = (tmp_path / "run" / "responses.csv").read_text("utf-8")
        assert text.splitlines()[1:] == [
            '"name[A], pub","A, a pub."',
            "name[B],B is a café.",
        ]

    def test_a_classifier_of_responses(self, folder, tmp_path):
        checkpoints.write(folder, "bert")
        data = tmp_path / "e2e"
        data.mkdir()
        for name in ("trainset.csv", "testset_w_refs.csv"):
            (data / name).write_text("mr,ref\na,b\n", "utf-8")
        config = self.config(folder, data, model="bert_classifier")
        message = "'bert_classifier' for 'e2e', which holds prompts and resp"
        with pytest.raises(ValueError, match=message):
            training_run.train(config, tmp_path / "run")


def test_a_run_from_before_a_field_existed_goes_on(results_only, tmp_path):
    """The field has its default: that is what the run did."""
    config = digits_config()
    workdir, first = results_only
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved_config = json.loads(path.read_text())
    del saved_config["reparametrize"], saved_config["trainable_layers"]
    path.write_text(json.dumps(saved_config))
    again = train(config, tmp_path / "run", resume=True)
    assert again["test_accuracy"] == first["test_accuracy"]
    config.trainable_layers = ("logits",)
    with pytest.raises(ValueError, match="trainable_layers is"):
        train(config, tmp_path / "run", resume=True)
