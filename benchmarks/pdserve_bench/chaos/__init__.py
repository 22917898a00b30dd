"""`pdserve chaos`: inject every fault into a graph under load and judge every response."""
