"""The vLLM sampler: its engine in this process or in a dedicated one, and how weights reach it."""
