import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest

from tests.launchers.papers.engine import finished_trials
from tests.launchers.programs import python, run_main
from tf_dpsub.launchers import papers, reproduce
from tf_dpsub.launchers.papers.engine import plots, results, trials
from tf_dpsub.launchers.terminal import program

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def small(monkeypatch):
    """An experiment named `small`, of four short trials."""
    made_trials = [
        finished_trials.trial(f"{method.lower()}_{seed}", method, seed=seed)
        for seed in (0, 1)
        for method in ("GP", "GEP")
    ]

    def build(inputs):
        """A small one."""
        return trials.Experiment(
            name="small",
            title="Small",
            trials=tuple(made_trials),
            figures={"accuracy": plots.accuracy_against_epsilon},
        )

    monkeypatch.setitem(papers.EXPERIMENTS, "small", build)
    return build(None)


class TestFlags:
    def test_list_names_every_experiment_with_what_it_shows(self, capsys):
        out, _, code = run_main(reproduce, capsys, list=True)
        names = [line.split()[0] for line in out.splitlines()]
        assert names == [*papers.EXPERIMENTS, *papers.STUDIES]
        assert all(len(line.split()) > 4 for line in out.splitlines())
        assert code == 0

    def test_dry_run_names_the_trials_and_writes_nothing(
        self, capsys, tmp_path
    ):
        workdir = tmp_path / "out"
        out, _, code = run_main(
            reproduce,
            capsys,
            experiment="pdp_mnist",
            only="^tanh_sigma18.*seed0$",
            dry_run=True,
            workdir=str(workdir),
        )
        assert out.split() == [
            f"tanh_sigma18_{method}_seed0" for method in ("dp", "pdp", "rpdp")
        ]
        assert code == 0
        assert not workdir.exists()

    def test_dry_run_of_one_trial_says_what_it_costs(self, capsys, tmp_path):
        out, _, code = run_main(
            reproduce,
            capsys,
            experiment="digits_methods",
            only="^epsilon2_rate0.5_dp_seed0$",
            dry_run=True,
            workdir=str(tmp_path / "out"),
        )
        name, *lines = out.splitlines()
        announced = dict(line.split(maxsplit=1) for line in lines)
        assert name == "epsilon2_rate0.5_dp_seed0"
        assert announced["privacy"].startswith(
            "ε = 2 at δ = 1e-05 (RDP) after 30"
        )
        assert {"mechanism", "time", "memory"} <= set(announced)
        assert code == 0
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "values, message",
        [
            ({}, "Expected --experiment, one of pdp_mnist, .* got None"),
            ({"experiment": "gep_mnits"}, "Did you mean 'gep_mnist'?"),
            ({"only": "("}, "--only to be a regular expression, got '\\('"),
            ({"only": "tanh_sigma19_dp"}, "is 'tanh_sigma1._dp_seed.'"),
            ({"fraction": 0.0}, "0 < --fraction <= 1, got 0.0"),
            ({"fraction": 1.5}, "0 < --fraction <= 1, got 1.5"),
            ({"workdir": None}, "Expected --workdir, got none"),
            ({"jobs": 0}, "Expected --jobs >= 1, got 0"),
            ({"experiment": "gep_mnist"}, "--public_images=FILE"),
            ({"experiment": "gep_linear_probe"}, "--features=FILE"),
        ],
    )
    def test_mistakes_are_told_in_one_line(
        self, capsys, tmp_path, values, message
    ):
        workdir = tmp_path / "out"
        if values:
            values = {
                "experiment": "pdp_mnist",
                "workdir": str(workdir),
            } | values
        out, err, code = run_main(reproduce, capsys, **values)
        assert (out, code) == ("", program.REFUSED)
        assert re.fullmatch(f"error: .*{message}.*\n", err), err
        assert not workdir.exists()


