"""The colour and the marker that a method keeps in all figures."""

from tf_dpsub.launchers.reports import figures

_STYLES = {
    "DP-SGD": (figures.GREY, "o"),
    "GP": (figures.GREY, "o"),
    "PDP-SGD": (figures.BLUE, "s"),
    "GEP": (figures.GREEN, "s"),
    "PDP-SGD (pairs)": (figures.BLUE, "v"),
    "GEP (pairs)": (figures.GREEN, "v"),
    "RPDP-SGD": (figures.RED, "^"),
    "GEP, random basis": (figures.RED, "^"),
    "B-GEP": (figures.ORANGE, "D"),
    "RGP": (figures.PURPLE, "s"),
    "RGP-weight": (figures.BLUE, "v"),
    "RGP-random": (figures.RED, "^"),
    "RGP-public": (figures.GREEN, "D"),
    "RGP, not private": (figures.PURPLE, "s"),
    "Full, not private": (figures.GREY, "o"),
    "DP-PowerSGD": (figures.ORANGE, "v"),
    "LoRA": (figures.ORANGE, "D"),
    "Poisson": (figures.GREY, "o"),
    "once per epoch": (figures.BLUE, "s"),
    "bands": (figures.GREEN, "D"),
}
COLOURS = {name: colour for name, (colour, _) in _STYLES.items()}
MARKERS = {name: marker for name, (_, marker) in _STYLES.items()}
