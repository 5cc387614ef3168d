"""From prompts to finished, scored responses: the environments that the policy samples in, of one turn or of several.

Imports rewards and `types`; training and evaluation import it.
"""