class TestReproduce:
    def finish(self, folder, experiment, names):
        for trial in experiment.trials:
            if trial.name in names:
                finished_trials.write(folder / "trials", trial, 0.9)

    def test_what_is_finished_is_not_run_again(self, small, tmp_path, capsys):
        names = [trial.name for trial in small.trials]
        self.finish(tmp_path / "small", small, names)
        code = reproduce.reproduce(
            small, list(small.trials), tmp_path, jobs=1, command="c"
        )
        assert code == 0
        out = capsys.readouterr().out
        assert "4 trials, 4 finished, 0 to run" in out
        assert {path.name for path in (tmp_path / "small").iterdir()} == {
            "accuracy.png",
            "accuracy.svg",
            "commands.json",
            "report.html",
            "results.json",
            "table.md",
            "trials",
        }

    def test_the_table_shows_trials_that_were_not_selected(
        self, small, tmp_path
    ):
        self.finish(tmp_path / "small", small, ["gp_0", "gep_0", "gep_1"])
        selected = reproduce.selected("small", small.trials, "^gep")
        assert [trial.name for trial in selected] == ["gep_0", "gep_1"]
        for command in ("c", "d", "c"):
            reproduce.reproduce(
                small, selected, tmp_path, jobs=1, command=command
            )
        table = (tmp_path / "small" / "table.md").read_text("utf-8")
        assert "| GP" in table and "| GEP" in table
        assert "1 of 4 trials have not finished" in table
        # Another command made the trial that was not selected.
        assert "```sh\nc\nd\n```" in table
        content = json.loads((tmp_path / "small" / "results.json").read_text())
        assert [len(row["trials"]) for row in content["rows"]] == [1, 2]

    def test_a_folder_of_another_fraction_is_refused(
        self, small, tmp_path, capsys
    ):
        self.finish(tmp_path / "small", small, ["gp_0"])
        config = tmp_path / "small" / "trials" / "gp_0" / "config.json"
        fields = {"epochs": 30}
        config.write_text(json.dumps(fields), "utf-8")
        out, err, code = run_main(
            reproduce, capsys, experiment="small", workdir=str(tmp_path), jobs=1
        )
        assert (out, code) == ("", program.REFUSED)
        assert "epochs is 30 there and 2 here" in err


PROGRAM = """
import functools, sys
from tf_dpsub.configs import default
from tf_dpsub.launchers import papers, reproduce
from tf_dpsub.launchers.papers.engine import plots, trials

def trial(name, method, **changes):
    config = default.get_config()
    config.model_kwargs = {{"hidden": (16,)}}
    config.noise_multiplier = 4.0
    config.batch_size = 256
    config.epochs = {epochs}
    for field, value in changes.items():
        config[field] = value
    return trials.Trial(name=name, labels={{"method": method}}, config=config)

def small(inputs):
    subspace = {{
        "optimizer": "ProjectedDPSGD",
        "subspace": "PublicSubspace",
        "subspace_kwargs": {{"rank": 5}},
        "public_examples": 30,
    }}
    wrong = subspace | {{"subspace_kwargs": {{"rank": 0}}}}
    return trials.Experiment(
        name="small",
        title="Small",
        trials=(
            trial("dp_seed0", "DP-SGD"),
            trial("rpdp_seed0", "RPDP-SGD", **wrong),
            trial("pdp_seed0", "PDP-SGD", **subspace),
        ),
        figures={{
            "accuracy": plots.accuracy_against_epsilon,
            "training": functools.partial(plots.training_curves, panel=None),
        }},
    )

if __name__ == "__main__":
    papers.EXPERIMENTS["small"] = small
    reproduce.run()
"""


