"""Comparisons of frameworks: what runs, goes on, and is told of it."""

import json
import sys

import pytest

from benchmarks.peers import compare
from benchmarks.peers.workloads import WORKLOADS
from tests.launchers.train_test import contents

OURS, OPACUS = "tf_dpsub", "opacus"


def run(framework, method, ms, peak_mib=100.0, **changes):
    """What one process found."""
    return {
        "round": 0,
        "workload": "cnn",
        "framework": framework,
        "method": method,
        "version": f"{framework} 1.0",
        "ms": ms,
        "peak_mib": peak_mib,
    } | changes


def impossible(framework, method, **changes):
    found = run(framework, method, None, **changes)
    del found["ms"], found["peak_mib"]
    return found | {"impossible": "no rule for the layer"}


# The second round was on a machine that was twice as slow.
RUNS = [
    run(OURS, "plain", [4.0, 5.0, 6.0]),
    run(OURS, "graph", [9.0, 10.0, 11.0], peak_mib=110.0),
    run(OPACUS, "plain", [10.0]),
    run(OPACUS, "hooks", [40.0], peak_mib=300.0),
    impossible(OPACUS, "ghost"),
    run(OURS, "plain", [10.0], round=1),
    run(OURS, "graph", [20.0], round=1),
    run(OPACUS, "hooks", [80.0], round=1),
]


class TestSummary:
    def test_ratios_are_of_one_round(self):
        rows = {(r["framework"], r["method"]): r for r in summary()}
        graph, hooks = rows[OURS, "graph"], rows[OPACUS, "hooks"]
        assert graph["to_plain"] == 2
        assert graph["to_ours"] == 1
        assert graph["peak_to_plain"] == pytest.approx(1.05)
        assert hooks["to_ours"] == 4
        # Its plain step was measured in the first round alone.
        assert hooks["to_plain"] == 4
        assert hooks["rounds"] == 2
        assert (graph["low"], graph["ms"]) == (9.75, 10.5)
        assert rows[OPACUS, "ghost"]["reason"] == "no rule for the layer"

    def test_nothing_to_compare_with(self):
        (row,) = compare.summarized([run(OPACUS, "hooks", [40.0])])
        assert row["to_plain"] is row["to_ours"] is None
        assert "| 40.0 |" in compare.markdown([row], "")

    def test_a_bar_that_dwarfs_the_others_is_cut(self):
        runs = [run(OURS, "graph", [10.0]), run(OPACUS, "hooks", [20.0])]
        (axes,) = compare.draw(compare.summarized(runs)).axes
        assert axes.get_xlim() == (0, 21)
        runs.append(run(OPACUS, "ghost", [400.0]))
        (axes,) = compare.draw(compare.summarized(runs)).axes
        assert axes.get_xlim() == (0, 30)
        assert [text.get_text() for text in axes.texts] == ["400 "]

    def test_files(self, tmp_path):
        text = compare.write(RUNS, tmp_path, "the command")
        assert (tmp_path / "table.md").read_text("utf-8") == text
        assert "the command" in text
        assert "| Opacus | hooks | 60.0 | 50.0 to 70.0 | 4.00 | 4.00 |" in text
        assert "- Opacus, ghost: no rule for the layer" in text
        assert "opacus 1.0; tf_dpsub 1.0." in text
        rows = json.loads((tmp_path / "results.json").read_text("utf-8"))
        assert len(rows) == 5
        assert (tmp_path / "bars.png").stat().st_size > 5000


def summary():
    return compare.summarized(RUNS)


