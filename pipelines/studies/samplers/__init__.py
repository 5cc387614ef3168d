"""What samplers are made of: the Gaussian process that knows its observations' noise and what is used of Optuna's inner
parts, neither of which knows what a trial is.
"""
