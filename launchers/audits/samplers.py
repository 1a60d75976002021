"""The audit of samplers whose claim is about the steps that they choose."""

import dataclasses
import time

import numpy as np

_EXAMPLES, _STEPS = 1000, 25


def audited():
    """Audits the sampler of epochs; returns a result that JSON can hold."""
    from tf_dpsub import auditing, data

    began = time.monotonic()
    batches = data.OncePerEpoch(
        np.zeros([_EXAMPLES, 1], np.float32),
        np.arange(_EXAMPLES),
        batch_size=_EXAMPLES // _STEPS,
    )
    findings = auditing.check_allocation(batches)
    return {
        "sampler": batches.sampling,
        "findings": [dataclasses.asdict(f) for f in findings],
        "passed": all(f.passed for f in findings),
        "seconds": time.monotonic() - began,
    }
