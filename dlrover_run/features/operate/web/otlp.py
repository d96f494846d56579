"""Sends the events of a job to a collector of OpenTelemetry, by OTLP over HTTP.

Only `events --otlp` imports this module, since the packages of OpenTelemetry are an extra. They read their own
variables, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from dlrover_run.command_line import values
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import ERROR, WARNING, LogOpened, name_of
from dlrover_run.features.inspect.spans import Record, Span, attributes_of, build_trace, trace_id
from dlrover_run.features.inspect.text import describe
from dlrover_run.rendezvous.client import AskFailed

BATCH = 1_000
"""Spans or records of one request: some hundred kilobytes, of the 4 MiB that collectors take."""

_VERSION = version("dlrover-run")
_SCOPE = InstrumentationScope("dlrover_run", _VERSION)
_SEVERITIES = {ERROR: SeverityNumber.ERROR, WARNING: SeverityNumber.WARN}


def parse_endpoint(text: str) -> str:
    """The address of a collector, without a slash at its end. Raises SpecError."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise values.invalid("--otlp", text, "is no address of a collector", "give one such as http://localhost:4318")
    return text.rstrip("/")


def send(endpoint: str, logs: Sequence[AgentLog], since: datetime | None, timeout: float) -> tuple[int, int]:
    """Send the spans and records that end from that time on, and return how many there were. Raises AskFailed if the
    collector does not take them within `timeout` seconds."""
    trace, after = trace_id(logs), 0 if since is None else since.timestamp() * 1e9
    spans: list[ReadableSpan] = []
    records: list[ReadableLogRecord] = []
    for log in logs:
        resource, found = _resource(log.opened), build_trace(log)
        spans += [_span(one, trace, resource) for one in found[0] if one.end >= after]
        records += [_record(one, trace, resource) for one in found[1] if one.at >= after]
    _export(f"{endpoint}/v1/traces", OTLPSpanExporter, spans, timeout)
    _export(f"{endpoint}/v1/logs", OTLPLogExporter, records, timeout)
    return len(spans), len(records)


def _export(url: str, exporter: Callable[..., Any], items: Sequence[Any], timeout: float) -> None:
    """Send all items to a URL. The packages log why that fails, and return only that it has failed."""
    reasons = _Reasons()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(reasons)
    logger.propagate = False
    client = exporter(endpoint=url, timeout=timeout)
    try:
        for start in range(0, len(items), BATCH):
            if client.export(items[start : start + BATCH]).name != "SUCCESS":
                raise AskFailed(f"the collector does not take the events at {url}: {reasons.last}")
    finally:
        client.shutdown()
        logger.removeHandler(reasons)


class _Reasons(logging.Handler):
    """Keeps the last message."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _resource(opened: LogOpened) -> Resource:
    return Resource(
        {
            "service.name": opened.program,
            "service.version": _VERSION,
            "service.instance.id": opened.node_id,
            "host.name": opened.host,
            "process.pid": opened.pid,
            "dlrover.job": opened.job,
        }
    )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _span(span: Span, trace: int, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        _context(trace, span.id),
        None if span.parent is None else _context(trace, span.parent),
        resource,
        span.attributes,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.start,
        end_time=span.end,
        instrumentation_scope=_SCOPE,
    )


def _record(record: Record, trace: int, resource: Resource) -> ReadableLogRecord:
    message = LogRecord(
        timestamp=record.at,
        observed_timestamp=record.at,
        context=set_span_in_context(NonRecordingSpan(_context(trace, record.span))),
        severity_text=record.event.severity,
        severity_number=_SEVERITIES.get(record.event.severity, SeverityNumber.INFO),
        body=describe(record.event),
        attributes=attributes_of(record.event),
        event_name=name_of(type(record.event)),
    )
    return ReadableLogRecord(message, resource, _SCOPE)
