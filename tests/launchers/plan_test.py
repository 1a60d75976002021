"""The planner for a config: what it reads, writes and refuses."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from tests.launchers.digits import digits_config
from tests.launchers.programs import run_here, run_program
from tf_dpsub import accounting
from tf_dpsub.launchers import plan
from tf_dpsub.launchers.training import config_plan
from tf_dpsub.planning import Candidate

QUICK = {
    "simulation": {"simulated_steps": 5, "points": 2},
    "measure_cost": False,
}


def config(**changes):
    return digits_config(
        **{"model_kwargs": {"hidden": (8,)}, "public_examples": 64} | changes
    )


def config_with_noise(**changes):
    """Without a budget: a search for its noise would take long."""
    return config(epsilon=None, noise_multiplier=1.0, **changes)


@pytest.fixture(name="small_plan", scope="module")
def _small_plan():
    """A plan of three methods, for one batch size."""
    return config_plan.plan_of(
        config_with_noise(),
        **QUICK,
        search={
            "methods": ("DP-SGD", "B-GEP", "RGP"),
            "ranks": (4,),
            "carrier_ranks": (2,),
        },
    )


def arrays(path, **changes):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 6)).astype("float32")
    contents = {
        "x_train": x[:80],
        "y_train": np.arange(80) % 3,
        "x_test": x[80:],
        "y_test": np.arange(40) % 3,
    }
    np.savez(path, **contents | changes)
    return str(path)


def test_reads_no_private_example(tmp_path):
    """Other private examples, as many: the same plan."""
    other = np.random.default_rng(1).normal(size=(80, 6)).astype("float32")
    plans = [
        config_plan.plan_of(
            config_with_noise(dataset=file, public_examples=0, batch_size=16),
            "test",
            **QUICK,
            search={"methods": ("DP-SGD", "PDP-SGD"), "ranks": (4,)},
        )
        for file in (
            arrays(tmp_path / "one.npz"),
            arrays(
                tmp_path / "other.npz",
                x_train=other,
                y_train=np.zeros(80, int) + np.arange(80) % 3,
            ),
        )
    ]
    first, second = (
        [(c.name, c.signal.gradient, c.signal.released) for c in f.candidates]
        for f in plans
    )
    assert first == second


def candidate(method, rank):
    return Candidate(
        method=method,
        rank=rank,
        l2_norm_clip=0.5,
        noise_multiplier=3.0,
        snr=1.0,
        alignment=0.5,
        kept=0.5,
        signal=None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, rank, expected",
    [
        ("DP-SGD", None, "DPSGD around SGD, noise multiplier 3.525, clip 0.5"),
        ("PDP-SGD", 7, "ProjectedDPSGD around SGD, noise multiplier 3.525"),
        ("GEP", 7, "GEP around SGD, noise multiplier 4.985"),
        ("B-GEP", 7, "GEP around SGD, noise multiplier 3.525"),
        ("RGP", 3, "RGP around SGD, noise multiplier 3.525"),
    ],
)
def test_training_command(method, rank, expected, tmp_path):
    """It trains the method that is meant, with the budget of the config."""
    command = plan.training_command(
        candidate(method, rank),
        128,
        config(public_examples=64),
        ["--config=configs/digits_dpsgd.py", "--config.public_examples=64"],
    )
    _, name, *flags = shlex.split(command)
    done = run_here(name, *flags, "--dry_run", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "Poisson batches of 128 expected" in done.stdout
    assert ("PublicSubspace" in done.stdout) == (rank == 7)


def test_no_training_command_where_fields_are_not_enough():
    gep = candidate("GEP", 7)
    for changed_config in (config(public_examples=0), config(optimizer="RGP")):
        assert plan.training_command(gep, 128, changed_config, []) is None


@pytest.mark.parametrize("name", ["plan", "spectrum"])
def test_the_workdir_of_another_program_stays(name, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    flags = ["--config=configs/digits_dpsgd.py", f"--workdir={tmp_path}"]
    done = run_here(name, *flags)
    assert done.returncode == 2
    assert "a new or empty workdir" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.slow
def test_dry_run_says_what_would_be_compared(tmp_path):
    workdir = tmp_path / "plan"
    done = run_here(
        "plan",
        "--config=configs/digits_dpsgd.py",
        "--methods=DP-SGD,RGP",
        "--carrier_ranks=4",
        "--best_batch_size",
        f"--workdir={workdir}",
        "--dry_run",
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["methods"] == "DP-SGD, RGP"
    assert lines["ranks"].endswith("of subspaces, 4 of carriers")
    assert lines["batches"] == "of the best size"
    assert lines["approach"].startswith("representation, start and head")
    assert not workdir.exists()


def test_carriers_are_those_of_the_config(small_plan):
    carriers = {"rank": 4, "exclude": ["logits"]}
    excluding_plan = config_plan.plan_of(
        config_with_noise(optimizer="RGP", reparametrize=carriers),
        **QUICK,
        search={"methods": ("RGP",), "carrier_ranks": (2,)},
    )
    excluding, everything = (
        next(
            c.signal.noise / c.l2_norm_clip**2
            for c in f.candidates
            if c.method == "RGP"
        )
        for f in (excluding_plan, small_plan)
    )
    # The kernel of the last layer, 8 by 10, is not in carriers of rank 2:
    # 2 (8 + 10) - 4 numbers instead of 80.
    assert excluding - everything == pytest.approx(80 - 32, rel=0.8)


@pytest.mark.slow
class TestProgram:
    @pytest.fixture(scope="class")
    @classmethod
    def done(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("plan")
        process = run_program(
            "plan",
            "--config=configs/digits_dpsgd.py",
            "--config.public_examples=64",
            f"--workdir={folder}",
            "--simulated_steps=2",
            "--methods=DP-SGD,B-GEP,RGP",
            "--subspace_ranks=4",
            "--carrier_ranks=2",
            "--best_batch_size",
        )
        assert process.returncode == 0, process.stderr
        return folder, process

    def test_says_what_it_recommends(self, done):
        folder, process = done
        saved_plan = json.loads((folder / "plan.json").read_text("utf-8"))
        chosen = saved_plan["recommended"]
        text = (folder / "table.md").read_text("utf-8")
        approach = saved_plan["recommendation"]["recommended"]
        assert approach["representation"] == "scattering"
        # It comes before mechanisms.
        first, _, text_of_mechanisms = text.partition("## Mechanisms for mlp")
        assert "FullBatch head on scattering" in first
        assert "--config=configs/best/digits.py" in first
        assert "--config.ridge_start_examples=64" in first
        assert text in process.stdout
        assert f"**{chosen['method']}" in text
        assert "no private example was read" in text
        rows = [
            line
            for line in text_of_mechanisms.splitlines()
            if line.startswith("| ")
        ]
        # Three clips of each method.
        assert len(rows) == 1 + 3 * 3
        assert "Per-example gradients" not in process.stderr

    def test_draws(self, done):
        assert (done[0] / "plan.png").stat().st_size > 10_000

    def test_measures(self, done):
        saved_plan = json.loads((done[0] / "plan.json").read_text("utf-8"))
        for candidate in saved_plan["candidates"]:
            assert candidate["cost"]["seconds_once"] >= 0
            assert candidate["cost"]["memory_bytes"] > 0

    @pytest.mark.parametrize(
        "flags, message",
        [
            ([], "Expected labelled public examples, got none"),
            (
                ["--labelled=test", "--subspace_ranks=x"],
                "Expected --subspace_ranks",
            ),
            (["--labelled=test", "--methods=SGD"], "Expected methods among"),
        ],
    )
    def test_wrong_flags(self, tmp_path, flags, message):
        process = run_here(
            "plan",
            "--config=configs/digits_dpsgd.py",
            f"--workdir={tmp_path}",
            *flags,
        )
        assert process.returncode == 2
        assert message in process.stderr
        assert "Traceback" not in process.stderr


def test_figure_without_several_batch_sizes(small_plan):
    assert len(plan.draw(small_plan, config()).axes) == 2


def advice_for(own, **changes):
    """A recommendation for a config, with some fields changed."""
    # Without labels nothing is simulated.
    own = own.copy_and_resolve_references()
    own.random_public_labels = True
    advice = config_plan.recommendation_of(own)
    chosen = dataclasses.replace(advice.recommended, **changes)
    return dataclasses.replace(advice, recommended=chosen)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "images.npz"
    generator = np.random.default_rng(0)
    np.savez(path, images=generator.integers(0, 256, (60, 8, 8, 3), np.uint8))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"rank": 20, "whiten": 0.5}, {"rank": None, "whiten": 0.0}],
    ids=["directions", "z-scores"],
)
def test_command_of_a_head(changes, images, tmp_path):
    """It starts at the ridge solution, on features of the file."""
    own = config(
        public_data=images,
        public_examples=0,
        ridge_start_examples=30,
        epsilon=0.7,
    )
    advice = advice_for(own, start="ridge", mechanism="FullBatch", **changes)
    command = config_plan.command_of(advice, own)
    _, name, *flags = shlex.split(command)
    assert flags[0] == "--config=configs/best/digits.py"
    done = run_here(name, *flags, "--dry_run", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "feature_classifier" in done.stdout
    assert "30 public" in done.stdout
    assert "DPSGD around SGD" in done.stdout
    assert "(PLD)" in done.stdout


@pytest.mark.parametrize("mechanism", ["PrivateRidge", "DP-SGD"])
def test_no_command_for_what_no_config_describes(mechanism):
    advice = advice_for(config(), mechanism=mechanism)
    assert config_plan.command_of(advice, config()) is None


def test_recommendation_reads_no_private_example(tmp_path):
    found = []
    for name, changes in (
        ("one", {}),
        ("other", {"x_train": np.ones((80, 6))}),
    ):
        file = arrays(tmp_path / f"{name}.npz", **changes)
        own = config(dataset=file, public_examples=0, batch_size=16)
        found.append(config_plan.recommendation_of(own, "test"))
    assert found[0] == found[1]
    assert found[0].recommended.representation == "inputs"


def test_unlabelled_images_are_enough(images, tmp_path):
    done = run_here(
        "plan",
        "--config=configs/digits_dpsgd.py",
        f"--config.public_data={images}",
        f"--workdir={tmp_path / 'plan'}",
    )
    assert done.returncode == 0, done.stderr
    assert "no labels to simulate with" in done.stdout
    assert "## Mechanisms" not in done.stdout
    found = json.loads((tmp_path / "plan" / "plan.json").read_text("utf-8"))
    assert list(found) == ["recommendation"]
    assert (tmp_path / "plan" / "report.html").exists()


def test_other_inputs_have_no_recommendation(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 4, 2)).astype("float32")
    file = arrays(tmp_path / "series.npz", x_train=x[:80], x_test=x[80:])
    assert config_plan.recommendation_of(config(dataset=file)) is None


def test_noise_multiplier_stands_for_its_epsilon():
    own = config(epsilon=None, noise_multiplier=2.0, random_public_labels=True)
    advice = config_plan.recommendation_of(own)
    spent = accounting.epsilon(
        noise_multiplier=2.0,
        sampling_rate=own.batch_size / advice.examples,
        steps=own.epochs * -(-advice.examples // own.batch_size),
        delta=1e-5,
    )
    assert advice.epsilon == pytest.approx(spent)
