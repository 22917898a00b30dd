"""`pdserve bench scale`: what each process costs in graphs of 10, 100 and 1,000 workers."""
