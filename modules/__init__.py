"""What learns: the policy, the objective heads, and the LightningModule that trains one with the other."""
