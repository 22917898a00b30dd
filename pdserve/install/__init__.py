"""What puts the engine into an environment: `pdserve install`, and `make install` and `make dev` of a checkout."""
