-- The catalogue: what the JSON documents in the home directory say. Each row belongs to a unit, the directory that it is from.

-- One row per experiment: its file, frozen when it was last run or submitted.
CREATE TABLE experiments (
    unit VARCHAR NOT NULL,
    name VARCHAR,                           -- the spec's `name`
    question VARCHAR,                       -- what it answers, in a sentence
    num_runs INTEGER,                       -- runs that it ever had
    fingerprint VARCHAR,                    -- of the frozen spec
    created_at TIMESTAMP WITH TIME ZONE,    -- when it was first run or submitted
    updated_at TIMESTAMP WITH TIME ZONE     -- when it was last run or submitted
);

-- One row per run: one cell of the matrix with one seed.
CREATE TABLE runs (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,                         -- the run: experiment, seed and a digest of all that changes its result
    experiment VARCHAR,                     -- name of the experiment that it belongs to
    name VARCHAR,                           -- readable: cell and seed
    seed BIGINT,                            -- of the order of the prompts and of the sampling; NULL: a model that was measured as it is
    status VARCHAR,                         -- pending running finished failed cancelled crashed
    started_at TIMESTAMP WITH TIME ZONE,    -- when it was first executed
    ended_at TIMESTAMP WITH TIME ZONE,      -- when it ended; NULL: it has not
    reason VARCHAR,                         -- why it failed or was cancelled, in words
    cause VARCHAR,                          -- of a failure: out_of_memory sampler_out_of_memory diverged lost_peer preempted user_error disk_full hung reward_failed reward_away program_error other
    step INTEGER,                           -- the last one that the trainer finished
    steps INTEGER,                          -- how many there are to be
    cell JSON,                              -- the matrix cell: path in the spec -> value
    setting VARCHAR,                        -- digest of the resolved spec, its seed left out, and of the code: runs that share it differ in the seed alone; NULL: never begun
    objective VARCHAR,                      -- its type; NULL: a model that was measured as it is
    question VARCHAR,                       -- what the experiment answers
    created_at TIMESTAMP WITH TIME ZONE,    -- when it was frozen
    flow_run_id VARCHAR,                    -- of Prefect's flow run that executed it last
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
    started_at TIMESTAMP WITH TIME ZONE,    -- when its work began; NULL where it was taken from an earlier result
    ended_at TIMESTAMP WITH TIME ZONE,      -- when its work ended
    reason VARCHAR,                         -- why it failed or was cancelled, in words
    output VARCHAR                          -- of the result, relative to the home
);

-- One row per start of the trainer. Rows that an attempt recorded after valid_through are superseded by a later attempt.
CREATE TABLE attempts (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,                        -- number of the start, from 1
    resumed_from_step INTEGER,              -- step of the checkpoint that it went on from; 0: from the base model
    valid_through INTEGER,                  -- NULL: no later attempt went back behind this one
    started_at TIMESTAMP WITH TIME ZONE     -- when the trainer began
);

-- One row per study.
CREATE TABLE studies (
    unit VARCHAR NOT NULL,
    name VARCHAR,                           -- the study's `name`
    question VARCHAR,                       -- what it answers, in a sentence
    experiment VARCHAR,                     -- file of the experiment whose fields it varies
    goal VARCHAR,                           -- the goals, in words
    goals JSON,                             -- of each: dataset, metric, direction, over_seeds
    constraints JSON,                       -- of each: metric, dataset, max, min
    sampler VARCHAR,                        -- what proposes the trials: random, tpe, cmaes, ...
    pruner JSON,                            -- what ends trials early: its settings
    trials_wanted INTEGER,                  -- trials that the search is to have
    num_trials INTEGER,                     -- trials that it has
    seeds BIGINT[],                         -- of every trial; those that confirm are in confirmations
    confidence DOUBLE,                      -- level of the intervals
    status VARCHAR,                         -- searching confirming finished stopped
    parameters JSON,                        -- path in the spec -> the values that may be taken
    confirmation JSON,                      -- dataset, seeds and arms, see confirmations
    spent STRUCT(tokens DOUBLE, gpu_hours DOUBLE, seconds DOUBLE), -- so far, by all its runs: response tokens, GPU hours, seconds
    created_at TIMESTAMP WITH TIME ZONE,    -- when it was first run
    updated_at TIMESTAMP WITH TIME ZONE     -- when its record was last written
);

