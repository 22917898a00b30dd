"""Goodput: the highest rate of requests at which nine of ten of them keep a service level objective."""
