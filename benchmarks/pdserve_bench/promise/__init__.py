"""`pdserve bench promise`: what SLOs in a model's file gain, measured on one graph with and without them."""
