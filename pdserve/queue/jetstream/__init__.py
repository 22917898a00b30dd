"""The queue seam on NATS: the only place that imports nats."""
