"""Loads, SLOs, statistics and reports that the benchmarks share."""
