-- The public views: the recorded rows that count, under documented names.
-- `recorded` has the rows; for metrics, rollouts, tokens, turns, evaluation_samples, evaluation_scores and drift_samples only those that no later attempt superseded.
-- A row counts unless a later attempt of its run resumed from an earlier step; a row of an evaluation counts while the run's state names the evaluation.
-- A rollback event always counts, since it happened to the run and belongs to no repeated step.
CREATE VIEW recorded.superseded AS
SELECT run_id, attempt, valid_through FROM recorded.attempts WHERE valid_through IS NOT NULL;

CREATE VIEW experiments AS SELECT * EXCLUDE (unit) FROM recorded.experiments;
CREATE VIEW runs AS SELECT * EXCLUDE (unit) FROM recorded.runs;
CREATE VIEW stages AS SELECT * EXCLUDE (unit) FROM recorded.stages;
CREATE VIEW attempts AS SELECT * EXCLUDE (unit) FROM recorded.attempts;
CREATE VIEW studies AS SELECT * EXCLUDE (unit) FROM recorded.studies;
CREATE VIEW trials AS SELECT * EXCLUDE (unit) FROM recorded.trials;
CREATE VIEW confirmations AS SELECT * EXCLUDE (unit) FROM recorded.confirmations;
CREATE VIEW artifacts AS SELECT * EXCLUDE (unit) FROM recorded.artifacts;
CREATE VIEW provenance AS SELECT * EXCLUDE (unit) FROM recorded.provenance;

CREATE VIEW rollouts AS SELECT * EXCLUDE (attempt) FROM recorded.rollouts;

CREATE VIEW tokens AS SELECT * EXCLUDE (attempt) FROM recorded.tokens;

CREATE VIEW checkpoints AS
SELECT r.* EXCLUDE (attempt)
FROM recorded.checkpoints AS r
WHERE NOT EXISTS (FROM recorded.superseded s WHERE s.run_id = r.run_id AND s.attempt = r.attempt AND r.step > s.valid_through);

CREATE VIEW events AS
SELECT r.* EXCLUDE (attempt)
FROM recorded.events AS r
WHERE kind = 'rolled_back' OR NOT EXISTS (FROM recorded.superseded s WHERE s.run_id = r.run_id AND s.attempt = r.attempt AND r.step > s.valid_through);

-- If a step was measured more than once, the last measurement counts; the evaluate stage comes after all training.
CREATE VIEW evaluations AS
SELECT e.* EXCLUDE (fingerprint, attempt)
FROM recorded.evaluations AS e
WHERE EXISTS (FROM runs WHERE runs.run_id = e.run_id AND runs.evaluation = e.fingerprint)
AND NOT EXISTS (FROM recorded.superseded s WHERE s.run_id = e.run_id AND s.attempt = e.attempt AND e.step > s.valid_through)
QUALIFY rank() OVER (PARTITION BY e.run_id, e.step ORDER BY e.attempt DESC NULLS FIRST) = 1;

CREATE VIEW evaluation_samples AS
SELECT e.* EXCLUDE (fingerprint, attempt)
FROM recorded.evaluation_samples AS e
WHERE EXISTS (FROM runs WHERE runs.run_id = e.run_id AND runs.evaluation = e.fingerprint)
QUALIFY rank() OVER (PARTITION BY e.run_id, e.step ORDER BY e.attempt DESC NULLS FIRST) = 1;

CREATE VIEW evaluation_scores AS
SELECT e.* EXCLUDE (fingerprint, attempt)
FROM recorded.evaluation_scores AS e
WHERE EXISTS (FROM runs WHERE runs.run_id = e.run_id AND runs.evaluation = e.fingerprint)
QUALIFY rank() OVER (PARTITION BY e.run_id, e.step ORDER BY e.attempt DESC NULLS FIRST) = 1;

CREATE VIEW drift_samples AS
SELECT e.* EXCLUDE (fingerprint, attempt)
FROM recorded.drift_samples AS e
WHERE EXISTS (FROM runs WHERE runs.run_id = e.run_id AND runs.evaluation = e.fingerprint)
QUALIFY rank() OVER (PARTITION BY e.run_id, e.step ORDER BY e.attempt DESC NULLS FIRST) = 1;

