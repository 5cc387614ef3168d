-- Tables of the DuckDB file besides the catalogue (catalogue.sql): the known directories and segments, and the rows of
-- the small tables. Rows of the other tables stay in their segments. A file with another version is rebuilt from the
-- run directories: the version is the number below and a digest of all SQL files, so no change of a column can be forgotten.
-- version: 2
CREATE TABLE version (version VARCHAR NOT NULL);

-- One row per directory with documents: a run, an experiment, a study, an artifact.
CREATE TABLE units (
    unit VARCHAR NOT NULL,              -- path relative to the home directory: runs/ID, artifacts/STAGE/FINGERPRINT
    stamp VARCHAR,                      -- times of change when it was read, ns; NULL if it must be read again
    has_merged BOOLEAN NOT NULL,        -- whether merged segments still have to be deleted
    problems VARCHAR[]                  -- problems of its documents; NULL without problems
);

CREATE TABLE segments (
    key VARCHAR NOT NULL,               -- path relative to the home directory
    table_name VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,
    modified_ns BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    current_columns BOOLEAN NOT NULL,   -- false for a segment of an older or newer version of the row classes
    problem VARCHAR,                    -- reason why it is skipped; NULL if it is valid
    pack VARCHAR                        -- path of the pack that also has its rows, relative to the home; NULL if no pack has them
);

-- One row per pack and run whose rows are in it. They count while the run has this number of segments that name the pack.
CREATE TABLE packed (
    pack VARCHAR NOT NULL,
    table_name VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,          -- size of the pack's file
    run_id VARCHAR NOT NULL,
    num_segments BIGINT NOT NULL        -- number of the run's segments in the pack
);

-- One row per run that could be read completely, see queries/rewards.sql; all NULL for runs without rewards.
CREATE TABLE rewards (
    run_id VARCHAR,
    last_step INTEGER,
    reward_first DOUBLE,
    reward_last DOUBLE
);

CREATE TABLE events (
    run_id VARCHAR,
    attempt INTEGER,
    step INTEGER,
    kind VARCHAR,
    message VARCHAR,
    recorded_at TIMESTAMP WITH TIME ZONE
);

CREATE TABLE checkpoints (
    run_id VARCHAR,
    attempt INTEGER,
    step INTEGER,
    path VARCHAR,
    kind VARCHAR,
    num_bytes BIGINT,
    recorded_at TIMESTAMP WITH TIME ZONE
);

CREATE TABLE evaluations (
    run_id VARCHAR,
    fingerprint VARCHAR,
    step INTEGER,
    dataset VARCHAR,
    metric VARCHAR,
    value DOUBLE,
    ci_low DOUBLE,
    ci_high DOUBLE,
    num_problems INTEGER,
    samples_per_problem INTEGER,
    attempt INTEGER,                    -- NULL for measures of the evaluate stage
    worst DOUBLE                        -- least value of score@k, if the reward declares one
);
