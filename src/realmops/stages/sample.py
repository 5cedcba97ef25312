"""Stage ``sample``: the sample corpus."""

from dataclasses import asdict
from typing import Any

from realmops.config import Sample
from realmops.corpus.sample import write_sample
from realmops.stages import Job


def run(job: Job) -> dict[str, Any]:
    """Write corpus, warm-up text, questions and tagged sentences; returns their counts."""
    return write_sample(job.out, **asdict(job.section(Sample)))
