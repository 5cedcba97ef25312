"""Options: each is one pydantic field with its type, bounds, default, sentence and the paper's value.

docs/options.md and the comments of params.yaml come from the fields (``make docs``). Sentences use the notation of
docs/options.md: x is the question or the masked sentence, z a passage, f(x, z) the retriever's score.
"""

import math
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from realmops.option_types import Amount, Count, PositiveAmount, PositiveShare, Section, Sections, Share, Size, option

CLOSED_BOOK = ("t5",)  # values of finetune.reader whose models read no passages
ENCODER, NO_READER = "encoder", "none"  # values of reader.init: the encoder's own reader; search without a reader


class RunOptions(Section):
    """Seed, device, dtype and threads of a run."""

    seed: Count = option(0, "seed of all random generators")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "fp32, bf16, or auto: bf16 if the processor supports it natively (with AMX above a width of 128)"
    )
    threads: Size | Literal["auto"] = option(
        "auto", "of a trainer and of a builder; auto: OMP_NUM_THREADS, or the CPUs (8 at most; 1 for narrow encoders)"
    )
    checkpoint_every: Size = option(100, "steps between checkpoints, also one a minute; pretrain: refresh_every")


class BertOptions(Section):
    """Shape of a new encoder; positions and dropout of any encoder."""

    vocabulary: Size = option(2400, "maximum size of the vocabulary; for small", paper="30522")
    width: Size = option(128, "for small", paper="768")
    layers: Size = option(2, "for small", paper="12")
    heads: Size = option(4, "for small", paper="12")
    positions: Size = option(512, "for small", paper="512")
    dropout: Share = option(0.0, "of any encoder; takes a third of a step on a CPU", paper="0.1")


class Sample(Section):
    """The generated sample corpus."""

    seed: Count = option(0, "seed of the generated world")
    subjects: Annotated[int, Field(ge=60, le=800)] = option(300, "entities; 300 give about 2,300 documents")


class SnapshotOptions(Section):
    """Documents, and how they are split into passages."""

    documents: str = option("data/sample/corpus.jsonl.gz", "a file, a folder, or hf:NAME for a dataset on the hub")
    format: str = option("auto", "auto (by file name and first bytes), or a format of docs/data.md")
    warmup: str = option("data/sample/warmup.jsonl.gz", "text for the reader's warm-up; empty: the documents")
    block_wordpieces: Annotated[Size, Field(ge=4)] = option(
        48, "of a passage: title, text and 3 special ones", paper="288"
    )
    language: str = option("en", "a code such as de, or auto: detected for each document")
    whole_documents: bool = option(False, "true: a document is one passage, truncated to its maximum length")
    wikipedia_titles: bool = option(False, 'drop "List of", "(disambiguation)" and the like', paper="true")
    broken_share: Share = option(0.01, "fraction of broken records above which the stage fails")
    ocr: str = option("auto", "of scans: auto (in all installed languages of tesseract), off, or languages: eng+deu")
    workers: Size = option(1, "processes that read and tokenise; the result does not depend on it")


class QuestionFiles(Section):
    """Question files of the three splits; their format is detected by content."""

    train: str = option("data/sample/questions.train.jsonl.gz", "JSON lines or another format, optionally gzipped")
    dev: str = option(
        "data/sample/questions.dev.jsonl.gz", "to fit BM25's weight and, with 20 questions of people, the confidence"
    )
    test: str = option("data/sample/questions.test.jsonl.gz", "only read by evaluate")


class Tag(Section):
    """Salient span tagging, and the training of the tagger."""

    method: Literal["tagger", "phrases", "given", "dates"] = option(
        "tagger",
        "tagger (trained) or phrases (by capitals or recurrence), both with dates; dates; or given (in the documents)",
    )
    train: str = option("data/sample/ner.train.conll", "CoNLL format: token in the first column, tag in the last")
    dev: str = option("data/sample/ner.dev.conll", "sentences for evaluating the tagger (seqeval's F1)")
    steps: Count = option(300, "training steps of the tagger")
    learning_rate: PositiveAmount = option(0.0005, "BERT for fine-tuning: 5e-5")


