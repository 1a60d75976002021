"""Comparisons of frameworks: their runs, their resumption and reports."""

import json
import statistics
import sys

import pytest

from benchmarks.peers import compare
from benchmarks.peers.workloads import WORKLOADS
from tests.launchers.programs import contents

OURS, OPACUS = "tf_dpsub", "opacus"


def run(framework, method, ms, peak_mib=100.0, our_ms=(10.0,), **changes):
    """Result of one process, in turns with our steps."""
    return {
        "round": 0,
        "workload": "cnn",
        "framework": framework,
        "method": method,
        "version": f"{framework} 1.0",
        "ms": ms,
        "our_ms": list(our_ms),
        "peak_mib": peak_mib,
    } | changes


def impossible(framework, method, **changes):
    result = run(framework, method, None, **changes)
    del result["ms"], result["our_ms"], result["peak_mib"]
    return result | {"impossible": "no rule for the layer"}


# The machine became slower by half for Opacus's own step, and again by half for
# the second round.
RUNS = [
    run(OURS, "plain", [4.0, 5.0, 6.0]),
    run(OURS, "graph", [9.0, 10.0, 11.0], peak_mib=110.0),
    run(OPACUS, "plain", [15.0], our_ms=[13.0, 15.0, 40.0]),
    run(OPACUS, "hooks", [40.0], peak_mib=300.0),
    impossible(OPACUS, "ghost"),
    run(OURS, "plain", [10.0], our_ms=[20.0], round=1),
    run(OURS, "graph", [20.0], our_ms=[20.0], round=1),
    run(OPACUS, "hooks", [80.0], our_ms=[20.0], round=1),
]


class TestSummary:
    def test_ratios_are_of_turns_in_one_round(self):
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

    def test_turns_stand_for_a_process_of_ours(self):
        plain = run(OURS, "plain", [5.0], our_ms=[9.0, 11.0], our_peak_mib=120)
        hooks = run(OPACUS, "hooks", [40.0], our_ms=[10.0], our_peak_mib=130)
        _, ours, _ = compare.summarized([plain, hooks])
        assert (ours["framework"], ours["method"]) == (OURS, "graph")
        assert (ours["ms"], ours["to_ours"], ours["to_plain"]) == (10, 1, 2)
        assert (ours["peak_mib"], ours["peak_to_plain"]) == (130, 1.3)
        graph = run(OURS, "graph", [12.0], our_peak_mib=110)
        _, ours, _ = compare.summarized([plain, graph, hooks])
        assert (ours["ms"], ours["peak_mib"]) == (12, 100)

    def test_rows_have_one_order(self):
        """A run that is repeated keeps its place."""
        rows = compare.summarized(RUNS[::-1])
        assert [(r["framework"], r["method"]) for r in rows] == [
            (r["framework"], r["method"]) for r in summary()
        ]

    def test_no_plain_step(self):
        (row,) = compare.summarized([run(OPACUS, "hooks", [40.0])])
        assert row["to_plain"] is None
        assert "| 40.0 | 40.0 to 40.0 |  | 4.00 |" in (
            compare.markdown([row], "")
        )

    def test_without_ours_there_is_no_row_of_the_overview(self):
        rows = compare.summarized(
            [impossible(OURS, "graph"), run(OURS, "vectorized_map", [20.0])]
        )
        assert compare.fastest(rows) == {"cnn": {}}

    def test_the_fastest_of_the_others_meets_our_dp_sgd(self):
        runs = [
            run(OURS, "plain", [5.0]),
            run(OURS, "graph", [10.0]),
            run(OURS, "vectorized_map", [9.0]),
            run(OURS, "dp_powersgd", [4.0]),
            run(OPACUS, "plain", [3.0]),
            # While the machine was fast.
            run(OPACUS, "hooks", [24.0], our_ms=[8.0]),
            run(OPACUS, "ghost", [25.0]),
            run("jax", "plain", [2.0]),
        ]
        rows = compare.summarized(runs)
        best = compare.fastest(rows)["cnn"]
        assert {f: row["method"] for f, row in best.items()} == {
            OURS: "graph",
            OPACUS: "ghost",
        }
        title = WORKLOADS["cnn"].title
        assert f"| {title} | 10.0 | 2.00 | 1.00 | 2.50 |  |  |" in (
            compare.markdown(rows, "")
        )

    def test_long_bars_are_cut(self):
        runs = [run(OURS, "graph", [10.0]), run(OPACUS, "hooks", [20.0])]
        runs.append(run("jax", "vmap", [400.0]))
        (axes,) = compare.draw(compare.summarized(runs)).axes
        assert axes.get_xlim() == (0, 4)
        widths = [bar.get_width() for bar in axes.patches if bar.get_width()]
        assert widths == [2, 40]
        assert [text.get_text() for text in axes.texts] == ["40 "]

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


