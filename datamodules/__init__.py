"""Where experience comes from: prompts, engines, snapshots, rollouts."""