class RetrieverOptions(Section):
    """Encoder and architecture of the retriever: tower, pooling, projection, head."""

    init: str = option(
        "small",
        "encoder of all models: small (from scratch, as in section bert), a folder, or a hub name",
        paper="BERT-base",
    )
    tower: Literal["bert", "bag"] = option("bert", "bert or bag (sum of word vectors; head: cosine)", paper="bert")
    pooling: Literal["auto", "cls", "mean", "last"] = option(
        "auto", "cls, mean (over all wordpieces), last, or auto: that of the sentence encoder, else cls", paper="cls"
    )
    projection: Literal["orthogonal", "identity", "first"] = option(
        "orthogonal",
        "initialisation of W: orthogonal, identity (no W) or first (leading dimensions)",
    )
    embedding_width: Count = option(128, "0: width of the encoder; for a bag 384 is suitable", paper="128")
    head: Literal["paper", "release", "normalised", "cosine"] = option(
        "normalised",
        "paper (W times CLS), release (pooler, dense, LayerNorm), normalised (LayerNorm, / sqrt of width) or cosine",
    )
    document_vectors: Size = option(1, "vectors per passage, scored by the nearest; needs pooling: mean", paper="1")
    hybrid: bool = option(False, "f(x, z) combines BM25 and embeddings, with fitted weights", paper="false")

    @model_validator(mode="after")
    def _check(self) -> Self:
        head, width, vectors, projection = self.head, self.embedding_width, self.document_vectors, self.projection
        bag = "retriever.tower is bag and retriever."
        if self.tower != "bag":
            self.check_vectors(self.pooling)
        elif head != "cosine":
            raise ValueError(f"{bag}head is {head}; set retriever.head=cosine")
        elif not width:
            raise ValueError(f"{bag}embedding_width is 0; set retriever.embedding_width=384")
        elif vectors > 1:
            raise ValueError(f"{bag}document_vectors is {vectors}; set retriever.document_vectors=1")
        if head == "release" and (self.pooling in ("mean", "last") or projection != "orthogonal"):
            raise ValueError(
                f"retriever.head is release, with retriever.pooling={self.pooling} and retriever.projection="
                f"{projection}: BERT's pooler reads [CLS]; set retriever.pooling=cls and "
                "retriever.projection=orthogonal, or another retriever.head"
            )
        return self

    def check_vectors(self, pooling: str) -> None:
        """Raise ValueError if this pooling, the encoder's for ``auto``, does not give ``document_vectors``."""
        if self.document_vectors > 1 and pooling in ("cls", "last"):
            raise ValueError(
                f"retriever.document_vectors is {self.document_vectors}, and retriever.pooling={self.pooling} gives "
                "one vector; set retriever.pooling=mean, or retriever.document_vectors=1"
            )

    def check_width(self, encoder_width: int) -> None:
        """Raise ValueError if the projection of vectors of this width does not give ``embedding_width``."""
        width, projection = self.embedding_width, self.projection
        if projection == "identity" and width not in (0, encoder_width):
            raise ValueError(
                f"retriever.projection is identity, which keeps the encoder's width of {encoder_width}, and "
                f"retriever.embedding_width is {width}; set retriever.embedding_width=0, or another "
                "retriever.projection"
            )
        if projection == "first" and width > encoder_width:
            raise ValueError(
                f"retriever.projection is first, and retriever.embedding_width is {width}: the encoder's vectors have "
                f"{encoder_width} numbers; set retriever.embedding_width={encoder_width} or less"
            )


class ReaderOptions(Section):
    """Architecture and initialisation of the reader; published readers are AutoModelForQuestionAnswering's."""

    init: str = option(
        "encoder",
        "encoder (as retriever.init, and trained), a folder or hub name of a published reader of spans, or none",
    )
    copies: bool = option(True, "copy masked words from the passage (pointer with a learned gate)", paper="false")
    apart: bool = option(
        True,
        "encode x and z separately, so that all passages of a batch are candidates of each x; needs copies",
        paper="false",
    )
    matches: bool = option(
        True,
        "lexical features of the passage's wordpieces, such as whether in x (with apart: only in fine-tuning)",
        paper="false",
    )

    @property
    def is_published(self) -> bool:
        """Whether the reader is a published one of answer spans."""
        return self.init not in (ENCODER, NO_READER)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.apart and not self.copies:
            raise ValueError("reader.apart is true and reader.copies is false; set both to true, or apart to false")
        return self


class IndexOptions(Section):
    """Search of pretrain and finetune; types other than exact choose candidates with FAISS."""

    type: Literal["auto", "exact", "ivf", "hnsw", "pq"] = option("auto", "docs/operate.md explains the types")
    target_recall: PositiveShare = option(0.95, "required recall of the exact top k")


class Ict(Section):
    """Warm start of the retriever (inverse cloze task) and the reader (masked words)."""

    crops: Count = option(0, "queries per passage, each a span of 4 to 16 words; 0: one query, a sentence", paper="0")
    steps: Count = option(60, "maximum training steps of the retriever", paper="100000")
    epochs: Amount = option(10, "limit of steps and reader_steps, over the passages; 0: none", paper="31")
    batch_size: Size = option(32, "passages", paper="4096")
    learning_rate: PositiveAmount = option(0.0005, paper="1e-4")
    removal: Share = option(0.9, "probability that a query is removed from its passage", paper="0.9")
    neighbours: Size = option(4, "consecutive passages in a batch, as hard negatives")
    reader_steps: Count = option(600, "of the reader on masked warm-up text, at most", paper="BERT's")
    reader_batch_size: Size = option(32, "pairs of sentence and passage")
    reader_learning_rate: PositiveAmount = option(0.0005, "BERT: 1e-4")


