"""The words of documents, counted in one pass, and the vocabulary that is learned from their counts."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from realmops.corpus.documents import Document, Raw, Rejected
from realmops.corpus.formats import Source
from realmops.corpus.ingest import Progress, Records, batches, convert, workers_in_order
from realmops.text.vocabulary import bert_words, learn_pieces

_SAMPLE_BYTES = 256 << 20
_DISTINCT_LIMIT = 4_000_000  # words in memory


def train_vocabulary(
    sources: Sequence[Source],
    *,
    size: int,
    min_count: int = 2,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """The vocabulary of a corpus, titles included: special tokens, characters, then pieces by merge order.

    It is learned from all documents while their files have at most 256 MiB together, as they lie on the disk;
    of a larger corpus from so large a share of the records, drawn by a generator with a fixed seed.
    It has ``size`` pieces at most, special tokens included; a character or pair that occurs less often than
    ``min_count`` becomes none. Any number of workers gives the same vocabulary. ``progress`` is called with the number
    of bytes read of the sources' files since the last call.
    """
    counts = count_words(sources, workers=workers, progress=progress)
    return learn_pieces(bert_words(counts), size=size, min_count=min_count)


def count_words(
    sources: Sequence[Source],
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Counter[str]:
    """How often each run of non-blank characters occurs in the documents, in one pass and bounded memory.

    Exact while there are at most ``_DISTINCT_LIMIT`` different ones; beyond, the rare lose their count so far.
    Broken records are left out: the snapshot names them.
    """
    counts: Counter[str] = Counter()
    floor = 0
    advance = Progress(sources, progress)
    share = _SAMPLE_BYTES / max(sum(source.size for source in sources), 1)
    with workers_in_order(workers, sources, _words_of) as count:
        for batch, words in count(batches(_sampled(sources, share))):
            counts.update(words)
            while len(counts) > _DISTINCT_LIMIT:
                floor += 1
                counts = Counter({word: count for word, count in counts.items() if count > floor})
            advance(batch)
    return counts


def _sampled(sources: Sequence[Source], share: float) -> Sequence[Source]:
    """The sources with only a share of their records, those that a generator with a fixed seed draws."""
    if share >= 1:
        return sources
    generator = random.Random(0)

    def sampled(records: Callable[[Path], Iterator[Raw | Rejected]], path: Path) -> Iterator[Raw | Rejected]:
        return (record for record in records(path) if generator.random() < share)

    return [
        replace(source, format=replace(source.format, records=partial(sampled, source.format.records)))
        for source in sources
    ]


def _words_of(records: Records) -> Counter[str]:
    words: Counter[str] = Counter()
    for outcome in convert(records):
        if isinstance(outcome, Document):
            words.update(outcome.title.split())
            words.update(outcome.text.split())
    return words