-- Drift is of all evaluation sets together, at the evaluated steps; `evaluations` has each set's, with intervals. Its
-- time is that of the step's training: evaluations record no time, so that the same results are the same files.
CREATE VIEW metrics AS
WITH timed AS NOT MATERIALIZED (
    SELECT d.*, m.recorded_at FROM drift_samples AS d
    LEFT JOIN recorded.metrics AS m ON m.run_id = d.run_id AND m.step = d.step AND m.name = 'time/step'
)
SELECT * EXCLUDE (attempt) FROM recorded.metrics
UNION ALL BY NAME
SELECT run_id, step, 'drift/reverse' AS name, sum(logprob - initial_logprob) / sum(num_tokens) AS value, any_value(recorded_at) AS recorded_at
FROM timed WHERE direction = 'reverse' GROUP BY run_id, step
UNION ALL BY NAME
SELECT run_id, step, 'drift/reverse_response' AS name, sum(logprob - initial_logprob) / count(*) AS value, any_value(recorded_at) AS recorded_at
FROM timed WHERE direction = 'reverse' GROUP BY run_id, step
UNION ALL BY NAME
SELECT run_id, step, 'drift/forward' AS name, sum(initial_logprob - logprob) / sum(num_tokens) AS value, any_value(recorded_at) AS recorded_at
FROM timed WHERE direction = 'forward' GROUP BY run_id, step
UNION ALL BY NAME
SELECT run_id, step, 'drift/forward_response' AS name, sum(initial_logprob - logprob) / count(*) AS value, any_value(recorded_at) AS recorded_at
FROM timed WHERE direction = 'forward' GROUP BY run_id, step;

-- One row per turn, of training and of evaluations. Older records lack restart, since programs could not rewrite their history then. For training rollout_id names the response; for an evaluation dataset, problem_id and sample do.
--   rollout_id: number of the response, as in rollouts; NULL for an evaluation
--   dataset: name of the evaluation set; NULL for training
--   problem_id: content hash of the problem of an evaluation; NULL for training
--   sample: number of the response to its problem in the evaluation, from 0; NULL for training
CREATE VIEW turns AS
SELECT * REPLACE (coalesce(restart, false) AS restart) FROM (
    SELECT * EXCLUDE (attempt), NULL::VARCHAR AS dataset, NULL::VARCHAR AS problem_id, NULL::INTEGER AS sample FROM recorded.turns
    UNION ALL BY NAME
    SELECT * EXCLUDE (said), unnest(said) FROM (
        SELECT
            run_id,
            step,
            dataset,
            problem_id,
            sample,
            unnest(TRY(from_json(turns, '[{"turn": "INTEGER", "sampled": "BOOLEAN", "tool": "VARCHAR", "text": "VARCHAR", "num_tokens": "INTEGER", "reward": "DOUBLE", "error": "VARCHAR", "seconds": "DOUBLE", "restart": "BOOLEAN"}]'))) AS said
        FROM evaluation_samples WHERE turns IS NOT NULL
    )
);

-- One row per reply of a judge; a response whose verdicts are not JSON has none, and `rpg db check` names its run. For training rollout_id names the response; for an evaluation dataset, problem_id and sample do.
--   step: step step of training, from 1; 0 for an evaluation of the base model
--   rollout_id: number of the response, as in rollouts; NULL for an evaluation
--   dataset: name of the evaluation set; NULL for training
--   problem_id: content hash of the problem
--   sample: number of the response to its problem in the evaluation, from 0; NULL for training
--   judge: name or directory of the judging model
--   vote: number of the reply to its question, from 0
--   place: place of the response among the answers in the question, from 0
--   text: the whole reply
--   score: verdict in the reply: a number of the scale, or in a comparison 1 for the better or best, 0 for the other or last; NULL if it could not be read
--   error: reason why no verdict could be read
--   prompt_tokens: number of tokens of the question
--   tokens: number of tokens of the reply
--   cost: cost in the currency of the spec's price; each response of a comparison has the cost of the whole question
--   key: key of the question, shared by its rows
CREATE VIEW verdicts AS
WITH judged AS (
    SELECT run_id, step, rollout_id, NULL AS dataset, prompt_id AS problem_id, NULL AS sample, verdicts FROM rollouts WHERE verdicts IS NOT NULL
    UNION ALL
    SELECT run_id, step, NULL, dataset, problem_id, sample, verdicts FROM evaluation_samples WHERE verdicts IS NOT NULL
), each AS (
    SELECT
        * EXCLUDE (verdicts),
        unnest(TRY(from_json(verdicts, '[{"judge": "VARCHAR", "vote": "INTEGER", "place": "INTEGER", "text": "VARCHAR", "score": "DOUBLE", "error": "VARCHAR", "prompt_tokens": "INTEGER", "tokens": "INTEGER", "cost": "DOUBLE", "key": "VARCHAR"}]'))) AS said
    FROM judged
)
SELECT * EXCLUDE (said), unnest(said) FROM each;