class Pretrain(Section):
    """REALM pre-training, index refresh and staleness."""

    steps: Count = option(300, "training steps; 0: keep the models of ict and measure nothing", paper="200000")
    batch_size: Size = option(16, "masked sentences", paper="512")
    candidates: Size = option(8, "candidate passages per sentence, including the null document", paper="8")
    retriever_learning_rate: PositiveAmount = option(0.0002, paper="3e-5")
    reader_learning_rate: PositiveAmount = option(0.0005, paper="3e-5")
    query_wordpieces: ClassVar[int] = 96  # as in the paper
    retriever_delay: Count = option(50, "initial steps that train only the reader", paper="0")
    reader_wordpieces: Size = option(128, "of x and the text of z together, also in ict", paper="384")
    examples: Literal["corpus", "warmup"] = option("corpus", "text of the masked sentences", paper="both")
    masking: Literal["salient", "recurring", "random_token", "random_span", "matched_span"] = option(
        "salient",
        "salient, recurring (salient, and in another passage too), random_token, random_span or matched_span",
        paper="salient",
    )
    marginal: Literal["joint", "per_token"] = option(
        "joint", "marginalisation of p(y|x) over passages: joint (paper, equation 1) or per_token (release)"
    )
    null_document: bool = option(True, "an empty passage among the candidates", paper="true")
    exclude_trivial: bool = option(True, "exclude the passage of x, and every passage that contains x", paper="true")
    crop_weight: Amount = option(0.0, "weight in the loss of the inverse cloze task on crops", paper="0")
    refresh_every: Size = option(25, "steps between index refreshes, each with a checkpoint", paper="about 500")
    lag: Count | Literal["auto"] = option(
        12, "steps from publishing weights to adopting their index (reproducible); auto: immediately (clusters)"
    )
    query_encoder: Literal["snapshot", "fresh"] = option(
        "snapshot", "weights that embed x for the search: snapshot (those of the index) or fresh; release: snapshot"
    )
    builder: Literal["child", "external"] = option("child", "child (the stage starts the index builder) or external")
    builder_timeout: PositiveAmount = option(900, "timeout in seconds for an index")
    exchange: str = option("auto", "folder shared with the builder; auto: in the work folder of the stage")
    shard_rows: Size = option(512, "passages per shard that a builder commits")
    masked_sentences: Count = option(400, "held out (at most a tenth, and 1,000) to select the best checkpoint")
    gradient_checkpointing: bool = option(False, "less memory, same weights, steps up to 40 % longer")

    @property
    def documents(self) -> int:
        """Number of candidate passages per example, without the null document."""
        return self.candidates - int(self.null_document)


class Finetune(Section):
    """Fine-tuning of retriever and reader on questions."""

    retriever: Literal["pretrain", "ict", "bm25", "tfidf", "graph", "path"] = option(
        "pretrain",
        "pretrain, ict (the ORQA baseline), path (learned paths over links), or without training: bm25, tfidf, graph",
    )
    reader: Literal["pretrain", "ict", "t5"] = option("pretrain", "pretrain, ict, or t5 (closed-book, see closed_book)")
    span_loss: Literal["marginal", "hard_em", "per_passage"] = option(
        "marginal", "marginal (paper), hard_em (only the most likely correct span) or per_passage (DrQA)"
    )
    retriever_training: Literal["queries", "passages"] = option(
        "queries",
        "queries (train the query tower) or passages (first train the whole retriever, in batches)",
        paper="queries",
    )
    retriever_epochs: Amount = option(
        2, "over the passages that answer training questions; for queries, unless reader.init is encoder: over these"
    )
    retriever_batch_size: Size = option(32, "batch size of retriever_epochs, in passages or questions")
    reader_training: Literal["passages", "windows"] = option(
        "passages",
        "passages (whole, as retrieved) or windows (one with the answer; always for a published reader)",
        paper="passages",
    )
    epochs: Amount = option(4, "over the training questions, may be fractional", paper="60 (WebQuestions)")
    batch_size: Size = option(4, "questions", paper="1")
    retriever_learning_rate: PositiveAmount = option(0.0001, paper="1e-5")
    reader_learning_rate: PositiveAmount = option(0.00025, paper="1e-5")
    reader_dropout: Share = option(0.0, "dropout of the reader in fine-tuning, instead of bert.dropout", paper="0.1")
    freeze_words: bool = option(False, "freeze the reader's word embeddings (faster)", paper="false")
    retriever_candidates: Size = option(5000, "passages in the early retriever loss", paper="5000")
    reader_candidates: Size = option(5, "passages that the reader reads", paper="5")
    query_wordpieces: Size = option(64, paper="64")
    reader_wordpieces: Size = option(128, paper="320")
    answer_wordpieces: Size = option(10, "maximum length of an answer span", paper="10")
    decoding: Literal["best_span", "minimum_risk"] = option(
        "best_span",
        "best_span (highest score) or minimum_risk (of the top 20, the highest expected EM and F1)",
        paper="best_span",
    )
    wanted_precision: Share = option(
        0.8, "abstain below the confidence that dev questions of people show to have this precision", paper="not used"
    )

    @property
    def reads_passages(self) -> bool:
        """Whether the reader answers from retrieved passages rather than from its weights alone."""
        return self.reader not in CLOSED_BOOK

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reader_wordpieces <= self.query_wordpieces + 1:
            raise ValueError(
                f"finetune.reader_wordpieces is {self.reader_wordpieces}, which leaves no room for a passage after a "
                f"question of finetune.query_wordpieces={self.query_wordpieces}; raise finetune.reader_wordpieces"
            )
        return self


