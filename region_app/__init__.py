"""The region: the coordinator that sums, noises, accounts and personalises."""
