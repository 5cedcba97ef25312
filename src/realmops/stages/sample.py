"""Stage ``sample``: the generated sample corpus."""

from typing import Any

from realmops.options import Sample
from realmops.sample.corpus import write_sample
from realmops.stages import Job


def run(job: Job) -> dict[str, Any]:
    """Write corpus, warm-up text, questions and tagged sentences; return their counts."""
    options = job.section(Sample)
    return write_sample(job.out, seed=options.seed, subjects=options.subjects)
