"""The format of a ledger, and the file that one ledger alone writes."""

import dataclasses
import hashlib
import json
import math
import os

from tf_dpsub import files
from tf_dpsub.accounting.entry import LedgerEntry

_FORMAT = "tf_dpsub privacy ledger"
_VERSION = 1

# Fields that ledgers of earlier versions lack, with what their steps had. The
# optional ones are written where they differ, so that earlier versions read all
# ledgers whose steps they know.
_OPTIONAL_FIELDS = {
    "target": "",
    "unit": "example",
    "largest_rate": None,
    "epoch_steps": None,
    "bands": 1,
    "trial": (),
    "mean_trials": 0.0,
    "trials_shape": 0.0,
}
_LATER_FIELDS = {"private_state": False, "uncovered": (), **_OPTIONAL_FIELDS}


@dataclasses.dataclass
class Segment:
    """Steps that one ledger counted without interruption.

    Attributes:
        name: str, random; the same name means the same steps.
        described: `LedgerEntry` without counts.
        steps: int. Defaults to 0.
        epochs: int. Defaults to 0.
    """

    name: str
    described: LedgerEntry
    steps: int = 0
    epochs: int = 0

    def entry(self):
        """The `LedgerEntry` with its counts."""
        return dataclasses.replace(
            self.described, steps=self.steps, epochs=self.epochs
        )


class LedgerFile:
    """A file of segments that is replaced as a whole, durably.

    Args:
        path: str or `os.PathLike`.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._content = self._read()

    @property
    def exists(self) -> bool:
        """True if there was a file, or one was written."""
        return self._content is not None

    def segments(self) -> list[Segment]:
        """Decodes the file as it was last read or written.

        Returns:
            List of `Segment`, empty if there is no file.

        Raises:
            ValueError: If the file holds no ledger.
        """
        if self._content is None:
            return []
        try:
            return decode(self._content)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: {error} The file was left as it is. "
                "Restore it, or, if the steps of its run need not be "
                "counted, use another folder."
            ) from error

    def write(self, segments):
        """Replaces the file, and waits until that is durable.

        Args:
            segments: list of `Segment`.

        Raises:
            RuntimeError: If something else has changed the file.
            OSError: If it cannot be written. It is then as it was.
        """
        content = encode(segments).encode()
        files.make_folder(os.path.dirname(os.path.abspath(self.path)))
        # Of two that write at once, the second sees what the first has written.
        with files.locked(self.path):
            if self._read() != self._content:
                raise RuntimeError(
                    f"Expected {self.path} as this ledger left it, but "
                    "something else has changed it. Two runs must not share a "
                    "ledger: its steps would be lost. Give each run a folder "
                    "of its own."
                )
            files.write_bytes(self.path, content)
        self._content = content

    def _read(self):
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None


def encode(segments) -> str:
    """Formats segments as JSON; those without steps are left out.

    Args:
        segments: iterable of `Segment`.

    Returns:
        A str, which `decode` reads.
    """
    entries = []
    for segment in segments:
        if not segment.steps and not segment.epochs:
            continue
        fields = _encoded(segment.entry())
        entries.append({"name": segment.name, **fields})
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "entries": entries,
        "sha256": _digest(entries),
    }
    return json.dumps(content, indent=2, allow_nan=False)


def decode(text) -> list[Segment]:
    """Reads what `encode` wrote, or an earlier version of it.

    Args:
        text: str or bytes.

    Returns:
        List of `Segment`.

    Raises:
        ValueError: If `text` is not a ledger, or a damaged one.
    """
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError(
                f"it says {content['format']!r}, version {content['version']}"
            )
        more = content.keys() - {"format", "version", "entries", "sha256"}
        if more:
            raise ValueError(f"it has {sorted(more)}")
        # Ledgers of earlier versions have none.
        if "sha256" in content and content["sha256"] != _digest(
            content["entries"]
        ):
            raise ValueError("its entries are not those of its SHA-256")
        segments = [_decode_segment(fields) for fields in content["entries"]]
        if len({segment.name for segment in segments}) < len(segments):
            raise ValueError("two entries have the same name")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a {_FORMAT} of version {_VERSION}, got something else, "
            f"or a damaged one ({type(error).__name__}: {error})."
        ) from error
    return segments


def _encoded(entry):
    """Fields of an entry that JSON can hold."""
    fields = {
        field.name: getattr(entry, field.name)
        for field in dataclasses.fields(entry)
    }
    if math.isinf(entry.l2_norm_clip):
        fields["l2_norm_clip"] = "inf"
    fields["trial"] = tuple(_encoded(part) for part in entry.trial)
    for name, default in _OPTIONAL_FIELDS.items():
        if fields[name] == default:
            del fields[name]
    return fields


def _digest(entries):
    text = json.dumps(
        entries, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _decode_segment(fields):
    fields = dict(fields)
    name = fields.pop("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"an entry's name is {name!r}")
    entry = _decoded(fields)
    return Segment(
        name=name,
        described=entry.description,
        steps=entry.steps,
        epochs=entry.epochs,
    )


def _decoded(fields):
    """The `LedgerEntry` that `_encoded` has written."""
    fields = {**_LATER_FIELDS, **fields}
    expected = {field.name for field in dataclasses.fields(LedgerEntry)}
    missing = sorted(expected - fields.keys())
    if missing:
        raise ValueError(f"an entry lacks {missing}")
    if fields["l2_norm_clip"] == "inf":
        fields["l2_norm_clip"] = math.inf
    fields["trial"] = tuple(_decoded(part) for part in fields["trial"])
    return LedgerEntry(**fields)
