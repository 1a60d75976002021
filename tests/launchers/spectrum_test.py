"""The study of a spectrum, on digits."""

import copy
import gc

import numpy as np
import pytest

import tf_dpsub
from tests.launchers.digits import digits_config
from tf_dpsub import accounting, analysis
from tf_dpsub.launchers import spectrum
from tf_dpsub.launchers.training import training_run


def config(**changes):
    return digits_config(**{"model_kwargs": {"hidden": (8,)}} | changes)


def study(folder, **changes):
    # Noise is fresh: so many that close singular values do not matter.
    arguments = {"k": 6, "ranks": (2, 6), "iterations": 300} | changes
    return spectrum.Study(**{"config": config(), "folder": folder} | arguments)


def models_alive():
    return sum(isinstance(o, tf_dpsub.PrivateModel) for o in gc.get_objects())


@pytest.fixture(scope="module")
def done_and_alive(tmp_path_factory):
    """A finished study, and how many models there were before each run."""
    folder, alive = tmp_path_factory.mktemp("study"), []
    train = training_run.train

    def counting(*args, **kwargs):
        alive.append(models_alive())
        return train(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "train", counting)
        study(folder, repeats=2).run("the command")
    return folder, alive


@pytest.fixture(scope="module")
def done(done_and_alive):
    return done_and_alive[0]


@pytest.mark.slow
class TestStudy:
    def test_values_are_those_of_the_gradients(self, done):
        store = analysis.GradientStore(done / "record" / "gradients")
        # Two epochs of six steps.
        assert store.steps.tolist() == list(range(1, 13))
        rows = store.block(slice(None), slice(None)).astype(float)
        expected = np.linalg.svd(rows, compute_uv=False)
        with np.load(done / "spectrum.npz") as arrays:
            np.testing.assert_allclose(
                arrays["values"], expected[:6], rtol=1e-3
            )
            assert arrays["energy"] == pytest.approx(np.sum(expected**2))
            assert arrays["directions"].shape == (rows.shape[1], 6)
            for window, part in zip(arrays["windows"], np.split(rows, 3)):
                window_values = np.linalg.svd(part, compute_uv=False)
                np.testing.assert_allclose(window, window_values[:4], rtol=1e-3)
            few, *_, many = arrays["by_iterations"]
            assert few[-1] <= many[-1] <= arrays["values"][-1] * (1 + 1e-6)

    def test_trains_again_in_the_directions(self, done):
        """The runs have as much noise, in all dimensions, and no privacy."""
        names = sorted(path.name for path in (done / "again").iterdir())
        assert names == ["all_0", "all_1", "k2_0", "k2_1", "k6_0", "k6_1"]
        noise = set()
        for name in names:
            ledger = accounting.PrivacyLedger(
                done / "again" / name / "ledger.json"
            )
            (entry,) = ledger.entries
            noise.add(entry.noise_multiplier)
            spent = ledger.epsilon(1e-5)
            assert (spent < 3.01) if name.startswith("all") else spent == np.inf
        assert len(noise - {0.0}) == 1

    def test_writes_a_table_and_figures(self, done):
        text = (done / "table.md").read_text("utf-8")
        assert "no ε covers what is here" in text
        assert "12 mean clipped gradients of 610 weights, along 12 st" in text
        assert "ranks 1 to 6" in text
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert [row.split(" | ")[0] for row in rows] == [
            "| directions", "| 2", "| 6", "| all"
        ]  # fmt: skip
        for name in ("spectrum", "spectra", "accuracy"):
            assert (done / f"{name}.png").stat().st_size > 10_000

    def test_says_that_nothing_is_covered(self, done):
        statement = done / "record" / "privacy_statement.txt"
        text = statement.read_text("utf-8")
        assert "does not cover the private gradients in gradients" in text

    def test_goes_on_where_it_stopped(self, done, monkeypatch):
        monkeypatch.setattr(
            spectrum.analysis, "top_singular_values", lambda *_, **__: 1 / 0
        )
        before = (done / "table.md").read_text("utf-8")
        study(done, repeats=2).run("the command")
        assert (done / "table.md").read_text("utf-8") == before

    def test_another_spectrum_needs_another_folder(self, done):
        with pytest.raises(ValueError, match="Expected a new workdir.*k = 5"):
            study(done, k=5, ranks=(2,)).run("the command")

    def test_of_gradients_that_were_kept_before(self, done, tmp_path):
        gradients = str(done / "record" / "gradients")
        second_study = study(tmp_path, gradients=gradients, ranks=(2,))
        second_study.run("the command")
        assert not (tmp_path / "record" / "gradients").exists()
        with np.load(tmp_path / "spectrum.npz") as arrays:
            with np.load(done / "spectrum.npz") as expected:
                np.testing.assert_allclose(
                    arrays["values"], expected["values"], rtol=1e-5
                )

    def test_more_directions_than_gradients(self, done, tmp_path):
        gradients = str(done / "record" / "gradients")
        second_study = study(tmp_path, gradients=gradients, k=13, ranks=(2,))
        with pytest.raises(ValueError, match="Expected k <= 12, got 13"):
            second_study.run("the command")


