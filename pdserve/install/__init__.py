"""Installs the engine: `pdserve install`, and `make install` and `make dev` of a checkout."""
