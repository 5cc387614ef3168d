-- The catalogue: what the JSON documents in the home directory say. Each row belongs to a unit, the directory that it is from.

-- One row per experiment: its file, frozen when it was last run or submitted.
CREATE TABLE experiments (
    unit VARCHAR NOT NULL,
    name VARCHAR,
    question VARCHAR,
    num_runs INTEGER,
    fingerprint VARCHAR,                    -- of the frozen spec
    created_at TIMESTAMP WITH TIME ZONE,
    updated_at TIMESTAMP WITH TIME ZONE
);

-- One row per run: one cell of the matrix with one seed.
CREATE TABLE runs (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    experiment VARCHAR,
    name VARCHAR,                           -- readable: cell and seed
    seed BIGINT,
    status VARCHAR,                         -- pending running finished failed cancelled crashed
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    reason VARCHAR,
    cause VARCHAR,                          -- of a failure: out_of_memory sampler_out_of_memory diverged lost_peer preempted user_error disk_full hung other
    step INTEGER,                           -- the last one that the trainer finished
    steps INTEGER,                          -- how many there are to be
    cell JSON,                              -- the matrix cell: path in the spec -> value
    objective VARCHAR,                      -- its type
    question VARCHAR,
    created_at TIMESTAMP WITH TIME ZONE,
    flow_run_id VARCHAR,
    evaluation VARCHAR,                     -- fingerprint of the evaluate stage that counts
    path VARCHAR                            -- of the run's directory, relative to the home
);

-- One row per run and stage.
CREATE TABLE stages (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    stage VARCHAR,                          -- data base train evaluate report
    fingerprint VARCHAR,                    -- of everything that can change its result
    status VARCHAR,                         -- pending running finished failed cancelled
    cached BOOLEAN,                         -- whether a result that was there already was taken
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    reason VARCHAR,
    output VARCHAR                          -- of the result, relative to the home
);

-- One row per start of the trainer. Rows that an attempt recorded after valid_through are superseded by a later attempt.
CREATE TABLE attempts (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,
    resumed_from_step INTEGER,
    valid_through INTEGER,                  -- NULL: no later attempt went back behind this one
    started_at TIMESTAMP WITH TIME ZONE
);

-- One row per study.
CREATE TABLE studies (
    unit VARCHAR NOT NULL,
    name VARCHAR,
    question VARCHAR,
    experiment VARCHAR,
    goal VARCHAR,
    goals JSON,                             -- of each: dataset, metric, direction, over_seeds
    constraints JSON,                       -- of each: metric, dataset, max, min
    sampler VARCHAR,
    pruner JSON,
    trials_wanted INTEGER,
    num_trials INTEGER,
    seeds BIGINT[],                         -- of every trial; those that confirm are in confirmations
    confidence DOUBLE,                      -- level of the intervals
    status VARCHAR,                         -- searching confirming finished
    parameters JSON,
    confirmation JSON,                      -- dataset, seeds and arms, see confirmations
    spent STRUCT(tokens DOUBLE, gpu_hours DOUBLE, seconds DOUBLE),
    created_at TIMESTAMP WITH TIME ZONE,
    updated_at TIMESTAMP WITH TIME ZONE
);

-- One row per trial of a study.
CREATE TABLE trials (
    unit VARCHAR NOT NULL,
    study VARCHAR,
    number INTEGER,
    state VARCHAR,                          -- finished pruned paused running pending failed
    run_id VARCHAR,
    run_ids VARCHAR[],
    value DOUBLE,                           -- of the first goal
    value_low DOUBLE,                       -- ends of its interval
    value_high DOUBLE,
    "values" JSON,                          -- of each goal
    baseline BOOLEAN,                       -- whether it has the experiment's own values
    params JSON,
    rung INTEGER,                           -- the last rung that it reached, a step
    rungs JSON,                             -- step -> value, low, high
    feasible BOOLEAN,                       -- whether it keeps the constraints
    constraints JSON,                       -- constrained metric -> value
    reason VARCHAR,                         -- why it was pruned or failed
    tokens DOUBLE,                          -- response tokens sampled for training, over its seeds
    gpu_hours DOUBLE,
    seconds DOUBLE,
    attempts INTEGER,                       -- how often it was begun anew after a failure that was not its own
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE
);

-- One row per arm (the baseline or a candidate) and fresh seed.
CREATE TABLE confirmations (
    unit VARCHAR NOT NULL,
    study VARCHAR,
    label VARCHAR,                          -- baseline, or the trial
    trial INTEGER,
    baseline BOOLEAN,
    params JSON,
    seed BIGINT,
    run_id VARCHAR,
    state VARCHAR,                          -- finished running pending failed
    value DOUBLE,                           -- of the first goal, on the confirmation's dataset
    reason VARCHAR
);

-- One row per published result of a stage.
CREATE TABLE artifacts (
    unit VARCHAR NOT NULL,
    stage VARCHAR,
    fingerprint VARCHAR,
    run_id VARCHAR,                         -- NULL: shared by runs
    path VARCHAR,                           -- relative to the home
    num_files INTEGER,
    num_bytes BIGINT,
    identity JSON,                          -- what was hashed into the fingerprint
    created_at TIMESTAMP WITH TIME ZONE
);
