-- The catalogue: the content of the JSON documents in the home directory. Each row belongs to a unit, the directory that it comes from.

-- One row per experiment: the frozen spec of its last run or submission.
CREATE TABLE experiments (
    unit VARCHAR NOT NULL,
    name VARCHAR,                           -- the spec's `name`
    question VARCHAR,                       -- its question, in a sentence
    num_runs INTEGER,                       -- number of runs that it ever had
    fingerprint VARCHAR,                    -- fingerprint of the frozen spec
    created_at TIMESTAMP WITH TIME ZONE,    -- time of the first run or submission
    updated_at TIMESTAMP WITH TIME ZONE     -- time of the last run or submission
);

-- One row per run: one cell of the matrix with one seed.
CREATE TABLE runs (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,                         -- id of the run: experiment, seed and a digest of all that changes its result
    experiment VARCHAR,                     -- name of the experiment that it belongs to
    name VARCHAR,                           -- readable name: cell and seed
    seed BIGINT,                            -- seed of the prompt order and the sampling; NULL for the evaluation of a model without training
    status VARCHAR,                         -- pending running finished failed cancelled crashed
    started_at TIMESTAMP WITH TIME ZONE,    -- time of its first execution
    ended_at TIMESTAMP WITH TIME ZONE,      -- time of its end; NULL before that
    reason VARCHAR,                         -- reason of its failure or cancellation
    cause VARCHAR,                          -- cause of a failure: out_of_memory sampler_out_of_memory diverged lost_peer preempted user_error disk_full hung reward_failed reward_away program_error other
    step INTEGER,                           -- last step that the trainer finished
    steps INTEGER,                          -- number of steps of the whole run
    cell JSON,                              -- the matrix cell: path in the spec -> value
    setting VARCHAR,                        -- digest of the resolved spec without the seed, and of the code: runs that share it differ only in the seed; NULL for a run that never started
    objective VARCHAR,                      -- type of the objective; NULL for the evaluation of a model without training
    question VARCHAR,                       -- question of the experiment
    created_at TIMESTAMP WITH TIME ZONE,    -- time at which its spec was frozen
    flow_run_id VARCHAR,                    -- id of the Prefect flow run that executed it last
    evaluation VARCHAR,                     -- fingerprint of the current evaluate stage
    path VARCHAR                            -- path of the run's directory, relative to the home
);

-- One row per run and stage.
CREATE TABLE stages (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    stage VARCHAR,                          -- data base train evaluate report
    fingerprint VARCHAR,                    -- digest of everything that can change its result
    status VARCHAR,                         -- pending running finished failed cancelled
    cached BOOLEAN,                         -- whether an existing result was reused
    started_at TIMESTAMP WITH TIME ZONE,    -- time at which its work began; NULL if an earlier result was reused
    ended_at TIMESTAMP WITH TIME ZONE,      -- time at which its work ended
    reason VARCHAR,                         -- reason of its failure or cancellation
    output VARCHAR                          -- path of the result, relative to the home
);

-- One row per start of the trainer. Rows that an attempt recorded after valid_through are superseded by a later attempt.
CREATE TABLE attempts (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,                        -- number of the start, from 1
    resumed_from_step INTEGER,              -- step of the checkpoint from which it resumed; 0 for the base model
    valid_through INTEGER,                  -- last step whose rows count; NULL if no later attempt resumed from an earlier step
    started_at TIMESTAMP WITH TIME ZONE     -- time at which the trainer started
);

-- One row per study.
CREATE TABLE studies (
    unit VARCHAR NOT NULL,
    name VARCHAR,                           -- the study's `name`
    question VARCHAR,                       -- its question, in a sentence
    experiment VARCHAR,                     -- path of the experiment's file
    goal VARCHAR,                           -- description of the goals
    goals JSON,                             -- dataset, metric, direction and over_seeds of each goal
    constraints JSON,                       -- metric, dataset, max and min of each constraint
    sampler VARCHAR,                        -- sampler of the trials: random, tpe, cmaes, ...
    pruner JSON,                            -- settings of the pruner
    trials_wanted INTEGER,                  -- number of trials that the search is to have
    num_trials INTEGER,                     -- number of its trials so far
    seeds BIGINT[],                         -- seeds of every trial; confirmations has the seeds of the confirmation
    confidence DOUBLE,                      -- level of the intervals
    status VARCHAR,                         -- searching confirming finished stopped
    parameters JSON,                        -- path in the spec -> its possible values
    confirmation JSON,                      -- dataset, seeds and arms of the confirmation, see confirmations
    spent STRUCT(tokens DOUBLE, gpu_hours DOUBLE, seconds DOUBLE), -- cost of all its runs so far: response tokens, GPU hours, seconds
    created_at TIMESTAMP WITH TIME ZONE,    -- time of its first run
    updated_at TIMESTAMP WITH TIME ZONE     -- time at which its record was last written
);