@pytest.mark.parametrize("every, most", [(1, 12), (5, 3)])
def test_too_few_gradients_are_found_out_before_training(every, most, tmp_path):
    arguments = {"every": every, "ranks": (1,)}
    study(tmp_path, k=most, **arguments).check()
    with pytest.raises(ValueError, match=rf"k <= {most}.*--k={most} or less"):
        study(tmp_path, k=most + 1, **arguments).check()


@pytest.mark.slow
def test_models_that_are_done_with_are_let_go(done_and_alive):
    _, alive = done_and_alive
    assert len(alive) == 7
    assert max(alive[1:]) <= alive[0] + 1


def test_announces_all_runs_and_begins_none(tmp_path, capsys):
    folder = tmp_path / "study"
    study(folder, repeats=5).announce()
    lines = capsys.readouterr().out.splitlines()
    announced = dict(line.split(maxsplit=1) for line in lines)
    assert "noise multiplier" in announced["mechanism"]
    assert (
        announced["gradients"]
        == "one in 1 steps is kept, in 20 GB at most; k = 6"
    )
    assert announced["again"].startswith(
        "15 more runs of this kind: in 2, 6 and in"
    )
    assert not folder.exists()


def test_a_basis_of_another_model(tmp_path, capsys):
    """Found before anything is trained with it."""
    file = tmp_path / "spectrum.npz"
    np.savez(file, directions=np.eye(5, dtype="float32")[:, :2])
    other_config = copy.deepcopy(config())
    other_config.optimizer = "ProjectedDPSGD"
    other_config.subspace = "FixedSubspace"
    other_config.subspace_kwargs = {"basis": str(file), "rank": 2}
    other_config.epsilon, other_config.noise_multiplier = None, 1.0
    with pytest.raises(ValueError, match="a basis of 610 rows.*got 5"):
        spectrum._train(other_config, tmp_path / "run")
    # The announcement says that the run is not private.
    assert "privacy    ε = inf" in capsys.readouterr().out
    other_config.subspace_kwargs = {"basis": str(file), "rank": 3}
    with pytest.raises(ValueError, match="1 <= rank <= 2, the directions"):
        spectrum._train(other_config, tmp_path / "other")


def test_a_rank_that_is_no_number():
    with pytest.raises(ValueError, match="--ranks of whole .*got 'a'"):
        spectrum._parse_rank("a")
    assert spectrum._parse_rank(" 12") == 12


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gradients": "nowhere"}, "folder with gradients, got 'nowhere'"),
        ({"ranks": (7,)}, "ranks from 1 to k = 6"),
        ({"ranks": (0,)}, "ranks from 1 to k = 6"),
        ({"repeats": 0}, "Expected --repeats >= 1, got 0"),
        ({"iterations": 0}, "Expected --iterations >= 1, got 0"),
        (
            {"config": config(optimizer="RGP")},
            "a config of DPSGD.*got RGP",
        ),
    ],
)
def test_what_cannot_be_studied(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        study(tmp_path, **changes)
