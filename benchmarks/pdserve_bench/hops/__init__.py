"""What pdserve's own hops of a request cost, alone: frontend and stream."""
