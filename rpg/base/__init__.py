"""Provides the model that training starts from: fetched or built from scratch, with its tokenizer and a warm-up.

A stage that runs in its own process. Imports data, processes and `types`.
"""
