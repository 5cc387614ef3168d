"""What a Prefect server does by itself for a submitted experiment: it sends notices of its runs, and submits it again
at set times.
"""
