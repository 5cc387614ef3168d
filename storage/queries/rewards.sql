-- Rewards for run_summary, for the runs with rows in `metrics`: means over the first and the last ten
-- steps, and the last step. An ingest stores the result for each run, so that a list of all runs reads none of their files.
SELECT
    run_id,
    max(step) AS last_step,
    avg(value ORDER BY step) FILTER (step < first_step + 10) AS reward_first,
    avg(value ORDER BY step) FILTER (step > last_step - 10) AS reward_last
FROM (
    SELECT
        run_id,
        step,
        value,
        max(step) OVER (PARTITION BY run_id) AS last_step,
        min(step) OVER (PARTITION BY run_id) AS first_step
    FROM metrics
    WHERE name = 'reward/mean'
)
GROUP BY run_id
