"""Word counts of documents in one pass, and training of a WordPiece vocabulary from them."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing

from realmops.corpus.ingest import Batch, parse_records, process_batches
from realmops.corpus.vocabulary import bert_words, learn_pieces
from realmops.readers.documents import Document
from realmops.readers.sources import Source

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
    """Train a vocabulary on titles and texts, those of a fixed sample of about 256 MiB if the files are larger."""
    counts = count_words(sources, workers=workers, progress=progress)
    return learn_pieces(bert_words(counts), size=size, min_count=min_count)


def count_words(
    sources: Sequence[Source], workers: int = 1, progress: Callable[[int], None] | None = None
) -> Counter[str]:
    """Count words between blanks in bounded memory: exactly up to ``_DISTINCT_LIMIT``, then rare words are evicted."""
    counts: Counter[str] = Counter()
    floor = 0
    share = _SAMPLE_BYTES / max(sum(source.size for source in sources), 1)
    batches = process_batches(sources, _words_of, workers=workers, on_progress=progress, share=share)
    with closing(batches):
        for _, words in batches:
            counts.update(words)
            while len(counts) > _DISTINCT_LIMIT:
                floor += 1
                counts = Counter({word: count for word, count in counts.items() if count > floor})
    return counts


def _words_of(batch: Batch) -> Counter[str]:
    words: Counter[str] = Counter()
    for outcome in parse_records(batch):
        if isinstance(outcome, Document):
            words.update(outcome.title.split())
            words.update(outcome.text.split())
    return words
