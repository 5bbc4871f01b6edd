-- Whether training stands still is asked at every poll: off the rollouts that were dropped, not all that wait.
CREATE INDEX rollouts_dropped ON rollouts (dropped, n) WHERE dropped IS NOT NULL;