-- One row per run and step: the most plotted metrics. NULL if a metric was not recorded.
--   run: name of the run: cell and seed
--   step: step of training, from 1
--   reward: metric reward/mean: mean reward of the step's responses, penalties included
--   reward_std: metric reward/std: standard deviation of those rewards
--   entropy: metric entropy, nats per token
--   kl: metric kl/reverse: KL(policy || reference) of a token, nats
--   kl_behaviour: metric kl/behaviour: KL(sampling policy || policy) of a token, nats
--   clip_fraction: share of the tokens on which a bound of the clip acts, 0 to 1: low, high and dual together
--   grad_norm: metric grad_norm: norm of the gradient before it is scaled down
--   response_length: metric response_length/mean, tokens
--   seconds: metric time/step: duration of the step, seconds
CREATE VIEW learning_curves AS
WITH wide AS (
    SELECT
        run_id,
        step,
        max(value) FILTER (name = 'reward/mean') AS reward,
        max(value) FILTER (name = 'reward/std') AS reward_std,
        max(value) FILTER (name = 'entropy') AS entropy,
        max(value) FILTER (name = 'kl/reverse') AS kl,
        max(value) FILTER (name = 'kl/behaviour') AS kl_behaviour,
        sum(value) FILTER (name IN ('clip_fraction/low', 'clip_fraction/high', 'clip_fraction/dual')) AS clip_fraction,
        max(value) FILTER (name = 'grad_norm') AS grad_norm,
        max(value) FILTER (name = 'response_length/mean') AS response_length,
        max(value) FILTER (name = 'time/step') AS seconds
    FROM metrics
    GROUP BY run_id, step
)
SELECT runs.experiment, wide.run_id, runs.name AS run, runs.seed, wide.* EXCLUDE (run_id)
FROM wide LEFT JOIN runs USING (run_id)
ORDER BY runs.experiment, run, wide.step;

-- One row per run, with its status and results. Rewards are means over the first and the last ten steps; accuracies are mean@k over all sets,
-- at the first and at the last evaluated step.
--   name: readable name: cell and seed
--   status: pending running finished failed cancelled crashed
--   started_at: time of its first execution
--   ended_at: time of its end; NULL before that
--   seconds: seconds from its start to its end, or to now
--   step: last recorded step
--   steps: number of steps of the whole run
--   reward_first: mean of reward/mean over the first ten steps
--   reward_last: mean of reward/mean over the last ten steps
--   accuracy_before: mean@k of the base model, 0 to 1; mean over the sets
--   accuracy_after: mean@k at the last evaluated step, 0 to 1; mean over the sets
--   score_before: score@k of the base model under a graded reward, in its units; mean over the sets
--   score_after: score@k at the last evaluated step; mean over the sets
--   evaluated_step: last evaluated step
CREATE VIEW run_summary AS
WITH means AS (
    SELECT
        run_id,
        step,
        avg(value) FILTER (metric LIKE 'mean@%') AS accuracy,
        avg(value) FILTER (metric LIKE 'score@%') AS score
    FROM evaluations WHERE metric LIKE 'mean@%' OR metric LIKE 'score@%' GROUP BY run_id, step
),
evaluated AS (
    SELECT
        run_id,
        arg_min(accuracy, step) FILTER (step = 0) AS accuracy_before,
        arg_max(accuracy, step) AS accuracy_after,
        arg_min(score, step) FILTER (step = 0) AS score_before,
        arg_max(score, step) AS score_after,
        max(step) AS evaluated_step
    FROM means GROUP BY run_id
)
SELECT
    runs.run_id,
    runs.experiment,
    runs.name,
    runs.seed,
    runs.status,
    runs.started_at,
    runs.ended_at,
    epoch(coalesce(runs.ended_at, now()) - runs.started_at) AS seconds,
    coalesce(reward.last_step, runs.step) AS step,
    runs.steps,
    reward.reward_first,
    reward.reward_last,
    evaluated.accuracy_before,
    evaluated.accuracy_after,
    evaluated.score_before,
    evaluated.score_after,
    evaluated.evaluated_step
FROM runs LEFT JOIN recorded.rewards AS reward USING (run_id) LEFT JOIN evaluated USING (run_id)
ORDER BY runs.experiment, runs.name;

