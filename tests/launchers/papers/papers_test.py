import copy
import dataclasses
import json
import re

import numpy as np
import pytest

from tests.launchers.papers.engine import finished_trials
from tf_dpsub.configs import default
from tf_dpsub.launchers import papers
from tf_dpsub.launchers.papers.engine import results, trials
from tf_dpsub.launchers.reports import figures
from tf_dpsub.launchers.training import config_checks, run_directory


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    images, features = folder / "images.npz", folder / "features.npz"
    np.savez(images, images=np.zeros((2000, 4, 4, 1), np.uint8))
    np.savez(features, x_train=np.zeros(1))
    return papers.Inputs(public_images=str(images), features=str(features))


@pytest.fixture(scope="module", params=papers.EXPERIMENTS)
def experiment(request, inputs):
    return papers.EXPERIMENTS[request.param](inputs)


def without_seed(trial):
    fields = run_directory.json_fields(trial.config)
    del fields["seed"]
    return fields


class TestEveryExperiment:
    def test_goes_by_its_name(self, experiment):
        build = papers.EXPERIMENTS[experiment.name]
        assert build.__doc__.splitlines()[0].endswith(".")
        assert experiment.title
        assert experiment.notes
        assert experiment.figures

    def test_configs_are_valid(self, experiment):
        for trial in experiment.trials:
            config_checks.check(trial.config)
            assert set(trial.config) == set(default.get_config())

    def test_names_are_distinct_and_make_folders(self, experiment):
        names = [trial.name for trial in experiment.trials]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[a-z0-9._]+", name) for name in names)

    def test_a_row_of_the_table_is_one_setting(self, experiment):
        rows = {}
        for trial in experiment.trials:
            rows.setdefault(trial.setting, []).append(trial)
        settings = []
        for row in rows.values():
            seeds = [trial.config.seed for trial in row]
            assert len(set(seeds)) == len(seeds)
            assert all(without_seed(t) == without_seed(row[0]) for t in row)
            assert len({(t.paper, t.paper_epsilon) for t in row}) == 1
            settings.append(json.dumps(without_seed(row[0]), sort_keys=True))
        # Another row, another setting.
        assert len(set(settings)) == len(settings)

    def test_seed_0_of_all_settings_comes_first(self, experiment):
        seeds = [trial.config.seed for trial in experiment.trials]
        assert seeds == sorted(seeds)

    def test_methods_are_what_they_are_called(self, experiment):
        kinds = {
            "SGD": ("DPSGD", None, None),
            "DP-SGD": ("DPSGD", None, None),
            "GP": ("DPSGD", None, None),
            "PDP-SGD": ("ProjectedDPSGD", "PublicSubspace", None),
            "RPDP-SGD": ("ProjectedDPSGD", "RandomSubspace", None),
            "B-GEP": ("GEP", "PublicSubspace", False),
            "GEP": ("GEP", "PublicSubspace", None),
            "PDP-SGD (pairs)": ("ProjectedDPSGD", "KroneckerSubspace", None),
            "GEP (pairs)": ("GEP", "KroneckerSubspace", None),
            "GEP, random basis": ("GEP", "RandomSubspace", None),
            "Full": ("DPSGD", None, None),
            "Linear only": ("DPSGD", None, None),
            "LoRA": ("DPSGD", None, None),
            "RGP": ("RGP", None, None),
            "RGP-weight": ("RGP", None, None),
            "RGP-random": ("RGP", None, None),
            "RGP-public": ("RGP", None, None),
            "PowerSGD": ("DPPowerSGD", None, None),
            "DP-PowerSGD": ("DPPowerSGD", None, None),
            "Poisson": ("DPSGD", None, None),
            "once per epoch": ("DPSGD", None, None),
            "bands": ("DPSGD", None, None),
        }
        for trial in experiment.trials:
            config = trial.config
            kind = (
                config.optimizer,
                config.subspace,
                config.optimizer_kwargs.get("residual"),
            )
            name = trial.method.partition(", σ")[0]
            name, _, not_private = name.partition(", not private")
            assert kind == kinds[name]
            assert config.sampling == (
                "once_per_epoch" if name == "once per epoch" else "poisson"
            )
            assert config.bands == ("auto" if name == "bands" else None)

    def test_figures_are_drawn(self, experiment, tmp_path):
        """Figures of finished trials, with two seeds of each setting."""
        done = []
        for trial in experiment.trials:
            if trial.config.seed > 1:
                continue
            config = copy.deepcopy(trial.config)
            config.epsilon = None
            config.noise_multiplier = config.noise_multiplier or 4.0
            done.append(dataclasses.replace(trial, config=config))
            finished_trials.write(
                tmp_path,
                done[-1],
                accuracy=0.5,
                errors=[0.4, 0.2],
                spectra=[[3.0, 2.0, 1.0], [2.0, 1.0, 0.5]],
                residuals=([0.2, 0.4], [0.4, 0.8]),
            )
        finished = results.Results(
            dataclasses.replace(experiment, trials=tuple(done)), tmp_path
        )
        assert experiment.figures
        with figures.style():
            for draw in experiment.figures.values():
                draw(finished).draw_without_rendering()

    def test_shortened_runs_begin_as_late_in_proportion(self, experiment):
        short = experiment.shortened(0.1)
        assert short.fraction == 0.1
        for whole, part in zip(experiment.trials, short.trials):
            assert part.name == whole.name
            assert part.config.epochs == max(1, round(whole.config.epochs / 10))
            assert 1 <= part.config.start_epoch <= part.config.epochs
            before = (whole.config.start_epoch - 1) / whole.config.epochs
            shortened = (part.config.start_epoch - 1) / part.config.epochs
            assert abs(before - shortened) <= 0.5 / part.config.epochs
            warmup = whole.config.optimizer_kwargs.get("warmup_steps", 0)
            assert round(0.1 * warmup) == part.config.optimizer_kwargs.get(
                "warmup_steps", 0
            )
        # The experiment itself is as it was.
        assert experiment.fraction == 1


