import dataclasses

import pytest

from tests.launchers.papers.engine import finished_trials
from tf_dpsub import accounting
from tf_dpsub.launchers.papers.engine import results, table, trials


@pytest.fixture
def experiment():
    made_trials = [
        finished_trials.trial(
            f"{method}_{seed}", method, seed=seed, paper=paper, k=k
        )
        for seed in (0, 1)
        for method, k, paper in (("GP", "", 0.947), ("GEP", 250, 0.963))
    ]
    return trials.Experiment(
        name="x",
        title="X on Y",
        trials=tuple(made_trials),
        figures={},
        notes=("N.",),
    )


def lines(experiment, folder):
    text = table.markdown(results.Results(experiment, folder), "a command")
    return text.splitlines()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


class TestMarkdown:
    def test_rows_beside_the_papers_figures(self, experiment, tmp_path):
        for trial, accuracy in zip(experiment.trials, (0.9, 0.95, 0.92, 0.96)):
            finished_trials.write(tmp_path, trial, accuracy)
        text = lines(experiment, tmp_path)
        header, rule, *rows = (line for line in text if line.startswith("|"))
        assert set(rule) == set("|- ")
        assert len({len(line) for line in (header, rule, *rows)}) == 1
        gp, gep = (dict(zip(cells(header), cells(row))) for row in rows)
        assert gp["method"] == "GP"
        assert gp["k"] == ""
        assert gp["test accuracy"] == "91.0 ± 1.4"
        assert gp["paper"] == "94.7"
        assert gp["seeds"] == "2"
        assert gp["epochs"] == "2"
        assert gp["paper's ε"] == "0.5"
        assert gep["k"] == "250"
        assert gep["test accuracy"] == "95.5 ± 0.7"
        for name, accountant in (("ε (RDP)", "rdp"), ("ε (PLD)", "pld")):
            spent = accounting.epsilon(
                noise_multiplier=4.0,
                sampling_rate=0.1,
                steps=finished_trials.STEPS,
                delta=1e-5,
                accountant=accountant,
            )
            # Three digits, rounded up.
            assert spent <= float(gep[name]) < spent + 0.001

    def test_head(self, experiment, tmp_path):
        for trial in experiment.trials:
            finished_trials.write(tmp_path, trial, 0.9)
        text = lines(experiment, tmp_path)
        assert text[:5] == ["# X on Y", "", "```sh", "a command", "```"]
        assert "- N." in text
        assert not any("Shortened" in line for line in text)
        assert not any("Not complete" in line for line in text)

    def test_what_was_shortened_and_what_is_missing(self, experiment, tmp_path):
        short = dataclasses.replace(experiment, fraction=0.1)
        finished_trials.write(tmp_path, short.trials[0], 0.9)
        text = lines(short, tmp_path)
        (shortened,) = (line for line in text if "Shortened" in line)
        assert "0.1 of the paper's epochs" in shortened
        (missing,) = (line for line in text if "Not complete" in line)
        assert "3 of 4 trials have not finished" in missing
        rows = [line for line in text if line.startswith("|")][2:]
        assert len(rows) == 1
        # One seed has no deviation.
        assert "±" not in rows[0]

    def test_without_any_result(self, experiment, tmp_path):
        assert any("4 of 4" in line for line in lines(experiment, tmp_path))

    def test_best_of_each_method_comes_first(self, experiment, tmp_path):
        made_trials = [
            finished_trials.trial(f"gp_{clip}", "GP", clip=clip)
            for clip in (1, 5)
        ]
        for trial, accuracy in zip(made_trials, (0.5, 0.6)):
            finished_trials.write(tmp_path, trial, accuracy, errors=(0.25,))
        tuned = dataclasses.replace(
            experiment, trials=tuple(made_trials), best_of=("method",)
        )
        written = lines(tuned, tmp_path)
        first = written.index("## Best by method")
        whole = written.index("## All")
        assert first < whole
        (best,) = [
            cells(line)
            for line in written[first:whole]
            if line.startswith("| GP")
        ]
        assert best[:4] == ["GP", "5", "60.0", "25.0"]
        assert sum(line.startswith("| GP") for line in written[whole:]) == 2
        # Neither paper accuracies nor its ε: no empty columns for them.
        assert not any("paper" in line for line in written[first:])
