"""Training against rollout: what training computes with, and what the engine that generates its samples will use."""
