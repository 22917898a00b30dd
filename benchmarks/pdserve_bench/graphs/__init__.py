"""Graphs that benchmarks start: with `serve`, without it, and clusters of NATS and etcd."""