-- One row per experiment, setting, set and measure: the mean over the seeds of finished runs, each at its last evaluated step,
-- best first. Runs are seeds of one setting if their resolved specs differ only in the seed.
--   rank: 1 is the best of its set and measure
--   cell: matrix cell, or the values of a study's trial: path in the spec -> value
--   setting: digest of the resolved spec without the seed, and of the code, see runs
--   dataset: name of the evaluation set
--   metric: as in evaluations; less is better for drift, bits_per_byte and perplexities
--   value: mean over the seeds: a share, 0 to 1, or for score@k a value in the reward's units
--   std: standard deviation over the seeds, ddof 1; NULL with one seed
--   lowest: lowest value of a seed
--   highest: highest value of a seed
--   num_seeds: number of runs in the mean
--   run_ids: ids of those runs
CREATE VIEW leaderboard AS
WITH last_step AS (
    SELECT run_id, max(step) AS step FROM evaluations GROUP BY run_id
),
settings AS (
    SELECT
        runs.experiment,
        runs.cell,
        runs.setting,
        e.dataset,
        e.metric,
        avg(e.value) AS value,
        stddev_samp(e.value) AS std,
        min(e.value) AS lowest,
        max(e.value) AS highest,
        count(*) AS num_seeds,
        list(e.run_id ORDER BY e.run_id) AS run_ids
    FROM evaluations AS e JOIN last_step USING (run_id, step) JOIN runs USING (run_id)
    WHERE runs.status = 'finished'
    GROUP BY ALL
)
SELECT
    rank() OVER (
        PARTITION BY dataset, metric
        ORDER BY if(metric LIKE 'drift/%' OR metric = 'bits_per_byte' OR metric LIKE '%perplexity', value, -value)
    ) AS rank,
    *
FROM settings
ORDER BY dataset, metric, rank, experiment;

-- One row per run, set and evaluated step: accuracy over the steps, during training (`evaluation.every_steps`, `.concurrent_ranks`) and after.
--   run: name of the run: cell and seed
--   dataset: name of the evaluation set
--   metric: mean@k: share of right answers among k responses; score@k: mean score of k responses under a graded reward
--   step: step of training; 0 for the base model
--   accuracy: mean of the metric over the problems: a share, 0 to 1, or for score@k a value in the reward's units
--   ci_low: lower end of the interval, see evaluations
--   ci_high: upper end of that interval
--   num_problems: number of the set's problems that were answered
--   is_last: whether it is the run's last evaluated step
--   is_best: whether it is the most accurate step of training, the latest of equal ones. It is selected on the same problems
--   that measure it, so its accuracy is biased upward, more so with more evaluated steps
CREATE VIEW accuracy_curves AS
SELECT
    runs.experiment,
    e.run_id,
    runs.name AS run,
    runs.seed,
    e.dataset,
    e.metric,
    e.step,
    e.value AS accuracy,
    e.ci_low,
    e.ci_high,
    e.num_problems,
    e.step = max(e.step) OVER (PARTITION BY e.run_id, e.dataset) AS is_last,
    e.step > 0 AND rank() OVER (PARTITION BY e.run_id, e.dataset, e.step > 0 ORDER BY e.value DESC, e.step DESC) = 1 AS is_best
FROM evaluations AS e LEFT JOIN runs USING (run_id)
WHERE e.metric LIKE 'mean@%' OR e.metric LIKE 'score@%'
ORDER BY runs.experiment, run, e.run_id, e.dataset, e.step;

-- One row per experiment, setting and set: accuracy at the last evaluated step of training and at the best one, means over the seeds
-- of finished runs, as papers' tables have them. Each run's best step is selected on the same set, so its accuracy is biased upward.
--   cell: matrix cell, or the values of a study's trial: path in the spec -> value
--   setting: digest of the resolved spec without the seed, and of the code, see runs
--   dataset: name of the evaluation set
--   metric: mean@k: share of right answers among k responses; score@k: mean score of k responses under a graded reward
--   last: accuracy, or score, at the last evaluated step
--   best: accuracy, or score, at each run's most accurate step
--   num_evaluated: number of evaluated steps from which a run's best was selected, the least over the seeds. With 1 the best is the last
--   num_seeds: number of runs in the means
--   best_steps: most accurate step of each run, in the order of run_ids
--   run_ids: ids of those runs
CREATE VIEW last_and_best AS
WITH curves AS (
    SELECT *, count(*) OVER (PARTITION BY run_id, dataset) AS num_evaluated FROM accuracy_curves WHERE step > 0
)
SELECT
    runs.experiment,
    runs.cell,
    runs.setting,
    c.dataset,
    c.metric,
    avg(c.accuracy) FILTER (c.is_last) AS last,
    avg(c.accuracy) FILTER (c.is_best) AS best,
    min(c.num_evaluated) AS num_evaluated,
    count(*) FILTER (c.is_last) AS num_seeds,
    list(c.step ORDER BY c.run_id) FILTER (c.is_best) AS best_steps,
    list(c.run_id ORDER BY c.run_id) FILTER (c.is_last) AS run_ids
FROM curves AS c JOIN runs USING (run_id)
WHERE runs.status = 'finished'
GROUP BY ALL
ORDER BY runs.experiment, c.dataset, last DESC;