-- One row per trial of a study.
CREATE TABLE trials (
    unit VARCHAR NOT NULL,
    study VARCHAR,                          -- name of the study
    number INTEGER,                         -- number of the trial, from 0, in the order of proposals
    state VARCHAR,                          -- finished pruned paused running pending failed cancelled
    run_id VARCHAR,                         -- id of the run with its first seed
    run_ids VARCHAR[],                      -- ids of the runs with all its seeds
    value DOUBLE,                           -- value of the first goal
    value_low DOUBLE,                       -- lower end of the value's interval
    value_high DOUBLE,                      -- upper end of that interval
    "values" JSON,                          -- value of each goal
    posterior_mean DOUBLE,                  -- expected value of the first goal by the sampler's model, without the trial's noise
    posterior_deviation DOUBLE,             -- standard deviation of posterior_mean
    chance_of_best DOUBLE,                  -- probability, by the model, that the trial is the best of the study
    baseline BOOLEAN,                       -- whether it has the experiment's own values
    params JSON,                            -- path in the spec -> the trial's value
    rung INTEGER,                           -- step of the last rung that it reached
    rungs JSON,                             -- step -> value, low, high
    feasible BOOLEAN,                       -- whether it satisfies the constraints
    constraints JSON,                       -- constrained metric -> value
    reason VARCHAR,                         -- why it was pruned, failed or cancelled
    tokens DOUBLE,                          -- response tokens sampled for training, over its seeds
    gpu_hours DOUBLE,                       -- GPU hours of its runs
    seconds DOUBLE,                         -- duration of its runs, seconds
    attempts INTEGER,                       -- number of restarts after failures that it did not cause
    started_at TIMESTAMP WITH TIME ZONE,    -- time at which its first run began
    ended_at TIMESTAMP WITH TIME ZONE       -- time at which its last run ended
);

-- One row per arm (the baseline or a candidate) and confirmation seed.
CREATE TABLE confirmations (
    unit VARCHAR NOT NULL,
    study VARCHAR,                          -- name of the study
    label VARCHAR,                          -- `baseline`, or the trial
    trial INTEGER,                          -- number of the trial
    baseline BOOLEAN,                       -- whether it has the experiment's own values
    params JSON,                            -- path in the spec -> the trial's value
    seed BIGINT,                            -- seed of the confirmation, which no trial had
    run_id VARCHAR,
    state VARCHAR,                          -- finished running pending failed
    value DOUBLE,                           -- value of the first goal on the confirmation's dataset
    reason VARCHAR                          -- reason of its failure
);

-- One row per published result of a stage.
CREATE TABLE artifacts (
    unit VARCHAR NOT NULL,
    stage VARCHAR,                          -- data base train evaluate
    fingerprint VARCHAR,                    -- digest of everything that can change it
    run_id VARCHAR,                         -- id of the run; NULL if runs share the result
    path VARCHAR,                           -- path, relative to the home
    num_files INTEGER,                      -- number of files
    num_bytes BIGINT,                       -- size in bytes; NULL if its manifest does not have it
    identity JSON,                          -- content of the fingerprint's digest
    created_at TIMESTAMP WITH TIME ZONE     -- time of publication
);

-- One row per value of a run's spec, with its origin, and per fact about the run's code, packages and machine.
CREATE TABLE provenance (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    kind VARCHAR,                           -- spec: a value of the spec; code: version, commit, diff (SHA-256 of uncommitted changes; empty without such changes); package: an installed version; lock: SHA-256 of all installed versions; machine: processor, GPU, driver, Python; environment: a variable, secrets hidden; data: SHA-256 of a file of the staged problems; certificate: SHA-256 of certificate.json; claim, when the objective's gradient is claimed to be exact: always, on_policy or none
    name VARCHAR,                           -- name of the fact; for a value of the spec its path, such as objective.clip.low
    value VARCHAR,                          -- value: a text unchanged, anything else as JSON
    origin VARCHAR,                         -- origin of a spec's value: file (the spec, one that it extends, or a study's), set (--set), matrix (the run's cell or seed), published (with the objective), default
    file VARCHAR,                           -- path of the file with the value, as the user named it
    line INTEGER,                           -- line of that file, from 1
    attempt INTEGER                         -- number of the trainer's start; NULL if it applies to the whole run
);
