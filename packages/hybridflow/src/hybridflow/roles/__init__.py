"""The models of RLHF as groups of workers: actor, critic, reference, rewards, rollout."""
