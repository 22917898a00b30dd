"""The prefill queue on NATS, and the only package that imports nats."""
