"""The experiments of the papers, by name."""

import dataclasses

from tf_dpsub.launchers.papers import digits, gep, pdp, rgp, sampling
from tf_dpsub.launchers.papers.accuracy_by_epsilon import AccuracyByEpsilon
from tf_dpsub.launchers.papers.geometric_median import GeometricMedian
from tf_dpsub.launchers.papers.head_first import HeadFirst
from tf_dpsub.launchers.papers.head_steps import HeadSteps
from tf_dpsub.launchers.papers.network_width import NetworkWidth
from tf_dpsub.launchers.papers.pate_mnist import PateMnist
from tf_dpsub.launchers.papers.plan_ranking import PlanRanking
from tf_dpsub.launchers.papers.private_search import PrivateSearch

# Functions that build a `trials.Experiment` from `Inputs`. The first line of
# their docstrings is the description that `reproduce --list` prints.
EXPERIMENTS = {
    "pdp_mnist": pdp.mnist,
    "pdp_fashion_mnist": pdp.fashion_mnist,
    "pdp_fashion_mnist_tuned": pdp.fashion_mnist_tuned,
    "pdp_k": pdp.rank,
    "pdp_m": pdp.public_examples,
    "pdp_refresh": pdp.refresh,
    "pdp_spectrum": pdp.spectrum,
    "gep_mnist": gep.mnist,
    "gep_mnist_tuned": gep.tuned,
    "gep_cifar10": gep.cifar10,
    "gep_cifar10_small": gep.cifar10_small,
    "gep_cifar10_small_tuned": gep.cifar10_small_tuned,
    "gep_cifar10_features": gep.cifar10_features,
    "gep_cifar10_features_tuned": gep.cifar10_features_tuned,
    "gep_k": gep.rank,
    "gep_m": gep.public_examples,
    "gep_random_basis": gep.random_basis,
    "gep_linear_probe": gep.linear_probe,
    "rgp_cifar10": rgp.cifar10,
    "rgp_cifar10_wrn28_2": rgp.cifar10_small,
    "rgp_sst2": rgp.sst2,
    "rgp_sst2_tuned": rgp.sst2_tuned,
    "rgp_sst2_long": rgp.sst2_long,
    "sst2_pairs": rgp.sst2_pairs,
    "rgp_glue": rgp.glue,
    "rgp_rank": rgp.rank,
    "rgp_residual": rgp.residual,
    "mnist_sampling": sampling.mnist,
    "digits_methods": digits.methods,
    "digits_precision": digits.precision,
}

# Experiments that train no Keras model: objects with a name, named points, and
# a method that runs these points.
STUDIES = {
    study.name: study
    for study in (
        AccuracyByEpsilon(),
        GeometricMedian(),
        HeadFirst(),
        HeadSteps(),
        NetworkWidth(),
        PateMnist(),
        PlanRanking(),
        PrivateSearch(),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Files and models that the user gives to some experiments.

    Attributes:
        public_images: string, an .npz file with `images`, for GEP and for
            features of images. Defaults to `None`.
        public_texts: string, a file with a text in each line, for features of
            texts. Defaults to `None`.
        features: string, an .npz file with features, for GEP on features.
            Defaults to `None`.
        language_model: string, a preset of keras_hub or a folder with a
            checkpoint, of BERT, for GLUE, and, a folder alone, for features of
            texts. Defaults to `None`: the preset of BERT-base for GLUE, MiniLM
            for features.
    """

    public_images: str | None = None
    public_texts: str | None = None
    features: str | None = None
    language_model: str | None = None
