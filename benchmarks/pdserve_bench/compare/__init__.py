"""`pdserve compare`: measure whether disaggregation pays for a load, and in which split."""