# A program that is ready, and makes a step whenever it is asked to.
READY = """
print("{}", flush=True)
for line in open(0):
    print('{"ms": [1.0], "peak_mib": 1.0}', flush=True)
"""


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
        """Log of processes and of their steps, of 5 ms each."""
        asked = []

        class Process:
            def __init__(self, name, framework, method, timeout, epochs):
                self._name = f"{framework} {method}"
                kind = " epochs" if epochs else ""
                asked.append(f"{name}{kind}: {self._name}")
                self._title = compare.FRAMEWORKS[framework][1]

            def __enter__(self):
                return self

            def __exit__(self, *exception):
                asked.append(f"{self._name} ends")

            def answer(self):
                return {"framework": self._title, "version": "1.0"}

            def make_steps(self, seconds):
                asked.append(self._name)
                return {"ms": [5.0, 5.0], "peak_mib": 1.0}

        monkeypatch.setattr(compare, "_Process", Process)
        return asked

    def measured(self, folder, rounds=2, names=("cnn",), frameworks=(OURS,)):
        return compare.measure(folder, names, frameworks, rounds, 0, 60)

    def test_processes_take_turns_with_ours(self, tmp_path, asked):
        (result, _) = self.measured(tmp_path, rounds=1, frameworks=(OPACUS,))
        ours = "tf_dpsub graph"
        turns = ["opacus plain", ours] * 3
        others = ["opacus hooks", ours] * 3
        assert asked == [
            f"cnn: {ours}",
            "cnn: opacus plain",
            *turns,
            "opacus plain ends",
            "cnn: opacus hooks",
            *others,
            "opacus hooks ends",
            f"{ours} ends",
        ]
        assert result["ms"] == result["our_ms"] == [5.0] * 6

    def test_turns_are_epochs(self, tmp_path, asked):
        compare.measure(tmp_path, ["cnn"], [OPACUS], 1, 0, 60, epochs=True)
        ours = "tf_dpsub graph"
        # One epoch of each is enough.
        assert asked[:5] == [
            f"cnn epochs: {ours}",
            "cnn epochs: opacus plain",
            "opacus plain",
            ours,
            "opacus plain ends",
        ]

    def test_order(self, tmp_path, asked):
        runs = self.measured(
            tmp_path, names=("cnn", "mlp"), frameworks=(OURS, OPACUS)
        )
        assert [
            (r["round"], r["workload"], r["framework"], r["method"])
            for r in runs
        ] == [
            (k, name, f, m)
            for k in range(2)
            for name in ("cnn", "mlp")
            for f, m in (
                (OURS, "plain"),
                (OURS, "graph"),
                (OPACUS, "plain"),
                (OPACUS, "hooks"),
            )
        ]
        assert asked.count("tf_dpsub graph ends") == 4 + 4

    @pytest.mark.parametrize(
        "methods, measured",
        [
            (["plain"], [(OURS, "plain"), (OPACUS, "plain")]),
            (["opacus:plain", "graph"], [(OURS, "graph"), (OPACUS, "plain")]),
        ],
    )
    def test_methods_of_all_frameworks_or_of_one(
        self, methods, measured, tmp_path, asked
    ):
        runs = compare.measure(
            tmp_path, ["cnn"], [OURS, OPACUS], 1, 0, 60, methods=methods
        )
        assert [(r["framework"], r["method"]) for r in runs] == measured

    def test_results_have_the_names_of_the_flags(self, tmp_path, asked):
        """Programs write the titles of their frameworks."""
        runs = self.measured(tmp_path, frameworks=(OPACUS,))
        assert {r["framework"] for r in runs} == {OPACUS}
        assert "| Opacus | hooks |" in compare.write(runs, tmp_path, "")

    def test_goes_on(self, tmp_path, asked):
        first = self.measured(tmp_path, rounds=1)
        # The process was stopped while it wrote the next one.
        with open(tmp_path / "runs.jsonl", "a", encoding="utf-8") as file:
            file.write('{"round": 1, "workl')
        again = self.measured(tmp_path, rounds=2)
        assert [r["round"] for r in again] == [0, 0, 1, 1]
        assert again[:2] == first
        asked.clear()
        assert self.measured(tmp_path, rounds=2) == again
        assert not asked

    @pytest.mark.slow
    def test_our_own_program(self, tmp_path, monkeypatch):
        """Keras's own step, in turns with a private one."""
        monkeypatch.setitem(
            compare.FRAMEWORKS, OURS, (None, "tf_dpsub", ("plain",))
        )
        (result,) = self.measured(tmp_path, rounds=1, names=("mlp",))
        for times in (result["ms"], result["our_ms"]):
            assert len(times) >= 5 and min(times) > 0
        assert result["first_ms"] > statistics.median(result["ms"])
        assert 100 < result["peak_mib"] < 10_000
        assert "Keras 3" in result["version"]

    @pytest.fixture(name="programs")
    def _programs(self, tmp_path, monkeypatch):
        """Replaces our program, and that of Opacus."""

        def install(*programs):
            frameworks = {}
            for name, program in zip((OURS, OPACUS), programs):
                folder = tmp_path / name
                python = folder / "bin" / "python"
                python.parent.mkdir(parents=True)
                (folder / "program.py").write_text(program)
                python.write_text(
                    f"#!/bin/sh\nexec {sys.executable} {folder}/program.py\n"
                )
                python.chmod(0o755)
                frameworks[name] = folder, name, ("plain",)
            monkeypatch.setattr(compare, "FRAMEWORKS", frameworks)

        return install

    @pytest.mark.parametrize(
        "program, reason",
        [
            ("raise SystemExit('error: too small')", "error: too small"),
            ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
            ("import time; time.sleep(60)", "not done after 1 s"),
            ("print('{}', flush=True); input(); exit('late')", "late"),
        ],
    )
    def test_failures_are_reported_and_not_tried_again(
        self, tmp_path, monkeypatch, programs, program, reason
    ):
        programs(READY, program)
        (result,) = compare.measure(tmp_path, ["cnn"], [OPACUS], 2, 0, 1)
        assert result["failed"] == reason
        # No task is pending, so our own process must not start.
        monkeypatch.delattr(compare, "_Process")
        again = compare.measure(tmp_path, ["cnn"], [OPACUS], 2, 0, 1)
        assert again == [result]

    @pytest.mark.parametrize(
        "program",
        ["exit('no memory')", "print('{}', flush=True); exit('no memory')"],
    )
    def test_nothing_to_compare_with(self, tmp_path, programs, program):
        programs(program, READY)
        with pytest.raises(compare._FailedError, match="no memory"):
            compare.measure(tmp_path, ["cnn"], [OPACUS], 1, 0, 9)
        assert not (tmp_path / "runs.jsonl").exists()

    def test_no_environment(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            compare, "FRAMEWORKS", {OURS: ("nowhere", "ours", ("plain",))}
        )
        with pytest.raises(FileNotFoundError, match="make bench"):
            compare.measure(tmp_path / "run", ["cnn"], [OURS], 1, 0.1, 9)
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