def launch(folder, *arguments, epochs):
    """Starts the program with an experiment of three trials on digits."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(epochs=epochs), "utf-8")
    return subprocess.Popen(
        [
            *(sys.executable, program, "--experiment=small"),
            *(f"--workdir={folder / 'out'}", *arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_epoch(process, folder):
    """Waits until a trial has written down an epoch."""
    end = time.monotonic() + 120
    while not results.epochs_done(folder):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def wait_for_end(session):
    """Waits until no process of a session is left."""
    end = time.monotonic() + 60
    command = ["ps", "-o", "pid=", "-s", str(session)]
    while subprocess.run(command, capture_output=True).stdout.split():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
class TestProgram:
    def test_end_to_end_with_a_trial_that_fails(
        self, tmp_path, monkeypatch, capsys
    ):
        process = launch(tmp_path, "--jobs=1", epochs=2)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 1
        folder = tmp_path / "out" / "small"
        first, *lines, last = out.splitlines()
        assert "3 trials, 0 finished, 3 to run" in first
        assert len(lines) == 3
        assert last == f"{folder}/table.md"
        failed, log = err.splitlines()
        assert failed.startswith(
            "failed: rpdp_seed0: ValueError: Expected rank >= 1 (int), got 0"
        )
        assert log.strip() == f"{folder}/logs/rpdp_seed0.log"
        assert {path.name for path in folder.iterdir()} == {
            "accuracy.png",
            "accuracy.svg",
            "commands.json",
            "logs",
            "report.html",
            "results.json",
            "table.md",
            "training.png",
            "training.svg",
            "trials",
        }
        table = (folder / "table.md").read_text("utf-8")
        assert "| DP-SGD" in table and "| PDP-SGD" in table
        assert "| RPDP-SGD" not in table
        assert "1 of 3 trials have not finished" in table

        # The trials that went well are kept; the other one is tried again.
        tried = []
        monkeypatch.setattr(
            reproduce,
            "_run",
            lambda _, unfinished, *__: tried.extend(unfinished) or [],
        )
        small = runpy.run_path(str(tmp_path / "program.py"))["small"](None)
        reproduce.reproduce(
            small, list(small.trials), tmp_path / "out", jobs=1, command="c"
        )
        assert [trial.name for trial in tried] == ["rpdp_seed0"]
        assert "3 trials, 2 finished, 1 to run" in capsys.readouterr().out

    def test_killed_it_leaves_no_process_and_goes_on(self, tmp_path):
        only = "--only=^dp"
        process = launch(tmp_path, only, "--jobs=1", epochs=30)
        folder = tmp_path / "out" / "small" / "trials" / "dp_seed0"
        wait_for_epoch(process, folder)
        process.kill()
        process.communicate(timeout=60)
        wait_for_end(process.pid)
        done = results.epochs_done(folder)
        assert 0 < done < 30

        process = launch(tmp_path, only, "--jobs=1", epochs=30)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        result = json.loads((folder / "result.json").read_text("utf-8"))
        assert result["epochs"] == 30
        log = folder.parents[1] / "logs" / "dp_seed0.log"
        assert "resumed    after" in log.read_text("utf-8")

    def test_an_interrupt_stops_cleanly_with_a_table(self, tmp_path):
        process = launch(tmp_path, "--jobs=2", epochs=2000)
        folder = tmp_path / "out" / "small"
        wait_for_epoch(process, folder / "trials" / "dp_seed0")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=180)
        assert process.returncode == 130
        assert "Interrupted; the same command goes on" in out
        assert "Traceback" not in out + err
        wait_for_end(process.pid)
        assert "not finished" in (folder / "table.md").read_text("utf-8")

    @pytest.mark.parametrize(
        "argument, message",
        [
            ("--experimnt=x", "error: Unknown command line flag 'experimnt'"),
            ("--jobs=two", "error: flag --jobs=two: "),
            ("pdp_mnist", "error: Expected flags only, got 'pdp_mnist'"),
        ],
    )
    def test_mistakes_end_with_one_line_and_without_tensorflow(
        self, argument, message
    ):
        code = (
            "import sys, atexit; from tf_dpsub.launchers import reproduce; "
            "atexit.register(lambda: print('tensorflow' in sys.modules)); "
            "sys.argv[0] = 'reproduce'; reproduce.run()"
        )
        done = python("-c", code, argument)
        assert done.returncode == 2
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1
        assert done.stdout == "False\n"
