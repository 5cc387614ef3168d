"""What samplers are made of, apart from any study: the Gaussian process that knows its observations' noise, and what is
used of Optuna's inner parts. Neither knows what a trial is.
"""
