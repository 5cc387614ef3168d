"""The model that training begins with: fetched or made from scratch, its tokenizer, and a supervised warm-up.

A stage in a process of its own. Imports data, processes and `types`.
"""
