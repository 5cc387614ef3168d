"""Values that training itself chooses: the learning rate of an update, closed loops, and plateaus of evaluations.

Plain numbers: imports the schema and the statistics of evaluations. The reference's schedule and the loop import it.
"""
