"""One sequence of a request: its `generation`, `migration` after a lost worker, and `pacing` of its outputs."""
