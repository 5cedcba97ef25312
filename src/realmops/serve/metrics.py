"""Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from realmops.answering.opened_model import OpenedModel

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
_QUESTIONS = (1, 2, 3, 4, 8, 16, 32)


class Metrics:
    """Metrics of one server. Labels never contain client input."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "realmops_requests", "Requests by route and status", ["route", "code"], registry=registry
        )
        self._seconds = Histogram(
            "realmops_request_seconds", "Request duration", ["route"], buckets=_SECONDS, registry=registry
        )
        self._batch = Histogram("realmops_batch_questions", "Batch size", buckets=_QUESTIONS, registry=registry)
        self._batch_seconds = Histogram("realmops_batch_seconds", "Batch duration", buckets=_SECONDS, registry=registry)
        self.waiting = Gauge("realmops_waiting_questions", "Accepted, unanswered questions", registry=registry)
        self._loads = Counter("realmops_generations", "New models by result", ["result"], registry=registry)
        self._info = Info("realmops_generation", "Served model", registry=registry)
        for result in ("served", "refused"):
            self._loads.labels(result)

    def request(self, route: str, code: int, seconds: float) -> None:
        self._requests.labels(route, str(code)).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, questions: int, seconds: float) -> None:
        self._batch.observe(questions)
        self._batch_seconds.observe(seconds)

    def model_changed(self, served: OpenedModel | None) -> None:
        self._loads.labels("refused" if served is None else "served").inc()
        if served is not None:
            self.show_model(served)

    def show_model(self, served: OpenedModel) -> None:
        self._info.info({name: str(value) for name, value in served.about.items()})

    def text(self) -> bytes:
        return generate_latest(self._registry)
