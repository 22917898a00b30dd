"""Start graphs for benchmarks, with or without `serve`, or on clusters of NATS and etcd; watch what they hold."""