def by_name(name, inputs):
    built = papers.EXPERIMENTS[name](inputs)
    return {trial.name: trial for trial in built.trials}


@pytest.mark.parametrize(
    "name, trial, sigma, rate, start_epoch, paper_epsilon",
    [
        ("pdp_mnist", "dp", 18, 0.05, 1, 0.23),
        ("pdp_mnist", "pdp", 18, 0.1, 1, 0.23),
        ("pdp_mnist", "pdp", 14, 0.2, 1, 0.30),
        ("pdp_mnist", "pdp", 10, 0.2, 1, 0.42),
        ("pdp_mnist", "dp", 8, 0.05, 1, 0.53),
        ("pdp_mnist", "pdp", 8, 0.1, 15, 0.53),
        ("pdp_mnist", "dp", 6, 0.1, 1, 0.72),
        ("pdp_mnist", "pdp", 4, 0.2, 15, 1.09),
        ("pdp_fashion_mnist", "pdp", 18, 0.01, 15, 0.23),
        ("pdp_fashion_mnist", "dp", 10, 0.01, 1, 0.42),
        ("pdp_fashion_mnist", "pdp", 10, 0.02, 15, 0.42),
        ("pdp_fashion_mnist", "dp", 4, 0.02, 1, 1.09),
        ("pdp_fashion_mnist", "pdp", 2, 0.05, 15, 2.41),
    ],
)
def test_tables_of_the_pdp_sgd_paper(
    inputs, name, trial, sigma, rate, start_epoch, paper_epsilon
):
    relu_trial = by_name(name, inputs)[f"relu_sigma{sigma}_{trial}_seed1"]
    config = relu_trial.config
    assert config.model_kwargs.activation == "relu"
    assert (config.noise_multiplier, config.seed) == (sigma, 1)
    assert (config.learning_rate, config.start_epoch) == (rate, start_epoch)
    assert relu_trial.paper_epsilon == paper_epsilon
    assert (config.batch_size, config.epochs) == (250, 30)


def test_pdp_sgd_is_compared_at_all_noise_of_the_paper(inputs):
    for name, sigmas in (
        ("pdp_mnist", {18, 14, 10, 8, 6, 4}),
        ("pdp_fashion_mnist", {18, 14, 10, 6, 4, 2}),
    ):
        trials = papers.EXPERIMENTS[name](inputs).trials
        assert {trial.config.noise_multiplier for trial in trials} == sigmas
        assert len(trials) == len(sigmas) * 3 * 3 * 2


@pytest.mark.parametrize(
    "name, epsilon, method, epochs, paper",
    [
        ("gep_mnist", 2, "gp", 50, 0.947),
        ("gep_mnist", 5, "bgep", 100, 0.945),
        ("gep_mnist", 8, "gep", 200, 0.984),
        ("gep_cifar10", 2, "gep", 50, 0.597),
        ("gep_cifar10", 8, "gp", 200, 0.564),
    ],
)
def test_table_of_the_gep_paper(inputs, name, epsilon, method, epochs, paper):
    trial = by_name(name, inputs)[f"epsilon{epsilon}_{method}_seed0"]
    assert trial.paper == pytest.approx(paper)
    assert trial.config.epsilon == trial.paper_epsilon == epsilon
    assert trial.config.noise_multiplier is None
    assert trial.config.epochs == epochs


