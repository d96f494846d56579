"""What a job answers over HTTP: status, metrics, spans, a page."""
