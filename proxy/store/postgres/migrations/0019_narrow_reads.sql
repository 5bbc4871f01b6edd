-- What a call, a second or a step reads of versions and steps is found without the others, however many there were.
CREATE INDEX policy_versions_by_status ON policy_versions (status, version);
CREATE INDEX policy_versions_served ON policy_versions (served_model, version) WHERE served_model IS NOT NULL;
CREATE INDEX policy_versions_with_files ON policy_versions (version) WHERE path IS NOT NULL;
CREATE INDEX policy_versions_published ON policy_versions (publish) WHERE publish IS NOT NULL;
CREATE INDEX steps_with_checkpoints ON steps (step) WHERE checkpoint IS NOT NULL;
