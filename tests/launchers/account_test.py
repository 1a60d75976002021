import json

import pytest

from tests.launchers.programs import python, run_here, run_main
from tf_dpsub import accounting
from tf_dpsub.launchers import account

RATE = {"batch_size": 150, "examples": 60000}
RUN = {"noise_multiplier": 1.3, "epochs": 15, "delta": 1e-5, **RATE}


class TestSolve:
    def test_epsilon(self):
        result = account.solve(**RUN)
        assert result["solved_for"] == "epsilon"
        assert result["steps"] == 6000
        assert result["sampling_rate"] == 150 / 60000
        assert result["poisson_sampling"] == pytest.approx(
            {"rdp": 0.72422, "pld": 0.64011}, rel=1e-4
        )
        unamplified = {
            by: accounting.epsilon(
                noise_multiplier=1.3,
                sampling_rate=1,
                steps=6000,
                delta=1e-5,
                accountant=by,
            )
            for by in ("rdp", "pld")
        }
        assert result["without_amplification"] == unamplified

    def test_rows_of_a_person(self):
        arguments = {**RUN, "noise_multiplier": 6.0, "epochs": 1}
        result = account.solve(**arguments, rows_per_person=3)
        assert result["rows_per_person"] == 3
        for name, rate in (
            ("poisson_sampling", 150 / 60000),
            ("without_amplification", 1),
        ):
            assert result[name] == {
                by: accounting.epsilon(
                    noise_multiplier=6.0,
                    sampling_rate=rate,
                    steps=400,
                    delta=1e-5,
                    accountant=by,
                    rows_per_person=3,
                )
                for by in ("rdp", "pld")
            }
        lines = [line.split() for line in account.table(result).splitlines()]
        assert "rows of a person, at most 3".split() in lines
        assert "rows_per_person" not in account.solve(**arguments)

    @pytest.mark.parametrize("rows", [1, 2])
    def test_bands(self, rows):
        """As the ledger of a run with bands, whose last cycle is not whole."""
        entry = accounting.LedgerEntry(
            mechanism="DPSGD",
            noise_multiplier=4.0,
            l2_norm_clip=1.0,
            batch_size=100,
            examples=1000,
            sampler="poisson",
            bands=4,
            steps=42,
        )
        noise = {"noise_multiplier": 4.0, "delta": 1e-5}
        ways = {
            "sampling_rate": 0.1,
            "bands": 4,
            "rows_per_person": rows,
        }
        result = account.solve(**noise, **ways, steps=42)
        ledger = accounting.PrivacyLedger()
        ledger.charge(entry.description, 42)
        for name, epsilon in (
            ("poisson_sampling", ledger.epsilon),
            ("without_amplification", ledger.epsilon_without_amplification),
        ):
            assert result[name] == {
                by: pytest.approx(epsilon(1e-5, by, rows), rel=1e-9)
                for by in ("rdp", "pld")
            }
        spent = result["poisson_sampling"]["rdp"]
        lines = [line.split() for line in account.table(result).splitlines()]
        assert ["bands", "4"] in lines
        assert any(line[:2] == ["with", "cyclic"] for line in lines)
        assert "once_per_epoch" not in result
        # Steps and noise of that run: its eleven cycles are 44 steps.
        budget = {"epsilon": spent * (1 + 1e-6), "delta": 1e-5}
        fitting = account.solve(**budget, **ways, noise_multiplier=4.0)
        assert fitting["poisson_sampling"]["rdp"] == 44
        noise = account.solve(**budget, **ways, steps=42)
        assert noise["poisson_sampling"]["rdp"] == pytest.approx(4.0, rel=1e-3)

    def test_too_many_bands(self):
        with pytest.raises(ValueError, match=r"11 \* 0.1: a batch comes from"):
            account.solve(
                noise_multiplier=4.0,
                delta=1e-5,
                steps=10,
                sampling_rate=0.1,
                bands=11,
            )

    def test_each_example_once_in_an_epoch(self):
        run = {"noise_multiplier": 4.0, "steps": 100, "delta": 1e-5}
        result = account.solve(**run, sampling_rate=0.05)
        assert result["once_per_epoch"] == {
            by: accounting.epsilon(
                **run,
                sampling_rate=0.05,
                accountant=by,
                sampling="once_per_epoch",
            )
            for by in ("rdp", "pld")
        }
        assert (
            result["once_per_epoch"]["pld"] < result["poisson_sampling"]["pld"]
        )
        assert "with each example once in an epoch" in account.table(result)

    def test_noise_multiplier(self):
        result = account.solve(
            epsilon=4.0, delta=1e-5, sampling_rate=1.0, steps=5
        )
        assert result["solved_for"] == "noise_multiplier"
        assert result["poisson_sampling"] == result["without_amplification"]
        for by, noise_multiplier in result["poisson_sampling"].items():
            spent = accounting.epsilon(
                noise_multiplier=noise_multiplier,
                sampling_rate=1,
                steps=5,
                delta=1e-5,
                accountant=by,
            )
            assert 4 * (1 - 1e-4) < spent <= 4

    def test_steps(self):
        result = account.solve(
            epsilon=4.0, delta=1e-5, sampling_rate=0.1, noise_multiplier=4.0
        )
        assert result["solved_for"] == "steps"
        for name, rate in (
            ("poisson_sampling", 0.1),
            ("without_amplification", 1),
        ):
            for by, steps in result[name].items():
                assert steps == accounting.steps(
                    epsilon=4.0,
                    delta=1e-5,
                    sampling_rate=rate,
                    noise_multiplier=4.0,
                    accountant=by,
                )

    @pytest.mark.parametrize(
        "rate, steps",
        [
            ({"batch_size": 7, "examples": 50}, 16),
            ({"sampling_rate": 0.1}, 20),
            ({"sampling_rate": 0.3}, 8),
        ],
    )
    def test_steps_of_epochs(self, rate, steps):
        result = account.solve(
            noise_multiplier=5.0, epochs=2, delta=1e-5, **rate
        )
        assert result["steps"] == steps

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({**RUN, "delta": None}, "Expected --delta, got none"),
            ({**RUN, "epsilon": 1.0}, "left out: none of them"),
            (
                {"delta": 1e-5, "sampling_rate": 0.1, "epochs": 1},
                "left out: --epsilon, --noise_multiplier",
            ),
            ({**RUN, "steps": 3}, "--steps or --epochs, got both"),
            ({**RUN, "sampling_rate": 0.1}, "--batch_size, got both"),
            ({**RUN, "examples": None}, "--batch_size and --examples, got"),
            ({**RUN, "batch_size": None}, "--batch_size and --examples, got"),
            ({**RUN, "batch_size": 60001}, "--batch_size <= --examples"),
            ({**RUN, "batch_size": 0}, "--batch_size >= 1, got 0"),
            ({**RUN, "examples": -5}, "--examples >= 1, got -5"),
            ({**RUN, "epochs": -1}, "--epochs >= 0, got -1"),
            (
                {
                    "noise_multiplier": 1.0,
                    "sampling_rate": 0.0,
                    "epochs": 1,
                    "delta": 1e-5,
                },
                "0 < --sampling_rate <= 1, got 0.0",
            ),
            ({**RUN, "delta": 1.0}, "0 < delta < 1, got 1.0"),
            ({**RUN, "noise_multiplier": -1.0}, "noise_multiplier < inf, got"),
        ],
    )
    def test_invalid(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            account.solve(**arguments)


class TestMain:
    def test_table(self, capsys):
        out, err, code = run_main(account, capsys, **RUN)
        lines = [line.split() for line in out.splitlines()]
        assert ["steps", "6000"] in lines
        assert ["epsilon", "RDP", "PLD"] in lines
        # Rounded up, of 0.724223 and 0.640111.
        assert ["with", "Poisson", "sampling", "0.72423", "0.64012"] in lines
        assert len({len(line) for line in out.splitlines() if line}) <= 2
        assert (err, code) == ("", 0)

    def test_json_without_noise(self, capsys):
        out, _, code = run_main(
            account, capsys, **{**RUN, "noise_multiplier": 0.0}, json=True
        )
        result = json.loads(out, parse_constant=pytest.fail)
        assert result["poisson_sampling"] == {"rdp": "inf", "pld": "inf"}
        assert code == 0

    def test_large_delta_warns(self, capsys):
        values = {**RUN, "delta": 1 / 60000, "noise_multiplier": 0.0}
        out, err, code = run_main(account, capsys, **values)
        assert "Warning: delta = 1.66667e-05 is not below 1 / examples" in err
        assert out
        assert code == 0

    def test_refusal_is_one_line(self, capsys):
        out, err, code = run_main(account, capsys, **RUN, steps=3)
        assert (out, code) == ("", 2)
        assert err == "error: Expected --steps or --epochs, got both.\n"


class TestProgram:
    def test_solves_without_tensorflow(self):
        code = (
            "import sys; from tf_dpsub.launchers import account; "
            "sys.argv[0] = 'account'; "
            "import atexit; atexit.register(lambda: print("
            "'tensorflow' in sys.modules, file=sys.stderr)); account.run()"
        )
        done = python(
            "-c",
            code,
            "--noise_multiplier=4",
            "--sampling_rate=0.1",
            "--steps=10",
            "--delta=1e-5",
            "--json",
        )
        assert done.returncode == 0
        assert done.stderr == "False\n"
        result = json.loads(done.stdout)
        assert result["steps"] == 10
        assert 0 < result["poisson_sampling"]["rdp"] < 1

    @pytest.mark.parametrize(
        "argument, message",
        [
            ("--noise_multiplier=high", "flag --noise_multiplier=high: "),
            ("--sigma=1", "Unknown command line flag 'sigma'"),
            ("1.3", "Expected flags only, got '1.3'."),
        ],
    )
    def test_refuses_the_command_line_in_one_line(self, argument, message):
        done = run_here("account", argument)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"error: {message}")
        assert done.stderr.count("\n") == 1
