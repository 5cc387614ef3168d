"""A script that uses the Python API. `make check` type-checks it, as a user would check their own script."""

from pipelines import load


def score(response: str, answer: str) -> float:
    """A reward of the script's own."""
    return float(response.strip() == answer)


def main() -> None:
    """Plans, runs and submits two variants."""
    spec: dict[str, object] = {"extends": "specs/experiments/quickstart.yaml"}
    for rate in (1e-4, 1e-3):
        spec |= {"reward": {"type": "mine"}, "training": {"optimizer": {"learning_rate": rate}}}
        job = load(spec, set={"training.steps": 2}, rewards={"mine": score})
        print(job.plan().data["runs"])
        outcome = job.run(parallel="auto", progress=False)
        best: str | None = outcome.verdict.best
        # Where mypy were content with this one too, it would call the comment unused.
        number: int = outcome.verdict.best  # type: ignore[assignment]
        for label, other, gap in outcome.verdict.differences:
            print(label, other, gap.low, best, number)
        print([run.status for run in outcome.runs], outcome.table().shape)
        outcome.figure("reward/mean").save(f"{rate}.pdf")
        for run_id, link in job.submit(profile=None):
            print(run_id, link)


if __name__ == "__main__":
    main()