class ClosedBookOptions(Section):
    """Closed-book baseline, for finetune.reader: t5."""

    init: str = option("small", "small (from scratch, with the reader's shape), a folder, or a name on the hub")
    steps: Count = option(600, "steps of span corruption over the passages, for small; T5: 2^19")
    epochs: Amount = option(20, "over the training questions")


class Optimiser(Section):
    """Adam and the learning rate schedule."""

    bias_correction: bool = option(False, "bias correction of Adam", paper="false")
    ramp_share: Share = option(0.1, "warm-up of the learning rate as a fraction of steps (10 to 10000)", paper="0.1")


class Evaluate(Section):
    """Evaluation."""

    bm25: bool = option(True, "also evaluate baselines: BM25, the reader over BM25's passages, a rule without training")


class Tracking(Section):
    """MLflow tracking."""

    enabled: bool = option(True, "MLflow: .realmops/mlflow/mlflow.db under the root, or MLFLOW_TRACKING_URI")
    experiment: str = option("realmops", "experiment in MLflow; MLFLOW_EXPERIMENT_NAME takes precedence")


class Options(Sections):
    """All options by section, in the order of docs/options.md."""

    run: RunOptions = RunOptions()
    bert: BertOptions = BertOptions()
    sample: Sample = Sample()
    snapshot: SnapshotOptions = SnapshotOptions()
    questions: QuestionFiles = QuestionFiles()
    tag: Tag = Tag()
    retriever: RetrieverOptions = RetrieverOptions()
    reader: ReaderOptions = ReaderOptions()
    index: IndexOptions = IndexOptions()
    ict: Ict = Ict()
    pretrain: Pretrain = Pretrain()
    finetune: Finetune = Finetune()
    closed_book: ClosedBookOptions = ClosedBookOptions()
    optimiser: Optimiser = Optimiser()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()

    def cache_key(self) -> dict[str, dict[str, Any]]:
        """Return the options that are part of cache keys: all but those that only choose where indexes are built."""
        return self.model_dump(exclude={"pretrain": {"builder", "exchange"}})

    def check(self) -> None:
        """Raise ValueError if one section contradicts another."""
        bert, limits = self.bert, ("block_wordpieces", "query_wordpieces", "reader_wordpieces")
        for (section, options), key in product(self, limits):
            if key in type(options).model_fields and (length := getattr(options, key)) > bert.positions:
                raise ValueError(
                    f"{section}.{key} is {length}, above the encoder's bert.positions={bert.positions}; lower "
                    f"{section}.{key} or raise bert.positions"
                )
        if self.retriever.init == "small":
            if bert.width % bert.heads:
                raise ValueError(f"bert.width is {bert.width}; it must be a multiple of bert.heads={bert.heads}")
            if self.retriever.tower != "bag":
                self.retriever.check_width(bert.width)
        if self.reader.is_published and (self.pretrain.steps or self.ict.reader_steps):
            raise ValueError(
                f"reader.init is {self.reader.init}, a reader of answer spans, with pretrain.steps="
                f"{self.pretrain.steps} and ict.reader_steps={self.ict.reader_steps}, which train a reader of masked "
                "words; set both to 0 (preset reader), or reader.init=encoder"
            )


SECTIONS: dict[str, type[Section]] = {name: type(section) for name, section in Options()}
SECTION_NAMES = {kind: name for name, kind in SECTIONS.items()}


def epoch_steps(items: int, batch_size: int, epochs: float) -> int:
    """Return the number of steps of ``epochs`` epochs, rounded up; epochs may be a fraction."""
    return math.ceil(epochs * math.ceil(items / batch_size))
