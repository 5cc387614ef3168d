"""Reports: one self-contained HTML page per run, experiment or study."""

from pipelines.report.experiment import write_experiment_report, write_run_report

__all__ = ["write_experiment_report", "write_run_report"]
