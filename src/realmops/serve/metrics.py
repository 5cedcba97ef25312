"""Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from realmops.serve.served_model import ServedModel

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

    def model_changed(self, served: ServedModel | None) -> None:
        """Count a newer model that serves now; None counts one that was refused."""
        self._loads.labels("refused" if served is None else "served").inc()
        if served is not None:
            self.show_model(served)

    def show_model(self, served: ServedModel) -> None:
        self._info.info({name: str(value) for name, value in served.about.items()})

    def text(self) -> bytes:
        return generate_latest(self._registry)
