"""Answers, comparisons and statistics of runs, the charts, and the self-contained page of a run or an experiment.

A study's page is in `studies/answers`, with the charts from here. Imports the home and the store.
"""

from pipelines.report.experiment import write_experiment_report, write_run_report

__all__ = ["write_experiment_report", "write_run_report"]
