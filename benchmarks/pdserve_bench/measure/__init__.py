"""Loads, samples, SLOs and reports that the benchmarks share."""
