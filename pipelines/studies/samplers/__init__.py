"""Parts of samplers: the Gaussian process with a noise model, and the functions that use Optuna's internals. They do
not depend on trials."""
