-- What the DuckDB file holds beside the catalogue (catalogue.sql): which directories and segments it knows, and the rows of
-- the small tables. Rows of the other tables stay in their segments. A file whose version differs is made again from the
-- run directories: the version is the number below and a digest of all SQL files, so no change of a column can be forgotten.
-- version: 2
CREATE TABLE version (version VARCHAR NOT NULL);

-- One row per directory with documents: a run, an experiment, a study, an artifact.
CREATE TABLE units (
    unit VARCHAR NOT NULL,              -- path relative to the home directory: runs/ID, artifacts/STAGE/FINGERPRINT
    stamp VARCHAR,                      -- its times of change when it was read, ns; NULL: to be read again in any case
    has_merged BOOLEAN NOT NULL,        -- segments that were merged into others are still there, to be deleted
    problems VARCHAR[]                  -- what of its documents was passed over; NULL: nothing
);

CREATE TABLE segments (
    key VARCHAR NOT NULL,               -- path relative to the home directory
    table_name VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,
    modified_ns BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    current_columns BOOLEAN NOT NULL,   -- false: written by an older or newer version of the row classes
    problem VARCHAR,                    -- why it is skipped; NULL: it is good
    pack VARCHAR                        -- path of the pack that has its rows too, relative to the home; NULL: none has
);

-- One row per pack and run whose rows are in it. They count while as many segments of the run name the pack as here.
CREATE TABLE packed (
    pack VARCHAR NOT NULL,
    table_name VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,          -- of the pack's file
    run_id VARCHAR NOT NULL,
    num_segments BIGINT NOT NULL        -- of the run, that the pack was made from
);

-- One row per run that could be read whole, see queries/rewards.sql; without rewards of NULLs.
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
    attempt INTEGER,                    -- NULL: measured by the evaluate stage
    worst DOUBLE                        -- of score@k, where the reward names one
);
