"""Controls the values that change during training: learning rate, closed loops, plateaus of evaluations.

It computes with plain numbers. It imports the schema and `statistics`; reference, evaluation and trainer import it.
"""
