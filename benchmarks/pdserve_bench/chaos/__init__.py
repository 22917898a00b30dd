"""`pdserve chaos`: a graph under load, every fault in turn, and what came of it."""