class TestMeasure:
    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch):
        few = {
            name: (folder, title, methods[:2])
            for name, (folder, title, methods) in compare.FRAMEWORKS.items()
        }
        monkeypatch.setattr(compare, "FRAMEWORKS", few)

    @pytest.fixture(name="asked")
    def _asked(self, monkeypatch):
        """What would have run, each of which takes 5 ms."""
        asked = []

        def answer(task, seconds, timeout):
            asked.append(task)
            title = compare.FRAMEWORKS[task["framework"]][1]
            found = run(title, task["method"], [5.0])
            del found["round"]
            return found

        monkeypatch.setattr(compare, "_run", answer)
        return asked

    def measured(self, folder, rounds=2, names=("cnn",), frameworks=(OURS,)):
        return compare.measure(folder, names, frameworks, rounds, 0.1, 60)

    def test_frameworks_take_turns(self, tmp_path, asked):
        self.measured(tmp_path, frameworks=(OURS, OPACUS))
        assert [(t["round"], t["framework"], t["method"]) for t in asked] == [
            (k, f, m)
            for k in range(2)
            for f, m in (
                (OURS, "plain"),
                (OURS, "graph"),
                (OPACUS, "plain"),
                (OPACUS, "hooks"),
            )
        ]

    def test_is_kept_under_the_names_that_were_asked_for(self, tmp_path, asked):
        """Programs write the titles of their frameworks."""
        runs = self.measured(tmp_path, frameworks=(OPACUS,))
        assert {r["framework"] for r in runs} == {OPACUS}
        assert "| Opacus | hooks |" in compare.write(runs, tmp_path, "")

    def test_goes_on(self, tmp_path, asked):
        first = self.measured(tmp_path, rounds=1)
        # The process was stopped while it wrote the next one.
        with open(tmp_path / "runs.jsonl", "a", encoding="utf-8") as file:
            file.write('{"round": 1, "workl')
        asked.clear()
        again = self.measured(tmp_path, rounds=2)
        assert [t["round"] for t in asked] == [1, 1]
        assert again[:2] == first
        assert self.measured(tmp_path, rounds=2) == again

    def test_what_cannot_run_is_tried_once(self, tmp_path, monkeypatch):
        asked = []

        def answer(task, seconds, timeout):
            asked.append(task["method"])
            return {"failed": "killed by signal 9"}

        monkeypatch.setattr(compare, "_run", answer)
        runs = self.measured(tmp_path, rounds=3)
        assert asked == ["plain", "graph"]
        assert {r["failed"] for r in runs} == {"killed by signal 9"}
        (row, _) = compare.summarized(runs)
        assert row["reason"] == "killed by signal 9"

    @pytest.mark.slow
    def test_our_own_program(self, tmp_path):
        plain, private = self.measured(tmp_path, rounds=1, names=("mlp",))
        assert plain["method"], private["method"] == ("plain", "graph")
        for found in (plain, private):
            assert len(found["ms"]) >= 5 and min(found["ms"]) > 0
            assert found["first_ms"] > max(found["ms"])
            assert 100 < found["peak_mib"] < 10_000
            assert "Keras 3" in found["version"]

    @pytest.mark.parametrize(
        "program, told",
        [
            ("raise SystemExit('error: too small')", "error: too small"),
            ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
            ("import time; time.sleep(60)", "not done after 0.5 s"),
        ],
    )
    def test_failures_are_told(self, tmp_path, monkeypatch, program, told):
        python = tmp_path / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
        python.chmod(0o755)
        monkeypatch.setattr(
            compare, "FRAMEWORKS", {OPACUS: (tmp_path, "Opacus", ("plain",))}
        )
        (found,) = compare.measure(tmp_path, ["cnn"], [OPACUS], 1, 0.1, 0.5)
        assert found["failed"] == told

    def test_no_environment(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            compare, "FRAMEWORKS", {OPACUS: ("nowhere", "Opacus", ("plain",))}
        )
        with pytest.raises(FileNotFoundError, match="make bench"):
            compare.measure(tmp_path / "run", ["cnn"], [OPACUS], 1, 0.1, 9)
        assert not contents(tmp_path / "run")


def test_every_framework_has_its_program():
    for name in compare.FRAMEWORKS:
        module = compare.__file__.replace("compare.py", f"{name}_steps.py")
        with open(module, encoding="utf-8") as file:
            text = file.read()
        for method in compare.FRAMEWORKS[name][2]:
            assert f'"{method}"' in text
            assert f"`{method}`" in text.split('"""')[1]


def test_titles_are_different():
    titles = {workload.title for workload in WORKLOADS.values()}
    assert len(titles) == len(WORKLOADS)
