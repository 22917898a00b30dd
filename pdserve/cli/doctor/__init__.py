"""`pdserve doctor`: is this machine fit, and if not, what to do."""