def test_gep_mnist_refreshes_at_every_step_at_epsilon_2_alone(inputs):
    for trial in papers.EXPERIMENTS["gep_mnist"](inputs).trials:
        if trial.method != "GP":
            every = trial.config.subspace_kwargs.get("update_every", 1)
            expected = 1 if trial.config.epsilon == 2 else 10
            assert every == expected == trial.labels["refreshed every"]


def test_cifar10_with_the_number_of_parameters_of_the_rgp_paper(inputs):
    """WRN-28-2; all else is as with WRN-28-4, which the paper names."""
    large = by_name("rgp_cifar10", inputs)
    small = by_name("rgp_cifar10_wrn28_2", inputs)
    assert small.keys() == large.keys()
    for name, trial in small.items():
        small_config, large_config = (
            trial.config.to_dict(),
            large[name].config.to_dict(),
        )
        assert small_config.pop("model") == "wrn28_2_gn"
        assert large_config.pop("model") == "wrn28_4_gn"
        assert small_config == large_config


def test_glue_is_in_the_setting_of_the_rgp_paper(inputs):
    trials = by_name("rgp_glue", inputs)
    assert trials["mnli_epsilon8_rgp_seed0"].paper == pytest.approx(0.791)
    assert trials["qnli_full_seed2"].paper == pytest.approx(0.916)
    for name, trial in trials.items():
        config, task = trial.config, name.partition("_")[0]
        assert config.dataset == f"glue/{task}"
        assert trial.labels["task"] == task
        is_large = task in ("mnli", "qqp")
        assert config.batch_size == (1000 if is_large else 500)
        assert config.delta == (1e-6 if is_large else 1e-5)
        assert config.epochs == 50
        assert config.model_kwargs.preset == "bert_base_en_uncased"


def test_glue_with_a_model_that_is_not_there(tmp_path):
    inputs = papers.Inputs(language_model=str(tmp_path / "none"))
    with pytest.raises(
        ValueError, match="folder with a checkpoint, got .*none"
    ):
        by_name("rgp_glue", inputs)


def test_glue_with_another_model(tmp_path):
    for source, kind in ((str(tmp_path), "folder"), ("bert_x", "preset")):
        trials = by_name("rgp_glue", papers.Inputs(language_model=source))
        for trial in trials.values():
            assert trial.config.model_kwargs[kind] == source
            assert {"folder", "preset"} & set(trial.config.model_kwargs) == {
                kind
            }


def test_tuned_methods_share_their_grid(inputs):
    grids = {}
    for trial in papers.EXPERIMENTS["gep_mnist_tuned"](inputs).trials:
        config = trial.config
        grids.setdefault(trial.method, set()).add(
            (config.l2_norm_clip, config.learning_rate)
        )
        if trial.method == "GEP":
            ratio = config.optimizer_kwargs.residual_norm_clip
            assert ratio == config.l2_norm_clip / 5
    assert grids["GP"] == grids["GEP"] == grids["B-GEP"]
    assert len(grids["GP"]) == 9


def test_pdp_and_dpsgd_share_their_rates_at_each_noise(inputs):
    rates = {}
    for trial in by_name("pdp_fashion_mnist_tuned", inputs).values():
        config = trial.config
        kind = trial.method, config.start_epoch, config.noise_multiplier
        rates.setdefault(kind, []).append((config.learning_rate, config.seed))
    assert len({tuple(r) for r in rates.values()}) == 1
    methods = {kind[:2] for kind in rates}
    assert methods == {("DP-SGD", 1), ("PDP-SGD", 1), ("PDP-SGD", 15)}


def test_rgp_and_dpsgd_share_their_rates(inputs):
    """And differ from the untuned runs in nothing else."""
    untuned = by_name("rgp_sst2", inputs)
    rates = {}
    for trial in by_name("rgp_sst2_tuned", inputs).values():
        rates.setdefault(trial.method, []).append(trial.config.learning_rate)
        short = {"RGP": "rgp", "DP-SGD": "dp"}[trial.method]
        expected = untuned[f"epsilon8_{short}_seed0"].config
        expected.learning_rate = trial.config.learning_rate
        assert trial.config.to_dict() == expected.to_dict()
    assert rates["RGP"] == rates["DP-SGD"]
    assert len(set(rates["RGP"])) == 4


