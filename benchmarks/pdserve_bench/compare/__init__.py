"""Should this load be disaggregated, and in which split? Measured, with the reason."""
