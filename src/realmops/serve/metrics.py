"""What Prometheus is told."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from realmops.commands.answers import Generation

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
_QUESTIONS = (1, 2, 3, 4, 8, 16, 32)


class Metrics:
    """The figures of one server. Labels never hold what a caller wrote."""

    def __init__(self) -> None:
        self._registry = at = CollectorRegistry()
        ProcessCollector(registry=at)
        self._requests = Counter("realmops_requests", "Requests by route and status", ["route", "code"], registry=at)
        told = "From the request's first byte to the end of its reply"
        self._seconds = Histogram("realmops_request_seconds", told, ["route"], buckets=_SECONDS, registry=at)
        self._batch = Histogram("realmops_batch_questions", "Questions of a batch", buckets=_QUESTIONS, registry=at)
        told = "Model's time of a batch"
        self._batch_seconds = Histogram("realmops_batch_seconds", told, buckets=_SECONDS, registry=at)
        self.waiting = Gauge("realmops_waiting_questions", "Accepted and not yet answered", registry=at)
        told = "New generations by what became of them: served, refused"
        self._loads = Counter("realmops_generations", told, ["result"], registry=at)
        self._info = Info("realmops_generation", "What answers come from", registry=at)
        for result in ("served", "refused"):
            self._loads.labels(result)

    def request(self, route: str, code: int, seconds: float) -> None:
        self._requests.labels(route, str(code)).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, questions: int, seconds: float) -> None:
        self._batch.observe(questions)
        self._batch_seconds.observe(seconds)

    def generation(self, generation: Generation | None) -> None:
        """Another generation serves now; None where one was refused."""
        self._loads.labels("refused" if generation is None else "served").inc()
        if generation is not None:
            self.serves(generation)

    def serves(self, generation: Generation) -> None:
        self._info.info({name: str(value) for name, value in generation.about.items()})

    def text(self) -> bytes:
        return generate_latest(self._registry)
