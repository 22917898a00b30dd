"""`pdserve bench goodput`: the highest request rate at which 90 % of the requests keep an SLO."""
