"""`pdserve bench scale`: what each process costs in graphs of many workers."""