def test_carriers_are_compared_at_the_same_rates(inputs):
    """On the same private examples, in as many steps of two optimizers."""
    rates, rest = {}, set()
    for trial in by_name("rgp_sst2_long", inputs).values():
        config = trial.config
        setting = trial.labels["optimizer"], trial.method
        rates.setdefault(setting, []).append(config.learning_rate)
        rest.add((config.private_examples, config.batch_size, config.epochs))
    assert rest == {(48_000, 320, 3)}
    methods_by_optimizer = {}
    for optimizer, method in rates:
        methods_by_optimizer.setdefault(optimizer, set()).add(method)
        if optimizer == "Adam" and method != "DP-SGD":
            # It alone was best at the end of these.
            assert [*rates["Adam", method], 1.6e-2] == rates["Adam", "DP-SGD"]
        elif optimizer == "SGD":
            assert rates["SGD", method] == rates["SGD", "DP-SGD"]
    assert methods_by_optimizer == {
        "Adam": {"RGP", "RGP-weight", "RGP-random", "RGP-public", "DP-SGD"},
        "SGD": {"RGP", "DP-SGD"},
        "Adam, not private": {"RGP, not private", "Full, not private"},
    }


def test_pairs_are_compared_with_the_same_training_by_dpsgd(inputs):
    """DP-SGD at the same rate, but for the method and its public examples."""
    baselines = {
        trial.labels["optimizer"]: trial.config
        for trial in by_name("rgp_sst2_long", inputs).values()
        if trial.method == "DP-SGD"
    }
    rates = {}
    for trial in by_name("sst2_pairs", inputs).values():
        config = trial.config
        setting = trial.labels["optimizer"], trial.method
        rates.setdefault(setting, set()).add(config.learning_rate)
        expected = baselines[trial.labels["optimizer"]].to_dict()
        found = config.to_dict()
        differ = {key for key in found if found[key] != expected[key]}
        assert differ - {"learning_rate"} == {
            "optimizer",
            "public_examples",
            "subspace",
            "subspace_kwargs",
        } | ({"optimizer_kwargs"} if "GEP" in trial.method else set())
    assert {method for _, method in rates} == {
        "PDP-SGD (pairs)",
        "GEP (pairs)",
    }
    for optimizer, method in rates:
        assert rates[optimizer, method] == rates[optimizer, "GEP (pairs)"]


@pytest.mark.parametrize("name", ["gep_cifar10_small", "gep_cifar10_features"])
def test_gep_is_tuned_as_its_baseline(name, inputs):
    """The same clips and rates, and then the best of each for longer."""
    settings = {}
    for trial in by_name(f"{name}_tuned", inputs).values():
        config = trial.config
        kwargs = config.optimizer_kwargs
        if trial.method == "GEP":
            assert kwargs.residual_norm_clip == config.l2_norm_clip / 5
        settings.setdefault((config.epsilon, trial.method), set()).add(
            (config.l2_norm_clip, config.learning_rate)
        )
    assert len(settings) == 6
    assert len(set(map(frozenset, settings.values()))) == 1
    longer = {}
    for trial in by_name(name, inputs).values():
        config = trial.config
        longer.setdefault((config.epsilon, trial.method), set()).add(
            (config.l2_norm_clip, config.learning_rate)
        )
    assert longer.keys() == settings.keys()
    for key, chosen in longer.items():
        assert chosen & settings[key]
    # As many for each of them.
    assert len(set(map(len, longer.values()))) == 1


@pytest.mark.parametrize(
    "name, flag",
    [("gep_mnist", "public_images"), ("gep_linear_probe", "features")],
)
@pytest.mark.parametrize(
    "path, problem", [(None, "none"), ("no", "'no', which")]
)
def test_missing_files(name, flag, path, problem):
    with pytest.raises(ValueError, match=f"--{flag}=FILE.*got {problem}"):
        papers.EXPERIMENTS[name](papers.Inputs(**{flag: path}))


def test_features_are_written_once(tmp_path):
    """And the file is refused before, where none is named."""
    with pytest.raises(ValueError, match="--features=FILE.* will be written"):
        papers.EXPERIMENTS["gep_cifar10_features"](papers.Inputs())
    file = tmp_path / "features.npz"
    prepare = papers.EXPERIMENTS["gep_cifar10_features"](
        papers.Inputs(features=str(file))
    ).prepare
    with pytest.raises(ValueError, match="--public_images=FILE"):
        prepare()
    file.write_text("there")
    prepare()
    assert file.read_text() == "there"


def test_a_name_twice():
    trial = trials.Trial(name="a", labels={}, config=default.get_config())
    with pytest.raises(ValueError, match=r"distinct names, got \['a'\]"):
        trials.Experiment(
            name="x", title="X", trials=(trial, trial), figures={}
        )
