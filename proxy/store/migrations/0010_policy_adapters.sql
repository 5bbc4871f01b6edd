-- What the adapters of agents that have one of their own are served as, by the adapter's name: JSON.
ALTER TABLE policy_versions ADD COLUMN adapters TEXT NOT NULL DEFAULT '{}';
