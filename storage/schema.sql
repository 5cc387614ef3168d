-- What the DuckDB file holds: the rows of the segments that were loaded, and which segments those are.
-- The catalogue tables (catalogue.sql) stand beside them. A file whose version differs is made again from the run directories:
-- the version is the number below and a digest of both SQL files, so no change of a column can be forgotten.
-- version: 1
CREATE SCHEMA recorded;

CREATE TABLE recorded.version (version VARCHAR NOT NULL);

-- The digest of the catalogue documents at the last load: an ingest with nothing new leaves the file alone.
CREATE TABLE recorded.catalogue (digest VARCHAR NOT NULL);

-- A segment is loaded in the transaction that adds its row here.
CREATE TABLE recorded.segments (
    segment_id BIGINT PRIMARY KEY,
    key VARCHAR NOT NULL UNIQUE,        -- path relative to the home directory
    table_name VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,
    modified_ns BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    current_columns BOOLEAN NOT NULL,   -- false: written by an older or newer version of the row classes
    problem VARCHAR                     -- why it is skipped; NULL: it is good
);

CREATE TABLE recorded.metrics (
    segment_id BIGINT NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,
    step INTEGER,
    name VARCHAR,
    value DOUBLE,
    recorded_at TIMESTAMP WITH TIME ZONE
);

CREATE TABLE recorded.events (
    segment_id BIGINT NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,
    step INTEGER,
    kind VARCHAR,
    message VARCHAR,
    recorded_at TIMESTAMP WITH TIME ZONE
);

CREATE TABLE recorded.checkpoints (
    segment_id BIGINT NOT NULL,
    run_id VARCHAR,
    attempt INTEGER,
    step INTEGER,
    path VARCHAR,
    kind VARCHAR,
    num_bytes BIGINT,
    recorded_at TIMESTAMP WITH TIME ZONE
);

CREATE TABLE recorded.evaluations (
    segment_id BIGINT NOT NULL,
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
    attempt INTEGER                     -- NULL: measured by the evaluate stage
);