-- One row per trial of a study.
CREATE TABLE trials (
    unit VARCHAR NOT NULL,
    study VARCHAR,                          -- name of the study
    number INTEGER,                         -- from 0, in the order in which they were proposed
    state VARCHAR,                          -- finished pruned paused running pending failed cancelled
    run_id VARCHAR,                         -- of its first seed
    run_ids VARCHAR[],                      -- of all its seeds
    value DOUBLE,                           -- of the first goal
    value_low DOUBLE,                       -- lower end of the value's interval
    value_high DOUBLE,                      -- upper end
    "values" JSON,                          -- of each goal
    posterior_mean DOUBLE,                  -- what the sampler's model expects of the first goal's value, without the trial's luck
    posterior_deviation DOUBLE,             -- that mean's standard deviation
    chance_of_best DOUBLE,                  -- chance by the model that the trial is the best of the study's
    baseline BOOLEAN,                       -- whether it has the experiment's own values
    params JSON,                            -- path in the spec -> the value taken
    rung INTEGER,                           -- the last rung that it reached, a step
    rungs JSON,                             -- step -> value, low, high
    feasible BOOLEAN,                       -- whether it keeps the constraints
    constraints JSON,                       -- constrained metric -> value
    reason VARCHAR,                         -- why it was pruned, failed or cancelled
    tokens DOUBLE,                          -- response tokens sampled for training, over its seeds
    gpu_hours DOUBLE,                       -- GPU hours of its runs
    seconds DOUBLE,                         -- duration of its runs, seconds
    attempts INTEGER,                       -- how often it was begun anew after a failure that was not its own
    started_at TIMESTAMP WITH TIME ZONE,    -- when its first run began
    ended_at TIMESTAMP WITH TIME ZONE       -- when its last run ended
);

-- One row per arm (the baseline or a candidate) and fresh seed.
CREATE TABLE confirmations (
    unit VARCHAR NOT NULL,
    study VARCHAR,                          -- name of the study
    label VARCHAR,                          -- baseline, or the trial
    trial INTEGER,                          -- number of the trial that it is
    baseline BOOLEAN,                       -- whether it is the experiment's own values
    params JSON,                            -- path in the spec -> the value taken
    seed BIGINT,                            -- a fresh one, which no trial had
    run_id VARCHAR,
    state VARCHAR,                          -- finished running pending failed
    value DOUBLE,                           -- of the first goal, on the confirmation's dataset
    reason VARCHAR                          -- why it failed
);

-- One row per published result of a stage.
CREATE TABLE artifacts (
    unit VARCHAR NOT NULL,
    stage VARCHAR,                          -- data base train evaluate
    fingerprint VARCHAR,                    -- of everything that can change it
    run_id VARCHAR,                         -- NULL: shared by runs
    path VARCHAR,                           -- relative to the home
    num_files INTEGER,                      -- files
    num_bytes BIGINT,                       -- bytes; NULL: its manifest does not say
    identity JSON,                          -- what was hashed into the fingerprint
    created_at TIMESTAMP WITH TIME ZONE     -- when it was published
);

-- One row per value of a run's spec, with where it comes from, and per fact about what the run was made with.
CREATE TABLE provenance (
    unit VARCHAR NOT NULL,
    run_id VARCHAR,
    kind VARCHAR,                           -- spec: a value of the spec; code: version, commit, diff (SHA-256 of what was not committed; empty: nothing); package: an installed version; lock: SHA-256 of all installed versions; machine: processor, GPU, driver, Python; environment: a variable, secrets hidden; data: SHA-256 of a file of the staged problems; certificate: SHA-256 of certificate.json; claim, when the objective's gradient is said to be exact: always, on_policy or none
    name VARCHAR,                           -- of a spec's value its path, such as objective.clip.low
    value VARCHAR,                          -- a text as it is, anything else as JSON
    origin VARCHAR,                         -- of a spec's value: file (the spec, one that it extends, or a study's), set (--set), matrix (the run's cell or seed), published (with the objective), default
    file VARCHAR,                           -- that says the value, as the user named it
    line INTEGER,                           -- of that file, from 1
    attempt INTEGER                         -- which start of the trainer had it; NULL: it holds for the whole run
);
